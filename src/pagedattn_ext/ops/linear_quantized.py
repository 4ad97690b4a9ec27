"""Linear layers with weights of 8 bits, on the CPU."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedattn_ext.huge_pages import empty_huge_pages

from ._call import call, check_rank, check_tensors

PANEL = 16  # output features that lie together in a packed weight; the last panel is filled up with zeros
QUAD = 4  # adjacent weights of an output feature


def pack_linear_weight_int8(weight: Tensor) -> Tensor:
    """The weight of `linear_int8` in the order in which it is read, in huge pages where the system grants them.

    Args:
        weight: int8 [out_features, in_features], on the CPU.

    Returns:
        uint8 [ceil(out_features / 16), ceil(in_features / 4), 16, 4]: each weight plus 128, filled up with zeros (128).
    """
    _check_matrix("pack_linear_weight_int8", "weight", weight, torch.int8)
    out_features, in_features = weight.shape
    num_panels, num_quads = -(-out_features // PANEL), -(-in_features // QUAD)
    padded = F.pad(weight.detach(), (0, num_quads * QUAD - in_features, 0, num_panels * PANEL - out_features))
    packed = empty_huge_pages((num_panels, num_quads, PANEL, QUAD), torch.uint8)
    packed.copy_(padded.view(torch.uint8).view(num_panels, PANEL, num_quads, QUAD).transpose(1, 2))
    return packed.bitwise_xor_(128)


def linear_int8(input: Tensor, packed_weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ (weight * weight_scales[:, None]).T + bias, of rows rounded to 8 bits and weights of 8 bits.

    Each row of the input is quantized by itself, at every call: scale = max|x| / 127, codes round(x / scale), to even.
    Products are summed in int32, exactly; then sum * (scale * weight_scale) + bias in fp32, rounded once on store. So a
    row's result does not depend on the other rows. A row with NaN or infinity gives NaN; elements below 2^-119 in a row
    without any larger one count as zeros. On the CPU only.

    Args:
        input: [..., in_features], evenly spaced rows of 1 to 131072 elements.
        packed_weight: from `pack_linear_weight_int8`.
        weight_scales: fp32 [out_features].
        bias: fp32 [out_features].

    Returns:
        [..., out_features], of the input's dtype.
    """
    check_tensors("linear_int8", input=input, weight_scales=weight_scales)
    check_rank("linear_int8", "weight_scales", weight_scales, 1)
    out = _empty_out("linear_int8", input, weight_scales.shape[0])
    call("linear_int8", out, input, packed_weight, weight_scales, bias)
    return out


def _empty_out(op: str, input: Tensor, out_features: int) -> Tensor:
    if input.device.type != "cpu":
        raise ValueError(f"{op}: input: expected a tensor on cpu, got one on {input.device}")
    return input.new_empty((*input.shape[:-1], out_features))


def _check_matrix(function: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    check_tensors(function, **{name: tensor})
    check_rank(function, name, tensor, 2)
    if tensor.dtype != dtype:
        expected, got = (str(dtype).removeprefix("torch.") for dtype in (dtype, tensor.dtype))
        raise TypeError(f"{function}: {name}: expected dtype {expected}, got {got}")
