"""A paged cache in each of the layouts that the ops take."""

from collections.abc import Callable

from torch import Tensor

NHD_LAYOUTS = ["nhd", "hnd", "interleaved"]  # 4-D caches
LAYOUTS = ["chunked", *NHD_LAYOUTS]


def make_cache_pair(
    layout: str, num_blocks: int, num_kv_heads: int, head_size: int, block_size: int, make: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """A key and a value cache, views of what `make` gives for a shape whose first dimension is num_blocks."""
    if layout == "chunked":
        value_cache = make(num_blocks, num_kv_heads, head_size, block_size)
        x = 16 // value_cache.dtype.itemsize
        return make(num_blocks, num_kv_heads, head_size // x, block_size, x), value_cache
    if layout == "nhd":
        return make(num_blocks, block_size, num_kv_heads, head_size), make(
            num_blocks, block_size, num_kv_heads, head_size
        )
    if layout == "hnd":
        shape = num_blocks, num_kv_heads, block_size, head_size
        return make(*shape).transpose(1, 2), make(*shape).transpose(1, 2)
    # as vLLM's CPU backend has it: one tensor, the keys of a head before its values
    both = make(num_blocks, num_kv_heads, 2 * block_size, head_size)
    key_cache, value_cache = both.chunk(2, dim=2)
    return key_cache.transpose(1, 2), value_cache.transpose(1, 2)
