"""RMS norm and layer norm with a gate behind them. Computed by torch, in fp32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pagedattn_ext._adapters import check_shape, refuse_gradients, to_fp32
from pagedattn_ext._gated_norm import check_norm, norm
from pagedattn_ext.ops._call import check_tensors

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swish": nn.functional.silu,
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    """norm(x + residual) * activation(g), like x; with prenorm (that, the sum).

    Args:
        x, residual: [..., hidden_size].
        g: as many rows of hidden_size numbers as x has.
        weight, bias: [hidden_size]; None are 1 and 0.
        activation: "swish", which "silu" is as well, or "sigmoid".
        residual_in_fp32: the dtype of the sum is fp32, if there is no residual whose dtype it has.
    """
    function = layer_norm_gated
    return _gated(function, x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps, False)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    """As `layer_norm_gated`, with an RMS norm."""
    function = rms_norm_gated
    return _gated(function, x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps, True)


class FusedLayerNormGated(nn.Module):
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        activation: str = "swish",
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_activation(type(self), activation)
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        self.activation = activation
        weight = torch.ones(hidden_size, device=device, dtype=dtype) if elementwise_affine else None
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight))
        self.register_parameter("bias", None if weight is None or not bias else nn.Parameter(torch.zeros_like(weight)))

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        return layer_norm_gated(
            x, g, self.weight, self.bias, self.activation, residual, prenorm, residual_in_fp32, self.eps
        )


class FusedRMSNormGated(nn.Module):
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_activation(type(self), activation)
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        self.activation = activation
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps)


class FusedLayerNormSwishGate(FusedLayerNormGated):
    """`FusedLayerNormGated`, without the argument `activation`."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, eps=eps, device=device, dtype=dtype)


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """`FusedRMSNormGated`, without the argument `activation`."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, eps, device=device, dtype=dtype)


def _gated(
    function: Callable[..., Any],
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    eps: float,
    is_rms_norm: bool,
) -> Any:
    check_tensors(function.__qualname__, x=x, g=g)
    refuse_gradients(function, x=x, g=g, weight=weight, bias=bias, residual=residual)
    _check_activation(function, activation)
    check_norm(function, x, weight=weight, bias=bias)
    check_shape(function, "residual", residual, x.shape)
    gate = to_fp32(function, "g", g)
    if g.shape[-1:] != x.shape[-1:] or g.numel() != x.numel():
        raise ValueError(f"{function.__qualname__}: g: expected shape {list(x.shape)}, got {list(g.shape)}")
    gate = gate.reshape(x.shape)
    total = x if residual is None else to_fp32(function, "residual", residual) + x
    normed = norm(total, weight, bias, eps, x.shape[-1], is_rms_norm) * GATES[activation](gate)
    normed = normed.to(x.dtype)
    if not prenorm:
        return normed
    sum_dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    return normed, total.to(sum_dtype)


def _check_activation(function: Callable[..., Any], activation: str) -> None:
    if activation not in GATES:
        raise ValueError(f"{function.__qualname__}: activation: expected one of {list(GATES)}, got {activation!r}")
