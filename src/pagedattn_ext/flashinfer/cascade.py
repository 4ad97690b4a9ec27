"""Merges of attention over several sets of tokens, and attention over prefixes that sequences share.

The lse has base 2. An infinite lse, of either sign, belongs to an empty set.
"""

import math

import torch
from torch import Tensor

from .. import ops


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of tokens, of two results (v [seq_len, num_heads, head_dim], s [seq_len, num_heads])."""
    s_a, s_b = _of_empty_sets(s_a), _of_empty_sets(s_b)
    base = _base(torch.maximum(s_a, s_b))
    merged, lse = ops.merge_attn_states(
        v_a.contiguous(), (s_a - base) * math.log(2), v_b.contiguous(), (s_b - base) * math.log(2)
    )
    return merged, lse * math.log2(math.e) + base


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """`merge_state` into v and s, of the rows that mask (bool [seq_len]) has."""
    merged, lse = merge_state(v, s, v_other, s_other)
    if mask is None:
        v.copy_(merged)
        s.copy_(lse)
    else:
        mask = mask.bool()
        v.copy_(torch.where(mask[:, None, None], merged, v))
        s.copy_(torch.where(mask[:, None], lse, s))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_state` of any number of states: v [seq_len, num_states, num_heads, head_dim], s [seq_len, num_states,
    num_heads]."""
    # One empty state more, for no states at all.
    s = torch.nn.functional.pad(_of_empty_sets(s), (0, 0, 0, 1), value=-math.inf)
    base = _base(s.amax(1))
    weights = (s - base[:, None]).exp2()
    total = weights.sum(1)
    shares = torch.where(total[:, None] > 0, weights / total[:, None], 0)[:, :-1, :, None]
    return (shares * v).sum(1).to(v.dtype), total.log2() + base


def _of_empty_sets(s: Tensor) -> Tensor:
    """fp32, -inf where the set is empty."""
    return s.float().masked_fill(s.isinf(), -math.inf)


def _base(largest: Tensor) -> Tensor:
    """What is taken off each lse before it is an exponent, so that an lse of any size keeps its differences."""
    return largest.masked_fill(largest.isinf(), 0)
