"""flash-linear-attention's gated delta rule on the op `gated_delta_rule`, on a CPU as on CUDA, without gradients.

    from pagedattn_ext.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

Names, order, defaults and results are those of flash-linear-attention 0.4. Both functions compute the same, token by
token. `pagedattn_ext.ops.gated_delta_rule` takes states in slots.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops
from ._adapters import call_as, expect_defaults, packed_rows, refuse_gradients, sequences_of_batch, states_before
from .ops._call import check_rank, check_tensors

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
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
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
        head_first: refused.
    """
    expect_defaults(chunk_gated_delta_rule, head_first=head_first)
    return _run(
        chunk_gated_delta_rule, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens,
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
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_gated_delta_rule`. Without g nothing decays, without beta it is 1. gk and gv are refused."""
    function = fused_recurrent_gated_delta_rule
    expect_defaults(function, gk=gk, gv=gv)
    check_tensors(function.__qualname__, q=q, k=k, v=v)
    check_rank(function.__qualname__, "v", v, 4)
    gates = v.shape[:3]
    g = torch.zeros(gates, device=v.device) if g is None else g
    beta = torch.ones(gates, device=v.device) if beta is None else beta
    return _run(
        function, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def _run(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    refuse_gradients(function, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    name = function.__qualname__
    check_tensors(name, q=q, k=k, v=v, g=g, beta=beta)
    for argument, tensor, rank in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, 3), ("beta", beta, 3)):
        check_rank(name, argument, tensor, rank)
    starts = sequences_of_batch(function, v, cu_seqlens)
    shape = (len(starts) - 1, v.shape[2], k.shape[3], v.shape[3])
    states = states_before(function, "initial_state", initial_state, shape, v)
    g, beta = (gate if gate.dtype == v.dtype else gate.float() for gate in (g, beta))
    rows = (packed_rows(tensor.flatten(0, 1)) for tensor in (q, k, v, g, beta))
    out = call_as(
        function, NAMES, ops.gated_delta_rule, *rows, states, scale=scale, use_qk_l2norm=use_qk_l2norm,
        query_start_loc=starts,
    )  # fmt: skip
    return out.view(v.shape), states if output_final_state else None
