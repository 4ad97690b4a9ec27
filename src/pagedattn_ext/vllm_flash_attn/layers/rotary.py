"""Rotary position embedding."""

from pagedattn_ext.flash_attn.layers.rotary import apply_rotary_emb

__all__ = ["apply_rotary_emb"]
