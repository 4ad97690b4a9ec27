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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from .._adapters import call_as, check_real, check_scales, converted_rows, is_recorded, kept
from .._index_checks import check_indices
from ..ops._call import call, check_bool, check_rank, check_tensors, to_int
from ._positions import check_positive
from ._rope_fp8 import mla_rope_quantize_fp8 as mla_rope_quantize_fp8
from ._rope_fp8 import rope_quantize_fp8 as rope_quantize_fp8
from ._rope_fp8 import rope_quantize_fp8_append_paged_kv_cache as rope_quantize_fp8_append_paged_kv_cache

Function = Callable[..., Any]

FIRST_TABLE, LARGEST_TABLE = 2**10, 2**16  # positions whose cosines and sines are kept

# What the functions without a cache call the arguments of the ops.
NAMES = {"query": "q", "key": "k"}
RAGGED_NAMES = {"start_loc": "indptr", "first_positions": "offsets"}


class Llama31Scaling(NamedTuple):
    """What `apply_llama31_rope` and its kin have beside rope_scale."""

    low_freq_factor: float
    high_freq_factor: float
    old_context_len: float


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
    return _rotate(
        apply_rope, *_copies(apply_rope, q=q, k=k), positions, rotary_dim, interleave, rope_scale, rope_theta
    )


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
    scaling = Llama31Scaling(low_freq_factor, high_freq_factor, old_context_len)
    return _rotate(
        apply_llama31_rope,
        *_copies(apply_llama31_rope, q=q, k=k),
        positions,
        rotary_dim,
        interleave,
        rope_scale,
        rope_theta,
        scaling,
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
    scaling = Llama31Scaling(low_freq_factor, high_freq_factor, old_context_len)
    _rotate(apply_llama31_rope_inplace, q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, scaling)


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
    copies = _copies(apply_rope_pos_ids, q=q, k=k)
    return _rotate(apply_rope_pos_ids, *copies, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


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
    scaling = Llama31Scaling(low_freq_factor, high_freq_factor, old_context_len)
    return _rotate(
        apply_llama31_rope_pos_ids,
        *_copies(apply_llama31_rope_pos_ids, q=q, k=k),
        pos_ids,
        rotary_dim,
        interleave,
        rope_scale,
        rope_theta,
        scaling,
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
    scaling = Llama31Scaling(low_freq_factor, high_freq_factor, old_context_len)
    _rotate(apply_llama31_rope_pos_ids_inplace, q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, scaling)


def _ragged_positions(function: Function, q: Tensor, indptr: Tensor, offsets: Tensor) -> Tensor:
    """The position of each row of q, int64 [nnz]."""
    check_tensors(function.__qualname__, q=q)
    check_rank(function.__qualname__, "q", q, 3)
    positions: Tensor = call_as(function, RAGGED_NAMES, call, "batch_positions", indptr, offsets, q.shape[0])[1]
    return positions


def _copies(function: Function, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """tensors: the two that are rotated, under the function's names."""
    check_tensors(function.__qualname__, **tensors)
    first, second = map(_copy, tensors.values())
    return first, second


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
    scaling: Llama31Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k in place."""
    check_tensors(function.__qualname__, q=q, k=k, pos_ids=positions)
    check_rank(function.__qualname__, "q", q, 3)
    check_rank(function.__qualname__, "k", k, 3)
    num_rows, _, head_dim = q.shape
    check_indices(function, "pos_ids", positions, num_rows)
    check_bool(function.__qualname__, "interleave", interleave)
    angles = _angles(function, head_dim, rotary_dim, rope_scale, rope_theta, scaling, q.device)
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
    scaling: Llama31Scaling | None,
    device: torch.device,
) -> _Angles:
    """Checks the function's arguments of which they are made."""
    rotary_dim = head_dim if rotary_dim is None else to_int(function.__qualname__, "rotary_dim", rotary_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"{function.__qualname__}: rotary_dim: expected an even number up to {head_dim}, got {rotary_dim}"
        )
    _check_scales(function, scaling, rope_scale=rope_scale, rope_theta=rope_theta)
    frequencies = rope_theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim)
    unscaled = torch.zeros_like(frequencies)
    if scaling is not None:
        low, high, old_context_len = scaling
        turns = frequencies * old_context_len / (2 * math.pi)
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    frequencies = torch.lerp(frequencies / rope_scale, frequencies, unscaled).repeat(2)
    phases = torch.zeros_like(frequencies)
    phases[rotary_dim // 2 :] = -math.pi / 2
    return _Angles(phases, frequencies)


def _check_scales(function: Function, scaling: Llama31Scaling | None, **scales: float) -> None:
    if scaling is None:
        check_positive(function, **scales)
        return
    low, high, old_context_len = scaling
    check_scales(function, low_freq_factor=low, high_freq_factor=high)
    if not 0 < low < high:
        expected = f"more than low_freq_factor {low}, and both positive"
        raise ValueError(f"{function.__qualname__}: high_freq_factor: expected {expected}, got {high}")
    check_positive(function, **scales, old_context_len=old_context_len)


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
    query, key = _copies(apply_rope_with_cos_sin_cache, query=query, key=key)
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
    if query.dim() == 0:
        raise ValueError(f"{function.__qualname__}: query: expected 2 or 3 dimensions, got 0")
    check_indices(function, "positions", positions, query.shape[0])
    if cos_sin_cache.dtype not in (query.dtype, torch.float32):
        check_real(function, cos_sin_cache=cos_sin_cache)
        cos_sin_cache = converted_rows(cos_sin_cache, positions, Tensor.float)
    call_as(function, {}, ops.rotary_embedding, positions.long(), query, key, head_size, cos_sin_cache, is_neox)
