"""The norms, where flash-linear-attention 0.6 has them: those with a gate."""

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
