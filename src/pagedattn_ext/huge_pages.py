"""Memory of the CPU in huge pages, for caches and packed weights, which are read in long pieces."""

import mmap
from contextlib import suppress
from math import prod
from threading import Lock

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = 4096
# Size of a mapping that smaller tensors share. In a mapping of its own, a weight of a few huge pages would have a large
# part outside of them.
REGION_BYTES = 32 << 20

_lock = Lock()
_region = torch.empty(0, dtype=torch.uint8, device="cpu")  # the part of the last shared mapping that no tensor has yet


@torch.inference_mode(False)  # a region may be written to in and out of it
def empty_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU, in huge pages where the system grants them. Within a page of 4 KiB the hardware
    fetches ahead; between two such pages it does not, so what is read in one piece should not lie across them.

    Tensors below 32 MiB share a mapping with the tensors allocated before and after. The mapping lasts as long as one
    of them.

    Raises:
        MemoryError: if there is not enough memory.
    """
    global _region
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes >= REGION_BYTES:
        memory = _map(num_bytes)
    else:
        num_page_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        with _lock:
            if num_page_bytes > _region.numel():
                _region = _map(REGION_BYTES)
            memory, _region = _region[:num_bytes], _region[num_page_bytes:]
    return memory.view(dtype).view(shape)


def _map(num_bytes: int) -> Tensor:
    """Memory that begins at a huge page and goes back to the system with the last tensor in it."""
    try:
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:  # an OverflowError is of more bytes than addresses reach
        reason = error.strerror if isinstance(error, OSError) else error
        raise MemoryError(f"{num_bytes} bytes of memory on the CPU: {reason}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return memory[-memory.data_ptr() % HUGE_PAGE_BYTES :][:num_bytes]
