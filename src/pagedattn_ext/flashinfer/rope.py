"""Rotary position embedding."""

from torch import Tensor

from .. import ops


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """`ops.rotary_embedding`, with positions of any int dtype."""
    if cos_sin_cache.dtype != query.dtype:
        cos_sin_cache = cos_sin_cache.float()
    ops.rotary_embedding(positions.long(), query, key, head_size, cos_sin_cache, is_neox)
