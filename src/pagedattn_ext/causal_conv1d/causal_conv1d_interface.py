"""The convolution of whole sequences, and of the next tokens of each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_ext._adapters import (
    call_as,
    check_memory,
    check_real,
    check_shape,
    refuse_expanded,
    refuse_gradients,
    starts_of_runs,
    to_fp32,
)
from pagedattn_ext._index_checks import check_indices, values_are_checked
from pagedattn_ext.ops._call import check_rank, check_tensors

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
        seq_idx: int32 [batch, seq_len], a number for the rows of each sequence in x, which lie side by side; -1 is
            padding, whose result is zeros. Not together with initial_states, return_final_states or final_states_out.
        initial_states: [batch, dim, width - 1], the rows before x; None is zeros.
        final_states_out: [batch, dim, width - 1], memory of x's dtype for the final states.
        activation: None, "silu" or "swish".
    """
    refuse_gradients(causal_conv1d_fn, x=x, weight=weight, bias=bias, initial_states=initial_states)
    check_rank(causal_conv1d_fn.__qualname__, "x", x, 3)
    check_rank(causal_conv1d_fn.__qualname__, "weight", weight, 2)
    num_seqs, dim, _ = x.shape
    starts = None
    if seq_idx is not None:
        of_batch = {"initial_states": initial_states, "final_states_out": final_states_out}
        given = [name for name, states in of_batch.items() if states is not None]
        given += ["return_final_states"] if return_final_states else []
        if given:
            raise ValueError(f"causal_conv1d_fn: seq_idx: expected None with {given[0]}, got a tensor")
        starts = starts_of_runs(causal_conv1d_fn, "seq_idx", seq_idx, (x.shape[0], x.shape[2]))
        num_seqs = len(starts) - 1
    states = x.new_zeros(num_seqs, max(weight.shape[1] - 1, 0), dim).transpose(1, 2)
    if initial_states is not None:
        check_shape(causal_conv1d_fn, "initial_states", initial_states, states.shape)
        check_real(causal_conv1d_fn, initial_states=initial_states)
        states.copy_(initial_states)
    check_memory(causal_conv1d_fn, "final_states_out", final_states_out, states.shape, x.dtype, x.device)
    out = _convolve(causal_conv1d_fn, x, states, weight, bias, activation, starts=starts)
    if seq_idx is not None:
        out.masked_fill_((seq_idx < 0).unsqueeze(1), 0)
    if final_states_out is not None:
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
        cache_seqlens: int32 [batch], how many tokens each sequence had before: states are ring buffers then, in which
            the token at position p has column p % state_len. None: the latest tokens are last.
        conv_state_indices: int32 [batch], the slot of each sequence; -1 is padding, whose result is zeros.
    """
    refuse_gradients(causal_conv1d_update, x=x, conv_state=conv_state, weight=weight, bias=bias)
    check_tensors("causal_conv1d_update", x=x)
    rows = x.unsqueeze(-1) if x.dim() == 2 else x
    check_rank(causal_conv1d_update.__qualname__, "x", rows, 3)
    if cache_seqlens is None:
        out = _convolve(causal_conv1d_update, rows, conv_state, weight, bias, activation, conv_state_indices)
    else:
        out = _update_rings(rows, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
    return out.squeeze(-1) if x.dim() == 2 else out


def _update_rings(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor,
    slots: Tensor | None,
) -> Tensor:
    """The convolution on copies of the rings, the oldest token first. Then the rings get what is new."""
    function = causal_conv1d_update
    check_tensors(function.__qualname__, conv_state=conv_state)
    check_rank(function.__qualname__, "conv_state", conv_state, 3)
    refuse_expanded(function, conv_state=conv_state)
    batch_size, _, seq_len = x.shape
    num_slots, dim, state_len = conv_state.shape
    check_indices(function, "cache_seqlens", cache_seqlens, batch_size)
    if values_are_checked(cache_seqlens) and min(cache_seqlens.tolist(), default=0) < 0:
        got = cache_seqlens.tolist()
        raise ValueError(f"{function.__qualname__}: cache_seqlens: expected 0 or more, got {got}")
    if slots is None:
        if num_slots != batch_size:
            expected = f"{batch_size} states, one for each sequence of x"
            raise ValueError(f"{function.__qualname__}: conv_state: expected {expected}, got {num_slots}")
        rings = conv_state
    else:
        check_indices(function, "conv_state_indices", slots, batch_size)
        if values_are_checked(slots):
            _check_slots(slots.tolist(), num_slots)
        if min(batch_size, num_slots) == 0:  # no sequences, or padding alone
            return _convolve(function, x, conv_state, weight, bias, activation, slots)
        before = rings = conv_state[slots.clamp(min=0)]
    ages = torch.arange(state_len, device=x.device)
    columns = ((cache_seqlens.long()[:, None] + ages) % max(state_len, 1))[:, None].expand(-1, dim, -1)
    states = rings.gather(2, columns)
    out = _convolve(function, x, states, weight, bias, activation)
    rings = rings.scatter(2, (columns + seq_len) % max(state_len, 1), states)
    if slots is None:
        conv_state.copy_(rings)
    else:
        # To leave out what is padding is to wait for a GPU. So padding writes what another row of the batch writes, or
        # the state that is there if there are no other rows.
        is_padding = (slots < 0)[:, None, None]
        other = slots.argmax().view(1)
        rings = torch.where(is_padding, before, rings)
        rings = torch.where(is_padding, rings.index_select(0, other), rings)
        slots = torch.where(slots < 0, slots.index_select(0, other), slots).clamp(min=0)
        conv_state[slots] = rings
        out.masked_fill_(is_padding, 0)
    return out


def _check_slots(slots: list[int], num_slots: int) -> None:
    used = [slot for slot in slots if slot != -1]
    if not all(0 <= slot < num_slots for slot in used):
        expected = f"-1 (padding) to {num_slots - 1}"
    elif len(set(used)) < len(used):
        expected = "every slot once"
    else:
        return
    raise ValueError(f"{causal_conv1d_update.__qualname__}: conv_state_indices: expected {expected}, got {slots}")


def _convolve(
    function: Callable[..., Any],
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    slots: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """x: [batch, dim, seq_len]; so is the result, with adjacent channels. starts: where sequences begin among the rows
    of the batch, and the last ends; None: one for each of the batch."""
    check_tensors(function.__qualname__, weight=weight)
    batch_size, dim, seq_len = x.shape
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != weight.dtype):
        weight = to_fp32(function, "weight", weight)
        bias = None if bias is None else to_fp32(function, "bias", bias)
    rows = x.transpose(1, 2).reshape(batch_size * seq_len, dim)
    if dim > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    if starts is None and seq_len != 1:
        starts = torch.arange(batch_size + 1, device=x.device) * seq_len
    out: Tensor = call_as(
        function, NAMES, ops.causal_conv1d, rows, states, weight.contiguous(), bias, activation,
        query_start_loc=starts, state_indices=slots,
    )  # fmt: skip
    return out.view(batch_size, seq_len, dim).transpose(1, 2)
