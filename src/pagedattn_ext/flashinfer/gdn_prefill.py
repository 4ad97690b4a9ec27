"""The gated delta rule over prompts, token by token, with states [num_heads, v_dim, k_dim]."""

from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._adapters import (
    call_as,
    check_memory,
    check_shape,
    expect_defaults,
    in_one_dtype,
    log_decay,
    packed_rows,
    refuse_bools,
    refuse_gradients,
    states_before,
    to_fp32,
    write_to_slots,
)
from .._index_checks import check_once, check_range, check_starts, num_seqs_of
from ..ops._call import check_rank, check_tensors

NAMES = {"query": "q", "key": "k", "value": "v", "states": "initial_state", "query_start_loc": "cu_seqlens"}
NAMES |= {"use_qk_l2norm": "use_qk_l2norm_in_kernel"}


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
    *,
    gate_domain: str = "linear",
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_is_logit: bool = False,
    cu_seqlens_cpu: Any = None,
    output_state_indices: Tensor | None = None,
    checkpoint_state_indices: Tensor | None = None,
    prefix_lens: Tensor | None = None,
) -> Any:
    """out; with output_final_state (out, the states behind each sequence).

    Args:
        q: [num_tokens, num_q_heads, k_dim].
        k: [num_tokens, num_k_heads, k_dim]; num_k_heads is num_q_heads, or num_v_heads and a divisor of num_q_heads.
        v: [num_tokens, num_v_heads, v_dim].
        g, beta: [num_tokens, num_heads], with num_heads the greater of num_q_heads and num_v_heads. g is the decay
            itself, from 0 to 1, or with gate_domain "log" its logarithm. Without them both are 1.
        scale: of q; None and 0 are k_dim ** -0.5.
        initial_state: [num_seqs, num_heads, v_dim, k_dim]; with state_indices [num_slots, ...]. None is zeros.
        cu_seqlens: int32 or int64 [num_seqs + 1], where each sequence begins, and the last ends.
        output: [num_tokens, num_heads, v_dim] of q's dtype, for the result.
        output_state: like initial_state, of any float dtype, for the states; a sequence without tokens leaves its own
            as it is. It may be initial_state. state_indices with output_final_state want it.
        state_indices: int32 or int64 [num_seqs], the slot of each sequence. No two sequences with tokens have the
            same one.
        use_qk_l2norm_in_kernel: each head of q and k is first divided by sqrt(its sum of squares + 1e-6).
        use_gate_in_kernel: g is what the decay is made of: exp(-exp(A_log) * softplus(g + dt_bias)).
        A_log, dt_bias: [num_heads], both with use_gate_in_kernel, and not without.
        beta_is_logit: beta is what the sigmoid is taken of; it is rounded to beta's dtype.

    Without effect: use_cp, backend, max_seqlen, cu_seqlens_cpu. Refused: state_checkpoints, checkpoint_cu_starts,
    checkpoint_every_n_tokens, checkpoint_state_indices, output_state_indices, prefix_lens.
    """
    function = chunk_gated_delta_rule
    expect_defaults(
        function, state_checkpoints=state_checkpoints, checkpoint_cu_starts=checkpoint_cu_starts,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens, checkpoint_state_indices=checkpoint_state_indices,
        output_state_indices=output_state_indices, prefix_lens=prefix_lens,
    )  # fmt: skip
    if gate_domain not in ("linear", "log"):
        raise ValueError(f"{function.__qualname__}: gate_domain: expected 'linear' or 'log', got {gate_domain!r}")
    check_tensors(function.__qualname__, q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    assert cu_seqlens is not None
    refuse_bools(function, scale=scale)
    refuse_gradients(function, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(function.__qualname__, name, tensor, 3)
    num_tokens, num_q_heads, k_dim = q.shape
    num_k_heads, (num_v_heads, v_dim) = k.shape[1], v.shape[1:]
    num_heads = max(num_q_heads, num_v_heads)
    if num_k_heads not in (num_q_heads, num_v_heads):
        expected = f"{num_q_heads} heads, as q has, or {num_v_heads}, as v has"
        raise ValueError(f"{function.__qualname__}: k: expected {expected}, got {num_k_heads}")
    if min(num_q_heads, num_v_heads) == 0 or num_heads % num_q_heads or num_heads % num_v_heads:
        expected = f"heads whose number divides the {num_q_heads} of q, or is a multiple of it"
        raise ValueError(f"{function.__qualname__}: v: expected {expected}, got {num_v_heads}")
    if num_q_heads > num_v_heads:
        v = v.repeat_interleave(num_q_heads // num_v_heads, 1)
    if num_k_heads != num_q_heads:  # as many as v
        k = k.repeat_interleave(num_heads // num_k_heads, 1)
        q = q.repeat_interleave(num_heads // num_q_heads, 1)
    log_decay = _log_decay(g, (num_tokens, num_heads), q.device, gate_domain, use_gate_in_kernel, A_log, dt_bias)
    rates = _rates(beta, (num_tokens, num_heads), q.device, beta_is_logit)
    num_seqs = num_seqs_of(function, "cu_seqlens", cu_seqlens)
    check_starts(function, "cu_seqlens", cu_seqlens, num_seqs, num_tokens)
    shape = (num_seqs, num_heads, v_dim, k_dim)
    check_memory(function, "output", output, (num_tokens, num_heads, v_dim), q.dtype, q.device)
    if state_indices is not None:
        if output_final_state and output_state is None:
            expected = "an explicit output_state pool with state_indices"
            raise ValueError(f"{function.__qualname__}: output_state: expected {expected}, got None")
        for name, pool in (("initial_state", initial_state), ("output_state", output_state)):
            if pool is not None:
                check_shape(function, name, pool, (pool.shape[0], *shape[1:]))
                check_range(function, "state_indices", state_indices, num_seqs, pool.shape[0] - 1)
        if output_final_state:
            check_once(function, "state_indices", state_indices.where(cu_seqlens.diff() > 0, -1))
        initial_state = None if initial_state is None else initial_state[state_indices]
    else:
        check_shape(function, "output_state", output_state, shape)
    if output_state is not None:
        check_memory(function, "output_state", output_state, output_state.shape, None, q.device)
    states = states_before(function, "initial_state", initial_state, shape, v).transpose(2, 3).contiguous()
    rows = in_one_dtype(function, q=q, k=k, v=v)
    out = call_as(
        function, NAMES, ops.gated_delta_rule, *map(packed_rows, rows), log_decay, rates, states,
        scale=scale or None, use_qk_l2norm=use_qk_l2norm_in_kernel, query_start_loc=cu_seqlens,
    ).to(q.dtype)  # fmt: skip
    out = out if output is None else output.copy_(out)
    if not output_final_state:
        return out
    states = states.transpose(2, 3)
    if output_state is None:
        return out, states
    slots = torch.arange(num_seqs, device=q.device) if state_indices is None else state_indices
    write_to_slots(output_state, slots, states, cu_seqlens.diff() > 0)
    return out, output_state


def _log_decay(
    g: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    gate_domain: str,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> Tensor:
    """fp32, the logarithm of the decay."""
    function = chunk_gated_delta_rule
    parameters = {"A_log": A_log, "dt_bias": dt_bias}
    if not use_gate:
        for name, tensor in parameters.items():
            if tensor is not None:
                raise ValueError(
                    f"{function.__qualname__}: {name}: expected None without use_gate_in_kernel, got a tensor"
                )
        if g is None:
            return torch.zeros(shape, device=device)
    gate = _gate("g", g, shape)
    if use_gate:
        check_tensors(function.__qualname__, **parameters)
        return log_decay(function, gate, A_log, dt_bias).contiguous()
    decay = to_fp32(function, "g", gate)
    return (decay if gate_domain == "log" else decay.log()).contiguous()


def _rates(beta: Tensor | None, shape: tuple[int, int], device: torch.device, is_logit: bool) -> Tensor:
    """fp32, how much of each token is written."""
    function = chunk_gated_delta_rule
    if beta is None and not is_logit:
        return torch.ones(shape, device=device)
    gate = _gate("beta", beta, shape)
    rates = to_fp32(function, "beta", gate)
    if is_logit:
        rates = rates.sigmoid().to(gate.dtype).float()
    return rates.contiguous()


def _gate(name: str, gate: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """A gate, which has to be there, and of this shape."""
    check_tensors(chunk_gated_delta_rule.__qualname__, **{name: gate})
    assert gate is not None
    check_shape(chunk_gated_delta_rule, name, gate, shape)
    return gate
