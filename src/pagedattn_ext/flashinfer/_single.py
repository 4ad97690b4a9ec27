"""Attention of one sequence, without a plan."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._adapters import kept
from ..ops._call import check_tensors
from ._mask import mask_of
from ._plan import NAMES, Plan, Scale, refusal
from ._ragged import RaggedBatch, attend_ragged
from .page import check_layout


def attend_one(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str,
    *,
    scales: tuple[Scale, Scale],  # of q, k
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    **options: Any,  # of `Plan`
) -> tuple[Tensor, Tensor]:
    """The last rows of a sequence: q [num_rows, num_qo_heads, head_dim], k and v in kv_layout. Returns out and the
    natural lse."""
    check_layout(function, kv_layout)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            check_tensors(function.__qualname__, **{name: tensor})
        if tensor.dim() != 3:
            raise refusal(function, name, "3 dimensions", f"shape {list(tensor.shape)}")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    heads = q.shape[1:], k.shape[1:], v.shape[1:]
    has_mask = custom_mask is not None or packed_custom_mask is not None
    plan = _plan_of_one(function, *heads, has_mask, tuple(options), *options.values(), q.device)
    if heads != (plan.query_shape, plan.key_shape, plan.value_shape):
        plan.check_tensors(function, ("q", "k", "v"), q, k, v)
    num_rows, num_keys = q.shape[0], k.shape[0]
    starts = _starts_of_one(num_rows, num_keys, q.device)
    mask = mask_of(function, custom_mask, packed_custom_mask, *starts)
    batch = RaggedBatch.of(plan, mask, starts[0], starts[1], sizes=(num_rows, num_keys))
    return attend_ragged(function, NAMES, plan, batch, q, k, v, plan.options(function, *scales, None, q.device))


@kept
def _plan_of_one(
    function: Callable[..., Any],
    query_shape: tuple[int, int],
    key_shape: tuple[int, int],
    value_shape: tuple[int, int],
    has_mask: bool,
    names: tuple[str, ...],
    *options_and_device: Any,
) -> Plan:
    """names: of the options of `Plan`, which follow."""
    return Plan(
        function=function,
        query_shape=query_shape,
        key_shape=(key_shape[0], query_shape[1]),
        value_shape=(key_shape[0], value_shape[1]),
        has_mask=has_mask,
        **dict(zip(names, options_and_device[:-1], strict=True)),
    )


@kept
def _starts_of_one(num_rows: int, num_keys: int, device: torch.device) -> tuple[Tensor, ...]:
    """Where the rows and the keys of one sequence begin and end."""
    return torch.tensor([[0, num_rows], [0, num_keys]], dtype=torch.int32, device=device).unbind()
