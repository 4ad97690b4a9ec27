"""The tensors of a GGUF file, memory-mapped, under the names that they have in a checkpoint from Hugging Face.

A weight of type q4_0 has the codes, scales and zeros of a layer of 4 bits. One of type q8_0 has a scale for each 32
weights of a row, where our layers of 8 bits have one for the row: it is quantized anew as it is read, tensor by tensor.
Weights of all other types are read as floats.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from pagedattn_serve.loading.gguf_file import GgufFile, TensorPlace, unreadable
from pagedattn_serve.loading.gguf_model import ROPE_FACTORS, TensorNames, tensor_names
from pagedattn_serve.models.quantization import (
    SYMMETRIC_ZERO,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    quantize_int8_in_parts,
)

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BLOCK = 32  # weights that share a scale, in the types that have a form here
AT_ONCE = 1 << 14  # weights that one thread dequantizes, in its cache: ops of torch that take more share the work
INT8_AT_ONCE = 1 << 20  # weights that are quantized anew at a time


@dataclass(slots=True, frozen=True)
class Blocks:
    """A matrix of a type that packs several weights in a block.

    data: uint8 [rows, bytes of a row].
    """

    data: Tensor
    type: str
    shape: tuple[int, int]

    def narrow(self, dim: int, begin: int, length: int) -> "Tensor | Blocks":
        """As a tensor's. Floats, where that would cut blocks."""
        num_rows, num_columns = self.shape
        if dim == 0:
            return Blocks(self.data.narrow(0, begin, length), self.type, (length, num_columns))
        if self.type not in DEQUANTIZE or begin % BLOCK or length % BLOCK:
            return self.dequantize().narrow(dim, begin, length)
        bytes_before, num_bytes = (n * self.data.shape[1] // num_columns for n in (begin, length))
        return Blocks(self.data.narrow(1, bytes_before, num_bytes), self.type, (num_rows, length))

    def dequantize(self) -> Tensor:
        """fp32 [rows, columns]."""
        out = torch.empty(self.shape)
        num_rows = max(1, AT_ONCE // max(1, self.shape[1]))
        for rows, data in zip(torch.split(out, num_rows), torch.split(self.data, num_rows), strict=True):
            rows.copy_(dequantize(data, self.type).view(rows.shape))
        return out

    def to_int8(self) -> Int8Weight:
        """Quantized anew, some rows at a time. Raises ValueError as `quantize_int8` does."""
        parts = torch.split(self.data, max(1, INT8_AT_ONCE // max(1, self.shape[1])))
        return quantize_int8_in_parts(
            Blocks(data, self.type, (len(data), self.shape[1])).dequantize() for data in parts
        )


# The layers that hold weights of a type, without an option that says other ones.
FORMS = {"q4_0": "int4", "q4_1": "int8", "q8_0": "int8"}


def as_float(tensor: Tensor | Blocks) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, Blocks) else tensor


def quantized_parts(parts: Sequence[Any], quantization: str | None) -> Sequence[QuantizedWeight] | None:
    """The parts of a layer's weight, all in the form of the layer; None if the layer is made of floats.

    A layer has the bits of the part with most. quantization: of layers made of floats, by an option; weights that have
    just as many bits in the file keep their codes.
    """
    types = {part.type if isinstance(part, Blocks) else "" for part in parts}
    if types == {"q4_0"} and quantization in (None, "int4"):
        return [Int4Weight(*unpack_q4_0(part.data)) for part in parts]
    if types <= FORMS.keys() and quantization is None:
        return [part.to_int8() for part in parts]
    return None


# ---- types ----------------------------------------------------------------------------------------------------------


def fields_of(data: Tensor, *sizes: int) -> list[Tensor]:
    """uint8 [rows, bytes] to the fields of each block, [rows, blocks, bytes of the field]."""
    return list(torch.split(data.unflatten(1, (-1, sum(sizes))), list(sizes), dim=-1))  # type: ignore[no-untyped-call]


def halves(field: Tensor) -> Tensor:
    """fp16 [rows, blocks, 1] of a field of two bytes."""
    return field.contiguous().view(torch.float16)


def nibbles(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, blocks, 16] to the codes of 32 weights: the lower halves of all bytes, then the upper ones."""
    codes = torch.empty(*pairs.shape[:2], 2, BLOCK // 2, dtype=dtype)
    codes[:, :, 0] = pairs & 15
    codes[:, :, 1] = pairs >> 4
    return codes.flatten(2)


def unpack_q4_0(data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [rows, columns], scales fp16 and zeros uint8 [rows, blocks]."""
    scales, pairs = fields_of(data, 2, BLOCK // 2)
    scales = halves(scales).squeeze(-1)
    zeros = torch.full(scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8)
    return nibbles(pairs, torch.uint8).flatten(1), scales, zeros


def dequantize_q4_0(data: Tensor) -> Tensor:
    scales, pairs = fields_of(data, 2, BLOCK // 2)
    return nibbles(pairs, torch.float32).sub_(SYMMETRIC_ZERO).mul_(halves(scales))


def dequantize_q4_1(data: Tensor) -> Tensor:
    scales, minima, pairs = fields_of(data, 2, 2, BLOCK // 2)
    return nibbles(pairs, torch.float32).mul_(halves(scales)).add_(halves(minima))


def dequantize_q8_0(data: Tensor) -> Tensor:
    scales, codes = fields_of(data, 2, BLOCK)
    return codes.view(torch.int8).float().mul_(halves(scales))


def dequantize_by_gguf(data: Tensor, type: str) -> Tensor:
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    return torch.from_numpy(quants.dequantize(data.numpy(), GGMLQuantizationType[type.upper()]))


DEQUANTIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": dequantize_q4_0,
    "q4_1": dequantize_q4_1,
    "q8_0": dequantize_q8_0,
}


def dequantize(data: Tensor, type: str) -> Tensor:
    """Blocks of a type, uint8 [rows, bytes], to fp32 with as many elements."""
    return DEQUANTIZE[type](data) if type in DEQUANTIZE else dequantize_by_gguf(data, type)


# ---- tensors --------------------------------------------------------------------------------------------------------


def open_gguf(file: GgufFile) -> dict[str, Callable[[], Any]]:
    """Every tensor by its name in a checkpoint: a Tensor, or Blocks for a matrix in blocks. Calling an entry reads it.

    Raises ValueError for a tensor that no model here has, and for a type that cannot be read.
    """
    names = tensor_names(file)
    check_types(file)
    tensors: dict[str, Callable[[], Any]] = {}
    for own_name, place in file.tensors.items():
        name = names.of(own_name)
        if name is not None:
            tensors[name] = partial(read_tensor, file, own_name, place, names)
        elif own_name != ROPE_FACTORS:
            raise unreadable(file.path, f"{own_name} has no place in the architecture {file.architecture}")
    return tensors


def read_tensor(file: GgufFile, name: str, place: TensorPlace, names: TensorNames) -> Tensor | Blocks:
    try:
        content = torch.from_file(str(file.path), shared=False, size=file.path.stat().st_size, dtype=torch.uint8)
        data = content[place.begin : place.begin + place.num_bytes]
        if data.numel() != place.num_bytes:
            raise unreadable(file.path, "it has become shorter")
    except (OSError, RuntimeError) as error:
        raise unreadable(file.path, f"{error}".partition("\n")[0]) from None
    dtype = FLOATS.get(place.type)
    if dtype is None and len(place.shape) != 2:
        return dequantize(data[None], place.type).view(place.shape)
    rows = data.view(-1, place.row_bytes)
    if (heads := names.heads_of(name)) is not None:
        rows = in_order(file, name, rows, heads, place)
    if dtype is None:
        return Blocks(rows, place.type, (place.shape[0], place.shape[1]))
    if rows.storage_offset() % dtype.itemsize:
        rows = rows.clone()
    tensor = rows.view(dtype).view(place.shape)
    offset = names.offset_of(name)
    return tensor.float() - offset if offset else tensor


def in_order(file: GgufFile, name: str, rows: Tensor, heads: int, place: TensorPlace) -> Tensor:
    """Rows in the order of Hugging Face's checkpoints, where the two elements that turn together lie half a head apart.
    llama.cpp's converter puts them beside each other."""
    num_rows = place.shape[0]
    if num_rows % (2 * heads):
        raise unreadable(file.path, f"expected {heads} heads of an even size in {name}, got {num_rows} rows")
    order = torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).flatten()
    if len(place.shape) == 1:  # a bias, which is one row of its bytes
        return rows.view(num_rows, -1)[order].view(1, -1)
    return rows[order]


def check_types(file: GgufFile) -> None:
    """Raise ValueError for a type of tensors that cannot be read."""
    for name, place in file.tensors.items():
        if place.type in FLOATS or place.type in DEQUANTIZE:
            continue
        try:
            dequantize_by_gguf(torch.zeros(1, place.row_bytes, dtype=torch.uint8), place.type)
        except NotImplementedError:
            raise unreadable(file.path, f"{name} is of type {place.type}, which cannot be read") from None


@dataclass(slots=True, frozen=True)
class GgufFormat:
    """How the weights of a file are stored: the number of matrices of each type."""

    types: tuple[tuple[str, int], ...]

    METHOD: ClassVar = "gguf"
    QUANTIZATION: ClassVar = "weights"
    inputs_per_rank: ClassVar = BLOCK

    def describe(self) -> str:
        words = [f"{number} {name} as {FORMS.get(name, 'floats')}" for name, number in self.types]
        return f"{', '.join(words)}, rows quantized at run time where weights are"


def gguf_format(file: GgufFile) -> GgufFormat | None:
    """None for a file whose weights are all floats."""
    types = Counter(place.type for place in file.tensors.values() if len(place.shape) == 2)
    return None if types.keys() <= FLOATS.keys() else GgufFormat(tuple(types.most_common()))
