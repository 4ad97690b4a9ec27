"""Merges of attention over several sets of tokens. The lse has base 2."""

import math

import torch
from torch import Tensor

from .. import ops


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of tokens, of two results (v [seq_len, num_heads, head_dim], s [seq_len, num_heads])."""
    merged, lse = ops.merge_attn_states(v_a, s_a * math.log(2), v_b, s_b * math.log(2))
    return merged, lse * math.log2(math.e)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """`merge_state` into v and s, of the rows that mask (bool [seq_len]) has."""
    merged, lse = merge_state(v, s, v_other, s_other)
    if mask is None:
        v.copy_(merged)
        s.copy_(lse)
    else:
        v.copy_(torch.where(mask[:, None, None], merged, v))
        s.copy_(torch.where(mask[:, None], lse, s))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_state` of any number of states: v [seq_len, num_states, num_heads, head_dim], s [seq_len, num_states,
    num_heads]."""
    natural = s.float() * math.log(2)
    lse = natural.logsumexp(1, keepdim=True)
    weights = torch.where(natural > -math.inf, (natural - lse).exp(), 0)
    return (weights[..., None] * v).sum(1).to(v.dtype), lse[:, 0] * math.log2(math.e)
