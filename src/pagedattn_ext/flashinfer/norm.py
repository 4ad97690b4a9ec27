"""Norms over the last dimension. Rows may be strided, as the heads of a fused qkv are: input is [..., hidden_size].

Functions that quantize divide by scale, a number or a tensor of one element, and saturate in the fp8 dtype of out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops
from .._adapters import call_as, check_memory, check_real, check_scales, to_fp32
from ..kv_cache import FP8_DTYPES
from ..ops._call import check_tensors

NAMES = {"epsilon": "eps"}
NAMES_OF_LAYERS = NAMES | {"weight": "gemma", "bias": "beta"}


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    return call_as(rmsnorm, NAMES, ops.rms_norm, input, weight, eps, out=out)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    call_as(fused_add_rmsnorm, NAMES, ops.fused_add_rms_norm, input, residual, weight, eps)


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    return call_as(gemma_rmsnorm, NAMES, ops.gemma_rms_norm, input, weight, eps, out=out)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    call_as(gemma_fused_add_rmsnorm, NAMES, ops.gemma_fused_add_rms_norm, input, residual, weight, eps)


def layernorm(input: Tensor, gemma: Tensor, beta: Tensor, eps: float = 1e-6) -> Tensor:
    """gemma is the weight and beta the bias, both fp32 or both of input's dtype."""
    return call_as(layernorm, NAMES_OF_LAYERS, ops.layer_norm, input, gemma, beta, eps)


def rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: float | Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`rmsnorm` into out, fp8."""
    _check_quantized(rmsnorm_quant, out, input, scale)
    _quantize(out, _normed(rmsnorm_quant, input.float(), weight, eps), scale)


def fused_add_rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: float | Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """residual += input; `rmsnorm` of the unrounded sum into out, fp8. input stays."""
    _check_quantized(fused_add_rmsnorm_quant, out, input, scale)
    check_tensors("fused_add_rmsnorm_quant", residual=residual)
    check_memory(fused_add_rmsnorm_quant, "residual", residual, input.shape, input.dtype, input.device)
    total = input.float() + residual.float()
    normed = _normed(fused_add_rmsnorm_quant, total, weight, eps)
    residual.copy_(total)
    _quantize(out, normed, scale)


def layernorm_quant(
    out: Tensor,
    input: Tensor,
    gemma: Tensor,
    beta: Tensor,
    scale: float | Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`layernorm`, rounded to input's dtype, into out, fp8."""
    _check_quantized(layernorm_quant, out, input, scale)
    normed = call_as(layernorm_quant, NAMES_OF_LAYERS, ops.layer_norm, input, gemma, beta, eps)
    _quantize(out, normed.float(), scale)


def _check_quantized(function: Callable[..., None], out: Tensor, input: Tensor, scale: float | Tensor) -> None:
    check_tensors(function.__qualname__, out=out, input=input)
    if out.dtype not in FP8_DTYPES:
        raise TypeError(f"{function.__qualname__}: out: expected dtype float8_e4m3fn or float8_e5m2, got {out.dtype}")
    check_real(function, input=input)
    check_memory(function, "out", out, input.shape, out.dtype, input.device)
    check_scales(function, scale=scale)


def _normed(function: Callable[..., None], numbers: Tensor, weight: Tensor, eps: float) -> Tensor:
    """numbers: fp32."""
    check_tensors(function.__qualname__, weight=weight)
    return call_as(function, NAMES, ops.rms_norm, numbers, to_fp32(function, "weight", weight), eps)


def _quantize(out: Tensor, values: Tensor, scale: float | Tensor) -> None:
    largest = torch.finfo(out.dtype).max
    out.copy_((values / scale).clamp(-largest, largest))
