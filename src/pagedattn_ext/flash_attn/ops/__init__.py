"""flash-attn's small ops that need no backward: `activations`, `rms_norm`, `triton.layer_norm`, `triton.rotary`."""
