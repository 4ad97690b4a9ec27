"""Memory of the CPU in huge pages, for caches and packed weights, which are read in long pieces."""

import mmap
from contextlib import suppress
from math import prod
from threading import Lock
from weakref import finalize

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = 4096
# Size of a mapping that smaller tensors share. In a mapping of its own, a weight of a few huge pages would have a large
# part outside of them.
REGION_BYTES = 32 << 20


class _Region:
    """A mapping that begins at a huge page. It goes back to the system with the last tensor in it, and whole huge pages
    of a tensor with this tensor."""

    def __init__(self, num_bytes: int) -> None:
        try:
            mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:  # an OverflowError is of more bytes than addresses reach
            reason = error.strerror if isinstance(error, OSError) else error
            raise MemoryError(f"{num_bytes} bytes of memory on the CPU: {reason}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mapping = mapping
        self._begin = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
        self._next = self._begin
        self._end = self._begin + num_bytes

    def take(self, num_bytes: int) -> Tensor | None:
        """The next pages, if there are as many: a storage of its own, as torch shares, saves and copies whole
        storages."""
        if num_bytes > self._end - self._next:
            return None
        begin, self._next = self._next, self._next + -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        piece = memoryview(self._mapping)[begin : begin + num_bytes]
        self._give_back_with(piece, begin)
        return torch.frombuffer(piece, dtype=torch.uint8)

    def _give_back_with(self, piece: memoryview, begin: int) -> None:
        """When the storage lets the piece go, the system gets the huge pages that are wholly in the piece. Tensors
        beside it may need the mapping for long."""
        first = begin + (self._begin - begin) % HUGE_PAGE_BYTES
        num_bytes = (begin + len(piece) - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if num_bytes > 0 and hasattr(mmap, "MADV_DONTNEED"):
            finalize(piece, _give_back, self._mapping, first, num_bytes).atexit = False


def _give_back(mapping: mmap.mmap, begin: int, num_bytes: int) -> None:
    with suppress(OSError):  # memory that the process has locked
        mapping.madvise(mmap.MADV_DONTNEED, begin, num_bytes)


_lock = Lock()
_region: _Region | None = None  # the last shared one


@torch.inference_mode(False)  # a tensor may be written to in and out of it
def empty_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU, in huge pages where the system grants them. Within a page of 4 KiB the hardware
    fetches ahead; between two such pages it does not, so what is read in one piece should not lie across them.

    Tensors below 32 MiB share a mapping with the tensors allocated before and after. The mapping lasts as long as one
    of them; whole huge pages of a tensor, on Linux, as long as the tensor.

    Raises:
        MemoryError: if there is not enough memory.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = _Region(num_bytes).take(num_bytes) if num_bytes >= REGION_BYTES else _take_shared(num_bytes)
    assert memory is not None
    return memory.view(dtype).view(shape)


def _take_shared(num_bytes: int) -> Tensor | None:
    global _region
    with _lock:
        memory = None if _region is None else _region.take(num_bytes)
        if memory is None:
            _region = _Region(REGION_BYTES)
            memory = _region.take(num_bytes)
        return memory
