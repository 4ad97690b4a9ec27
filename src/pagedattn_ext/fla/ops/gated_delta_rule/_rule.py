"""What both functions of the gated delta rule are: their checks, and the op token by token."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pagedattn_ext import ops
from pagedattn_ext._adapters import (
    call_as,
    check_shape,
    in_one_dtype,
    log_decay,
    packed_rows,
    refuse_gradients,
    sequences_of_batch,
    states_before,
    to_fp32,
)
from pagedattn_ext.ops._call import check_bool, check_rank, check_tensors

NAMES = {"query": "q", "key": "k", "value": "v", "states": "initial_state", "query_start_loc": "cu_seqlens"}


def run(
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


def is_v_first(function: Callable[..., Any], state_v_first: bool, older_name: bool | None) -> bool:
    if older_name is None:
        return state_v_first
    if state_v_first:
        name = f"{function.__qualname__}: transpose_state_layout"
        raise ValueError(f"{name}: expected None with state_v_first, its newer name, got {older_name}")
    warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=3)
    return older_name
