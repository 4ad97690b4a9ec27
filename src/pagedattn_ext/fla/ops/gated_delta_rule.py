"""The gated delta rule."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_ext._adapters import (
    call_as,
    check_shape,
    expect_defaults,
    in_one_dtype,
    log_decay,
    packed_rows,
    refuse_gradients,
    sequences_of_batch,
    states_before,
    to_fp32,
)
from pagedattn_ext.ops._call import check_bool, check_rank, check_tensors

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]

NAMES = {"query": "q", "key": "k", "value": "v", "states": "initial_state", "query_start_loc": "cu_seqlens"}


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(out [batch, seq_len, num_v_heads, v_dim], the final states, if they are asked for).

    Args:
        q, k: [batch, seq_len, num_k_heads, k_dim].
        v: [batch, seq_len, num_v_heads, v_dim].
        g, beta: [batch, seq_len, num_v_heads].
        scale: of q; None is k_dim ** -0.5.
        initial_state: [num_seqs, num_v_heads, k_dim, v_dim], which stays as it is; None is zeros.
        output_final_state: whether to return the states, fp32 [num_seqs, num_v_heads, k_dim, v_dim].
        cu_seqlens: int32 or int64 [num_seqs + 1], with a batch of 1: where sequences begin in it, and the last ends.
        use_gate_in_kernel: g is what the decay is made of: the decay is -exp(A_log) * softplus(g + dt_bias).
        A_log, dt_bias: [num_v_heads]; dt_bias may be None.
        use_beta_sigmoid_in_kernel: beta is what the sigmoid is taken of.
        allow_neg_eigval: beta is twice the sigmoid.
        state_v_first: states are [num_seqs, num_v_heads, v_dim, k_dim]. transpose_state_layout is its older name.
        cu_seqlens_cpu, chunk_indices, kwargs: have no effect.
        head_first, cp_context: refused.
    """
    expect_defaults(chunk_gated_delta_rule, head_first=head_first, cp_context=cp_context)
    return _run(
        chunk_gated_delta_rule, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        _is_v_first(chunk_gated_delta_rule, state_v_first, transpose_state_layout),
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_gated_delta_rule`. Without g nothing decays, without beta it is 1. gk and gv are refused as well."""
    function = fused_recurrent_gated_delta_rule
    expect_defaults(function, gk=gk, gv=gv, head_first=head_first, cp_context=cp_context)
    check_tensors(function.__qualname__, q=q, k=k, v=v)
    check_rank(function.__qualname__, "v", v, 4)
    gates = v.shape[:3]
    if g is None and not use_gate_in_kernel:
        g = torch.zeros(gates, device=v.device)
    if beta is None and not use_beta_sigmoid_in_kernel:
        beta = torch.ones(gates, device=v.device)
    return _run(
        function, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        _is_v_first(function, state_v_first, transpose_state_layout),
    )  # fmt: skip


def _run(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm: bool,
    cu_seqlens: Tensor | None,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:
    name = function.__qualname__
    for argument, flag in (
        ("output_final_state", output_final_state),
        ("use_qk_l2norm_in_kernel", use_qk_l2norm),
        ("use_gate_in_kernel", use_gate),
        ("use_beta_sigmoid_in_kernel", use_beta_sigmoid),
        ("allow_neg_eigval", allow_neg_eigval),
        ("state_v_first", state_v_first),
    ):
        check_bool(name, argument, flag)
    check_tensors(name, q=q, k=k, v=v, g=g, beta=beta)
    refuse_gradients(function, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias)
    assert g is not None and beta is not None
    for argument, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(name, argument, tensor, 4)
        check_shape(function, argument, tensor, (*v.shape[:2], *tensor.shape[2:]))
    for argument, tensor in (("g", g), ("beta", beta)):
        check_shape(function, argument, tensor, v.shape[:3])
    if use_gate:
        g = log_decay(function, g, A_log, dt_bias)
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError(f"{name}: allow_neg_eigval: expected False without use_beta_sigmoid_in_kernel, got True")
    if use_beta_sigmoid:
        beta = to_fp32(function, "beta", beta).sigmoid() * (2 if allow_neg_eigval else 1)
    starts = sequences_of_batch(function, v, cu_seqlens)
    shape = (len(starts) - 1, v.shape[2], k.shape[3], v.shape[3])
    given_shape = (*shape[:2], shape[3], shape[2]) if state_v_first else shape
    states = states_before(function, "initial_state", initial_state, given_shape, v)
    if state_v_first:
        states = states.transpose(2, 3).contiguous()
    q, k, value = in_one_dtype(function, q=q, k=k, v=v)
    g, beta = (
        gate if gate.dtype == value.dtype else to_fp32(function, n, gate) for n, gate in (("g", g), ("beta", beta))
    )
    rows = (packed_rows(tensor.flatten(0, 1)) for tensor in (q, k, value, g, beta))
    out = call_as(
        function, NAMES, ops.gated_delta_rule, *rows, states, scale=scale, use_qk_l2norm=use_qk_l2norm,
        query_start_loc=starts,
    ).to(v.dtype)  # fmt: skip
    if state_v_first:
        states = states.transpose(2, 3)
    return out.view(v.shape), states if output_final_state else None


def _is_v_first(function: Callable[..., Any], state_v_first: bool, older_name: bool | None) -> bool:
    if older_name is None:
        return state_v_first
    if state_v_first:
        name = f"{function.__qualname__}: transpose_state_layout"
        raise ValueError(f"{name}: expected None with state_v_first, its newer name, got {older_name}")
    warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=3)
    return older_name
