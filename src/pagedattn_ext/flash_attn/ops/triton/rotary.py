"""Rotary position embedding."""

from functools import partial

import torch
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_ext._adapters import call_as, converted_rows, refuse_expanded, refuse_gradients
from pagedattn_ext._index_checks import check_indices
from pagedattn_ext.ops._call import check_rank, check_tensors


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """`ops.rotary_embedding` of the first rotary_dim elements of each head (Su et al., "RoFormer", 2021).

    Args:
        x: [batch, seqlen, num_heads, head_size]; with cu_seqlens [total, num_heads, head_size].
        cos, sin: [max_position, rotary_dim / 2].
        seqlen_offsets: the position of each sequence's first row, an int or int32 or int64 [batch].
        cu_seqlens: int32 [batch + 1], from 0 to total.
        max_seqlen: without effect.
        interleaved: rotate elements 2i and 2i + 1, and not i of the two halves.
        conjugate: rotate the other way round.

    Returns:
        x itself if inplace, otherwise a contiguous tensor like it.
    """
    function = apply_rotary
    check_tensors(function.__name__, x=x, cos=cos, sin=sin)
    refuse_gradients(function, x=x, cos=cos, sin=sin)
    check_rank(function.__name__, "x", x, 4 if cu_seqlens is None else 3)
    if inplace:
        refuse_expanded(function, x=x)
    check_rank(function.__name__, "cos", cos, 2)
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ValueError(
            f"{function.__name__}: sin: expected shape {list(cos.shape)} and {cos.dtype}, as cos has, got "
            f"{list(sin.shape)} and {sin.dtype}"
        )
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    dtype = x.dtype if cos.dtype == x.dtype else torch.float32
    if cos.dtype != dtype or not (cos.is_contiguous() and sin.is_contiguous()):
        in_dtype = partial(Tensor.to, dtype=dtype)
        cos, sin = (converted_rows(tensor, positions, in_dtype) for tensor in (cos, sin))
    if conjugate:
        sin = converted_rows(sin, positions, Tensor.neg)
    # The op rotates rows that are evenly spaced.
    is_even = x.stride(-1) == 1 and (x.dim() == 3 or x.stride(0) == x.shape[1] * x.stride(1))
    rotated = x if inplace and is_even else x.clone(memory_format=torch.contiguous_format)
    names = {"query": "x", "positions": "seqlen_offsets", "cos_sin_cache": "cos", "sin_cache": "sin"}
    call_as(
        function, names, ops.rotary_embedding,
        positions, rotated, None, x.shape[-1], cos, not interleaved, sin_cache=sin,
    )  # fmt: skip
    return x.copy_(rotated) if inplace and not is_even else rotated


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The position of each row, int64 [batch, seqlen] or [total]."""
    num_seqs = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if not isinstance(offsets, Tensor):
        offsets = torch.full((num_seqs,), offsets, device=x.device)
    check_indices(apply_rotary, "seqlen_offsets", offsets, num_seqs)
    names = {"start_loc": "cu_seqlens", "first_positions": "seqlen_offsets"}
    _, positions = call_as(apply_rotary, names, ops.batch_positions, cu_seqlens, offsets, x.shape[:-2].numel())
    return positions.view(x.shape[:-2])
