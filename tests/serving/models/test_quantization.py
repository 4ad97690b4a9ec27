"""Weights in 8 and 4 bits: how near they come to those in floating point."""

import re

import pytest
import torch
from torch import Tensor

from pagedattn_serve.models.quantization import dequantized, quantize_int4, quantize_int8

SHAPES = [(1, 32), (7, 64), (300, 1024), (3, 1 << 17)]


def normal(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def by_range(weight: Tensor) -> Tensor:
    """What is left of a weight if the 16 levels of a group span its range."""
    groups = weight.view(-1, 32)
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    return (((groups / scales + zeros).round().clamp(0, 15) - zeros) * scales).view(weight.shape)


@pytest.mark.parametrize("shape", [*SHAPES, (5, 13)])
def test_int8_is_the_nearest_level(shape: tuple[int, int]) -> None:
    weight = normal(shape)
    quantized = quantize_int8(weight)
    assert quantized.codes.dtype == torch.int8 and quantized.scales.dtype == torch.float32
    largest = weight.abs().amax(1)
    assert torch.equal(quantized.scales, largest / 127)
    assert torch.equal(quantized.codes.abs().amax(1), torch.full((len(weight),), 127, dtype=torch.int8))
    error = (dequantized(quantized) - weight).abs()
    assert (error <= quantized.scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_int4(shape: tuple[int, int]) -> None:
    weight = normal(shape)
    quantized = quantize_int4(weight)
    assert quantized.codes.dtype == quantized.zeros.dtype == torch.uint8
    assert quantized.codes.shape == shape and quantized.group_size == 32
    assert quantized.scales.dtype == torch.float16
    assert quantized.codes.max() <= 15 and quantized.zeros.max() <= 15
    errors, of_range = ((w - weight).view(-1, 32).norm(dim=1) for w in (dequantized(quantized), by_range(weight)))
    assert (errors <= of_range * 1.01).all()  # as scales are rounded to fp16
    if weight.numel() > 10000:
        assert errors.norm() < 0.965 * of_range.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits(dtype: torch.dtype) -> None:
    weight = normal((20, 96)).to(dtype)
    for quantize in (quantize_int8, quantize_int4):
        assert torch.equal(dequantized(quantize(weight)), dequantized(quantize(weight.float())))


def test_weights_in_another_order_in_memory() -> None:
    weight = normal((96, 64)).t()
    for quantize in (quantize_int8, quantize_int4):
        assert torch.equal(quantize(weight).codes, quantize(weight.contiguous()).codes)


def test_zeros_stay_zeros() -> None:
    weight = normal((4, 128))
    weight[1] = 0
    weight[2, 32:64] = 0
    weight[3, ::3] = 0
    for quantize in (quantize_int8, quantize_int4):
        assert (dequantized(quantize(weight))[weight == 0] == 0).all()


@pytest.mark.parametrize("value", [3.7, -0.02, 1e-30, 1e29])
def test_a_group_of_one_value(value: float) -> None:
    """All of it on one side of zero, which is a level nevertheless."""
    weight = torch.full((2, 32), value)
    for quantize in (quantize_int8, quantize_int4):
        torch.testing.assert_close(dequantized(quantize(weight)), weight, rtol=2**-11, atol=0)


def test_scales_take_32_bits_where_16_would_lose_too_much() -> None:
    weight = normal((4, 64))
    weight[:, 32:] *= 1e-7  # lost beside the others of the row
    assert quantize_int4(weight).scales.dtype == torch.float16
    weight[3, :32] = 0
    quantized = quantize_int4(weight)
    assert quantized.scales.dtype == torch.float32
    assert (dequantized(quantized)[3] - weight[3]).norm() < 0.1 * weight[3].norm()


def test_an_outlier_costs_its_group_alone() -> None:
    weight = normal((1, 1024))
    weight[0, 500] = 1000
    error = (dequantized(quantize_int4(weight)) - weight).reshape(-1, 32).norm(dim=1)
    assert error.argmax() == 500 // 32 and error.sort().values[-2] < 0.8


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_weights_that_cannot_be_quantized(value: float) -> None:
    weight = normal((5000, 64))
    weight[4000, 40] = value
    for quantize in (quantize_int8, quantize_int4):
        with pytest.raises(ValueError, match=re.escape(f"expected elements between -1e+30 and 1e+30, got {value}")):
            quantize(weight)
