"""What the layers of a model keep of each token: the shapes of their caches, and the allocation of caches of many
shapes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn_ext import allocate_kv_cache, padded_head_size
from pagedattn_ext.huge_pages import empty_huge_pages
from pagedattn_ext.kv_cache import FLOAT_DTYPES, MAX_HEAD_SIZE, num_value_rows
from pagedattn_serve.errors import ArgumentError


@dataclass(slots=True, frozen=True)
class CacheShape:
    """What one cache holds of a token: keys and values of the heads of a layer; of a rank, where ranks share the model.

    head_size: elements of a key. A narrower value is padded to this size; and both are padded to whole 16 bytes.
    has_values: False for latents (MLA): the cache has one head of keys, of any size, and values are part of the keys.
    window: tokens up to a row's own that the layers of the cache see, at most; None: all.
    """

    num_kv_heads: int
    head_size: int
    has_values: bool = True
    window: int | None = None

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a token takes in a cache of `dtype`, key and value together. ValueError for latents in 8 bits."""
        if not self.has_values:
            if dtype not in FLOAT_DTYPES:
                name = str(dtype).removeprefix("torch.")
                raise ArgumentError("kv_cache_dtype", "auto, as the cache holds latents (MLA)", name)
            return self.head_size * dtype.itemsize
        key_rows = padded_head_size(self.head_size, dtype)
        return self.num_kv_heads * (key_rows + num_value_rows(key_rows, dtype)) * dtype.itemsize


def widest(windows: Iterable[int | None]) -> int | None:
    """The widest of some windows; None is one that shows all."""
    return max(windows, key=lambda window: math.inf if window is None else window, default=None)


def bytes_per_block(shapes: Sequence[CacheShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all caches."""
    return block_size * sum(shape.slot_bytes(dtype) for shape in shapes)


def allocate_caches(
    shapes: Sequence[CacheShape],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pin_memory: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """A key cache and a value cache for each shape, each of `num_blocks` blocks, as `allocate_kv_cache` makes them. A
    cache of latents is [num_blocks, block_size, head_size], and its value cache has no elements.

    Raises ValueError for head sizes above MAX_HEAD_SIZE.
    """
    pairs = {}
    for shape, count in Counter(shapes).items():  # those of one shape at once: pinned memory comes in large pieces
        if not shape.has_values:
            latents = allocate_latents(count, (num_blocks, block_size, shape.head_size), dtype, device, pin_memory)
            pairs[shape] = iter(latents)
            continue
        head_size = padded_head_size(shape.head_size, dtype)
        if head_size > MAX_HEAD_SIZE:
            raise ArgumentError("head_size", f"at most {MAX_HEAD_SIZE}", head_size)
        caches = allocate_kv_cache(
            num_blocks,
            shape.num_kv_heads,
            head_size,
            block_size,
            dtype,
            device,
            num_layers=count,
            pin_memory=pin_memory,
        )
        pairs[shape] = iter(caches)
    return [next(pairs[shape]) for shape in shapes]


def allocate_latents(
    num_caches: int, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str, pin_memory: bool
) -> list[tuple[Tensor, Tensor]]:
    """Caches of latents of this size."""
    if pin_memory or torch.device(device).type != "cpu":
        caches = list(torch.empty((num_caches, *size), dtype=dtype, device=device, pin_memory=pin_memory))
    else:
        caches = [empty_huge_pages(size, dtype) for _ in range(num_caches)]
    return [(cache, cache.new_empty(size[0], 0)) for cache in caches]
