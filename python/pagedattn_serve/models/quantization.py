"""Weights of linear layers in 8 bits and in 4 bits, and how float weights are quantized."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn_ext import ops

GROUP_SIZE = 32  # weights that share a scale and a zero, as ops.quantize_weight_int4 has them
CODES_PER_INT32 = 8  # codes of four bits in an int32
SYMMETRIC_ZERO = 8  # of codes of four bits, in symmetric formats
CHUNK_ELEMENTS = 1 << 16  # that ops of torch take at a time, so that what is between them stays in the CPU's cache


@dataclass(slots=True, frozen=True)
class Int8Weight:
    """codes: int8 [out_features, in_features]; scales: fp32 [out_features]. A weight is code * scale."""

    codes: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(slots=True, frozen=True)
class Int4Weight:
    """A weight is (code - zero) * scale, with the zero and the scale of its group in the row.

    codes: uint8 [out_features, in_features], 0 to 15, or int32 [out_features, in_features / 8], eight in each, the
    lowest four bits first. scales: float [out_features, num_groups]. zeros: uint8, the same shape, 0 to 15.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def group_size(self) -> int:
        in_features = self.codes.shape[1] * (CODES_PER_INT32 if self.codes.dtype == torch.int32 else 1)
        return in_features // self.scales.shape[1]


QuantizedWeight = Int8Weight | Int4Weight


def dequantized(weight: QuantizedWeight) -> Tensor:
    """fp32 [out_features, in_features]. weight: in 4 bits, with its codes in uint8."""
    if isinstance(weight, Int8Weight):
        return weight.codes * weight.scales[:, None]
    codes = weight.codes.reshape(*weight.scales.shape, -1).float()
    return ((codes - weight.zeros[..., None]) * weight.scales[..., None].float()).flatten(1)


def quantizable(weight: Tensor) -> Tensor:
    """The weight in a dtype that can be quantized: its own, or fp32.

    So the codes depend on the checkpoint alone, whatever the dtype of the model.
    """
    return weight if weight.dtype in (torch.float32, torch.float16, torch.bfloat16) else weight.float()


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Each weight becomes the nearest of 255 levels; the largest weight of an output feature is at 127.

    weight: fp32, fp16 or bf16 [out_features, in_features]. Raises ValueError for NaN, infinity, and numbers beyond
        1e30.
    """
    return Int8Weight(*ops.quantize_weight_int8(weight))


def quantize_int8_in_parts(parts: Iterable[Tensor]) -> Int8Weight:
    """As `quantize_int8`, of a weight whose rows come some at a time."""
    quantized = [quantize_int8(part) for part in parts]
    return Int8Weight(torch.cat([part.codes for part in quantized]), torch.cat([part.scales for part in quantized]))


def quantize_int4(weight: Tensor) -> Int4Weight:
    """Each group of a row has 16 levels. A few choices of levels are tried; the least squared error wins.

    weight: fp32, fp16 or bf16 [out_features, in_features], in_features a multiple of GROUP_SIZE. Raises ValueError for
        NaN, infinity, and numbers beyond 1e30.
    """
    codes, scales, zeros = ops.quantize_weight_int4(weight)
    return Int4Weight(codes, shortened(scales), zeros)


def shortened(scales: Tensor) -> Tensor:
    """The scales in fp16, unless one is too large for fp16, or so small that its error would show in its row."""
    short = scales.half()
    error = (short.float() - scales).abs()
    return short if (error <= scales.abs().amax(1, keepdim=True) / 2048).all() else scales


def chunks(matrix: Tensor) -> tuple[Tensor, ...]:
    """Its rows, some at a time."""
    return torch.split(matrix, max(1, CHUNK_ELEMENTS // max(1, matrix.shape[1])))
