"""Activations."""

import torch
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_ext._adapters import refuse_gradients
from pagedattn_ext.ops._call import check_tensors


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y (Shazeer, "GLU Variants Improve Transformer", 2020); x and y of one shape."""
    check_tensors("swiglu", x=x, y=y)
    refuse_gradients(swiglu, x=x, y=y)
    if x.shape != y.shape:
        raise ValueError(f"swiglu: y: expected shape {list(x.shape)}, as x has, got {list(y.shape)}")
    return ops.silu_and_mul(torch.cat([x, y], -1))


def fast_gelu_impl(x: Tensor) -> Tensor:
    """`ops.gelu_fast`, the gelu of a tanh."""
    refuse_gradients(fast_gelu_impl, x=x)
    return ops.gelu_fast(x)
