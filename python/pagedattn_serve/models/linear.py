"""Linear layers on the CPU. They keep one copy of the weight, in the form and the order in which a product reads it.

`LinearForms` chooses the form of each layer; `pack_linear_layers` replaces the layers. Whatever the form, the result of
a row does not depend on the other rows. Weights are plain attributes, because nn.Module takes a microsecond to look up
a buffer.
"""

import ctypes
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagedattn_ext import ops
from pagedattn_serve.models.partition import SlicedLinear
from pagedattn_serve.models.quantization import (
    GROUP_SIZE,
    Int4Weight,
    Int8Weight,
    chunks,
    quantize_int4,
    quantize_int8,
)


class PackedLinear(nn.Module):
    """Weights of 32 or 16 bits and rows of any float dtype; sums in fp32."""

    FORM = "not quantized, in 16 bits where these hold the weights exactly"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features = weight.shape[0]
        self.packed_weight = ops.pack_linear_weight(narrowed(weight))
        self.bias = as_fp32(bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], of the same dtype. All layers of this module do the same."""
        return ops.linear_packed(hidden, self.packed_weight, self.out_features, self.bias)


class Int8Linear(nn.Module):
    """Weights of 8 bits with a scale for each output feature. Each row is quantized as well when it comes."""

    FORM = "int8, a scale for each output feature, rows quantized at run time"

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.packed_weight = ops.pack_linear_weight_int8(weight.codes)
        self.weight_scales = weight.scales
        self.bias = as_fp32(bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return ops.linear_int8(hidden, self.packed_weight, self.weight_scales, self.bias)


class Int4Linear(nn.Module):
    """Weights of 4 bits with a scale and a zero for each group. Rows are quantized to 8 bits when they come."""

    FORM = f"int4 in groups of {GROUP_SIZE}, rows quantized at run time"

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features = weight.codes.shape[0]
        self.group_size = weight.group_size
        self.scale_dtype = weight.scales.dtype
        self.packed_weight = ops.pack_linear_weight_int4(weight.codes, weight.scales, weight.zeros)
        self.bias = as_fp32(bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return ops.linear_int4(
            hidden, self.packed_weight, self.group_size, self.out_features, self.bias, self.scale_dtype
        )


LinearType = type[PackedLinear] | type[Int8Linear] | type[Int4Linear]


@dataclass(slots=True, frozen=True)
class LinearForms:
    """Which form each linear layer of a model takes.

    vocab_size: out_features of the model's last layer, with the slices of all ranks. quantization: "int8", "int4" or
        None.
    """

    vocab_size: int
    quantization: str | None

    def of(self, linear: nn.Linear) -> LinearType:
        """The type of the layer that takes the place of `linear`.

        With int4, two kinds of layers have 8 bits: the last layer, because no later layer evens out its errors, and
        layers whose in_features are no multiple of a group.
        """
        if self.quantization is None:
            return PackedLinear
        if self.quantization == "int4" and linear.in_features % GROUP_SIZE == 0 and not self.is_head(linear):
            return Int4Linear
        return Int8Linear

    def is_head(self, linear: nn.Linear) -> bool:
        # A slice of the last layer may be as large as other layers are.
        out_features = linear.outputs.whole if isinstance(linear, SlicedLinear) else linear.out_features
        return out_features == self.vocab_size

    def pack(self, name: str, linear: nn.Linear) -> nn.Module:
        """The layer, called `name`, in its form. ValueError for weights that cannot be quantized."""
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        form = self.of(linear)
        if form is PackedLinear:
            return PackedLinear(weight, bias)
        quantize = quantize_int4 if form is Int4Linear else quantize_int8
        try:
            return quantized_linear(quantize(weight), bias)
        except ValueError as error:
            raise ValueError(f"quantization: {name}: {str(error).partition(': ')[2]}") from None

    def describe(self, model: nn.Module) -> str:
        """The forms in words. The model's layers are not packed; the model may be on any device."""
        layers = linear_layers(model).values()
        counts = Counter(self.of(linear).FORM for linear in layers if not self.is_head(linear))
        words = [form if len(counts) == 1 else f"{count} {form}" for form, count in counts.most_common()]
        heads = {self.of(linear).FORM for linear in layers if self.is_head(linear)}
        return "; ".join([*words, *(f"the last one {form}" for form in heads - counts.keys())])


def quantized_linear(weight: Int8Weight | Int4Weight, bias: Tensor | None) -> nn.Module:
    return Int8Linear(weight, bias) if isinstance(weight, Int8Weight) else Int4Linear(weight, bias)


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


def narrowed(weight: Tensor) -> Tensor:
    """The weight in fp16 or bf16 if one of them holds every element exactly, as after a conversion from 16 bits."""
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if all(torch.equal(weight[a:b].to(dtype).float(), weight[a:b]) for a, b in chunks(weight)):
                return weight.to(dtype)
    return weight


def as_fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()
