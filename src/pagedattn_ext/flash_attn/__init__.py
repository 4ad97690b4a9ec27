"""flash-attn's functions on the ops of this package, on a CPU as on CUDA.

    from pagedattn_ext.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Names, order, defaults and meaning of the arguments are those of flash-attn 2.8. Behind them, as keywords, stand the
arguments that FlashAttention-3 and 4, sgl_kernel and vLLM have added or renamed: page_table is block_table, s_aux and
learnable_sink are sinks, return_lse and return_softmax_lse ask for the lse beside the output. Callers that rely on
another order of the arguments have modules of their own: `pagedattn_ext.flash_attn_interface` has the order of
FlashAttention-3, `flash_attn.cute` of FlashAttention-4, `pagedattn_ext.vllm_flash_attn` of vLLM's fork.

More than theirs: fp32; pages of any size, whose table is int32 or int64, and -1 or anything else behind a sequence's
own pages; fp8 caches beside queries of 16 or 32 bits; caches of any strides whose last dimension is contiguous.

Taken, and without effect: max_seqlen_q, max_seqlen_k (a bound, where there is seqused_k and no block table),
deterministic (all results are), num_splits, pack_gqa, sm_margin, scheduler_metadata, ver, fa_version; scales of what is
not fp8.

Different: a row without keys has an lse of -inf, as in FlashAttention-3 (flash-attn 2 says +inf). With ALiBi the lse is
that of the bias -slope * |t - p|, where flash-attn 2 leaves a constant out of causal rows.

Refused, with a ValueError that names the argument: dropout_p, qv. A bool is no scale (TypeError). Tensors that require
grad raise RuntimeError, because there is no backward. Heads of a size that is no multiple of 16 bytes, and values of
another width than keys, are padded in copies, caches included.

The submodules import by absolute names, so that they load under the name `flash_attn` as well.
"""

from pagedattn_ext.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.4"  # of the flash-attn whose functions these are

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
