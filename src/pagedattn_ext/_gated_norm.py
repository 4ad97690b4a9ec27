"""Norms with a gate, in plain torch, for the modules of the libraries that have them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._adapters import check_real, check_shape


def check_norm(function: Callable[..., Any], x: Tensor, **of_channels: Tensor | None) -> None:
    """x is [..., hidden_size] of real numbers, and so is each of of_channels, [hidden_size], that is not None."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{function.__qualname__}: x: expected rows of 1 number at least, got shape {list(x.shape)}")
    for name, tensor in of_channels.items():
        check_shape(function, name, tensor, x.shape[-1:])
    check_real(function, x=x, **of_channels)


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group_size: int, is_rms_norm: bool
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias of each group of group_size numbers, in fp32; with is_rms_norm
    x / sqrt(mean(x ** 2) + eps) * weight + bias.

    Args:
        x: [..., hidden_size], which group_size divides.
        weight, bias: [hidden_size].
    """
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    centered = groups if is_rms_norm else groups - groups.mean(-1, keepdim=True)
    unit = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    normed = unit.flatten(-2)
    normed = normed if weight is None else normed * weight.float()
    return normed if bias is None else normed + bias.float()
