"""Rotary position embedding.

q and k are [nnz, num_heads, head_dim], and may be slices of wider heads. The first rotary_dim elements of a head are
rotated, all of them by default. With interleave, elements 2i and 2i + 1 are a pair. Without, element i of the first
half and element i of the second half are one.

Without a cache of cosines and sines, pair i of the token at position p is rotated by the angle p * rope_theta **
(-2i / rotary_dim) / rope_scale. Angles are fp64, cosines and sines fp32. `apply_llama31_rope` and its kin scale as
Llama 3.1 does: a pair that turns less than low_freq_factor times within old_context_len tokens is scaled by rope_scale,
a pair that turns more than high_freq_factor times is not scaled, and in between the scale changes linearly.

Bad arguments raise ValueError or TypeError before anything is written.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._adapters import call_as, check_scales, check_shape, is_recorded, kept, refuse_bools
from .._index_checks import check_indices
from ..ops._call import call, check_bool, check_rank, check_tensors, to_int
from .page import check_layout, pages_of, pair_of, write_slots

Function = Callable[..., Any]

FIRST_TABLE, LARGEST_TABLE = 2**10, 2**16  # positions whose cosines and sines are kept

# What the functions without a cache call the arguments of the ops.
NAMES = {"query": "q", "key": "k"}
RAGGED_NAMES = {"start_loc": "indptr", "first_positions": "offsets"}

# ---- from positions --------------------------------------------------------------------------------------------------


def apply_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """(q, k) rotated, as new tensors. Sequence i has rows indptr[i] to indptr[i + 1], at positions from offsets[i].

    Args:
        indptr: int [num_seqs + 1], from 0 to nnz at most, in ascending order. Rows behind the last sequence stay.
        offsets: int [num_seqs], not negative.
    """
    positions = _ragged_positions(apply_rope, q, indptr, offsets)
    return _rotate(apply_rope, *_copies(apply_rope, q, k), positions, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope` into q and k."""
    positions = _ragged_positions(apply_rope_inplace, q, indptr, offsets)
    _rotate(apply_rope_inplace, q, k, positions, rotary_dim, interleave, rope_scale, rope_theta)


def apply_llama31_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:
    """`apply_rope` with the scale of Llama 3.1."""
    positions = _ragged_positions(apply_llama31_rope, q, indptr, offsets)
    passage = low_freq_factor, high_freq_factor, old_context_len
    return _rotate(
        apply_llama31_rope,
        *_copies(apply_llama31_rope, q, k),
        positions,
        rotary_dim,
        interleave,
        rope_scale,
        rope_theta,
        passage,
    )


def apply_llama31_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope` into q and k."""
    positions = _ragged_positions(apply_llama31_rope_inplace, q, indptr, offsets)
    passage = low_freq_factor, high_freq_factor, old_context_len
    _rotate(apply_llama31_rope_inplace, q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, passage)


def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """(q, k) rotated, as new tensors, at the positions pos_ids, int [nnz]."""
    return _rotate(
        apply_rope_pos_ids, *_copies(apply_rope_pos_ids, q, k), pos_ids, rotary_dim, interleave, rope_scale, rope_theta
    )


def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope_pos_ids` into q and k."""
    _rotate(apply_rope_pos_ids_inplace, q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


def apply_llama31_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:
    """`apply_rope_pos_ids` with the scale of Llama 3.1."""
    passage = low_freq_factor, high_freq_factor, old_context_len
    return _rotate(
        apply_llama31_rope_pos_ids,
        *_copies(apply_llama31_rope_pos_ids, q, k),
        pos_ids,
        rotary_dim,
        interleave,
        rope_scale,
        rope_theta,
        passage,
    )


def apply_llama31_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope_pos_ids` into q and k."""
    passage = low_freq_factor, high_freq_factor, old_context_len
    _rotate(apply_llama31_rope_pos_ids_inplace, q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, passage)


def _ragged_positions(function: Function, q: Tensor, indptr: Tensor, offsets: Tensor) -> Tensor:
    """The position of each row of q, int64 [nnz]."""
    check_tensors(function.__qualname__, q=q)
    positions: Tensor = call_as(function, RAGGED_NAMES, call, "batch_positions", indptr, offsets, q.shape[0])[1]
    return positions


def _copies(function: Function, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    check_tensors(function.__qualname__, q=q, k=k)
    return _copy(q), _copy(k)


def _copy(tensor: Tensor) -> Tensor:
    """Contiguous."""
    return tensor.clone() if tensor.is_contiguous() else tensor.contiguous()


def _rotate(
    function: Function,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    passage: tuple[float, float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k in place. passage is (low_freq_factor, high_freq_factor, old_context_len) of Llama 3.1."""
    check_tensors(function.__qualname__, q=q, k=k, pos_ids=positions)
    check_rank(function.__qualname__, "q", q, 3)
    check_rank(function.__qualname__, "k", k, 3)
    num_rows, _, head_dim = q.shape
    check_indices(function, "pos_ids", positions, num_rows)
    check_bool(function.__qualname__, "interleave", interleave)
    angles = _angles(function, head_dim, rotary_dim, rope_scale, rope_theta, passage, q.device)
    if q.is_cpu and not is_recorded(q.device):  # on a CPU the op sees whether its table has all positions
        try:
            call("rotary_embedding", positions.long(), q, k, head_dim, angles.table, not interleave)
            return q, k
        except (ValueError, TypeError, RuntimeError):  # what else may be wrong is said below, in the function's words
            angles.grow(positions)
    rows, cos_sin = torch.arange(num_rows, device=q.device), angles.of(positions)
    call_as(function, NAMES, call, "rotary_embedding", rows, q, k, head_dim, cos_sin, not interleave)
    return q, k


class _Angles:
    """Of position p the cosines of rotary_dim / 2 pairs, then the sines, as cos(phases + p * frequencies)."""

    def __init__(self, phases: Tensor, frequencies: Tensor) -> None:
        """fp64 [rotary_dim] each."""
        self._phases, self._frequencies = phases, frequencies
        self._table: Tensor | None = None

    def of(self, positions: Tensor) -> Tensor:
        """fp32 [num_positions, rotary_dim]."""
        return torch.addr(self._phases, positions, self._frequencies).cos_().float()

    @property
    def table(self) -> Tensor:
        """Of the positions from 0 on."""
        if self._table is None:
            self._table = self.of(torch.arange(FIRST_TABLE))
        return self._table

    def grow(self, positions: Tensor) -> None:
        """For later calls, if positions are beyond the table, and a table of them takes 2 ** 16 rows at most."""
        largest = int(positions.max()) if positions.numel() > 0 else 0
        if len(self.table) <= largest < LARGEST_TABLE:
            self._table = self.of(torch.arange(2 ** largest.bit_length()))


@kept
def _angles(
    function: Function,
    head_dim: int,
    rotary_dim: int | None,
    rope_scale: float,
    rope_theta: float,
    passage: tuple[float, float, float] | None,
    device: torch.device,
) -> _Angles:
    """Checks the function's arguments of which they are made."""
    rotary_dim = head_dim if rotary_dim is None else to_int(function.__qualname__, "rotary_dim", rotary_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"{function.__qualname__}: rotary_dim: expected an even number up to {head_dim}, got {rotary_dim}"
        )
    _check_scales(function, passage, rope_scale=rope_scale, rope_theta=rope_theta)
    frequencies = rope_theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim)
    unscaled = torch.zeros_like(frequencies)
    if passage is not None:
        low, high, old_context_len = passage
        turns = frequencies * old_context_len / (2 * math.pi)
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    frequencies = torch.lerp(frequencies / rope_scale, frequencies, unscaled).repeat(2)
    phases = torch.zeros_like(frequencies)
    phases[rotary_dim // 2 :] = -math.pi / 2
    return _Angles(phases, frequencies)


def _check_scales(function: Function, passage: tuple[float, float, float] | None, **scales: float) -> None:
    if passage is not None:
        low, high, scales["old_context_len"] = passage
        if not 0 < low < high:
            expected = f"more than low_freq_factor {low}, and both positive"
            raise ValueError(f"{function.__qualname__}: high_freq_factor: expected {expected}, got {high}")
    refuse_bools(function, **scales)
    for name, value in scales.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{function.__qualname__}: {name}: expected a positive number, got {value}")


# ---- from a cache of cosines and sines -------------------------------------------------------------------------------


def apply_rope_with_cos_sin_cache(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    """(query, key) rotated, as new tensors.

    Args:
        positions: int [nnz], rows of cos_sin_cache.
        query, key: [nnz, num_heads * head_size] or [nnz, num_heads, head_size].
        cos_sin_cache: [max_position, rotary_dim], cosines, then sines, of any floating dtype.
        is_neox: pairs are of the two halves; otherwise they are neighbours.
    """
    query, key = _copies(apply_rope_with_cos_sin_cache, query, key)
    _rotate_by_cache(apply_rope_with_cos_sin_cache, positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """`apply_rope_with_cos_sin_cache` into query and key."""
    _rotate_by_cache(apply_rope_with_cos_sin_cache_inplace, positions, query, key, head_size, cos_sin_cache, is_neox)


def _rotate_by_cache(
    function: Function,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    check_tensors(function.__qualname__, positions=positions, query=query, key=key, cos_sin_cache=cos_sin_cache)
    check_indices(function, "positions", positions, query.shape[0])
    if cos_sin_cache.dtype != query.dtype:
        cos_sin_cache = cos_sin_cache.float()
    call_as(function, {}, ops.rotary_embedding, positions.long(), query, key, head_size, cos_sin_cache, is_neox)


# ---- with a quantization to fp8 --------------------------------------------------------------------------------------


def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q_rope, k_rope, q_nope, k_nope) as fp8, the first two rotated, each times its scale and saturating.

    Args:
        q_rope, q_nope: [nnz, num_heads, any width]; None is no width.
        k_rope, k_nope: the same of keys, or [nnz, any width], as MLA's latent keys are.
        cos_sin_cache, pos_ids: as cos_sin_cache and positions of `apply_rope_with_cos_sin_cache`.
        quantize_dtype: float8_e4m3fn or float8_e5m2; by default that of the results that are given, or the first.
        q_rope_out, k_rope_out, q_nope_out, k_nope_out: written; allocated by default.
    """
    return _rope_quantize(
        rope_quantize_fp8, (q_rope, k_rope, q_nope, k_nope), cos_sin_cache, pos_ids, is_neox, quantize_dtype,
        quant_scale_q, quant_scale_kv, (q_rope_out, k_rope_out, q_nope_out, k_nope_out),
    )  # fmt: skip


def mla_rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor,
    k_nope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rope_quantize_fp8`."""
    return _rope_quantize(
        mla_rope_quantize_fp8, (q_rope, k_rope, q_nope, k_nope), cos_sin_cache, pos_ids, is_neox, quantize_dtype,
        quant_scale_q, quant_scale_kv, (q_rope_out, k_rope_out, q_nope_out, k_nope_out),
    )  # fmt: skip


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope_quantize_fp8` of queries and keys, and of v, with keys and values appended to fp8 pages.

    Args:
        v: [nnz, num_kv_heads, head_dim]; None for MLA's latent keys.
        paged_kv_cache: (keys, values) as in `append_paged_kv_cache`; for MLA (k_nope, k_rope), [num_pages, page_size,
            width] each.
        kv_indices, kv_indptr, batch_indices, positions: as in `append_paged_kv_cache`.

    Returns:
        (q_rope, q_nope) as fp8.
    """
    function = rope_quantize_fp8_append_paged_kv_cache
    check_layout(function, kv_layout)
    parts = q_rope, k_rope, q_nope, k_nope
    _check_parts(function, parts)
    if (v is None) != (k_rope.dim() == 2):
        expected = "None for keys without heads" if v is not None else "values for keys with heads"
        raise ValueError(f"{function.__qualname__}: v: expected {expected}, got {'None' if v is None else 'a tensor'}")
    rope_width, nope_width = k_rope.shape[-1], 0 if k_nope is None else k_nope.shape[-1]
    if v is None:
        caches, widths = pair_of(function, "paged_kv_cache", paged_kv_cache), (nope_width, rope_width)
    else:
        caches, width = pages_of(function, "paged_kv_cache", paged_kv_cache, kv_layout), rope_width + nope_width
        widths = width, width
    dtype = caches[0].dtype if quantize_dtype is None else quantize_dtype
    for cache, width in zip(caches, widths, strict=True):
        expected_shape = [*caches[0].shape[:1], page_size, *k_rope.shape[1:-1], width]
        if [*cache.shape] != expected_shape or cache.dtype != dtype:
            raise ValueError(
                f"{function.__qualname__}: paged_kv_cache: expected shape {expected_shape} of {dtype}, got "
                f"{list(cache.shape)} of {cache.dtype}"
            )
    check_shape(function, "v", v, (*k_rope.shape[:2], widths[1]))
    check_indices(function, "positions", positions, len(q_rope))
    slots = call_as(
        function, SLOT_NAMES, ops.compute_slot_mapping, positions, kv_indices, page_size, caches[0].shape[0],
        batch_indices=batch_indices, block_start_loc=kv_indptr,
    )  # fmt: skip
    numbers, outs = _rotated_and_scaled(
        function, parts, cos_sin_cache, pos_ids, is_neox, dtype, quant_scale_q, quant_scale_kv,
        (q_rope_out, None, q_nope_out, None),
    )  # fmt: skip
    k_rope, k_nope = outs[1].copy_(numbers[1]), outs[3].copy_(numbers[3])
    if v is None:
        rows_and_caches = [
            (_as_fp16(function, name, rows), _as_fp16(function, "paged_kv_cache", cache))
            for name, rows, cache in (("k_nope", k_nope, caches[0]), ("k_rope", k_rope, caches[1]))
        ]
        for written in (slice(0), slice(None)):  # no row first: both caches are checked before anything is written
            for rows, cache in rows_and_caches:
                # The op writes two parts side by side: here a row's first number, and the others.
                halves = rows[written, :1], rows[written, 1:]
                call_as(function, CACHE_NAMES, ops.concat_and_cache_mla, *halves, cache, slots[written])
    else:
        value = _scaled(v, quant_scale_kv, dtype).to(dtype)
        write_slots(function, CACHE_NAMES, torch.cat([k_rope, k_nope], -1), value, *caches, slots)
    return outs[0].copy_(numbers[0]), outs[2].copy_(numbers[2])


SLOT_NAMES = {"block_tables": "kv_indices", "block_start_loc": "kv_indptr", "block_size": "page_size"}
CACHE_NAMES = dict.fromkeys(("key_cache", "value_cache", "kv_cache"), "paged_kv_cache")
CACHE_NAMES |= {"key": "k_rope", "value": "v"}


def _as_fp16(function: Function, name: str, tensor: Tensor) -> Tensor:
    """Two elements of fp8 as one of fp16, for an op that moves them."""
    try:
        return tensor.view(torch.float16)
    except RuntimeError:
        expected = "rows of an even number of elements, side by side"
        got = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        raise ValueError(f"{function.__qualname__}: {name}: expected {expected}, got {got}") from None


Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # q_rope, k_rope, q_nope, k_nope
Optionals = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _rope_quantize(
    function: Function,
    parts: Parts,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool,
    dtype: torch.dtype | None,
    scale_q: float,
    scale_kv: float,
    outs: Optionals,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """outs: for each of the parts."""
    _check_parts(function, parts)
    numbers, memory = _rotated_and_scaled(
        function, parts, cos_sin_cache, pos_ids, is_neox, dtype, scale_q, scale_kv, outs
    )
    q_rope, k_rope, q_nope, k_nope = (out.copy_(each) for each, out in zip(numbers, memory, strict=True))
    return q_rope, k_rope, q_nope, k_nope


def _check_parts(function: Function, parts: Parts) -> None:
    q_rope, k_rope, q_nope, k_nope = parts
    check_tensors(function.__qualname__, q_rope=q_rope, k_rope=k_rope)
    check_rank(function.__qualname__, "q_rope", q_rope, 3)
    if k_rope.dim() not in (2, 3):
        expected, got = "2 or 3 dimensions", list(k_rope.shape)
        raise ValueError(f"{function.__qualname__}: k_rope: expected {expected}, got shape {got}")
    for name, nope, rope in (("q_nope", q_nope, q_rope), ("k_nope", k_nope, k_rope)):
        if nope is None:
            continue
        check_tensors(function.__qualname__, **{name: nope})
        if nope.dim() != rope.dim() or nope.shape[:-1] != rope.shape[:-1]:
            expected, got = ", ".join(map(str, rope.shape[:-1])), list(nope.shape)
            raise ValueError(f"{function.__qualname__}: {name}: expected shape [{expected}, *], got {got}")


def _rotated_and_scaled(
    function: Function,
    parts: Parts,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool,
    dtype: torch.dtype | None,
    scale_q: float,
    scale_kv: float,
    outs: Optionals,
) -> tuple[list[Tensor], list[Tensor]]:
    """For each of the parts, which `_check_parts` has seen, the numbers that fp8 is to hold, in fp32, and memory of
    fp8 for them, which is not written."""
    q_rope, k_rope, q_nope, k_nope = parts
    check_tensors(function.__qualname__, cos_sin_cache=cos_sin_cache, pos_ids=pos_ids)
    check_scales(function, quant_scale_q=scale_q, quant_scale_kv=scale_kv)
    check_indices(function, "pos_ids", pos_ids, len(q_rope))
    dtype = next((out.dtype for out in outs if out is not None), torch.float8_e4m3fn) if dtype is None else dtype
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise TypeError(f"{function.__qualname__}: quantize_dtype: expected float8_e4m3fn or float8_e5m2, got {dtype}")
    whole = (
        q_rope, k_rope,
        q_rope[..., :0] if q_nope is None else q_nope,
        k_rope[..., :0] if k_nope is None else k_nope,
    )  # fmt: skip
    memory = []
    for name, part, out in zip(("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"), whole, outs, strict=True):
        if out is None:
            out = torch.empty_like(part, dtype=dtype, memory_format=torch.contiguous_format)
        elif out.shape != part.shape or out.dtype != dtype:
            expected, got = (f"{list(tensor.shape)} of {kind}" for tensor, kind in ((part, dtype), (out, out.dtype)))
            raise ValueError(f"{function.__qualname__}: {name}: expected {expected}, got {got}")
        if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
            expected = "memory for each element"
            raise ValueError(f"{function.__qualname__}: {name}: expected {expected}, got an expanded tensor")
        memory.append(out)
    query, key = (part.float().contiguous() for part in whole[:2])
    query, key = (each.clone() if each is part else each for each, part in zip((query, key), whole[:2], strict=True))
    names = {"query": "q_rope", "key": "k_rope", "positions": "pos_ids"}
    heads = key[:, None] if key.dim() == 2 else key
    call_as(
        function, names, ops.rotary_embedding, pos_ids.long(), query, heads, query.shape[2],
        cos_sin_cache.float(), is_neox,
    )  # fmt: skip
    rotated = query, key, *whole[2:]
    return [_scaled(part, scale, dtype) for part, scale in zip(rotated, (scale_q, scale_kv) * 2, strict=True)], memory


def _scaled(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """fp32, saturated for dtype."""
    largest = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-largest, largest)
