"""The cache tensors of every layer, and copies of blocks within them."""

import torch

from pagedattn_ext import allocate_kv_cache, ops
from pagedattn_serve.models.metadata import KVCache


class CacheEngine:
    """One key and one value cache a layer; the layout is that of `pagedattn_ext.ops`.

    Raises ValueError for head sizes above 256.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        head_size = padded_head_size(head_size, dtype)
        if head_size > 256:
            raise ValueError(f"head_size: expected at most 256, got {head_size}")
        # Not filled: a slot is written before it is read, and memory that is never used is never taken.
        self.kv_caches: list[KVCache] = allocate_kv_cache(
            num_blocks, num_kv_heads, head_size, block_size, dtype, device, num_layers=num_layers
        )

    def copy(self, blocks: list[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in every layer."""
        key_caches = [key_cache for key_cache, _ in self.kv_caches]
        value_caches = [value_cache for _, value_cache in self.kv_caches]
        ops.copy_blocks(key_caches, value_caches, torch.tensor(blocks, dtype=torch.int64))


def bytes_per_block(num_layers: int, num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values together."""
    return 2 * num_layers * num_kv_heads * padded_head_size(head_size, dtype) * block_size * dtype.itemsize


def padded_head_size(head_size: int, dtype: torch.dtype) -> int:
    """The next multiple of 16 bytes, in elements: what the cache's layout needs."""
    x = 16 // dtype.itemsize
    return -(-head_size // x) * x
