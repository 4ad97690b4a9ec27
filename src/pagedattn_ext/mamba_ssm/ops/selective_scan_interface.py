"""The scan of Mamba 1 over whole sequences."""

from typing import Any

import torch
from torch import Tensor

from pagedattn_ext._adapters import check_shape, refuse_gradients
from pagedattn_ext.mamba_ssm._scan import ANY_STEP, scan
from pagedattn_ext.ops._call import check_rank, check_tensors

NAMES = {"input": "u", "dt": "delta", "dt_bias": "delta_bias"}


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
        B, C: [batch, state_size, seq_len] or [batch, num_groups, state_size, seq_len]; [dim, state_size] for the same
            numbers at all tokens.
        D, delta_bias: [dim].

    The last state is fp32 [batch, dim, state_size].
    """
    function = selective_scan_fn
    check_tensors(function.__qualname__, u=u, delta=delta, A=A, B=B, C=C)
    refuse_gradients(function, u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias)
    check_rank(function.__qualname__, "u", u, 3)
    check_rank(function.__qualname__, "A", A, 2)
    for name, tensor in (("delta", delta), ("z", z)):
        check_shape(function, name, tensor, u.shape)
    batch_size, dim, seq_len = u.shape
    check_shape(function, "A", A, (dim, A.shape[1]))
    is_constant = 2 in (B.dim(), C.dim())
    B, C = (tensor.unsqueeze(1) if tensor.dim() == 3 else tensor for tensor in (B, C))
    if is_constant:
        B, C = (_of_channels(name, tensor, A.shape, u) for name, tensor in (("B", B), ("C", C)))
    for name, tensor in (("B", B), ("C", C)):
        check_rank(function.__qualname__, name, tensor, 4)
        check_shape(function, name, tensor, (batch_size, tensor.shape[1], A.shape[1], seq_len))
    u_rows, dt_rows = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (u, delta))
    z_rows = None if z is None else z.transpose(1, 2).flatten(0, 1).unsqueeze(2)
    b_rows, c_rows = (tensor.permute(0, 3, 1, 2).flatten(0, 1) for tensor in (B, C))
    states = u.new_zeros(batch_size, dim, 1, A.shape[1], dtype=torch.float32)
    out = scan(
        function, u_rows.unsqueeze(2), dt_rows, A, b_rows, c_rows, states, D, z_rows, delta_bias,
        names=NAMES, dt_softplus=delta_softplus, dt_min=ANY_STEP,
        query_start_loc=torch.arange(batch_size + 1, device=u.device) * seq_len,
    )  # fmt: skip
    out = out.view(batch_size, seq_len, dim).transpose(1, 2)
    return (out, states.squeeze(2)) if return_last_state else out


def _of_channels(name: str, tensor: Tensor, shape: torch.Size, u: Tensor) -> Tensor:
    """B or C with a group for each channel, [batch, dim, state_size, seq_len]: of any groups, or [dim, state_size]."""
    batch_size, dim, seq_len = u.shape
    if tensor.dim() != 2:
        return tensor.repeat_interleave(max(dim // max(tensor.shape[1], 1), 1), 1)
    if tensor.shape != shape:
        expected = f"shape {list(shape)}, as A has"
        raise ValueError(f"{selective_scan_fn.__qualname__}: {name}: expected {expected}, got {list(tensor.shape)}")
    return tensor[None, :, :, None].expand(batch_size, -1, -1, seq_len)
