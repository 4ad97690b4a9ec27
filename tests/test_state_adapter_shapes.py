"""The modules with the names of mamba-ssm and fla: what shapes they refuse before they flatten dimensions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from pagedattn_ext.fla import chunk_gated_delta_rule
from pagedattn_ext.mamba_ssm import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update

# Of each function: arguments that fit, and those of which two dimensions may be swapped.
FITTING: list[tuple[Callable[..., Any], dict[str, list[int]], dict[str, tuple[int, int]]]] = [
    (
        selective_scan_fn,
        dict(u=[2, 4, 6], delta=[2, 4, 6], A=[4, 3], B=[2, 3, 6], C=[2, 3, 6], D=[4]),
        dict(delta=(0, 2), A=(0, 1), B=(0, 2), C=(0, 2)),
    ),
    (
        selective_state_update,
        dict(state=[2, 4, 8, 16], x=[2, 4, 8], dt=[2, 4, 8], A=[4, 8, 16], B=[2, 1, 16], C=[2, 1, 16], D=[4, 8]),
        dict(x=(1, 2), dt=(1, 2), A=(0, 1), B=(0, 1), C=(0, 1), D=(0, 1), state=(1, 2)),
    ),
    (
        selective_state_update,
        dict(state=[2, 4, 16], x=[2, 4], dt=[2, 4], A=[4, 16], B=[2, 16], C=[2, 16]),
        dict(x=(0, 1), dt=(0, 1), A=(0, 1), B=(0, 1), C=(0, 1), state=(1, 2)),
    ),
    (
        partial(mamba_chunk_scan_combined, chunk_size=4),
        dict(x=[2, 6, 4, 8], dt=[2, 6, 4], A=[4], B=[2, 6, 2, 16], C=[2, 6, 2, 16]),
        dict(dt=(0, 1), B=(0, 1), C=(0, 1)),
    ),
    (
        chunk_gated_delta_rule,
        dict(q=[2, 5, 2, 8], k=[2, 5, 2, 8], v=[2, 5, 2, 8], g=[2, 5, 2], beta=[2, 5, 2]),
        dict(q=(0, 1), k=(0, 1), g=(0, 1), beta=(0, 1)),
    ),
]


@pytest.mark.parametrize(("function", "shapes", "swaps"), FITTING, ids=lambda each: getattr(each, "__name__", ""))
def test_swapped_dimensions_are_refused(
    function: Callable[..., Any], shapes: dict[str, list[int]], swaps: dict[str, tuple[int, int]]
) -> None:
    """Also where as many numbers come as were expected."""
    arguments = {name: torch.rand(shape) for name, shape in shapes.items()}
    function(**arguments)
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    for name, swap in swaps.items():
        with pytest.raises(ValueError, match=r": expected shape \[.*\], got \["):
            function(**arguments | {name: arguments[name].transpose(*swap)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in arguments.items() if name != "state")
