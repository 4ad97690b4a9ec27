"""What flash-linear-attention has as modules: norms with a gate."""

from pagedattn_ext.fla.modules.fused_norm_gate import (
    FusedLayerNormGated,
    FusedLayerNormSwishGate,
    FusedRMSNormGated,
    FusedRMSNormSwishGate,
)

__all__ = [
    "FusedLayerNormGated",
    "FusedLayerNormSwishGate",
    "FusedRMSNormGated",
    "FusedRMSNormSwishGate",
]
