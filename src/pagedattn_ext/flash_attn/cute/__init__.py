"""FlashAttention-4's functions on the ops of this package, on a CPU as on CUDA.

Names, order, defaults and results are those of FlashAttention-4 (4.0.0b36), where all functions return (out, lse).
`pagedattn_ext.flash_attn` computes, and says what the arguments mean and what has no effect. So have none those of the
backward: score_mod_bwd, block_sparse_tensors_bwd, gather_bwd_recompute_p and gather_bwd_token_chunk.

Refused, with a ValueError that names the argument: qv, gather_kv_indices, score_mod, mask_mod, aux_tensors,
aux_scalars, block_sparse_tensors; windows that leave out the row's own token.
"""

from pagedattn_ext.flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

__version__ = "4.0.0b36"  # of the FlashAttention-4 whose functions these are

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
