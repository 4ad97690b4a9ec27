"""Paged caches: their layouts, and new tokens."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import ops
from .._adapters import rows_of

PagedCache = Tensor | tuple[Tensor, Tensor]


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes keys and values [num_tokens, num_kv_heads, head_dim] to these positions (int [num_tokens]) of these
    sequences (batch_indices, int [num_tokens]), whose pages kv_indptr and kv_indices name as in `plan`. What is fp8
    already is written as it is."""
    check_layout(append_paged_kv_cache, kv_layout)
    key_cache, value_cache = pages_of(paged_kv_cache, kv_layout)
    page_size = key_cache.shape[1]
    pages = kv_indices[kv_indptr[batch_indices] + positions // page_size]
    slots = pages.long() * page_size + positions % page_size
    if append_key.itemsize == 1:
        append_key, append_value = append_key.half(), append_value.half()  # exact, and so is the way back
    ops.reshape_and_cache(append_key, append_value, key_cache, value_cache, slots)


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sequence and the position of each of nnz new tokens, the last ones of sequences of these lengths; int32
    [nnz]. append_indptr [batch + 1] is where the new tokens of each sequence begin."""
    sequence, place = rows_of(append_indptr, nnz)
    position = (seq_lens - append_indptr.diff())[sequence] + place
    return (
        sequence.int() if batch_indices is None else batch_indices.copy_(sequence),
        position.int() if positions is None else positions.copy_(position),
    )


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """The lengths of sequences in pages."""
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def pages_of(cache: PagedCache, kv_layout: str) -> tuple[Tensor, Tensor]:
    """The pair [num_pages, page_size, num_kv_heads, head_dim]; views."""
    key_cache, value_cache = cache.unbind(1) if isinstance(cache, Tensor) else cache
    if key_cache.dim() == 3:  # pages of one token
        return key_cache[:, None], value_cache[:, None]
    if kv_layout == "HND":
        return key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    return key_cache, value_cache


def check_layout(function: Callable[..., Any], kv_layout: str) -> None:
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"{function.__qualname__}: kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")
