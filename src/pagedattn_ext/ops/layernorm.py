"""RMS norm."""

import torch
from torch import Tensor

from ._call import call, check_tensors


def rms_norm(input: Tensor, weight: Tensor, epsilon: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """out = input / sqrt(mean(input ** 2) + epsilon) * weight, over the last dimension (Zhang and Sennrich, 2019).

    Args:
        input: [..., hidden_size], rows of one stride or of two, as of the heads of a fused qkv.
        weight: [hidden_size].
        out: like input (it may be input); allocated by default.

    Returns:
        out.
    """
    check_tensors("rms_norm", input=input)
    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    call("rms_norm", out, input, weight, epsilon)
    return out


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """residual += input, then input = rms_norm(residual), both in place; the norm sees the unrounded sum.

    Args:
        input, residual: [..., hidden_size], rows of one stride or of two; updated.
        weight: [hidden_size].

    Returns:
        (input, residual).
    """
    call("fused_add_rms_norm", input, residual, weight, epsilon)
    return input, residual
