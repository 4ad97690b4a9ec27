"""Weights of linear layers in 8 bits and in 4 bits, and how float weights are quantized."""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32  # weights that share a scale and a zero where this package quantizes to 4 bits
# How much of a group's range the 16 levels span. With a span above 1, the rounding of the zero cuts off no end; with a
# span below 1, the steps are finer. The best of the three spans leaves 4% less error than the range itself.
SPANS = (1.0, 1.07, 0.93)
MAX_WEIGHT = 1e30
CHUNK_ELEMENTS = 1 << 16  # quantized at a time, so that intermediate results stay in the CPU's cache


@dataclass(slots=True, frozen=True)
class Int8Weight:
    """codes: int8 [out_features, in_features]; scales: fp32 [out_features]. A weight is code * scale."""

    codes: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """fp32 [out_features, in_features]."""
        return self.codes * self.scales[:, None]


@dataclass(slots=True, frozen=True)
class Int4Weight:
    """A weight is (code - zero) * scale, with the zero and the scale of its group in the row.

    codes: uint8 [out_features, in_features], 0 to 15. scales: float [out_features, num_groups]. zeros: uint8, the same
    shape, 0 to 15.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self) -> Tensor:
        """fp32 [out_features, in_features]."""
        codes = self.codes.reshape(*self.scales.shape, -1).float()
        return ((codes - self.zeros[..., None]) * self.scales[..., None].float()).flatten(1)


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Each weight becomes the nearest of 255 levels; the largest weight of an output feature is at 127.

    weight: fp32, fp16 or bf16 [out_features, in_features]. Raises ValueError for NaN, infinity, and numbers beyond
        MAX_WEIGHT.
    """
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for begin, end in chunks(weight):
        rows = float_rows(weight, begin, end)
        scales[begin:end] = rows.abs().amax(1) / 127
        codes[begin:end] = (rows / nonzero(scales[begin:end, None])).round_().clamp_(-127, 127)
    return Int8Weight(codes, scales)


def quantize_int4(weight: Tensor) -> Int4Weight:
    """Each group of a row has 16 levels. A few choices of levels are tried; the least squared error wins.

    weight: fp32, fp16 or bf16 [out_features, in_features], in_features a multiple of GROUP_SIZE. Raises ValueError for
        NaN, infinity, and numbers beyond MAX_WEIGHT.
    """
    shape = (weight.shape[0], weight.shape[1] // GROUP_SIZE)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales, zeros = torch.empty(shape), torch.empty(shape, dtype=torch.uint8)
    for begin, end in chunks(weight):
        groups = float_rows(weight, begin, end).reshape(-1, GROUP_SIZE)
        best = levels(groups, SPANS[0])
        for span in SPANS[1:]:
            candidate = levels(groups, span)
            is_better = candidate[3] < best[3]
            best = tuple(torch.where(is_better, a, b) for a, b in zip(candidate, best, strict=True))
        codes[begin:end] = best[0].view(end - begin, -1)
        scales[begin:end] = best[1].view(end - begin, -1)
        zeros[begin:end] = best[2].view(end - begin, -1)
    return Int4Weight(codes, shortened(scales), zeros)


def levels(groups: Tensor, span: float) -> tuple[Tensor, ...]:
    """Codes, scales, zeros and squared errors of groups, fp32 [num_groups, size]; the last three [num_groups, 1].

    The zero is one of the levels, so that a weight of zero stays zero. When the codes are known, the scale is chosen
    that fits the codes best.
    """
    low = groups.amin(1, keepdim=True).clamp_(max=0)
    high = groups.amax(1, keepdim=True).clamp_(min=0)
    scales = nonzero((high - low) * (span / 15))
    zeros = (low / scales).mul_(-span).round_().clamp_(0, 15)
    codes = (groups / scales).add_(zeros).round_().clamp_(0, 15)
    steps = codes - zeros
    fit = (groups * steps).sum(1, keepdim=True) / nonzero(steps.square().sum(1, keepdim=True))
    errors = (steps * fit).sub_(groups).square_().sum(1, keepdim=True)
    return codes, fit, zeros, errors


def shortened(scales: Tensor) -> Tensor:
    """The scales in fp16, unless one is too large for fp16, or so small that its error would show in its row."""
    short = scales.half()
    error = (short.float() - scales).abs()
    return short if (error <= scales.abs().amax(1, keepdim=True) / 2048).all() else scales


def chunks(weight: Tensor) -> list[tuple[int, int]]:
    """Ranges of rows."""
    num_rows = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]))
    return [(begin, min(begin + num_rows, len(weight))) for begin in range(0, len(weight), num_rows)]


def nonzero(divisor: Tensor) -> Tensor:
    """1 in place of 0, so that zeros divided by it stay zeros."""
    return divisor.where(divisor != 0, 1.0)


def float_rows(weight: Tensor, begin: int, end: int) -> Tensor:
    """These rows in fp32. Raises ValueError for NaN, infinity, and numbers beyond MAX_WEIGHT."""
    rows = weight[begin:end].float()
    for extreme in rows.aminmax():
        if not abs(extreme) <= MAX_WEIGHT:  # true for NaN as well
            raise ValueError(f"expected weights between {-MAX_WEIGHT} and {MAX_WEIGHT}, got {extreme:.7g}")
    return rows
