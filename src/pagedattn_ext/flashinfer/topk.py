"""The k greatest of each row, and their places in the tokens or in the pages of a sequence, for sparse attention.

Scores are [num_rows, max_len], of any float dtype. Computed by torch. All results are deterministic: places come in
ascending order. Taken, and without effect: deterministic, dsa_graph_safe. NaN counts as the greatest number.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from .._adapters import check_memory, refuse_gradients
from .._index_checks import check_indices, check_range, values_are_checked
from ..ops._call import check_rank, check_tensors, to_int


class TopKTieBreak(IntEnum):
    """Which of several equal scores are among the k: any, those of the smallest places, or those of the largest."""

    NONE = 0
    SMALL = 1
    LARGE = 2


def top_k(
    input: Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[Tensor, Tensor]:
    """(values, indices) of the k greatest numbers of each row.

    Args:
        input: [batch_size, size].
        k: at most size.
        sorted: the greatest first, and of equal ones the smaller place; otherwise places ascend.
        tie_break: `TopKTieBreak`.

    Returns:
        values, of input's dtype, and indices, int64, both [batch_size, k].
    """
    k = _checked_k(top_k, input, k)
    if k > input.shape[1]:
        raise ValueError(f"top_k: k: expected at most {input.shape[1]} (the numbers of a row of input), got {k}")
    indices = _greatest(top_k, input, k, tie_break).sort().values
    values = input.gather(1, indices)
    if sorted:
        values, order = values.sort(descending=True, stable=True)
        indices = indices.gather(1, order)
    return values, indices


topk = top_k


def top_k_page_table_transform(
    input: Tensor,
    src_page_table: Tensor,
    lengths: Tensor,
    k: int,
    row_to_batch: Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
    page_table_row_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    out: Tensor | None = None,
    out_raw_indices: Tensor | None = None,
) -> Tensor:
    """The slots of the k tokens with the greatest scores: page * page_size + the place in the page.

    Args:
        input: [num_rows, max_len].
        src_page_table: int32 [batch_size, max_num_pages].
        lengths: int32 [num_rows], the tokens of each row.
        row_to_batch: int32 [num_rows], the row of src_page_table of each row; None is the same row.
        row_starts: int32 [num_rows], where the tokens of each row begin in input; None is 0.
        page_table_row_starts: int32 [num_rows], where they begin in src_page_table, in pages; None is row_starts, for
            which pages have one token.
        out, out_raw_indices: int32 [num_rows, k], for the slots, and for the places of the same tokens among the row's.

    Returns:
        int32 [num_rows, k]; -1 behind the tokens of a row that has less than k.
    """
    function = top_k_page_table_transform
    page_size = to_int(function.__qualname__, "page_size", page_size)
    if page_size < 1:
        raise ValueError(f"{function.__qualname__}: page_size: expected 1 or more, got {page_size}")
    if page_size > 1 and row_starts is not None and page_table_row_starts is None:
        expected = f"a tensor with row_starts and a page_size of {page_size}"
        raise ValueError(f"{function.__qualname__}: page_table_row_starts: expected {expected}, got None")
    local, is_token = _places(function, input, lengths, k, tie_break, row_starts)
    check_tensors(function.__qualname__, src_page_table=src_page_table)
    check_indices(function, "src_page_table", src_page_table.flatten())
    check_rank(function.__qualname__, "src_page_table", src_page_table, 2)
    for name, given in (("out", out), ("out_raw_indices", out_raw_indices)):
        check_memory(function, name, given, local.shape, torch.int32, local.device)
    num_rows, (batch_size, max_num_pages) = input.shape[0], src_page_table.shape
    if row_to_batch is None:
        if batch_size != num_rows:
            expected, got = f"{num_rows} rows, as input has", batch_size
            raise ValueError(f"{function.__qualname__}: src_page_table: expected {expected}, got {got}")
        tables = src_page_table
    else:
        check_range(function, "row_to_batch", row_to_batch, num_rows, batch_size - 1)
        tables = src_page_table[row_to_batch]
    first = row_starts if page_table_row_starts is None else page_table_row_starts
    if page_table_row_starts is not None:
        check_range(function, "page_table_row_starts", page_table_row_starts, num_rows, max_num_pages)
    if values_are_checked(lengths):
        begins = [0] * num_rows if first is None else first.tolist()
        sizes = zip(begins, lengths.tolist(), strict=True)
        needed = max((begin + -(-length // page_size) for begin, length in sizes if length), default=0)
        if needed > max_num_pages:
            expected, got = f"{needed} pages, for the tokens of all rows", max_num_pages
            raise ValueError(f"{function.__qualname__}: src_page_table: expected {expected}, got {got}")
    entries = torch.where(is_token, local // page_size + (0 if first is None else first[:, None]), 0)
    tables = tables if max_num_pages else tables.new_zeros(num_rows, 1)  # no row has a token
    slots = tables.gather(1, entries) * page_size + local % page_size
    if out_raw_indices is not None:
        out_raw_indices.copy_(torch.where(is_token, local, -1))
    slots = torch.where(is_token, slots, -1)
    return slots.int() if out is None else out.copy_(slots)


def top_k_ragged_transform(
    input: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
) -> Tensor:
    """The places of the k tokens with the greatest scores, from offsets on.

    Args:
        input: [num_rows, max_len].
        offsets: int32 [num_rows], what is added to the places of each row.
        lengths: int32 [num_rows], the tokens of each row.
        row_starts: int32 [num_rows], where they begin in input; None is 0.

    Returns:
        int32 [num_rows, k]; -1 behind the tokens of a row that has less than k.
    """
    local, is_token = _places(top_k_ragged_transform, input, lengths, k, tie_break, row_starts)
    check_indices(top_k_ragged_transform, "offsets", offsets, input.shape[0])
    return torch.where(is_token, local + offsets[:, None], -1).int()


def _places(
    function: Callable[..., Any], input: Tensor, lengths: Tensor, k: int, tie_break: int, row_starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of each row, the ascending places of the k greatest among its own scores, and whether there are so many; both
    [num_rows, k]."""
    k = _checked_k(function, input, k)
    num_rows, max_len = input.shape
    starts = lengths.new_zeros(num_rows) if row_starts is None and isinstance(lengths, Tensor) else row_starts
    check_range(function, "lengths", lengths, num_rows, max_len)
    if row_starts is not None:
        check_range(function, "row_starts", row_starts, num_rows, max_len)
        if values_are_checked(lengths):
            end = max(map(sum, zip(row_starts.tolist(), lengths.tolist(), strict=True)), default=0)
            if end > max_len:
                expected = f"at most {max_len} with row_starts"
                raise ValueError(f"{function.__qualname__}: lengths: expected {expected}, got {end}")
    assert starts is not None
    local = torch.arange(max_len, device=input.device) - starts[:, None]
    is_own = (local >= 0) & (local < lengths[:, None])
    # An own score of -inf is still one of a token.
    scores = input if input.dtype == torch.float64 else input.float()
    scores = scores.clamp_min(torch.finfo(scores.dtype).min).where(is_own, -torch.inf)
    columns = _greatest(function, scores, min(k, max_len), tie_break)
    is_token = is_own.gather(1, columns)
    columns = columns.where(is_token, max_len).sort().values
    columns = torch.nn.functional.pad(columns, (0, k - columns.shape[1]), value=max_len)
    is_token = columns < max_len
    return torch.where(is_token, columns - starts[:, None], 0), is_token


def _greatest(function: Callable[..., Any], scores: Tensor, k: int, tie_break: int) -> Tensor:
    """int64 [num_rows, k], in any order."""
    if tie_break not in tuple(TopKTieBreak):
        raise ValueError(f"{function.__qualname__}: tie_break: expected 0, 1 or 2, got {tie_break}")
    if tie_break == TopKTieBreak.NONE:
        return scores.topk(k, sorted=False).indices
    if tie_break == TopKTieBreak.SMALL:
        return scores.argsort(descending=True, stable=True)[:, :k]
    return scores.shape[1] - 1 - scores.flip(1).argsort(descending=True, stable=True)[:, :k]


def _checked_k(function: Callable[..., Any], input: Tensor, k: int) -> int:
    check_tensors(function.__qualname__, input=input)
    check_rank(function.__qualname__, "input", input, 2)
    if not input.is_floating_point():
        dtype = str(input.dtype).removeprefix("torch.")
        raise TypeError(f"{function.__qualname__}: input: expected a float dtype, got {dtype}")
    refuse_gradients(function, input=input)
    k = to_int(function.__qualname__, "k", k)
    if k < 1:
        raise ValueError(f"{function.__qualname__}: k: expected 1 or more, got {k}")
    return k
