"""The norms with a gate, where flash-linear-attention 0.6 has them."""

from pagedattn_ext.fla.modules.fused_norm_gate import (
    FusedLayerNormGated,
    FusedLayerNormSwishGate,
    FusedRMSNormGated,
    FusedRMSNormSwishGate,
    layer_norm_gated,
    rms_norm_gated,
)

__all__ = [
    "FusedLayerNormGated",
    "FusedLayerNormSwishGate",
    "FusedRMSNormGated",
    "FusedRMSNormSwishGate",
    "layer_norm_gated",
    "rms_norm_gated",
]
