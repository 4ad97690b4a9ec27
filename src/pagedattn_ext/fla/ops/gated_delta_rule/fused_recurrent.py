"""The gated delta rule over the tokens of a decode."""

from typing import Any

import torch
from torch import Tensor

from pagedattn_ext._adapters import expect_defaults
from pagedattn_ext.fla.ops.gated_delta_rule._rule import is_v_first, run
from pagedattn_ext.ops._call import check_rank, check_tensors


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
    return run(
        function, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        is_v_first(function, state_v_first, transpose_state_layout),
    )  # fmt: skip


fused_recurrent_gdn = fused_recurrent_gated_delta_rule
