"""causal-conv1d's functions on the op `causal_conv1d`, on a CPU as on CUDA, without gradients.

    from pagedattn_ext.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

Names, order, defaults and results are those of causal-conv1d 1.6. Weights of another dtype than x are converted to
fp32. `pagedattn_ext.ops.causal_conv1d` takes rows of sequences of any lengths, and states in slots.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops
from ._adapters import call_as, expect_defaults, refuse_gradients
from .ops._call import check_rank, check_tensors

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]

NAMES = {"input": "x", "conv_states": "conv_state", "state_indices": "conv_state_indices"}


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """The convolution of whole sequences: out, with return_final_states (out, final_states).

    Args:
        x: [batch, dim, seq_len], fastest with adjacent channels.
        weight: [dim, width].
        bias: [dim].
        seq_idx: refused.
        initial_states: [batch, dim, width - 1], the rows before x; None is zeros.
        final_states_out: [batch, dim, width - 1], memory for the final states.
        activation: None, "silu" or "swish".
    """
    refuse_gradients(causal_conv1d_fn, x=x, weight=weight, bias=bias, initial_states=initial_states)
    expect_defaults(causal_conv1d_fn, seq_idx=seq_idx)
    check_rank(causal_conv1d_fn.__qualname__, "x", x, 3)
    check_rank(causal_conv1d_fn.__qualname__, "weight", weight, 2)
    batch_size, dim = x.shape[:2]
    states = x.new_zeros(batch_size, max(weight.shape[1] - 1, 0), dim).transpose(1, 2)
    if initial_states is not None:
        _check_shape(causal_conv1d_fn, "initial_states", initial_states, states)
        states.copy_(initial_states)
    out = _convolve(causal_conv1d_fn, x, states, weight, bias, activation)
    if final_states_out is not None:
        _check_shape(causal_conv1d_fn, "final_states_out", final_states_out, states)
        states = final_states_out.copy_(states)
    return (out, states) if return_final_states else out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The convolution of the next tokens of each sequence, whose state is updated in place.

    Args:
        x: [batch, dim] or [batch, dim, seq_len].
        conv_state: [batch, dim, state_len], or [num_slots, dim, state_len] with conv_state_indices; state_len is
            width - 1 or more. x's dtype.
        weight: [dim, width].
        bias: [dim].
        activation: None, "silu" or "swish".
        cache_seqlens: refused: states are no ring buffers.
        conv_state_indices: int32 [batch], the slot of each sequence; -1 is padding, whose result is zeros.
    """
    refuse_gradients(causal_conv1d_update, x=x, conv_state=conv_state, weight=weight, bias=bias)
    expect_defaults(causal_conv1d_update, cache_seqlens=cache_seqlens)
    check_tensors("causal_conv1d_update", x=x)
    if x.dim() == 2:
        rows = x.unsqueeze(-1)
        out = _convolve(causal_conv1d_update, rows, conv_state, weight, bias, activation, conv_state_indices)
        return out.squeeze(-1)
    check_rank(causal_conv1d_update.__qualname__, "x", x, 3)
    return _convolve(causal_conv1d_update, x, conv_state, weight, bias, activation, conv_state_indices)


def _convolve(
    function: Callable[..., Any],
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    slots: Tensor | None = None,
) -> Tensor:
    """x: [batch, dim, seq_len]; so is the result, with adjacent channels."""
    check_tensors(function.__qualname__, weight=weight)
    batch_size, dim, seq_len = x.shape
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != weight.dtype):
        weight, bias = weight.float(), None if bias is None else bias.float()
    rows = x.transpose(1, 2).reshape(batch_size * seq_len, dim)
    if dim > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    starts = None if seq_len == 1 else torch.arange(batch_size + 1, device=x.device) * seq_len
    out: Tensor = call_as(
        function, NAMES, ops.causal_conv1d, rows, states, weight.contiguous(), bias, activation,
        query_start_loc=starts, state_indices=slots,
    )  # fmt: skip
    return out.view(batch_size, seq_len, dim).transpose(1, 2)


def _check_shape(function: Callable[..., Any], name: str, tensor: Tensor, expected: Tensor) -> None:
    check_tensors(function.__qualname__, **{name: tensor})
    if tensor.shape != expected.shape:
        raise ValueError(
            f"{function.__qualname__}: {name}: expected shape {list(expected.shape)}, got {list(tensor.shape)}"
        )
