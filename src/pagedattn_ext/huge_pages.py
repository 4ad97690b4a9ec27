"""Memory of the CPU in huge pages: caches and packed weights, which are read in long pieces."""

from math import prod

import torch
from torch import Tensor

from pagedattn_ext import _C

HUGE_PAGE_BYTES = 2 << 20


def empty_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU, not initialised, that begins at a huge page, where the system grants them: the hardware
    fetches ahead within a page of 4 KiB, so what is read in one piece should not lie across two."""
    num_bytes = prod(shape) * dtype.itemsize
    memory = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8, device="cpu")
    tensor = memory[-memory.data_ptr() % HUGE_PAGE_BYTES :][:num_bytes].view(dtype).view(shape)
    _C.advise_huge_pages(tensor.data_ptr(), num_bytes)
    return tensor
