"""mamba-ssm's functions for inference on the op `selective_scan`, on a CPU as on CUDA, without gradients.

    from pagedattn_ext.mamba_ssm import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update

Names, order, defaults and results are those of mamba-ssm 2.3. All compute token by token: `chunk_size` has no effect.
`pagedattn_ext.ops.selective_scan` takes rows of sequences of any lengths, and states in slots.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops
from ._adapters import call_as, expect_defaults, packed_rows, refuse_gradients, sequences_of_batch, states_before
from .ops._call import check_rank, check_tensors

__all__ = ["mamba_chunk_scan_combined", "selective_scan_fn", "selective_state_update"]

NAMES = {"input": "x", "states": "state", "state_indices": "state_batch_indices"}
NAMES_OF_MAMBA_1 = {"input": "u", "dt": "delta", "dt_bias": "delta_bias"}


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token of each sequence, whose state is updated in place: out, like x.

    Of Mamba 1, num_heads and num_groups are left out of all shapes. Numbers of heads that are expanded, as A, D, dt and
    dt_bias of Mamba 2, are computed with once a head.

    Args:
        state: [batch, num_heads, head_dim, state_size], or [num_slots, ...] with state_batch_indices. In another dtype
            than fp32 it is rounded at each token.
        x, dt, z: [batch, num_heads, head_dim].
        A: [num_heads, head_dim, state_size].
        B, C: [batch, num_groups, state_size].
        D, dt_bias: [num_heads, head_dim].
        state_batch_indices: int32 [batch], the slot of each sequence; -1 is padding, whose result is zeros.
    """
    function = selective_state_update
    check_tensors(function.__qualname__, state=state, x=x, dt=dt, A=A, B=B, C=C)
    refuse_gradients(function, state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    if x.dim() == 2:  # of Mamba 1
        state, x, dt, B, C = (tensor.unsqueeze(1) for tensor in (state, x, dt, B, C))
        z, D, dt_bias = (
            None if tensor is None else tensor.unsqueeze(dim) for tensor, dim in ((z, 1), (D, 0), (dt_bias, 0))
        )
        out = selective_state_update(
            state, x, dt, A.unsqueeze(0), B, C, D, z, dt_bias, dt_softplus, state_batch_indices
        )
        return out.squeeze(1)
    for name, tensor, rank in (("state", state, 4), ("x", x, 3), ("dt", dt, 3), ("A", A, 3), ("B", B, 3), ("C", C, 3)):
        check_rank(function.__qualname__, name, tensor, rank)
    of_channels = {name: tensor for name, tensor in (("D", D), ("dt_bias", dt_bias)) if tensor is not None}
    for name, tensor in of_channels.items():
        check_rank(function.__qualname__, name, tensor, 2)
    states = packed_rows(state.float())
    if x.shape[2] != 1 and (A.stride()[1:] != (0, 0) or any(t.stride(-1) != 0 for t in (dt, *of_channels.values()))):
        # Each channel is a head of its own.
        x_rows, z_rows = x.flatten(1).unsqueeze(2), None if z is None else z.flatten(1).unsqueeze(2)
        view, A = states.flatten(1, 2).unsqueeze(2), A.flatten(0, 1)
        dt, D, dt_bias = dt.flatten(1), *(None if t is None else t.flatten() for t in (D, dt_bias))
    else:
        x_rows, z_rows, view = x, z, states
        A = A[:, 0, 0] if A.stride(2) == 0 else A[:, 0]
        dt, D, dt_bias = dt[:, :, 0], *(None if t is None else t[:, 0] for t in (D, dt_bias))
    out = _scan(
        function, x_rows, dt, A, B, C, view, D, z_rows, dt_bias,
        dt_softplus=dt_softplus, state_indices=state_batch_indices,
    )  # fmt: skip
    if states.data_ptr() != state.data_ptr():
        state.copy_(states)
    return out.view(x.shape)


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
) -> Any:
    """The scan of Mamba 2 over whole sequences: out, with return_final_states or return_varlen_states (out, states).

    Args:
        x, z: [batch, seq_len, num_heads, head_dim].
        dt: [batch, seq_len, num_heads].
        A, D, dt_bias: [num_heads].
        B, C: [batch, seq_len, num_groups, state_size].
        chunk_size: has no effect.
        initial_states: [num_seqs, num_heads, head_dim, state_size], which stay as they are; None is zeros.
        seq_idx: has no effect beside cu_seqlens, and is refused without.
        cu_seqlens: int32 or int64 [num_seqs + 1], with a batch of 1: where sequences begin in it, and the last ends.
        dt_limit: the least and the greatest step.
        return_final_states: without cu_seqlens, and return_varlen_states with cu_seqlens: whether to return the states,
            fp32 [num_seqs, num_heads, head_dim, state_size].
    """
    function = mamba_chunk_scan_combined
    check_tensors(function.__qualname__, x=x, dt=dt, A=A, B=B, C=C)
    refuse_gradients(function, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
    for name, tensor, rank in (("x", x, 4), ("dt", dt, 3), ("B", B, 4), ("C", C, 4)):
        check_rank(function.__qualname__, name, tensor, rank)
    if cu_seqlens is None:
        expect_defaults(function, seq_idx=seq_idx, return_varlen_states=return_varlen_states)
    else:
        expect_defaults(function, return_final_states=return_final_states)
    starts = sequences_of_batch(function, x, cu_seqlens)
    states = states_before(function, "initial_states", initial_states, (len(starts) - 1, *x.shape[2:], B.shape[3]), x)
    least, greatest = dt_limit
    x_rows, dt_rows, b_rows, c_rows = (tensor.flatten(0, 1) for tensor in (x, dt, B, C))
    z_rows = None if z is None else z.flatten(0, 1)
    out = _scan(
        function, x_rows, dt_rows, A, b_rows, c_rows, states, D, z_rows, dt_bias, dt_softplus=dt_softplus,
        dt_min=least, dt_max=None if greatest == math.inf else greatest, query_start_loc=starts,
    ).view(x.shape)  # fmt: skip
    return (out, states) if return_final_states or return_varlen_states else out


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """The scan of Mamba 1 over whole sequences: out, with return_last_state (out, last_state).

    Args:
        u, delta, z: [batch, dim, seq_len].
        A: [dim, state_size].
        B, C: [batch, state_size, seq_len] or [batch, num_groups, state_size, seq_len].
        D, delta_bias: [dim].

    The last state is fp32 [batch, dim, state_size].
    """
    function = selective_scan_fn
    check_tensors(function.__qualname__, u=u, delta=delta, A=A, B=B, C=C)
    refuse_gradients(function, u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias)
    for name, tensor in (("u", u), ("delta", delta)):
        check_rank(function.__qualname__, name, tensor, 3)
    check_rank(function.__qualname__, "A", A, 2)
    batch_size, dim, seq_len = u.shape
    B, C = (tensor.unsqueeze(1) if tensor.dim() == 3 else tensor for tensor in (B, C))
    for name, tensor in (("B", B), ("C", C)):
        check_rank(function.__qualname__, name, tensor, 4)
    u_rows, dt_rows = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (u, delta))
    z_rows = None if z is None else z.transpose(1, 2).flatten(0, 1).unsqueeze(2)
    b_rows, c_rows = (tensor.permute(0, 3, 1, 2).flatten(0, 1) for tensor in (B, C))
    states = u.new_zeros(batch_size, dim, 1, A.shape[1], dtype=torch.float32)
    out = _scan(
        function, u_rows.unsqueeze(2), dt_rows, A, b_rows, c_rows, states, D,
        z_rows, delta_bias,
        dt_softplus=delta_softplus, query_start_loc=torch.arange(batch_size + 1, device=u.device) * seq_len,
    )  # fmt: skip
    out = out.view(batch_size, seq_len, dim).transpose(1, 2)
    return (out, states.squeeze(2)) if return_last_state else out


def _scan(
    function: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    **options: Any,
) -> Tensor:
    """The op, with parameters of any dtype and rows of any strides."""
    out: Tensor = call_as(
        function,
        NAMES_OF_MAMBA_1 if function is selective_scan_fn else NAMES,
        ops.selective_scan,
        packed_rows(x),
        packed_rows(dt if dt.dtype == x.dtype else dt.float()),
        A.float().contiguous(),
        packed_rows(B),
        packed_rows(C),
        states,
        D=None if D is None else D.float().contiguous(),
        z=None if z is None else packed_rows(z),
        dt_bias=None if dt_bias is None else dt_bias.float().contiguous(),
        **options,
    )
    return out
