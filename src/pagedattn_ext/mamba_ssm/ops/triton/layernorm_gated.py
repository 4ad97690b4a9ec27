"""RMS norm and layer norm with a gate, behind the norm or before it. Computed by torch, in fp32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pagedattn_ext._adapters import check_shape, refuse_gradients, to_fp32
from pagedattn_ext._gated_norm import check_norm, norm
from pagedattn_ext.ops._call import check_tensors, to_int


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """norm(x) * silu(z), like x; norm(x * silu(z)) without norm_before_gate, and norm(x) without z.

    Args:
        x, z: [..., hidden_size].
        weight, bias: [hidden_size].
        group_size: how many numbers are normed together; it divides hidden_size. None is all of them.
        is_rms_norm: `rmsnorm_fn`.
    """
    return _normed(layernorm_fn, x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """As `layernorm_fn`, with an RMS norm."""
    return _normed(rmsnorm_fn, x, weight, bias, z, eps, group_size, norm_before_gate, True)


class LayerNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return layernorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


class RMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)


def _normed(
    function: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    is_rms_norm: bool,
) -> Tensor:
    check_tensors(function.__qualname__, x=x, weight=weight)
    refuse_gradients(function, x=x, weight=weight, bias=bias, z=z)
    check_norm(function, x, weight=weight, bias=bias)
    check_shape(function, "z", z, x.shape)
    hidden_size = x.shape[-1]
    size = hidden_size if group_size is None else to_int(function.__qualname__, "group_size", group_size)
    if size < 1 or hidden_size % size:
        expected = f"a divisor of {hidden_size} (x has so many numbers)"
        raise ValueError(f"{function.__qualname__}: group_size: expected {expected}, got {size}")
    gate = None if z is None else nn.functional.silu(to_fp32(function, "z", z))
    if gate is not None and not norm_before_gate:
        return norm(x * gate, weight, bias, eps, size, is_rms_norm).to(x.dtype)
    normed = norm(x, weight, bias, eps, size, is_rms_norm)
    return (normed if gate is None else normed * gate).to(x.dtype)
