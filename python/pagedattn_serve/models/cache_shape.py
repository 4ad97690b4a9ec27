"""What the layers of a model keep of each token: the shapes of their caches, which of the caches share block tables and
memory, and the allocation of caches of many shapes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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


class CacheGroups(NamedTuple):
    """Groups of caches. A sequence has a block table for each group. The memory of a block holds the block's tokens in
    the caches of one group, whichever that is: all groups lie in the same memory, and a block belongs to one of them.

    windows: of each group, as in `CacheShape`.
    shapes: of the memory's parts, which hold a cache of each group.
    places: of each cache its group, and its part of the memory.
    """

    windows: tuple[int | None, ...]
    shapes: tuple[CacheShape, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def single(cls, shapes: Sequence[CacheShape]) -> "CacheGroups":
        """All caches as one group, which sees what the widest of them sees."""
        return cls(
            (widest(shape.window for shape in shapes),), tuple(shapes), tuple((0, i) for i in range(len(shapes)))
        )

    def describe(self) -> str:
        """How many groups there are for each window, and of how many caches."""
        return "; ".join(
            f"{count} of {len(self.shapes)} caches that see {'all' if window is None else f'{window:,}'} tokens"
            for window, count in Counter(self.windows).items()
        )


MAX_GROUPS = 16  # more tables would take the host too long


def group_caches(shapes: Sequence[CacheShape]) -> CacheGroups:
    """Caches of the same window as one group, or as several groups of about as many caches as each other window has.

    Groups have room for the same number of caches, the largest number that leaves no window more than a tenth of the
    room of its groups unused. Where that makes too many groups, or where caches differ in more than their windows, all
    of them are one group.
    """
    caches_of: dict[int | None, list[int]] = {}
    for cache, shape in enumerate(shapes):
        caches_of.setdefault(shape.window, []).append(cache)
    if len(caches_of) < 2 or len({replace(shape, window=None) for shape in shapes}) > 1:
        return CacheGroups.single(shapes)
    counts = [len(caches) for caches in caches_of.values()]
    size = max(n for n in range(1, max(counts) + 1) if all(-(-count // n) * n <= 1.1 * count for count in counts))
    if sum(-(-count // size) for count in counts) > MAX_GROUPS:
        return CacheGroups.single(shapes)
    windows: list[int | None] = []
    places = [(0, 0)] * len(shapes)
    for window, caches in caches_of.items():
        for i, cache in enumerate(caches):
            if i % size == 0:
                windows.append(window)
            places[cache] = len(windows) - 1, i % size
    return CacheGroups(tuple(windows), (replace(shapes[0], window=None),) * size, tuple(places))


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
