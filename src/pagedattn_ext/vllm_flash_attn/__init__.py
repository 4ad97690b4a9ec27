"""The functions of vLLM's fork of flash-attn (`vllm.vllm_flash_attn`) on the ops of this package.

Names, order and defaults are those of the fork in vLLM 0.33. `pagedattn_ext.flash_attn` computes, and says what the
arguments mean and what has no effect. Refused, with a ValueError that names the argument: dropout_p, q_v, output_scale,
cp_world_size above 1, mask_mod, block_sparse_tensors, aux_tensors, dynamic_causal, gather_kv_indices,
gather_kv_valid_length. Left out: the sparse functions, and the modules of `cute`.

The submodules import by absolute names, so that they load under the name `vllm.vllm_flash_attn` as well.
"""

from pagedattn_ext.vllm_flash_attn.flash_attn_interface import (
    FA2_AVAILABLE,
    FA3_AVAILABLE,
    compile_flash_attn_varlen_func_from_specs,
    fa_version_unsupported_reason,
    flash_attn_varlen_func,
    get_scheduler_metadata,
    is_fa_version_supported,
)

__all__ = [
    "FA2_AVAILABLE",
    "FA3_AVAILABLE",
    "compile_flash_attn_varlen_func_from_specs",
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]
