"""The scan of Mamba 2 over whole sequences."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from pagedattn_ext._adapters import (
    check_shape,
    expect_defaults,
    refuse_gradients,
    sequences_of_batch,
    starts_of_runs,
    states_before,
    to_fp32,
)
from pagedattn_ext.mamba_ssm._scan import ANY_STEP, scan
from pagedattn_ext.ops._call import check_rank, check_tensors


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """The scan of Mamba 2 over whole sequences: out, or a tuple of out and the states that are asked for, final states
    before varlen states.

    Args:
        x, z: [batch, seq_len, num_heads, head_dim].
        dt: [batch, seq_len, num_heads].
        A, dt_bias: [num_heads].
        D: [num_heads] or [num_heads, head_dim].
        B, C: [batch, seq_len, num_groups, state_size].
        chunk_size: has no effect.
        initial_states: [num_seqs, num_heads, head_dim, state_size], which stay as they are; None is zeros.
        seq_idx: int32 [batch, seq_len], a number for the rows of each sequence in x, which lie side by side. Initial
            states are those of the first sequence in each of the batch, and final states those of the last. It has no
            effect beside cu_seqlens.
        cu_seqlens: int32 or int64 [num_seqs + 1], with a batch of 1: where sequences begin in it, and the last ends.
        dt_limit: the least and the greatest step.
        return_final_states: whether to return the states behind the rows of each of the batch, fp32 [batch, num_heads,
            head_dim, state_size]. With cu_seqlens it is refused without return_varlen_states, and the states are those
            of the last sequence.
        return_varlen_states: only with cu_seqlens: whether to return the states of each sequence, fp32 [num_seqs,
            num_heads, head_dim, state_size].
        state_dtype: has no effect: states are fp32.
    """
    function = mamba_chunk_scan_combined
    check_tensors(function.__qualname__, x=x, dt=dt, A=A, B=B, C=C)
    refuse_gradients(function, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
    for name, tensor in (("x", x), ("B", B), ("C", C)):
        check_rank(function.__qualname__, name, tensor, 4)
    check_shape(function, "dt", dt, x.shape[:3])
    check_shape(function, "z", z, x.shape)
    for name, tensor in (("B", B), ("C", C)):
        check_shape(function, name, tensor, (*x.shape[:2], *tensor.shape[2:]))
    try:
        least, greatest = dt_limit
    except (TypeError, ValueError):
        raise ValueError(f"{function.__qualname__}: dt_limit: expected (least, greatest), got {dt_limit!r}") from None
    if cu_seqlens is None:
        expect_defaults(function, return_varlen_states=return_varlen_states)
    elif not return_varlen_states:
        expect_defaults(function, return_final_states=return_final_states)
    starts = sequences_of_batch(function, x, cu_seqlens)
    states = states_before(function, "initial_states", initial_states, (len(starts) - 1, *x.shape[2:], B.shape[3]), x)
    last = None
    if seq_idx is not None and cu_seqlens is None and x.shape[1] > 0:
        of_batch, starts = states, starts_of_runs(function, "seq_idx", seq_idx, (x.shape[0], x.shape[1]))
        first = (starts[:-1] % x.shape[1] == 0).nonzero().squeeze(1)  # of each of the batch
        last = (starts[1:] % x.shape[1] == 0).nonzero().squeeze(1)
        states = x.new_zeros(len(starts) - 1, *of_batch.shape[1:], dtype=torch.float32)
        states[first] = of_batch
    x_rows, dt_rows, b_rows, c_rows = (tensor.flatten(0, 1) for tensor in (x, dt, B, C))
    z_rows = None if z is None else z.flatten(0, 1)
    options: dict[str, Any] = dict(
        dt_softplus=dt_softplus,
        dt_min=ANY_STEP if least == -math.inf else least,
        dt_max=None if greatest == math.inf else greatest,
        query_start_loc=starts,
    )
    if D is None or D.dim() != 2:
        out = scan(function, x_rows, dt_rows, A, b_rows, c_rows, states, D, z_rows, dt_bias, **options)
    else:
        check_shape(function, "D", D, x.shape[2:])
        rows, D = to_fp32(function, "x", x_rows), to_fp32(function, "D", D)
        out = scan(function, rows, dt_rows, A, b_rows, c_rows, states, None, None, dt_bias, **options) + rows * D
        if z_rows is not None:
            out = out * nn.functional.silu(to_fp32(function, "z", z_rows))
        out = out.to(x.dtype)
    out = out.view(x.shape)
    states = states if last is None else states[last]
    if not return_varlen_states:
        return (out, states) if return_final_states else out
    return (out, states[-1:].clone(), states) if return_final_states else (out, states)
