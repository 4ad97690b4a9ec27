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
import os
from functools import lru_cache

import torch
from torch import Tensor

from .. import _C, ops
from .._adapters import call_for, check_scale
from ..ops._call import check_bool, check_rank, check_tensors, to_int

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
        indptr: int [num_seqs + 1], from 0 to nnz, in ascending order.
        offsets: int [num_seqs], not negative.
    """
    call = "apply_rope"
    positions = _ragged_positions(call, q, indptr, offsets)
    return _rotate(call, *_copies(call, q, k), positions, rotary_dim, interleave, rope_scale, rope_theta)


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
    call = "apply_rope_inplace"
    positions = _ragged_positions(call, q, indptr, offsets)
    _rotate(call, q, k, positions, rotary_dim, interleave, rope_scale, rope_theta)


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
    call = "apply_llama31_rope"
    positions = _ragged_positions(call, q, indptr, offsets)
    passage = low_freq_factor, high_freq_factor, old_context_len
    return _rotate(call, *_copies(call, q, k), positions, rotary_dim, interleave, rope_scale, rope_theta, passage)


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
    call = "apply_llama31_rope_inplace"
    positions = _ragged_positions(call, q, indptr, offsets)
    passage = low_freq_factor, high_freq_factor, old_context_len
    _rotate(call, q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, passage)


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
    call = "apply_rope_pos_ids"
    return _rotate(call, *_copies(call, q, k), pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


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
    call = "apply_rope_pos_ids_inplace"
    _rotate(call, q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


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
    call = "apply_llama31_rope_pos_ids"
    passage = low_freq_factor, high_freq_factor, old_context_len
    return _rotate(call, *_copies(call, q, k), pos_ids, rotary_dim, interleave, rope_scale, rope_theta, passage)


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
    call = "apply_llama31_rope_pos_ids_inplace"
    passage = low_freq_factor, high_freq_factor, old_context_len
    _rotate(call, q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, passage)


def _ragged_positions(call: str, q: Tensor, indptr: Tensor, offsets: Tensor) -> Tensor:
    """The position of each row of q, int64 [nnz]."""
    check_tensors(call, q=q, indptr=indptr, offsets=offsets)
    check_rank(call, "q", q, 3)
    check_rank(call, "indptr", indptr, 1)
    for name, values in (("indptr", indptr), ("offsets", offsets)):
        _check_ints(call, name, values, q)
    if len(indptr) == 0 or offsets.shape != (len(indptr) - 1,):
        expected = f"expected shape [{max(0, len(indptr) - 1)}], one less than indptr"
        raise ValueError(f"{call}: offsets: {expected}, got {list(offsets.shape)}")
    if _are_readable(indptr):
        starts = indptr.tolist()
        if starts[0] != 0 or starts[-1] != len(q) or starts != sorted(starts):
            raise ValueError(f"{call}: indptr: expected rows from 0 to {len(q)} in ascending order, got {starts}")
        if len(offsets) > 0 and int(offsets.min()) < 0:
            raise ValueError(f"{call}: offsets: expected positions of 0 and more, got {int(offsets.min())}")
    before = (offsets - indptr[:-1]).repeat_interleave(indptr.diff(), output_size=len(q))
    return before + torch.arange(len(q), device=q.device)


def _are_readable(values: Tensor) -> bool:
    """Whether values may be looked at now: not while they are compiled or captured, and not without need on a GPU,
    where Python would wait for them."""
    if torch.compiler.is_compiling() or _C.CpuGraph.is_capturing():
        return False
    return values.is_cpu or os.environ.get("PAGEDATTN_CHECK") == "1"


def _copies(call: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    check_tensors(call, q=q, k=k)
    return q.clone(memory_format=torch.contiguous_format), k.clone(memory_format=torch.contiguous_format)


def _rotate(
    call: str,
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
    check_tensors(call, q=q, k=k, pos_ids=positions)
    check_rank(call, "q", q, 3)
    check_rank(call, "k", k, 3)
    _check_ints(call, "pos_ids", positions, q)
    if positions.shape != q.shape[:1]:
        raise ValueError(f"{call}: pos_ids: expected shape [{q.shape[0]}], got {list(positions.shape)}")
    check_bool(call, "interleave", interleave)
    rotary_dim = q.shape[2] if rotary_dim is None else to_int(call, "rotary_dim", rotary_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= q.shape[2]:
        raise ValueError(f"{call}: rotary_dim: expected an even number up to {q.shape[2]}, got {rotary_dim}")
    check_scale(call, "rope_scale", rope_scale)
    check_scale(call, "rope_theta", rope_theta)
    phases, frequencies = _waves(rotary_dim, rope_scale, rope_theta, passage, q.device)
    cos_sin = torch.addr(phases, positions.double(), frequencies).cos_().float()
    rows = torch.arange(len(q), device=q.device)
    names = {"query": "q", "key": "k"}
    call_for(call, names, ops.rotary_embedding, rows, q, k, q.shape[2], cos_sin, not interleave)
    return q, k


@lru_cache(maxsize=32)
def _waves(
    rotary_dim: int,
    rope_scale: float,
    rope_theta: float,
    passage: tuple[float, float, float] | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """(phases, frequencies), fp64 [rotary_dim]: cos(phases + p * frequencies) are the cosines of position p, then its
    sines."""
    frequencies = rope_theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim)
    unscaled = torch.zeros_like(frequencies)
    if passage is not None:
        low, high, old_context_len = passage
        turns = frequencies * old_context_len / (2 * math.pi)
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    frequencies = torch.lerp(frequencies / rope_scale, frequencies, unscaled).repeat(2)
    phases = torch.zeros_like(frequencies)
    phases[rotary_dim // 2 :] = -math.pi / 2
    return phases, frequencies


def _check_ints(call: str, name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{call}: {name}: expected dtype int32 or int64, got {str(tensor.dtype).removeprefix('torch.')}"
        )
    if tensor.device != q.device:
        raise ValueError(f"{call}: {name}: expected a tensor on {q.device}, got one on {tensor.device}")


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
    call = "apply_rope_with_cos_sin_cache"
    query, key = _copies(call, query, key)
    _rotate_by_cache(call, positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """`apply_rope_with_cos_sin_cache` into query and key."""
    call = "apply_rope_with_cos_sin_cache_inplace"
    _rotate_by_cache(call, positions, query, key, head_size, cos_sin_cache, is_neox)


def _rotate_by_cache(
    call: str, positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    check_tensors(call, positions=positions, query=query, key=key, cos_sin_cache=cos_sin_cache)
    check_rank(call, "positions", positions, 1)
    _check_ints(call, "positions", positions, query)
    if cos_sin_cache.dtype != query.dtype:
        cos_sin_cache = cos_sin_cache.float()
    call_for(call, {}, ops.rotary_embedding, positions.long(), query, key, head_size, cos_sin_cache, is_neox)
