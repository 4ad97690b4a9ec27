"""The caches of a model, on the device and on the host, and copies of blocks within and between them."""

import weakref
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_serve.config import CACHE_DTYPES, check_kv_cache_dtype
from pagedattn_serve.errors import reason_of
from pagedattn_serve.models.cache_shape import CacheGroups, allocate_caches, bytes_per_block
from pagedattn_serve.models.causal_lm import KVCache

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, of_torch in CACHE_DTYPES.items()}


class HostMemoryError(MemoryError):
    """The pool on the host does not fit."""


class CacheEngine:
    """A key cache and a value cache for each shape of the groups, in the layout of `pagedattn_ext.ops`; block b of a
    group is block b of each pair. On the host there is a pool of the same blocks, for sequences that are swapped out.

    On CUDA, a stream of its own swaps blocks, cache after cache, while the model computes the layers before. Taking a
    pair from `kv_caches` lets the current stream wait for the copies of that pair (this has not run on a GPU yet). On
    the CPU a swap has happened when the call returns.

    groups: of the caches, which are in the order in which the layers of the model take them (`kv_caches`).
    kv_scales: (k_scale, v_scale) of each cache, for a cache in fp8; None: all are 1.

    Raises ValueError for head sizes above MAX_HEAD_SIZE, HostMemoryError for a pool on the host that does not fit.
    """

    def __init__(
        self,
        groups: CacheGroups,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        num_host_blocks: int = 0,
        kv_scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        on_cuda = torch.device(device).type == "cuda"
        # Not filled: a slot is written before it is read, and memory that is never written is never taken.
        shapes = groups.shapes
        pairs = allocate_caches(shapes, num_blocks, block_size, dtype, device)
        caches = [KVCache(*pairs[place], group=group) for group, place in groups.places]
        if kv_scales is not None:
            scales = [[torch.tensor(scale, dtype=torch.float32) for scale in of_cache] for of_cache in kv_scales]
            caches = [
                cache._replace(k_scale=k_scale, v_scale=v_scale)
                for cache, (k_scale, v_scale) in zip(caches, scales, strict=True)
            ]
        places = [place for _, place in groups.places]
        self._cache_of_pair = [places.index(place) for place in range(len(pairs))]
        pin_memory = on_cuda and num_host_blocks > 0
        try:
            self.host_caches = allocate_caches(shapes, num_host_blocks, block_size, dtype, pin_memory=pin_memory)
        except (MemoryError, RuntimeError) as error:  # the allocator decides which of the two it raises
            num_bytes = num_host_blocks * bytes_per_block(shapes, block_size, dtype)
            raise HostMemoryError(
                f"swap_space: expected a pool that fits in the host's memory, got {num_host_blocks:,} blocks of "
                f"{block_size} tokens, {num_bytes:,} bytes ({reason_of(error)})"
            ) from None
        self.device = device
        self.kv_caches: Sequence[KVCache] = caches
        self._stream: torch.cuda.Stream | None = None
        if on_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.kv_caches = self._pending = PendingCaches(caches, places, device)
            # torch's allocator must not give this memory away while copies still go to it.
            weakref.finalize(self, self._stream.synchronize)

    def swap_out(self, blocks: list[tuple[int, int]]) -> None:
        """Copy (device, host) blocks of every cache to the host, before what is computed from now on."""
        self._swap(blocks, to_host=True)

    def swap_in(self, blocks: list[tuple[int, int]]) -> None:
        """Copy (host, device) blocks of every cache to the device, after all that was swapped out before."""
        self._swap(blocks, to_host=False)

    def copy(self, blocks: list[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in every cache."""
        caches = [self.kv_caches[cache] for cache in self._cache_of_pair]
        ops.copy_blocks(
            [cache.key_cache for cache in caches],
            [cache.value_cache for cache in caches],
            torch.tensor(blocks, dtype=torch.int64),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes that a block takes over all caches."""
        return sum(part.shape[1] for part in self._byte_parts)

    def read_block(self, block: int) -> npt.NDArray[np.uint8]:
        """A copy of a block's bytes in every cache, one after the other. On the CPU alone, as `write_block`."""
        return np.concatenate([part[block] for part in self._byte_parts])

    def write_block(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Put back what `read_block` gave."""
        begin = 0
        for part in self._byte_parts:
            end = begin + part.shape[1]
            part[block] = data[begin:end]
            begin = end

    @cached_property
    def _byte_parts(self) -> list[npt.NDArray[np.uint8]]:
        """The memory of each cache, [num_blocks, bytes]."""
        caches = [self.kv_caches[cache] for cache in self._cache_of_pair]
        tensors = [tensor for cache in caches for tensor in (cache.key_cache, cache.value_cache) if tensor.numel()]
        return [tensor.view(len(tensor), -1).view(torch.uint8).numpy() for tensor in tensors]

    def _swap(self, blocks: list[tuple[int, int]], to_host: bool) -> None:
        if self._stream is None:
            mapping = torch.tensor(blocks, dtype=torch.int64)
            for cache, host_caches in zip(self._cache_of_pair, self.host_caches, strict=True):
                swap_pair(self.kv_caches[cache], host_caches, mapping, to_host)
            return
        # The current stream wrote the blocks that go out, and may still read the blocks that are overwritten.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            # One copy for all caches, from pinned memory: with other memory the host would wait for the stream.
            mapping = torch.tensor(blocks, dtype=torch.int64).pin_memory().to(self.device, non_blocking=True)
            for pair, (cache, host_caches) in enumerate(zip(self._cache_of_pair, self.host_caches, strict=True)):
                swap_pair(self._pending.caches[cache], host_caches, mapping, to_host)
                self._pending.copied[pair] = self._stream.record_event()


class PendingCaches(Sequence[KVCache]):
    """The caches of a CUDA device. Another stream may be copying their blocks.

    Taking a cache lets the current stream wait for the copies of its pair. So no block is overwritten before it has
    gone out, and no block is read before it has come in.

    pair_of: the pair of tensors that each cache lies in.
    """

    def __init__(self, caches: list[KVCache], pair_of: list[int], device: str) -> None:
        self.caches = caches
        self.pair_of = pair_of
        self.device = device
        self.copied: list[torch.cuda.Event | None] = [None] * len(caches)  # by pair; None where nobody has to wait

    def __len__(self) -> int:
        return len(self.caches)

    def __getitem__(self, cache: int) -> KVCache:  # type: ignore[override]  # nobody takes slices
        pair = self.pair_of[cache]
        copied, self.copied[pair] = self.copied[pair], None
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
        return self.caches[cache]


def swap_pair(caches: KVCache, host_caches: tuple[Tensor, Tensor], mapping: Tensor, to_host: bool) -> None:
    """Copy blocks of one pair, keys and values, on the current stream. mapping: int64 [num_pairs, 2]."""
    for cache, host_cache in zip((caches.key_cache, caches.value_cache), host_caches, strict=True):
        source, target = (cache, host_cache) if to_host else (host_cache, cache)
        ops.swap_blocks(source, target, mapping)


def choose_cache_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the cache of a model of `dtype`; "auto" means the model's. Raises ValueError for an unknown name."""
    check_kv_cache_dtype(kv_cache_dtype)
    return TORCH_DTYPES.get(kv_cache_dtype, dtype)
