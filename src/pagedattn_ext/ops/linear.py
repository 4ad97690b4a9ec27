"""Linear layers on the CPU, with weights that are packed once."""

import torch
from torch import Tensor

from pagedattn_ext._C import INT4_STEP
from pagedattn_ext._C import LINEAR_PANEL as PANEL
from pagedattn_ext._C import LINEAR_QUAD as QUAD
from pagedattn_ext.huge_pages import empty_huge_pages

from ._call import NAMESPACE, call_on_cpu, check_float, check_one_device, check_rank, check_tensors

CODES_PER_INT32 = 8


def pack_linear_weight(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """`weight` in the order in which `linear_packed` reads it, in huge pages where the system grants them.

    Args:
        weight: [out_features, in_features], fp32, fp16 or bf16, on the CPU.
        out: where the panels go, of the shape and dtype of what is returned; None: new memory. With the panels of a
            larger weight, the parts of a weight are packed one by one: each but the last has a multiple of 16 features.

    Returns:
        [ceil(out_features / 16), in_features, 16], a copy: output features in panels of 16; the last panel is filled up
        with zeros.
    """
    _check_weight("pack_linear_weight", weight)
    out_features, in_features = weight.shape
    if out is None:
        out = empty_huge_pages((-(-out_features // PANEL), in_features, PANEL), weight.dtype)
    with torch.no_grad():
        call_on_cpu("pack_linear_weight", out, _with_rows(weight))
    return out


def linear_packed(input: Tensor, packed_weight: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias, for a weight of `pack_linear_weight`. On the CPU alone.

    Rows and weights are multiplied in fp32, whatever their dtypes. If both are bf16 and the CPU has AVX512-BF16 or AMX,
    its instructions multiply them, and add in fp32. The result of a row is the same, bit for bit, whatever other rows
    there are.

    Args:
        input: [..., in_features], fp32, fp16 or bf16, evenly spaced rows.
        packed_weight: [ceil(out_features / 16), in_features, 16], of any of these dtypes.
        out_features: of the weight before it was packed.
        bias: fp32 [out_features].

    Returns:
        [..., out_features], of input's dtype.
    """
    return call_on_cpu("linear_packed", input, packed_weight, out_features, bias)


@torch.library.register_fake(f"{NAMESPACE}::linear_packed")
def _(input: Tensor, packed_weight: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    check_one_device("linear_packed", input, packed_weight, bias)
    return _empty_out(input, out_features)


def pack_linear_weight_int8(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """The weight of `linear_int8` in the order in which it is read, in huge pages where the system grants them.

    Args:
        weight: int8 [out_features, in_features], on the CPU.
        out: as in `pack_linear_weight`.

    Returns:
        uint8 [ceil(out_features / 16), ceil(in_features / 4), 16, 4]: each weight plus 128, filled up with zeros (128).
    """
    _check_matrix("pack_linear_weight_int8", "weight", weight, torch.int8)
    out_features, in_features = weight.shape
    if out is None:
        out = empty_huge_pages((-(-out_features // PANEL), -(-in_features // QUAD), PANEL, QUAD), torch.uint8)
    call_on_cpu("pack_linear_weight_int8", out, _with_rows(weight))
    return out


def quantize_weight_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of a linear layer in 8 bits, a scale for each output feature: weight = codes * scales[:, None].

    scale = max|row| / 127, code = round(element / scale), to even. A row of zeros has the scale 0. On the CPU only.

    Args:
        weight: [out_features, in_features], fp32, fp16 or bf16; elements between -1e30 and 1e30.

    Returns:
        codes: int8 [out_features, in_features], from -127 to 127.
        scales: fp32 [out_features].
    """
    _check_weight("quantize_weight_int8", weight)
    codes = weight.new_empty(weight.shape, dtype=torch.int8)
    scales = weight.new_empty(weight.shape[:1], dtype=torch.float32)
    call_on_cpu("quantize_weight_int8", codes, scales, _with_rows(weight))
    return codes, scales


def linear_int8(input: Tensor, packed_weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ (weight * weight_scales[:, None]).T + bias, of rows rounded to 8 bits and weights of 8 bits.

    Each row of the input is quantized by itself, at every call: scale = max|x| / 127, codes round(x / scale), to even.
    Products are summed in int32, exactly; then sum * (scale * weight_scale) + bias in fp32, rounded once on store. So a
    row's result does not depend on the other rows. A row with NaN or infinity gives NaN. If no element of a row reaches
    2^-119, its elements count as zeros. On the CPU only.

    Args:
        input: [..., in_features], evenly spaced rows of 1 to 131072 elements.
        packed_weight: from `pack_linear_weight_int8`.
        weight_scales: fp32 [out_features].
        bias: fp32 [out_features].

    Returns:
        [..., out_features], of the input's dtype.
    """
    return call_on_cpu("linear_int8", input, packed_weight, weight_scales, bias)


@torch.library.register_fake(f"{NAMESPACE}::linear_int8")
def _(input: Tensor, packed_weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    check_one_device("linear_int8", input, packed_weight, weight_scales, bias)
    return _empty_out(input, weight_scales.shape[0])


def pack_linear_weight_int4(codes: Tensor, scales: Tensor, zeros: Tensor, out: Tensor | None = None) -> Tensor:
    """The weight of `linear_int4` in the order in which it is read, in huge pages where the system grants them.

    Element i of a row of the weight is (code - zero) * scale, with the scale and zero of its group i // group_size.
    Scales are used as they are: fp16 scales stay fp16, bf16 and fp32 scales are stored in fp32.

    Args:
        codes: uint8 [out_features, in_features], 0 to 15, on the CPU; or int32 [out_features, in_features / 8], eight
            in each, the lowest four bits first, as compressed-tensors keeps them.
        scales: fp32, fp16 or bf16 [out_features, in_features / group_size]; group_size is a multiple of 32.
        zeros: uint8, like scales, 0 to 15; 8 for symmetric weights.
        out: as in `pack_linear_weight`.

    Returns:
        uint8 [ceil(out_features / 16), in_features / group_size, 8 * group_size + 48, with fp32 scales + 80].
    """
    name = "pack_linear_weight_int4"
    _check_matrix(name, "codes", codes, torch.uint8, torch.int32)
    check_tensors(name, scales=scales)
    check_rank(name, "scales", scales, 2)
    check_float(name, scales=scales)
    out_features, num_groups = codes.shape[0], scales.shape[1]
    in_features = codes.shape[1] * (CODES_PER_INT32 if codes.dtype == torch.int32 else 1)
    if (
        scales.shape[0] != out_features
        or num_groups == 0
        or in_features == 0
        or in_features % (num_groups * INT4_STEP) != 0
    ):
        expected = f"shape [{out_features}, {in_features} / a multiple of {INT4_STEP}]"
        raise ValueError(f"{name}: scales: expected {expected}, got {list(scales.shape)}")
    _check_matrix(name, "zeros", zeros, torch.uint8)
    if zeros.shape != scales.shape:
        raise ValueError(f"{name}: zeros: expected shape {list(scales.shape)}, got {list(zeros.shape)}")
    for argument, tensor in (("codes", codes), ("scales", scales), ("zeros", zeros)):
        if not tensor.is_cpu:
            raise ValueError(f"{name}: {argument}: expected a tensor on cpu, got one on {tensor.device}")

    if scales.dtype == torch.bfloat16:
        scales = scales.float()
    group_bytes = PANEL * (in_features // num_groups // 2 + scales.itemsize + 1)
    if out is None:
        out = empty_huge_pages((-(-out_features // PANEL), num_groups, group_bytes), torch.uint8)
    call_on_cpu(name, out, *map(_with_rows, (codes, scales, zeros)))
    return out


def quantize_weight_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weight of a linear layer in 4 bits, in groups of 32 elements: weight = (code - zero) * scale.

    The levels of a group span its range, or 1.07 or 0.93 times its range: the least squared error wins. Zero is one of
    the levels. When the codes are known, the scale is the scale that fits the codes best. On the CPU only.

    Args:
        weight: [out_features, in_features], fp32, fp16 or bf16; in_features is a multiple of 32; elements between -1e30
            and 1e30.

    Returns:
        codes: uint8 [out_features, in_features], from 0 to 15.
        scales: fp32 [out_features, in_features / 32].
        zeros: uint8, like scales, from 0 to 15.
    """
    _check_weight("quantize_weight_int4", weight)
    groups = (weight.shape[0], weight.shape[1] // INT4_STEP)
    codes = weight.new_empty(weight.shape, dtype=torch.uint8)
    scales, zeros = weight.new_empty(groups, dtype=torch.float32), weight.new_empty(groups, dtype=torch.uint8)
    call_on_cpu("quantize_weight_int4", codes, scales, zeros, _with_rows(weight))
    return codes, scales, zeros


def linear_int4(
    input: Tensor,
    packed_weight: Tensor,
    group_size: int,
    out_features: int,
    bias: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> Tensor:
    """input @ ((codes - zeros) * scales).T + bias, of rows rounded to 8 bits and weights of 4 bits.

    A row is quantized in blocks, at every call: a block is the elements beside a group of weights, 128 of them at most.
    Its largest element becomes 127. The products of a block are summed in integers, exactly. The sums are multiplied by
    both scales and added in fp32, always in the same order. So a row's result does not depend on the other rows. A row
    with NaN or infinity gives NaN. On the CPU only.

    Args:
        input: [..., in_features], evenly spaced rows.
        packed_weight: from `pack_linear_weight_int4`.
        group_size: elements that share a scale of the weight, as it was packed.
        out_features: of the weight, as it was packed.
        bias: fp32 [out_features].
        scale_dtype: of the scales that the weight was packed with; None: fp32.

    Returns:
        [..., out_features], of the input's dtype.
    """
    return call_on_cpu("linear_int4", input, packed_weight, group_size, out_features, bias, scale_dtype)


@torch.library.register_fake(f"{NAMESPACE}::linear_int4")
def _(
    input: Tensor,
    packed_weight: Tensor,
    group_size: int,
    out_features: int,
    bias: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> Tensor:
    check_one_device("linear_int4", input, packed_weight, bias)
    return _empty_out(input, out_features)


def grouped_linear_packed(
    input: Tensor, offsets: Tensor, packed_weight: Tensor, out_features: int, bias: Tensor | None = None
) -> Tensor:
    """A linear layer for each expert, on rows that are sorted by expert. On the CPU alone.

    Rows [offsets[e], offsets[e + 1]) are multiplied with the weight of expert e. A row's result is that of
    `linear_packed` with this weight, bit for bit. All experts are one call: threads share experts and output features.

    Args:
        input: [num_rows, in_features], evenly spaced rows.
        offsets: int32 or int64 [num_experts + 1]: begins with 0, does not decrease, ends with num_rows.
        packed_weight: [num_experts, ceil(out_features / 16), in_features, 16], a `pack_linear_weight` for each expert.
        out_features: of each weight before it was packed.
        bias: fp32 [num_experts, out_features].

    Returns:
        [num_rows, out_features], of input's dtype.
    """
    return call_on_cpu("grouped_linear_packed", input, offsets, packed_weight, out_features, bias)


@torch.library.register_fake(f"{NAMESPACE}::grouped_linear_packed")
def _(input: Tensor, offsets: Tensor, packed_weight: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    check_one_device("grouped_linear_packed", input, offsets, packed_weight, bias)
    return _empty_out(input, out_features)


def grouped_linear_int8(
    input: Tensor, offsets: Tensor, packed_weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """As `grouped_linear_packed`, of `linear_int8`.

    Args:
        input, offsets, bias: as in `grouped_linear_packed`.
        packed_weight: [num_experts, ...], a `pack_linear_weight_int8` for each expert.
        weight_scales: fp32 [num_experts, out_features].

    Returns:
        [num_rows, out_features], of the input's dtype.
    """
    return call_on_cpu("grouped_linear_int8", input, offsets, packed_weight, weight_scales, bias)


@torch.library.register_fake(f"{NAMESPACE}::grouped_linear_int8")
def _(
    input: Tensor, offsets: Tensor, packed_weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    check_one_device("grouped_linear_int8", input, offsets, packed_weight, weight_scales, bias)
    return _empty_out(input, weight_scales.shape[1])


def grouped_linear_int4(
    input: Tensor,
    offsets: Tensor,
    packed_weight: Tensor,
    group_size: int,
    out_features: int,
    bias: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> Tensor:
    """As `grouped_linear_packed`, of `linear_int4`.

    Args:
        input, offsets, bias: as in `grouped_linear_packed`.
        packed_weight: [num_experts, ...], a `pack_linear_weight_int4` for each expert.
        group_size, out_features, scale_dtype: of each weight, as it was packed (`linear_int4`).

    Returns:
        [num_rows, out_features], of the input's dtype.
    """
    return call_on_cpu(
        "grouped_linear_int4", input, offsets, packed_weight, group_size, out_features, bias, scale_dtype
    )


@torch.library.register_fake(f"{NAMESPACE}::grouped_linear_int4")
def _(
    input: Tensor,
    offsets: Tensor,
    packed_weight: Tensor,
    group_size: int,
    out_features: int,
    bias: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> Tensor:
    check_one_device("grouped_linear_int4", input, offsets, packed_weight, bias)
    return _empty_out(input, out_features)


def _empty_out(input: Tensor, out_features: int) -> Tensor:
    return input.new_empty((*input.shape[:-1], out_features))


def _with_rows(matrix: Tensor) -> Tensor:
    """The matrix with contiguous rows."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _check_weight(function: str, weight: Tensor) -> None:
    check_tensors(function, weight=weight)
    check_rank(function, "weight", weight, 2)
    check_float(function, weight=weight)


def _check_matrix(function: str, name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    check_tensors(function, **{name: tensor})
    check_rank(function, name, tensor, 2)
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(_name_of, dtypes))
        raise TypeError(f"{function}: {name}: expected dtype {expected}, got {_name_of(tensor.dtype)}")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
