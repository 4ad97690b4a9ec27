"""flash-linear-attention's gated delta rule on the op `gated_delta_rule`, on a CPU as on CUDA, without gradients.

    from pagedattn_ext.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

Names, order, defaults and results are those of flash-linear-attention 0.6, where keywords that a function does not know
have no effect. Both functions compute the same, token by token. Tensors of several dtypes are computed with in fp32.
`pagedattn_ext.ops.gated_delta_rule` takes states in slots. `fla.modules` has norms with a gate, in plain torch.

The submodules import by absolute names, so that they load under the name `fla` as well.
"""

from pagedattn_ext.fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

__version__ = "0.6.0"  # of the flash-linear-attention whose functions these are

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
