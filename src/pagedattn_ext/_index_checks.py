"""Index and length arguments of one call, checked against each other, for all functions of other libraries.

Each check raises ValueError or TypeError, which name the function, the argument, what was expected and what came. The
values of tensors on a GPU are looked at only if PAGEDATTN_CHECK is 1, because to look at them is to wait for the GPU.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .ops._call import check_rank, check_tensors
from .switches import is_on


def check_indices(function: Callable[..., Any], name: str, tensor: Tensor, size: int | None = None) -> None:
    """int32 or int64 [size]; None is any size."""
    if not isinstance(tensor, Tensor):
        check_tensors(function.__qualname__, **{name: tensor})
    if tensor.dtype not in (torch.int32, torch.int64):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{function.__qualname__}: {name}: expected dtype int32 or int64, got {dtype}")
    if tensor.dim() != 1:
        check_rank(function.__qualname__, name, tensor, 1)
    if size is not None and tensor.shape[0] != size:
        raise ValueError(f"{function.__qualname__}: {name}: expected {size} elements, got {tensor.shape[0]}")


def num_seqs_of(function: Callable[..., Any], name: str, starts: Tensor) -> int:
    """Of int32 or int64 [num_seqs + 1], where each sequence begins and the last ends."""
    check_indices(function, name, starts)
    if starts.shape[0] == 0:
        raise ValueError(f"{function.__qualname__}: {name}: expected at least 1 element, got 0")
    return starts.shape[0] - 1


def check_starts(
    function: Callable[..., Any], name: str, starts: Tensor, num_seqs: int | None = None, largest: int | None = None
) -> None:
    """int32 or int64 [num_seqs + 1], where each sequence begins and the last ends: 0 first, no offset less than the one
    before, none more than `largest`. None is any number of sequences, or any end."""
    if num_seqs is None:
        num_seqs = num_seqs_of(function, name, starts)
    check_indices(function, name, starts, num_seqs + 1)
    if not values_are_checked(starts):
        return
    offsets = starts.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{function.__qualname__}: {name}: expected 0 first, got {offsets[0]}")
    for sequence, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(
                f"{function.__qualname__}: {name}: expected offsets that do not decrease, got {start} and then {end} "
                f"at sequence {sequence}"
            )
    if largest is not None and offsets[-1] > largest:
        raise ValueError(f"{function.__qualname__}: {name}: expected at most {largest} last, got {offsets[-1]}")


def check_range(
    function: Callable[..., Any], name: str, tensor: Tensor, size: int, largest: int, smallest: int = 0
) -> None:
    """int32 or int64 [size], from smallest to largest."""
    check_indices(function, name, tensor, size)
    if not values_are_checked(tensor):
        return
    for value in tensor.tolist():
        if not smallest <= value <= largest:
            raise ValueError(f"{function.__qualname__}: {name}: expected {smallest} to {largest}, got {value}")


def check_once(function: Callable[..., Any], name: str, slots: Tensor) -> None:
    """No slot twice, of those that are written. Less than 0 is none."""
    if not values_are_checked(slots):
        return
    seen = set()
    for sequence, slot in enumerate(slots.tolist()):
        if slot in seen:
            text = f"expected every slot once, got {slot} again at sequence {sequence}"
            raise ValueError(f"{function.__qualname__}: {name}: {text}")
        if slot >= 0:
            seen.add(slot)


def check_page_lists(function: Callable[..., Any], page_size: int, **lists: Tensor) -> None:
    """The three lists by which sequences have pages, under the function's names, in this order: where the pages of each
    sequence begin [num_seqs + 1], the pages [any number], and the tokens in the last page of each sequence [num_seqs],
    from 1 to page_size. A sequence without pages may have anything as its last page's tokens."""
    (indptr_name, indptr), (indices_name, indices), (last_name, last_page_len) = lists.items()
    if page_size < 1:
        raise ValueError(f"{function.__qualname__}: page_size: expected 1 or more, got {page_size}")
    check_indices(function, indices_name, indices)
    check_starts(function, indptr_name, indptr, largest=indices.shape[0])
    check_indices(function, last_name, last_page_len, indptr.shape[0] - 1)
    if not (values_are_checked(indptr) and values_are_checked(last_page_len)):
        return
    offsets = indptr.tolist()
    for sequence, length in enumerate(last_page_len.tolist()):
        if offsets[sequence] < offsets[sequence + 1] and not 1 <= length <= page_size:
            raise ValueError(
                f"{function.__qualname__}: {last_name}: expected 1 to {page_size} (page_size), got {length} at "
                f"sequence {sequence}"
            )


def values_are_checked(tensor: Tensor) -> bool:
    return tensor.is_cpu or is_on("PAGEDATTN_CHECK")
