"""The cache tensors of every layer, on the device and on the host, and copies of blocks within and between them."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from pagedattn_ext import allocate_kv_cache, ops, padded_head_size
from pagedattn_ext.kv_cache import MAX_HEAD_SIZE, num_value_rows
from pagedattn_serve.config import CACHE_DTYPES, check_kv_cache_dtype
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.models.causal_lm import KVCache

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, of_torch in CACHE_DTYPES.items()}


class HostMemoryError(MemoryError):
    """The pool on the host does not fit."""


class CacheEngine:
    """A key cache and a value cache for each layer, in the layout of `pagedattn_ext.ops`. On the host there is a pool
    of the same blocks, for sequences that are swapped out.

    On CUDA, a stream of its own swaps blocks, layer after layer, while the model computes the layers before. Taking a
    layer's caches from `kv_caches` lets the current stream wait for the copies of that layer (this has not run on a GPU
    yet). On the CPU a swap has happened when the call returns.

    kv_scales: (k_scale, v_scale) of each layer, for a cache in fp8; None: all are 1.

    Raises ValueError for head sizes above MAX_HEAD_SIZE, HostMemoryError for a pool on the host that does not fit.
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
        num_host_blocks: int = 0,
        kv_scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        head_size = padded_head_size(head_size, dtype)
        if head_size > MAX_HEAD_SIZE:
            raise ArgumentError("head_size", f"at most {MAX_HEAD_SIZE}", head_size)
        on_cuda = torch.device(device).type == "cuda"
        # Not filled: a slot is written before it is read, and memory that is never written is never taken.
        pairs = allocate_kv_cache(num_blocks, num_kv_heads, head_size, block_size, dtype, device, num_layers=num_layers)
        scales: Sequence[Sequence[float]] = kv_scales or [()] * num_layers
        caches = [
            KVCache(*pair, *(torch.tensor(scale, dtype=torch.float32) for scale in of_layer))
            for pair, of_layer in zip(pairs, scales, strict=True)
        ]
        try:
            self.host_caches = allocate_kv_cache(
                num_host_blocks,
                num_kv_heads,
                head_size,
                block_size,
                dtype,
                num_layers=num_layers,
                pin_memory=on_cuda and num_host_blocks > 0,
            )
        except (MemoryError, RuntimeError) as error:  # the allocator decides which of the two it raises
            num_bytes = num_host_blocks * bytes_per_block(num_layers, num_kv_heads, head_size, block_size, dtype)
            raise HostMemoryError(
                f"swap_space: expected a pool that fits in the host's memory, got {num_host_blocks:,} blocks of "
                f"{block_size} tokens, {num_bytes:,} bytes ({str(error).partition(chr(10))[0] or 'out of memory'})"
            ) from None
        self.device = device
        self.kv_caches: Sequence[KVCache] = caches
        self._stream: torch.cuda.Stream | None = None
        if on_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.kv_caches = self._pending = PendingCaches(caches, device)
            # torch's allocator must not give this memory away while copies still go to it.
            weakref.finalize(self, self._stream.synchronize)

    def swap_out(self, blocks: list[tuple[int, int]]) -> None:
        """Copy (device, host) blocks of every layer to the host, before what is computed from now on."""
        self._swap(blocks, to_host=True)

    def swap_in(self, blocks: list[tuple[int, int]]) -> None:
        """Copy (host, device) blocks of every layer to the device, after all that was swapped out before."""
        self._swap(blocks, to_host=False)

    def copy(self, blocks: list[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in every layer."""
        caches = list(self.kv_caches)
        ops.copy_blocks(
            [layer.key_cache for layer in caches],
            [layer.value_cache for layer in caches],
            torch.tensor(blocks, dtype=torch.int64),
        )

    def _swap(self, blocks: list[tuple[int, int]], to_host: bool) -> None:
        if self._stream is None:
            mapping = torch.tensor(blocks, dtype=torch.int64)
            for caches, host_caches in zip(self.kv_caches, self.host_caches, strict=True):
                swap_layer(caches, host_caches, mapping, to_host)
            return
        # The current stream wrote the blocks that go out, and may still read the blocks that are overwritten.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            # One copy for all layers, from pinned memory: with other memory the host would wait for the stream.
            mapping = torch.tensor(blocks, dtype=torch.int64).pin_memory().to(self.device, non_blocking=True)
            for layer, host_caches in enumerate(self.host_caches):
                swap_layer(self._pending.caches[layer], host_caches, mapping, to_host)
                self._pending.copied[layer] = self._stream.record_event()


class PendingCaches(Sequence[KVCache]):
    """The caches of a CUDA device, a pair for each layer. Another stream may be copying their blocks.

    Taking a layer's pair lets the current stream wait for the copies of that layer. So no block is overwritten before
    it has gone out, and no block is read before it has come in.
    """

    def __init__(self, caches: list[KVCache], device: str) -> None:
        self.caches = caches
        self.device = device
        self.copied: list[torch.cuda.Event | None] = [None] * len(caches)  # by layer; None where nobody has to wait

    def __len__(self) -> int:
        return len(self.caches)

    def __getitem__(self, layer: int) -> KVCache:  # type: ignore[override]  # nobody takes slices
        copied, self.copied[layer] = self.copied[layer], None
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
        return self.caches[layer]


def swap_layer(caches: KVCache, host_caches: tuple[Tensor, Tensor], mapping: Tensor, to_host: bool) -> None:
    """Copy blocks of one layer, keys and values, on the current stream. mapping: int64 [num_pairs, 2]."""
    for cache, host_cache in zip((caches.key_cache, caches.value_cache), host_caches, strict=True):
        source, target = (cache, host_cache) if to_host else (host_cache, cache)
        ops.swap_blocks(source, target, mapping)


def bytes_per_block(num_layers: int, num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values together."""
    key_rows = padded_head_size(head_size, dtype)
    slot_elements = num_kv_heads * (key_rows + num_value_rows(key_rows, dtype))
    return num_layers * slot_elements * block_size * dtype.itemsize


def choose_cache_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the cache of a model of `dtype`; "auto" means the model's. Raises ValueError for an unknown name."""
    check_kv_cache_dtype(kv_cache_dtype)
    return TORCH_DTYPES.get(kv_cache_dtype, dtype)
