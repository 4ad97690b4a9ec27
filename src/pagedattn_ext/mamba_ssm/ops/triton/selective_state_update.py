"""A token of each sequence."""

import torch
from torch import Tensor

from pagedattn_ext._adapters import (
    check_memory,
    check_shape,
    converted_rows,
    packed_rows,
    refuse_gradients,
    write_to_slots,
)
from pagedattn_ext.mamba_ssm._scan import ANY_STEP, scan
from pagedattn_ext.ops._call import check_rank, check_tensors


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
        state: [batch, num_heads, head_dim, state_size], or [num_slots, ...] with state_batch_indices. In another float
            dtype than fp32 it is rounded at each token.
        x, dt, z: [batch, num_heads, head_dim].
        A: [num_heads, head_dim, state_size].
        B, C: [batch, num_groups, state_size].
        D, dt_bias: [num_heads, head_dim].
        state_batch_indices: int32 [batch], the slot of each sequence; -1 is padding, whose result is zeros.
    """
    function = selective_state_update
    check_tensors(function.__qualname__, state=state, x=x, dt=dt, A=A, B=B, C=C)
    refuse_gradients(function, state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    rank = 2 if x.dim() == 2 else 3  # 2: of Mamba 1
    for name, tensor in (("x", x), ("A", A), ("B", B), ("C", C)):
        check_rank(function.__qualname__, name, tensor, rank)
    check_rank(function.__qualname__, "state", state, rank + 1)
    num_slots = x.shape[0] if state_batch_indices is None else state.shape[0]
    check_memory(function, "state", state, (num_slots, *x.shape[1:], state.shape[-1]), None, x.device)
    check_shape(function, "dt", dt, x.shape)
    check_shape(function, "z", z, x.shape)
    check_shape(function, "A", A, state.shape[1:])
    for name, tensor in (("B", B), ("C", C)):
        check_shape(function, name, tensor, (x.shape[0], *tensor.shape[1:-1], state.shape[-1]))
    check_shape(function, "D", D, x.shape[1:])
    check_shape(function, "dt_bias", dt_bias, x.shape[1:])
    shape = x.shape
    if rank == 2:
        state, x, dt, B, C = (tensor.unsqueeze(1) for tensor in (state, x, dt, B, C))
        A, z = A.unsqueeze(0), None if z is None else z.unsqueeze(1)
        D, dt_bias = (None if tensor is None else tensor.unsqueeze(0) for tensor in (D, dt_bias))
    of_channels = [tensor for tensor in (dt, D, dt_bias) if tensor is not None]
    slots = state_batch_indices
    if state.dtype == torch.float32 and packed_rows(state) is state:
        states = state
    elif slots is None:
        states = state.float().contiguous()
    else:
        check_tensors(function.__qualname__, state_batch_indices=slots)
        states = converted_rows(state, slots, Tensor.float)
    if x.shape[2] != 1 and (A.stride()[1:] != (0, 0) or any(t.stride(-1) != 0 for t in of_channels)):
        # Each channel is a head of its own.
        x_rows, z_rows = x.flatten(1).unsqueeze(2), None if z is None else z.flatten(1).unsqueeze(2)
        view, A = states.flatten(1, 2).unsqueeze(2), A.flatten(0, 1)
        dt, D, dt_bias = dt.flatten(1), *(None if t is None else t.flatten() for t in (D, dt_bias))
    else:
        x_rows, z_rows, view = x, z, states
        A = A[:, 0, 0] if A.stride(2) == 0 else A[:, 0]
        dt, D, dt_bias = dt[:, :, 0], *(None if t is None else t[:, 0] for t in (D, dt_bias))
    out = scan(
        function, x_rows, dt, A, B, C, view, D, z_rows, dt_bias,
        dt_softplus=dt_softplus, dt_min=ANY_STEP, state_indices=slots,
    )  # fmt: skip
    if states is not state:
        if slots is None:
            state.copy_(states)
        else:  # the other slots may be another thread's
            write_to_slots(state, slots, states[slots.clamp_min(0)], slots >= 0)
    return out.view(shape)
