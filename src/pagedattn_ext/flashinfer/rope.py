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
    """`ops.rotary_embedding`, with positions of any int dtype, and cosines and sines in fp32 beside any query."""
    if cos_sin_cache.dtype == query.dtype:
        ops.rotary_embedding(positions.long(), query, key, head_size, cos_sin_cache, is_neox)
        return
    rotated = query.float(), key.float()
    ops.rotary_embedding(positions.long(), *rotated, head_size, cos_sin_cache.float(), is_neox)
    query.copy_(rotated[0])
    key.copy_(rotated[1])
