"""The gated delta rule over prompts."""

from typing import Any

from torch import Tensor

from pagedattn_ext._adapters import expect_defaults
from pagedattn_ext.fla.ops.gated_delta_rule._rule import is_v_first, run


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
    return run(
        chunk_gated_delta_rule, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        is_v_first(chunk_gated_delta_rule, state_v_first, transpose_state_layout),
    )  # fmt: skip


chunk_gdn = chunk_gated_delta_rule
