"""flash-attn's layers that need no backward: `rotary`."""
