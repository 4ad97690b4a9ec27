"""Linear layers on the CPU. They keep one copy of the weight, in the form and the order in which a product reads it.

`LinearForms` chooses the form of each layer; `pack_linear_layers` replaces the layers. Whatever the form, the result of
a row does not depend on the other rows. Weights are plain attributes, because nn.Module takes a microsecond to look up
a buffer.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from pagedattn_ext import ops
from pagedattn_ext.huge_pages import empty_huge_pages
from pagedattn_serve.errors import op_errors_about
from pagedattn_serve.models.quantization import (
    GROUP_SIZE,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    chunks,
    quantize_int4,
    quantize_int8,
)

PANEL = 16  # output features that lie together, as the ops pack them
QUANTIZED_AT_ONCE = 1 << 22  # weights


class PackedLinear(nn.Module):
    """Weights of 32 or 16 bits and rows of any float dtype; sums in fp32."""

    FORM = "not quantized, in 16 bits where these hold the weights exactly"

    def __init__(self, weight: Tensor | Sequence[Tensor], bias: Tensor | None) -> None:
        """weight: whole, or in parts that lie one below the other."""
        super().__init__()
        parts = narrowed([weight] if isinstance(weight, Tensor) else weight)
        self.out_features = sum(map(len, parts))
        rows = whole_panels([(part,) for part in parts])
        self.packed_weight = pack_parts(ops.pack_linear_weight, rows, self.out_features)
        self.bias = as_fp32(bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], of the same dtype. All layers of this module do the same."""
        return ops.linear_packed(hidden, self.packed_weight, self.out_features, self.bias)


class Int8Linear(nn.Module):
    """Weights of 8 bits with a scale for each output feature. Each row is quantized as well when it comes."""

    FORM = "int8, a scale for each output feature, rows quantized at run time"

    def __init__(self, weight: Int8Weight | Sequence[Int8Weight] | Sequence[Tensor], bias: Tensor | None) -> None:
        """weight: whole, or in parts that lie one below the other. Floats are quantized some rows at a time, so that
        few codes lie in memory twice."""
        super().__init__()
        parts = [weight] if isinstance(weight, Int8Weight) else weight
        out_features = sum(len(part) for part in parts)
        scales = []

        def rows() -> Iterator[tuple[Tensor]]:
            for part in int8_parts(parts):
                scales.append(part.scales)
                yield (part.codes,)

        self.packed_weight = pack_parts(ops.pack_linear_weight_int8, rows(), out_features)
        self.weight_scales = torch.cat(scales)
        self.bias = as_fp32(bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return ops.linear_int8(hidden, self.packed_weight, self.weight_scales, self.bias)


class Int4Linear(nn.Module):
    """Weights of 4 bits with a scale and a zero for each group. Rows are quantized to 8 bits when they come."""

    FORM = f"int4 in groups of {GROUP_SIZE}, rows quantized at run time"

    def __init__(self, weight: Int4Weight | Sequence[Int4Weight], bias: Tensor | None) -> None:
        """weight: whole, or in parts that lie one below the other."""
        super().__init__()
        parts = [weight] if isinstance(weight, Int4Weight) else weight
        self.out_features = sum(map(len, parts))
        self.group_size = parts[0].group_size
        self.scale_dtype = reduce(torch.promote_types, [part.scales.dtype for part in parts])
        rows = whole_panels([(part.codes, part.scales.to(self.scale_dtype), part.zeros) for part in parts])
        self.packed_weight = pack_parts(ops.pack_linear_weight_int4, rows, self.out_features)
        self.bias = as_fp32(bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return ops.linear_int4(
            hidden, self.packed_weight, self.group_size, self.out_features, self.bias, self.scale_dtype
        )


LinearType = type[PackedLinear] | type[Int8Linear] | type[Int4Linear]


@dataclass(slots=True, frozen=True)
class LinearForms:
    """Which form each linear layer of a model takes.

    head: the name of the model's last layer. quantization: "int8", "int4" or None.
    """

    head: str
    quantization: str | None

    def of(self, name: str, in_features: int) -> LinearType:
        """The type of the layer that takes the place of the one called `name`.

        With int4, two kinds of layers have 8 bits: the last layer, because no later layer evens out its errors, and
        layers whose in_features are no multiple of a group.
        """
        if self.quantization is None:
            return PackedLinear
        if self.quantization == "int4" and in_features % GROUP_SIZE == 0 and name != self.head:
            return Int4Linear
        return Int8Linear

    def pack(self, name: str, linear: nn.Linear, parts: Sequence[Tensor] | None = None) -> nn.Module:
        """The layer, called `name`, in its form. ValueError for weights that cannot be quantized.

        parts: of the weight, one below the other; None: the layer's own weight.
        """
        parts = [linear.weight.detach()] if parts is None else parts
        bias = None if linear.bias is None else linear.bias.detach()
        form = self.of(name, linear.in_features)
        if form is PackedLinear:
            return PackedLinear(parts, bias)
        with op_errors_about(f"quantization: {name}"):
            if form is Int8Linear:
                return Int8Linear(parts, bias)
            return Int4Linear([quantize_int4(part) for part in parts], bias)

    def describe(self, in_features: dict[str, int]) -> str:
        """The forms in words, of layers with so many inputs."""
        forms = {name: self.of(name, size).FORM for name, size in in_features.items()}
        heads = {form for name, form in forms.items() if name == self.head}
        counts = Counter(form for name, form in forms.items() if name != self.head)
        words = [form if len(counts) == 1 else f"{count} {form}" for form, count in counts.most_common()]
        return "; ".join([*words, *(f"the last one {form}" for form in heads - counts.keys())])


def quantized_linear(parts: Sequence[QuantizedWeight], bias: Tensor | None) -> nn.Module:
    """parts: of the weight, one below the other, all of one kind."""
    if of_8_bits := [part for part in parts if isinstance(part, Int8Weight)]:
        return Int8Linear(of_8_bits, bias)
    return Int4Linear([part for part in parts if isinstance(part, Int4Weight)], bias)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer whose forward is torch's, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }


def pack_linear_layers(model: nn.Module, forms: LinearForms) -> None:
    """Replace the linear layers, one after the other. So the memory of a weight is free before the next is packed."""
    layers = linear_layers(model)
    while layers:
        name, linear = layers.popitem()
        model.set_submodule(name, forms.pack(name, linear))
        del linear
        give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Give the system the memory of tensors that are gone. Of its own accord glibc keeps much of this memory: after a
    load, up to half as much as the model has."""
    with suppress(AttributeError, OSError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)


# ---- weights in parts -----------------------------------------------------------------------------------------------

Rows = tuple[Tensor, ...]  # of a weight: what the op that packs them takes


def pack_parts(pack: Callable[..., Tensor], parts: Iterable[Rows], out_features: int) -> Tensor:
    """The packed weight that has these parts, one below the other. Each begins with a panel of its own."""
    packed, place = None, 0
    for part in parts:
        if packed is None:
            panels = pack(*(tensor[:0] for tensor in part))
            packed = empty_huge_pages((num_panels(out_features), *panels.shape[1:]), panels.dtype)
        end = place + num_panels(len(part[0]))
        pack(*part, out=packed[place:end])
        place = end
    assert packed is not None and place == len(packed)
    return packed


def whole_panels(parts: Sequence[Rows]) -> Sequence[Rows]:
    """The same rows in parts that `pack_parts` takes."""
    if all(len(part[0]) % PANEL == 0 for part in parts[:-1]):
        return parts
    return [tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))]


def num_panels(out_features: int) -> int:
    return -(-out_features // PANEL)


def int8_parts(parts: Sequence[Int8Weight] | Sequence[Tensor]) -> Iterator[Int8Weight]:
    """The same rows in 8 bits, in parts that `pack_parts` takes."""
    quantized = [(part.codes, part.scales) for part in parts if isinstance(part, Int8Weight)]
    yield from (Int8Weight(*rows) for rows in whole_panels(quantized))
    for [part] in whole_panels([(part,) for part in parts if isinstance(part, Tensor)]):
        num_rows = QUANTIZED_AT_ONCE // max(1, part.shape[1]) // PANEL * PANEL
        for rows in torch.split(part, max(PANEL, num_rows)):
            yield quantize_int8(rows)
            give_back_freed_memory()  # malloc finds no use for what the codes before have left


def narrowed(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of one dtype: fp16 or bf16 if one of them holds every element exactly, as after a conversion from 16 bits."""
    dtype = reduce(torch.promote_types, [part.dtype for part in parts])
    if dtype == torch.float32:
        for short in (torch.bfloat16, torch.float16):
            if all(torch.equal(rows.to(short).float(), rows.float()) for part in parts for rows in chunks(part)):
                dtype = short
                break
    return [part.to(dtype) for part in parts]


def as_fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()
