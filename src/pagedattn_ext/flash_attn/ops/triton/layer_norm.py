"""RMS norm and layer norm, of a sum with a residual if there is one.

An RMS norm without a bias, of one dtype, is `ops.rms_norm` or `ops.fused_add_rms_norm`. All else is computed by torch,
in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pagedattn_ext import ops
from pagedattn_ext._adapters import check_memory, check_shape, expect_defaults, refuse_gradients
from pagedattn_ext.ops._call import check_tensors


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """(s - mean(s)) / sqrt(var(s) + eps) * weight + bias of the sum s = x * rowscale + x1 + residual, over the last
    dimension. With is_rms_norm `rms_norm_fn`. With weight1 (that, the same with weight1 and bias1).

    Args:
        x, x1, residual: [..., hidden_size].
        weight, bias, weight1, bias1: [hidden_size].
        rowscale: [...]; not together with x1.
        prenorm: return the sum behind the norm or norms.
        residual_in_fp32: the dtype of the sum is fp32, if there is no residual whose dtype it has.
        zero_centered_weight: the weights are those of the formula - 1.
        out_dtype: the dtype of the norm; default that of x.
        return_dropout_mask: return two masks behind all, which are None without dropout.
        out, residual_out: where the norm and the sum go, of any float dtype; allocated by default.

    Refused, with a ValueError that names the argument: dropout_p.
    """
    function = rms_norm_fn if is_rms_norm else layer_norm_fn
    expect_defaults(function, dropout_p=dropout_p)
    if x1 is not None:
        expect_defaults(function, rowscale=rowscale)
    if weight1 is None:
        expect_defaults(function, bias1=bias1)
    check_tensors(function.__name__, x=x, weight=weight)
    refuse_gradients(function, x=x, weight=weight, bias=bias, residual=residual, x1=x1, weight1=weight1, bias1=bias1)
    _check_shapes(function, x.shape, residual=residual, x1=x1)
    _check_shapes(function, x.shape[-1:], weight=weight, bias=bias, weight1=weight1, bias1=bias1)
    _check_shapes(function, x.shape[:-1], rowscale=rowscale)
    check_memory(function, "out", out, x.shape, None, x.device)
    check_memory(function, "residual_out", residual_out, x.shape, None, x.device)
    sum_dtype = x.dtype if residual is None else residual.dtype
    if residual is None and residual_in_fp32:
        sum_dtype = torch.float32
    plain = is_rms_norm and not zero_centered_weight and all(each is None for each in (bias, rowscale, x1, weight1))
    normed1 = None
    if plain and x.dtype == weight.dtype == sum_dtype and out_dtype in (None, x.dtype):
        if residual is None:
            normed, total = ops.rms_norm(x, weight, eps), x
        else:
            normed, total = ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, eps)
    else:
        total = x.float() if rowscale is None else x.float() * rowscale[..., None]
        total = total if x1 is None else total + x1
        total = total if residual is None else total + residual
        centered = total if is_rms_norm else total - total.mean(-1, keepdim=True)
        unit = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)

        def weighted(weight: Tensor, bias: Tensor | None) -> Tensor:
            scaled = unit * (weight.float() + 1 if zero_centered_weight else weight)
            return (scaled if bias is None else scaled + bias).to(out_dtype or x.dtype)

        normed, normed1 = weighted(weight, bias), None if weight1 is None else weighted(weight1, bias1)
        total = total.to(sum_dtype)
    normed = normed if out is None else out.copy_(normed)
    total = total if residual_out is None else residual_out.copy_(total)
    results: list[Any] = [normed, *([] if normed1 is None else [normed1]), *([total] if prenorm else [])]
    results += [None, None] if return_dropout_mask else []
    return tuple(results) if len(results) > 1 else normed


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """s / sqrt(mean(s ** 2) + eps) * weight + bias of the sum s = x * rowscale + x1 + residual (Zhang and Sennrich,
    2019); arguments as in `layer_norm_fn`."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, True, return_dropout_mask, out_dtype, out, residual_out,
    )  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        expect_defaults(type(self), dropout_p=dropout_p)
        self.eps, self.zero_centered_weight = eps, zero_centered_weight
        initial = torch.zeros if zero_centered_weight else torch.ones
        self.weight = nn.Parameter(initial(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        return rms_norm_fn(
            x, self.weight, None, residual, eps=self.eps, prenorm=prenorm, residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )  # fmt: skip


def _check_shapes(function: Callable[..., Any], shape: torch.Size, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        check_shape(function, name, tensor, shape)
