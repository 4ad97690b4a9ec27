"""What flash-attn writes in Triton, on the ops of this package: `layer_norm` and `rotary`."""
