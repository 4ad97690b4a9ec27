"""Paged caches: their layouts, and new tokens."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._adapters import call_as, check_memory, sequences_of_rows
from .._index_checks import check_indices
from ..ops._call import check_rank, check_tensors, to_int

PagedCache = Tensor | tuple[Tensor, Tensor]

# What the functions that append to pages call the arguments of the ops.
NAMES = {"key": "append_key", "value": "append_value", "key_cache": "paged_kv_cache", "value_cache": "paged_kv_cache"}
NAMES |= {"block_tables": "kv_indices", "block_start_loc": "kv_indptr", "last_block_lens": "kv_last_page_len"}
NAMES |= {"slot_mapping": "positions", "block_size": "page_size"}


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
    """Writes keys and values of new tokens into the pages of their sequences.

    Args:
        append_key, append_value: [num_tokens, num_kv_heads, head_dim]. What is fp8, as the cache is, is written bit for
            bit.
        batch_indices, positions: int32 or int64 [num_tokens], the sequence of each token, and its position there. A
            token with a negative sequence is skipped.
        kv_indices, kv_indptr, kv_last_page_len: the pages of the sequences, as in `plan`.

    Raises:
        ValueError: before anything is written, for a position outside of the pages of its sequence, for a page outside
            of the cache, and for lists that do not fit together.
    """
    function = append_paged_kv_cache
    check_layout(function, kv_layout)
    key_cache, value_cache = pages_of(function, "paged_kv_cache", paged_kv_cache, kv_layout)
    slots = _slots_in(key_cache, function, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    write_slots(function, NAMES, append_key, append_value, key_cache, value_cache, slots)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """`append_paged_kv_cache` of latents and rotary parts.

    Args:
        append_ckv: [num_tokens, head_dim_ckv]; append_kpe: [num_tokens, head_dim_kpe].
        ckv_cache: [num_pages, page_size, head_dim_ckv]; kpe_cache: [num_pages, page_size, head_dim_kpe]. Both may be
            slices of one tensor.
    """
    function = append_paged_mla_kv_cache
    pairs = (("append_ckv", append_ckv, "ckv_cache", ckv_cache), ("append_kpe", append_kpe, "kpe_cache", kpe_cache))
    for rows_name, rows, cache_name, cache in pairs:
        check_tensors(function.__qualname__, **{rows_name: rows, cache_name: cache})
        check_rank(function.__qualname__, rows_name, rows, 2)
        expected = [*ckv_cache.shape[:2], rows.shape[1]]
        if cache.dim() != 3 or [*cache.shape] != expected or cache.dtype != rows.dtype:
            raise ValueError(
                f"{function.__qualname__}: {cache_name}: expected shape {expected} of {rows.dtype}, got "
                f"{list(cache.shape)} of {cache.dtype}"
            )
    slots = _slots_in(ckv_cache, function, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    if len(slots) != len(append_ckv) or len(slots) != len(append_kpe):
        got = f"{len(append_ckv)} and {len(append_kpe)}"
        raise ValueError(f"{function.__qualname__}: append_ckv: expected {len(slots)} rows, as positions, got {got}")
    write_latents(function, pairs, slots)


def _slots_in(
    cache: Tensor,
    function: Callable[..., Any],
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> Tensor:
    """The slot of each new token in a cache [num_pages, page_size, ...]."""
    check_indices(function, "kv_indptr", kv_indptr)
    check_indices(function, "kv_last_page_len", kv_last_page_len)
    # The op takes both in one dtype. In the narrower one a length could become another.
    dtype = torch.int64 if kv_last_page_len.dtype == torch.int64 else kv_indptr.dtype
    slots: Tensor = call_as(
        function, NAMES, ops.compute_slot_mapping, positions, kv_indices, cache.shape[1], cache.shape[0],
        batch_indices=batch_indices, block_start_loc=kv_indptr.to(dtype), last_block_lens=kv_last_page_len.to(dtype),
    )  # fmt: skip
    return slots


def write_slots(
    function: Callable[..., Any],
    names: Mapping[str, str],
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> None:
    """`ops.reshape_and_cache` by `call_as`. fp8 goes into a cache of its dtype bit for bit."""
    check_tensors(function.__qualname__, **{names["key"]: key, names["value"]: value})
    tensors = {"key": key.contiguous(), "value": value.contiguous(), "key_cache": key_cache, "value_cache": value_cache}
    if key.itemsize == 1 and key.dtype == value.dtype == key_cache.dtype == value_cache.dtype:
        if key.shape[-1] % 16:
            expected = f"heads of a multiple of 16 elements of {key.dtype}"
            raise ValueError(f"{function.__qualname__}: {names['key_cache']}: expected {expected}, got {key.shape[-1]}")
        # The op would round its rows to fp8. Two elements of fp8 are moved as one of fp16.
        tensors = {name: as_fp16(function, names[name], tensor) for name, tensor in tensors.items()}
    call_as(function, names, ops.reshape_and_cache, *tensors.values(), slots)


def write_latents(
    function: Callable[..., Any], pairs: Iterable[tuple[str, Tensor, str, Tensor]], slots: Tensor
) -> None:
    """`ops.concat_and_cache_mla` by `call_as`. pairs: rows [num_tokens, width], and the cache [num_pages, page_size,
    width] that they go to, both behind what the function calls them."""
    for written in (slice(0), slice(None)):  # no row first: all pairs are checked before anything is written
        for rows_name, rows, cache_name, cache in pairs:
            names = NAMES | {"kv_cache": cache_name, "kv_c": rows_name, "k_pe": rows_name}
            # The op writes two parts side by side: here a row's first number, and the others.
            parts = rows[written, :1], rows[written, 1:]
            call_as(function, names, ops.concat_and_cache_mla, *parts, cache, slots[written])


def as_fp16(function: Callable[..., Any], name: str, tensor: Tensor) -> Tensor:
    """Two elements of fp8 as one of fp16, for an op that moves them."""
    try:
        return tensor.view(torch.float16)
    except RuntimeError:
        expected = "rows of an even number of elements, side by side, with even strides and an even offset"
        got = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}, offset {tensor.storage_offset()}"
        raise ValueError(f"{function.__qualname__}: {name}: expected {expected}, got {got}") from None


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sequence and the position of each of nnz new tokens, the last ones of sequences of these lengths.

    Args:
        append_indptr: int32 or int64 [batch + 1], where the new tokens of each sequence begin, at most nnz.
        seq_lens: int32 or int64 [batch], the new tokens included.
        batch_indices, positions: int32 [nnz], where the results go; allocated by default.

    Returns:
        (batch_indices, positions), int32 [nnz]. Behind the tokens of all sequences these are -1 and 0.
    """
    function = get_batch_indices_positions
    check_indices(function, "append_indptr", append_indptr)
    check_indices(function, "seq_lens", seq_lens, append_indptr.shape[0] - 1)
    names = {"start_loc": "append_indptr", "first_positions": "seq_lens", "num_tokens": "nnz"}
    first = seq_lens.to(append_indptr.device) - append_indptr.diff()
    sequence, position = call_as(function, names, ops.batch_positions, append_indptr, first, nnz)
    check_memory(function, "batch_indices", batch_indices, sequence.shape, torch.int32, sequence.device)
    check_memory(function, "positions", positions, position.shape, torch.int32, position.device)
    return (
        sequence.int() if batch_indices is None else batch_indices.copy_(sequence),
        position.int() if positions is None else positions.copy_(position),
    )


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """The lengths of sequences in pages."""
    check_indices(get_seq_lens, "kv_indptr", kv_indptr)
    page_size = to_int("get_seq_lens", "page_size", page_size)
    check_indices(get_seq_lens, "kv_last_page_len", kv_last_page_len, kv_indptr.shape[0] - 1)
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def tables_of(kv_indices: Tensor, kv_indptr: Tensor, most: int, total: int) -> Tensor:
    """[batch, most]: the pages of each sequence, and behind them what the memory happens to hold. Nothing is written
    there, so that one long sequence among many costs only its own pages.

    most, total: pages of the longest sequence, and of all sequences.
    """
    sequence, place = sequences_of_rows(kv_indptr.contiguous(), total)
    batch = kv_indptr.shape[0] - 1
    return kv_indices.new_empty(batch * most).scatter_(0, sequence * most + place, kv_indices[:total]).view(batch, most)


def pair_of(function: Callable[..., Any], name: str, cache: PagedCache) -> tuple[Tensor, Tensor]:
    """(keys, values) of a pair, or of a tensor [num_pages, 2, ...]."""
    if isinstance(cache, Tensor):
        if cache.dim() < 2 or cache.shape[1] != 2:
            expected, got = "shape [num_pages, 2, ...] or a pair of tensors", list(cache.shape)
            raise ValueError(f"{function.__qualname__}: {name}: expected {expected}, got shape {got}")
        keys, values = cache.unbind(1)
        return keys, values
    if not isinstance(cache, (tuple, list)):
        expected, kind = "a tensor or a pair of tensors", type(cache).__name__
        raise TypeError(f"{function.__qualname__}: {name}: expected {expected}, got {kind}")
    if len(cache) != 2:
        raise ValueError(f"{function.__qualname__}: {name}: expected a pair of tensors, got {len(cache)} elements")
    keys, values = cache
    for tensor in (keys, values):
        check_tensors(function.__qualname__, **{name: tensor})
    return keys, values


def pages_of(function: Callable[..., Any], name: str, cache: PagedCache, kv_layout: str) -> tuple[Tensor, Tensor]:
    """The pair [num_pages, page_size, num_kv_heads, head_dim]; views."""
    key_cache, value_cache = pair_of(function, name, cache)
    for tensor in (key_cache, value_cache):
        if tensor.dim() not in (3, 4):
            expected, got = "keys and values of 3 or 4 dimensions", list(tensor.shape)
            raise ValueError(f"{function.__qualname__}: {name}: expected {expected}, got shape {got}")
    if key_cache.dim() == 3:  # pages of one token
        return key_cache[:, None], value_cache[:, None]
    if kv_layout == "HND":
        return key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    return key_cache, value_cache


def check_layout(function: Callable[..., Any], kv_layout: str) -> None:
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"{function.__qualname__}: kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")
