"""A paged cache in each of the layouts that the ops take."""

from collections.abc import Callable

from checks import with_row_gap
from torch import Tensor

NHD_LAYOUTS = ["nhd", "hnd", "interleaved", "apart"]  # 4-D caches
LAYOUTS = ["chunked", *NHD_LAYOUTS]


def make_cache_pair(
    layout: str,
    num_blocks: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    make: Callable[..., Tensor],
    block_gap: int = 0,
) -> tuple[Tensor, Tensor]:
    """A key and a value cache of what `make` gives for a shape whose first dimension is num_blocks.

    `block_gap` elements of NaN follow each block of the keys, and twice as many each block of the values. "apart" has
    gaps of its own, so that no stride of the keys is one of the values. A kernel that takes the strides of the keys for
    those of the values then reads other numbers.
    """
    if layout == "chunked":
        value_cache = make(num_blocks, num_kv_heads, head_size, block_size)
        x = 16 // value_cache.dtype.itemsize
        key_cache = make(num_blocks, num_kv_heads, head_size // x, block_size, x)
        return with_row_gap(key_cache, block_gap), with_row_gap(value_cache, 2 * block_gap)
    nhd = num_blocks, block_size, num_kv_heads, head_size
    hnd = num_blocks, num_kv_heads, block_size, head_size
    if layout == "nhd":
        return with_row_gap(make(*nhd), block_gap), with_row_gap(make(*nhd), 2 * block_gap)
    if layout == "hnd":
        keys, values = with_row_gap(make(*hnd), block_gap), with_row_gap(make(*hnd), 2 * block_gap)
        return keys.transpose(1, 2), values.transpose(1, 2)
    if layout == "apart":
        keys, values = make(*nhd), make(*hnd)
        x = 16 // keys.dtype.itemsize
        return with_row_gap(keys, x, num_dims=3), with_row_gap(values, 2 * x, num_dims=3).transpose(1, 2)
    # as vLLM's CPU backend has it: one tensor, the keys of a head before its values
    both = with_row_gap(make(num_blocks, num_kv_heads, 2 * block_size, head_size), block_gap)
    key_cache, value_cache = both.chunk(2, dim=2)
    return key_cache.transpose(1, 2), value_cache.transpose(1, 2)
