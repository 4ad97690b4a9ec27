"""Layers that keep a state instead of keys and values: short causal convolutions, the gated delta rule (Gated
DeltaNet), and the selective scan (Mamba 1 and 2).

A state is of one sequence. The states of all sequences lie in one tensor, [num_slots, ...], and a sequence has one slot
of it, as the tokens of a paged cache have blocks. The ops read the state of each sequence, go through the sequence's
new tokens, and write the state behind them to the same slot. Three arguments say what belongs to whom:

    query_start_loc    int32 or int64 [num_seqs + 1], where the rows of each sequence begin: 0, then not decreasing,
                       last num_tokens. None: one row a sequence.
    state_indices      int32 or int64 [num_seqs], the slot of each sequence; no slot twice. -1 is a sequence that is
                       padding: its rows of the result are zeros, and no state is read or written. None: sequence s has
                       slot s.
    has_initial_state  bool [num_seqs]: False is a sequence that begins with its first row here, so that its state is
                       zeros, whatever its slot holds. None: every slot holds the state of what came before.

A sequence without rows keeps its state. Rows of one sequence are computed one after the other, in one order: a row's
result and the state are the same bits however a prompt is cut into calls, and whatever other sequences are in a call.
Nothing needs to be aligned to a chunk.
"""

import torch
from torch import Tensor

from ._call import call, check_bool, check_tensors


def causal_conv1d(
    input: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    query_start_loc: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A causal convolution of each channel over the tokens of a sequence (depthwise), as of the causal-conv1d package.

    out[t, d] = activation(bias[d] + sum over j < width of weight[d, j] * x[t - (width - 1) + j, d]), where x are the
    rows of the sequence, and before its first row what its state holds.

    Args:
        input: [num_tokens, dim], rows of any stride.
        conv_states: [num_slots, dim, state_len], input's dtype, any strides that keep elements apart; updated: the last
            state_len rows of each sequence, the latest last. state_len is width - 1 to 32. States whose channels are
            adjacent (strides [..., 1, dim]) are read and written fastest.
        weight: [dim, width], input's dtype or fp32, contiguous; width is 1 to 8.
        bias: [dim], weight's dtype.
        activation: None, "silu" or its other name "swish".
        query_start_loc, state_indices, has_initial_state: see the module.
        out: like input (it may not be input); allocated by default.

    Returns:
        out.

    Raises:
        ValueError, TypeError: as all ops do.
    """
    check_tensors("causal_conv1d", input=input)
    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    call(
        "causal_conv1d",
        out,
        input,
        conv_states,
        weight,
        bias,
        _is_silu("causal_conv1d", activation),
        query_start_loc=query_start_loc,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
    )
    return out


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    query_start_loc: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gated delta rule (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024), for prompts and decodes alike.

    For each token t of a sequence and each value head, with the head's state S [k_dim, v_dim]:

        S = exp(g[t]) * S
        S = S + outer(key[t], beta[t] * (value[t] - key[t] @ S))
        out[t] = scale * query[t] @ S

    Args:
        query, key: [num_tokens, num_k_heads, k_dim], value's dtype, any stride in dimension 0. Each serves
            num_v_heads / num_k_heads value heads that follow each other.
        value: [num_tokens, num_v_heads, v_dim], any stride in dimension 0.
        g: [num_tokens, num_v_heads], fp32 or value's dtype, any stride in dimension 0: the logarithm of the decay, 0 or
            less.
        beta: [num_tokens, num_v_heads], likewise: how much of the old value is replaced.
        states: fp32 [num_slots, num_v_heads, k_dim, v_dim], any stride in dimension 0; updated.
        scale: of the queries; None is k_dim ** -0.5.
        use_qk_l2norm: each query and each key is first divided by sqrt(its sum of squares + 1e-6).
        query_start_loc, state_indices, has_initial_state: see the module.
        out: like value; allocated by default.

    Returns:
        out.

    Raises:
        ValueError, TypeError: as all ops do.
    """
    check_tensors("gated_delta_rule", value=value)
    check_bool("gated_delta_rule", "use_qk_l2norm", use_qk_l2norm)
    if out is None:
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
    call(
        "gated_delta_rule",
        out,
        query,
        key,
        value,
        g,
        beta,
        states,
        scale,
        use_qk_l2norm,
        query_start_loc=query_start_loc,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
    )
    return out


def selective_scan(
    input: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    query_start_loc: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The selective scan of Mamba 2 (Dao and Gu, 2024) and of Mamba 1 (Gu and Dao, 2023), for prompts and decodes
    alike.

    For each token t of a sequence and each head h, with the head's state S [head_dim, state_size] and the head's group
    of B and C:

        step = clamp(softplus(dt[t, h] + dt_bias[h]), dt_min, dt_max)    (softplus only with dt_softplus)
        S = exp(step * A[h]) * S + step * outer(input[t, h], B[t])
        out[t, h] = (S @ C[t] + D[h] * input[t, h]) * silu(z[t, h])

    Mamba 1 has heads of one channel each: head_dim is 1, A is [num_heads, state_size], and B and C have one group.

    Args:
        input: [num_tokens, num_heads, head_dim], any stride in dimension 0.
        dt: [num_tokens, num_heads], input's dtype or fp32, any stride in dimension 0.
        A: fp32 [num_heads], or [num_heads, state_size]; 0 or less.
        B, C: [num_tokens, num_groups, state_size], input's dtype, any stride in dimension 0. Each group serves
            num_heads / num_groups heads that follow each other.
        states: fp32 [num_slots, num_heads, head_dim, state_size], any stride in dimension 0; updated.
        D, dt_bias: fp32 [num_heads].
        z: like input.
        dt_min, dt_max: the least and the greatest step; None is no limit.
        query_start_loc, state_indices, has_initial_state: see the module.
        out: like input; allocated by default.

    Returns:
        out.

    Raises:
        ValueError, TypeError: as all ops do.
    """
    check_tensors("selective_scan", input=input)
    check_bool("selective_scan", "dt_softplus", dt_softplus)
    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    call(
        "selective_scan",
        out,
        input,
        dt,
        A,
        B,
        C,
        states,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_min,
        dt_max,
        query_start_loc=query_start_loc,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
    )
    return out


def _is_silu(op: str, activation: str | None) -> bool:
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"{op}: activation: expected a str or None, got {type(activation).__name__}")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'{op}: activation: expected None, "silu" or "swish", got {activation!r}')
    return activation is not None
