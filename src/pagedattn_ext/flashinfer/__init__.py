"""FlashInfer's functions and wrappers on the ops of this package, on a CPU as on CUDA.

    from pagedattn_ext import flashinfer

    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout="NHD")
    decode.plan(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size)
    out = decode.run(q, paged_kv_cache)

Names, order, defaults and meaning of the arguments are those of FlashInfer 0.7. A paged cache is a pair (keys, values)
or one tensor [num_pages, 2, ...], with pages [page_size, num_kv_heads, head_dim] (NHD) or [num_kv_heads, page_size,
head_dim] (HND), of any page size. The lse has base 2. A row without keys gives zeros and an lse of -inf.

More than theirs: fp32, and dtypes that `plan` was not told, because `run` looks at its tensors.

Taken, and without effect: workspaces and buffers, backend, use_tensor_cores, use_fp16_qk_reduction, data types,
rope_scale, rope_theta, non_blocking, block_tables, seq_lens and all that says how to split the work, enable_pdl.

Refused, with a ValueError that names the argument: use_cuda_graph, jit_args, a pos_encoding_mode other than "NONE",
custom_mask and packed_custom_mask, prefix_len_ptr and all of multi-item scoring, values whose heads are not as wide as
those of the keys, q_len_per_req, block scales of 4-bit caches. Left out: `gemma_rmsnorm`,
`gemma_fused_add_rmsnorm`, MLA, cascade wrappers, `fast_decode_plan` and all else that is for CUDA graphs, quantization,
communication, mixtures of experts.
"""

from typing import NoReturn

from .activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from .cascade import merge_state, merge_state_in_place, merge_states
from .decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from .norm import fused_add_rmsnorm, rmsnorm
from .page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from .prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from .rope import apply_rope_with_cos_sin_cache_inplace
from .sampling import (
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "append_paged_kv_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "chain_speculative_sampling",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "min_p_sampling_from_probs",
    "rmsnorm",
    "sampling_from_logits",
    "sampling_from_probs",
    "silu_and_mul",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"pagedattn_ext.flashinfer: {name} is left out; it has {', '.join(__all__)}")
