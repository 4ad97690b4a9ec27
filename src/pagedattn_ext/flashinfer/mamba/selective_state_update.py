"""One token or several of each sequence, whose states may go to other slots, or nowhere, as drafts of tokens want."""

from typing import Any

import torch
from torch import Tensor

from ..._adapters import check_memory, check_shape, expect_defaults, write_to_slots
from ..._index_checks import check_once, check_range
from ...mamba_ssm.ops.triton.selective_state_update import selective_state_update as _update_token
from ...ops._call import check_rank, check_tensors


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: Tensor | None = None,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    intermediate_state_scales: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """As mamba-ssm's `selective_state_update`, and of several tokens: the result, like x.

    Args:
        state: [num_slots, num_heads, head_dim, state_size].
        x, dt, z: [batch, num_heads, head_dim], or [batch, num_tokens, ...].
        A: [num_heads, head_dim, state_size].
        B, C: [batch, num_groups, state_size], or [batch, num_tokens, ...].
        D, dt_bias: [num_heads, head_dim].
        state_batch_indices: int32 or int64 [batch], the slot of each sequence; None is 0, 1, 2 and so on.
        pad_slot_id: the slot of padding, whose result is zeros.
        disable_state_update: the states stay as they are.
        intermediate_states_buffer: [num_buffers, at least num_tokens, num_heads, head_dim, state_size], for the states
            behind each token.
        intermediate_state_indices: int32 or int64 [batch], the row of it for each sequence; None is 0, 1, 2 and so on.
        dst_state_batch_indices: int32 or int64 [batch], the slots to which the states go; not together with
            intermediate_states_buffer.
        algorithm, backend, cache_steps, philox_rounds: have no effect.
        state_scale, intermediate_state_scales, rand_seed, cu_seqlens, num_accepted_tokens: refused.

    Of Mamba 1, num_heads and num_groups are left out of all shapes.
    """
    function = selective_state_update
    expect_defaults(
        function, state_scale=state_scale, intermediate_state_scales=intermediate_state_scales, rand_seed=rand_seed,
        cu_seqlens=cu_seqlens, num_accepted_tokens=num_accepted_tokens,
    )  # fmt: skip
    name = function.__qualname__
    if intermediate_states_buffer is not None:
        expect_defaults(function, dst_state_batch_indices=dst_state_batch_indices)
    check_tensors(name, state=state, x=x, dt=dt, A=A, B=B, C=C)
    if z is not None:
        check_tensors(name, z=z)
    check_memory(function, "out", out, x.shape, x.dtype, x.device)
    if not disable_state_update:
        check_memory(function, "state", state, state.shape, None, x.device)
    slots = state_batch_indices
    if slots is not None:
        slots = _padded(slots, pad_slot_id)
    if x.dim() < 4 and not disable_state_update and intermediate_states_buffer is dst_state_batch_indices is None:
        result = _update_token(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, slots)
        return result if out is None else out.copy_(result)
    with_heads = state.dim() == 4
    steps: dict[str, Any] = {"x": x, "dt": dt, "B": B, "C": C} | ({} if z is None else {"z": z})
    if x.dim() < 4 or not with_heads:
        check_rank(name, "x", x, 3 if with_heads else 2)
        steps = {argument: tensor.unsqueeze(1) for argument, tensor in steps.items()}
    for argument, tensor in steps.items():
        check_rank(name, argument, tensor, 4 if with_heads else 3)
    batch, num_tokens = steps["x"].shape[:2]
    for argument, tensor in steps.items():
        check_shape(function, argument, tensor, (batch, num_tokens, *tensor.shape[2:]))
    every = torch.arange(batch, device=x.device)
    slots = every if slots is None else slots
    check_range(function, "state_batch_indices", slots, batch, len(state) - 1, -1)
    is_sequence = slots >= 0
    targets, name_of_targets = slots, "state_batch_indices"
    if dst_state_batch_indices is not None:
        targets, name_of_targets = _padded(dst_state_batch_indices, pad_slot_id), "dst_state_batch_indices"
        check_range(function, name_of_targets, targets, batch, len(state) - 1, -1)
    if not disable_state_update:
        check_once(function, name_of_targets, targets.where(is_sequence, -1))
    places = every if intermediate_state_indices is None else intermediate_state_indices
    if intermediate_states_buffer is not None:
        check_tensors(name, intermediate_states_buffer=intermediate_states_buffer)
        check_rank(name, "intermediate_states_buffer", intermediate_states_buffer, 1 + state.dim())
        rows, capacity = intermediate_states_buffer.shape[:2]
        shape = rows, capacity, *state.shape[1:]
        check_memory(function, "intermediate_states_buffer", intermediate_states_buffer, shape, None, x.device)
        if capacity < num_tokens:
            expected = f"room for {num_tokens} tokens of each sequence"
            raise ValueError(f"{name}: intermediate_states_buffer: expected {expected}, got {capacity}")
        check_range(function, "intermediate_state_indices", places, batch, rows - 1)
        check_once(function, "intermediate_state_indices", places.where(is_sequence, -1))
    states = state[slots.clamp_min(0)].float()  # a copy, in fp32 from token to token
    results = []
    for token in range(num_tokens):
        now = {argument: tensor[:, token] for argument, tensor in steps.items()}
        results.append(
            _update_token(states, now["x"], now["dt"], A, now["B"], now["C"], D, now.get("z"), dt_bias, dt_softplus)
        )
        if intermediate_states_buffer is not None:
            write_to_slots(intermediate_states_buffer[:, token], places, states, is_sequence)
    if not disable_state_update:
        write_to_slots(state, targets, states, is_sequence & (targets >= 0))
    result = torch.stack(results, 1) if results else torch.zeros_like(x)
    result = result.where(is_sequence.view(-1, *[1] * (result.dim() - 1)), 0)
    result = result.view(x.shape)
    return result if out is None else out.copy_(result)


def _padded(slots: Tensor, pad_slot_id: int) -> Tensor:
    """With -1 for padding."""
    if pad_slot_id == -1 or not isinstance(slots, Tensor):
        return slots
    return slots.masked_fill(slots == pad_slot_id, -1)
