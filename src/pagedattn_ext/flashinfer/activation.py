"""Gated activations."""

from torch import Tensor

from .. import ops


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return ops.silu_and_mul(input, out=out)


def gelu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return ops.gelu_and_mul(input, out=out)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return ops.gelu_tanh_and_mul(input, out=out)
