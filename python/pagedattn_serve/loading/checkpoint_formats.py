"""How checkpoints hold quantized weights: the tensors of a layer, and the weight that they make.

Codes, scales and zeros are the checkpoint's, where a layer here can have them; other codes are quantized anew.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pagedattn_serve.models.partition import Share, everything
from pagedattn_serve.models.quantization import (
    CODES_PER_INT32,
    SYMMETRIC_ZERO,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    chunks,
    quantize_int8_in_parts,
)

ROW_GROUP = 32  # rows are quantized in groups of this size; a group of weights is a multiple of it
ROWS_ANEW = 256  # that are floats at a time, where codes are quantized anew
SCALES = {"scales", "weight_scale"}  # how programs name the tensor of scales
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight output features among the 4-bit pieces of an int32, lowest bits first


@dataclass(slots=True, frozen=True)
class CheckpointFormat:
    """How the tensors of a layer make up its weight. A tensor is named by what follows the layer's name.

    MARKER: the tensor that a layer has if it is quantized. OPTIONAL: tensors that a layer may be without.
    group_size: how many weights of a row share a scale; None: all of them.
    """

    METHOD: ClassVar[str]
    QUANTIZATION: ClassVar[str]
    MARKER: ClassVar[str]
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()

    group_size: int | None

    def describe(self) -> str:
        scales = "a scale for each output feature" if self.group_size is None else f"in groups of {self.group_size}"
        return f"{self.QUANTIZATION}, {scales}, as {self.METHOD} made it, rows quantized at run time"

    @property
    def inputs_per_rank(self) -> int:
        """How many inputs of a layer stay on one rank together: a group, of weights or of what comes to them."""
        return self.group_size or ROW_GROUP

    def shapes(self, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
        """The tensors that a layer has: what the rank holds of each of their axes."""
        raise NotImplementedError

    def weight(self, tensors: dict[str, Tensor]) -> QuantizedWeight:
        """The weight, made of tensors with the names and shapes of `shapes`. Raises ValueError, with the name of the
        tensor, for what a layer here cannot have."""
        for name in SCALES & tensors.keys():
            check_dtype(name, tensors[name], torch.float32, torch.float16, torch.bfloat16)
        return self.unpack(tensors)

    def unpack(self, tensors: dict[str, Tensor]) -> QuantizedWeight:
        raise NotImplementedError

    def groups(self, inputs: Share) -> Share:
        """Groups in a row. Raises ValueError if a group is no multiple of ROW_GROUP, or no divisor of the row."""
        size = self.group_size or inputs.whole
        if size % ROW_GROUP or inputs.whole % size:
            raise ValueError(
                f"quantization_config: group_size: expected a multiple of {ROW_GROUP} and a divisor of its "
                f"{inputs.whole} in_features, got {size}"
            )
        return inputs.packed(size)  # all ranks hold the only group of a row


class CompressedInt8(CheckpointFormat):
    METHOD: ClassVar = "compressed-tensors"
    QUANTIZATION: ClassVar = "int8"
    MARKER: ClassVar = "weight_scale"

    @property
    def inputs_per_rank(self) -> int:
        return 1

    def shapes(self, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
        return {"weight": [outputs, inputs], "weight_scale": [outputs, everything(1)]}

    def unpack(self, tensors: dict[str, Tensor]) -> Int8Weight:
        check_dtype("weight", tensors["weight"], torch.int8)
        return Int8Weight(tensors["weight"], tensors["weight_scale"][:, 0].float())


class PackedInt8(CheckpointFormat):
    """The same codes, four in an int32, 128 too large."""

    METHOD: ClassVar = "compressed-tensors"
    QUANTIZATION: ClassVar = "int8"
    MARKER: ClassVar = "weight_packed"

    def shapes(self, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
        packed = {"weight_packed": [outputs, inputs.packed(4)], "weight_shape": [everything(2)]}
        return {**packed, "weight_scale": [outputs, everything(1)]}

    def unpack(self, tensors: dict[str, Tensor]) -> Int8Weight:
        codes = unpack_codes("weight_packed", tensors["weight_packed"], bits=8)
        return Int8Weight((codes ^ 128).view(torch.int8), tensors["weight_scale"][:, 0].float())


@dataclass(slots=True, frozen=True)
class CompressedInt4(CheckpointFormat):
    METHOD: ClassVar = "compressed-tensors"
    QUANTIZATION: ClassVar = "int4"
    MARKER: ClassVar = "weight_packed"

    bits: ClassVar = 4

    symmetric: bool

    def shapes(self, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
        return shapes_of_packed(self, outputs, inputs)

    def unpack(self, tensors: dict[str, Tensor]) -> Int4Weight:
        check_dtype("weight_packed", tensors["weight_packed"], torch.int32)
        return Int4Weight(tensors["weight_packed"], tensors["weight_scale"], zeros_of_packed(tensors, self))


@dataclass(slots=True, frozen=True)
class Gptq(CheckpointFormat):
    """With groups in order: others are `Anew`."""

    METHOD: ClassVar = "gptq"
    QUANTIZATION: ClassVar = "int4"
    MARKER: ClassVar = "qweight"
    OPTIONAL: ClassVar = frozenset({"g_idx"})

    bits: ClassVar = 4

    zero_offset: int  # what the first version of the format subtracts from its zeros
    symmetric: bool | None  # None: config.json does not say

    def shapes(self, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
        return {**shapes_of_gptq(self, outputs, inputs), "g_idx": [everything(inputs.whole)]}

    def unpack(self, tensors: dict[str, Tensor]) -> Int4Weight:
        codes = tensors["qweight"].t()
        check_dtype("qweight", codes, torch.int32)
        scales = tensors["scales"].t()
        if "g_idx" in tensors:
            check_order(tensors["g_idx"], self)
        return Int4Weight(codes, scales, zeros_of_gptq(unpack_nibbles("qzeros", tensors["qzeros"]).t(), self))


@dataclass(slots=True, frozen=True)
class Awq(CheckpointFormat):
    METHOD: ClassVar = "awq"
    QUANTIZATION: ClassVar = "int4"
    MARKER: ClassVar = "qweight"

    symmetric: bool | None  # as in Gptq

    def shapes(self, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
        groups = self.groups(inputs)
        shapes = {
            "qweight": [inputs, outputs.packed(CODES_PER_INT32)],
            "qzeros": [groups, outputs.packed(CODES_PER_INT32)],
        }
        return {**shapes, "scales": [groups, outputs]}

    def unpack(self, tensors: dict[str, Tensor]) -> Int4Weight:
        codes, zeros = (
            unpack_nibbles(name, tensors[name]).view(len(tensors[name]), -1, 8)[..., AWQ_PLACES].flatten(1).t()
            for name in ("qweight", "qzeros")
        )
        if self.symmetric and not is_filled(zeros, SYMMETRIC_ZERO):
            raise asymmetric("qzeros", zeros, "8 in all places")
        return Int4Weight(codes, tensors["scales"].t(), zeros)


@dataclass(slots=True, frozen=True)
class Anew(CheckpointFormat):
    """Codes that no layer here can have: of 8 bits, with a scale for each group, or with inputs that are not in the
    order of their groups. They become floats, layer by layer, which are quantized anew, with a scale for each output
    feature.

    bits: of a code, 4 or 8. is_in_order: whether a group has inputs that follow each other.
    """

    QUANTIZATION: ClassVar = "int8"

    bits: int
    is_in_order: bool

    def describe(self) -> str:
        return f"int8, quantized anew from the {self.bits} bits of {self.METHOD}, rows quantized at run time"

    def groups(self, inputs: Share) -> Share:
        groups = CheckpointFormat.groups(self, inputs)
        return groups if self.is_in_order else everything(groups.whole)

    def order(self, inputs: Share) -> Share:
        """Of the tensor that has the group of each input. All of it is looked at where it says nothing."""
        return everything(inputs.whole) if self.is_in_order else inputs

    def make(self, codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None) -> Int8Weight:
        """codes: uint8 [outputs, inputs]. scales, zeros: [outputs, groups]. order: the group of each input."""
        groups = self.group_of_input(codes.shape[1], scales.shape[1], order)
        parts = zip(*(torch.split(each, ROWS_ANEW) for each in (codes, scales, zeros)), strict=True)
        return quantize_int8_in_parts(
            (some.float() - of_zeros.float()[:, groups]) * of_scales.float()[:, groups]
            for some, of_scales, of_zeros in parts
        )

    def group_of_input(self, num_inputs: int, num_groups: int, order: Tensor | None) -> Tensor:
        if self.is_in_order:
            if order is not None:
                check_order(order, self)
            return torch.arange(num_inputs) // (num_inputs // num_groups)
        if order is None or not 0 <= int(order.min()) <= int(order.max()) < num_groups:
            got = "none" if order is None else f"{order.min()} to {order.max()}"
            raise ValueError(f"g_idx: expected the group of each input, 0 to {num_groups - 1}, got {got}")
        return order.long()


@dataclass(slots=True, frozen=True)
class GptqAnew(Anew):
    METHOD: ClassVar = "gptq"
    MARKER: ClassVar = "qweight"
    OPTIONAL: ClassVar = frozenset({"g_idx"})

    zero_offset: int
    symmetric: bool | None

    def shapes(self, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
        return {**shapes_of_gptq(self, outputs, inputs), "g_idx": [self.order(inputs)]}

    def unpack(self, tensors: dict[str, Tensor]) -> Int8Weight:
        codes = unpack_codes("qweight", tensors["qweight"].t(), self.bits)
        zeros = zeros_of_gptq(unpack_codes("qzeros", tensors["qzeros"], self.bits).t(), self)
        return self.make(codes, tensors["scales"].t(), zeros, tensors.get("g_idx"))


@dataclass(slots=True, frozen=True)
class PackedAnew(Anew):
    METHOD: ClassVar = "compressed-tensors"
    MARKER: ClassVar = "weight_packed"
    OPTIONAL: ClassVar = frozenset({"weight_g_idx"})

    symmetric: bool

    def shapes(self, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
        return {**shapes_of_packed(self, outputs, inputs), "weight_g_idx": [self.order(inputs)]}

    def unpack(self, tensors: dict[str, Tensor]) -> Int8Weight:
        codes = unpack_codes("weight_packed", tensors["weight_packed"], self.bits)
        return self.make(codes, tensors["weight_scale"], zeros_of_packed(tensors, self), tensors.get("weight_g_idx"))


def shapes_of_gptq(format: Gptq | GptqAnew, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
    groups, number = format.groups(inputs), 32 // format.bits
    shapes = {"qweight": [inputs.packed(number), outputs], "qzeros": [groups, outputs.packed(number)]}
    return {**shapes, "scales": [groups, outputs]}


def shapes_of_packed(format: CompressedInt4 | PackedAnew, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
    groups, number = format.groups(inputs), 32 // format.bits
    zeros = {} if format.symmetric else {"weight_zero_point": [outputs.packed(number), groups]}
    shapes = {"weight_packed": [outputs, inputs.packed(number)], "weight_scale": [outputs, groups]}
    return {**shapes, **zeros, "weight_shape": [everything(2)]}


def zeros_of_packed(tensors: dict[str, Tensor], format: CompressedInt4 | PackedAnew) -> Tensor:
    scales = tensors["weight_scale"]
    if format.symmetric:
        return torch.full(scales.shape, 1 << (format.bits - 1), dtype=torch.uint8)
    stored = tensors["weight_zero_point"].t()
    return unpack_codes("weight_zero_point", stored, format.bits).t()[: len(scales)]


def zeros_of_gptq(stored: Tensor, format: Gptq | GptqAnew) -> Tensor:
    """The zeros, from those that are stored."""
    middle = 1 << (format.bits - 1)
    if format.symmetric is not False and is_filled(stored, middle, middle - 1):
        return stored.new_full(stored.shape, middle)  # programs differ in what they write, not in the zero
    if format.symmetric:
        raise asymmetric("qzeros", stored, f"{middle - 1} in all places or {middle} in all places")
    return stored.add_(format.zero_offset).bitwise_and_((1 << format.bits) - 1)


def is_filled(zeros: Tensor, *values: int) -> bool:
    """Whether one of the values stands in all places."""
    return any(bool((zeros == value).all()) for value in values)


def asymmetric(name: str, zeros: Tensor, expected: str) -> ValueError:
    return ValueError(
        f"{name}: expected zeros of {expected}, as sym is true in quantization_config, "
        f"got {int(zeros.min())} to {int(zeros.max())}"
    )


def row_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as elements of another dtype."""
    # Not `contiguous`, which leaves the strides of a single row or column as they are; `view` looks at them.
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


def unpack_nibbles(name: str, packed: Tensor) -> Tensor:
    """int32 [n, k] to uint8 [n, 8 * k], the lowest four bits first."""
    check_dtype(name, packed, torch.int32)
    pairs = row_bytes(packed, torch.uint8)
    codes = torch.empty(len(pairs), 2 * pairs.shape[1], dtype=torch.uint8)
    for words, some in zip(chunks(codes.view(torch.int16)), chunks(pairs), strict=True):
        words.copy_(some)
        words |= words << 4  # the upper of the two codes moves to the second byte
        words &= 0x0F0F
    return codes


def unpack_codes(name: str, packed: Tensor, bits: int) -> Tensor:
    """int32 [n, k] to uint8 [n, 32 / bits * k], the lowest bits first. bits: 4 or 8."""
    if bits == 4:
        return unpack_nibbles(name, packed)
    check_dtype(name, packed, torch.int32)
    return row_bytes(packed, torch.uint8)


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def check_order(order: Tensor, format: Gptq | Anew) -> None:
    """Raise ValueError unless groups have inputs that follow each other. order: the group of each input, all ranks."""
    if not torch.equal(order.long(), torch.arange(len(order)) // (format.group_size or len(order))):
        raise ValueError("g_idx: expected groups in order, got other ones")
