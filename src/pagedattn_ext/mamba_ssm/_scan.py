"""The op behind all functions, with what it takes made of what mamba-ssm takes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_ext._adapters import call_as, in_one_dtype, packed_rows, to_fp32

NAMES = {"input": "x", "states": "state", "state_indices": "state_batch_indices"}
NAMES |= {"dt_min": "dt_limit", "dt_max": "dt_limit", "query_start_loc": "cu_seqlens"}
ANY_STEP = torch.finfo(torch.float32).min  # as dt_min, of which the default is 0: negative steps stay as they are


def scan(
    function: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    names: Mapping[str, str] = NAMES,
    **options: Any,
) -> Tensor:
    """The op, with rows of any strides and tensors of any dtypes. The result has x's.

    names: of arguments of the op, what the function calls them.
    """
    named = {"input": x, "B": B, "C": C} | ({} if z is None else {"z": z})
    rows, B, C, *gate = in_one_dtype(function, **{names.get(name, name): tensor for name, tensor in named.items()})
    of_heads = {
        name: None if tensor is None else to_fp32(function, names.get(name, name), tensor).contiguous()
        for name, tensor in (("A", A), ("D", D), ("dt_bias", dt_bias))
    }
    steps = dt if dt.dtype == rows.dtype else to_fp32(function, names.get("dt", "dt"), dt)
    out: Tensor = call_as(
        function, names, ops.selective_scan,
        packed_rows(rows), packed_rows(steps), of_heads.pop("A"), packed_rows(B), packed_rows(C), states,
        **of_heads, z=packed_rows(gate[0]) if gate else None, **options,
    )  # fmt: skip
    return out.to(x.dtype)
