"""Checkpoints whose weights come quantized: what `quantization_config` may say, and how tensors become our weights.

Codes, scales and zeros are the checkpoint's; nothing is quantized anew. The tensors of a layer say whether the layer is
quantized. So there is no list of names of layers that a checkpoint does not quantize (mostly lm_head).
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from pagedattn_serve.loading.gguf_file import GgufFile, is_gguf
from pagedattn_serve.loading.gguf_weights import GgufFormat, gguf_format
from pagedattn_serve.loading.quantization_config import expect, quantization_config, section
from pagedattn_serve.loading.scaled_floats import METHODS, scaled_floats
from pagedattn_serve.models.partition import Share, SlicedLinear, everything
from pagedattn_serve.models.quantization import (
    CODES_PER_INT32,
    SYMMETRIC_ZERO,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    chunks,
)

ROW_GROUP = 32  # rows are quantized in groups of this size; a group of weights is a multiple of it
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

    def unpack(self, tensors: dict[str, Tensor]) -> QuantizedWeight:
        """The weight, made of tensors with the names and shapes of `shapes`."""
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


@dataclass(slots=True, frozen=True)
class CompressedInt4(CheckpointFormat):
    METHOD: ClassVar = "compressed-tensors"
    QUANTIZATION: ClassVar = "int4"
    MARKER: ClassVar = "weight_packed"

    symmetric: bool

    def shapes(self, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
        groups = self.groups(inputs)
        zeros = {} if self.symmetric else {"weight_zero_point": [outputs.packed(CODES_PER_INT32), groups]}
        shapes = {"weight_packed": [outputs, inputs.packed(CODES_PER_INT32)], "weight_scale": [outputs, groups]}
        return {**shapes, **zeros, "weight_shape": [everything(2)]}

    def unpack(self, tensors: dict[str, Tensor]) -> Int4Weight:
        scales = tensors["weight_scale"]
        if self.symmetric:
            zeros = torch.full(scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8)
        else:
            zeros = unpack_nibbles("weight_zero_point", tensors["weight_zero_point"].t()).t()[: len(scales)]
        check_dtype("weight_packed", tensors["weight_packed"], torch.int32)
        return Int4Weight(tensors["weight_packed"], scales, zeros)


@dataclass(slots=True, frozen=True)
class Gptq(CheckpointFormat):
    METHOD: ClassVar = "gptq"
    QUANTIZATION: ClassVar = "int4"
    MARKER: ClassVar = "qweight"
    OPTIONAL: ClassVar = frozenset({"g_idx"})  # groups are in order, because desc_act is refused

    zero_offset: int  # what the first version of the format subtracts from its zeros
    symmetric: bool | None  # None: config.json does not say

    def shapes(self, outputs: Share, inputs: Share) -> dict[str, list[Share]]:
        groups = self.groups(inputs)
        shapes = {
            "qweight": [inputs.packed(CODES_PER_INT32), outputs],
            "qzeros": [groups, outputs.packed(CODES_PER_INT32)],
        }
        return {**shapes, "scales": [groups, outputs], "g_idx": [everything(inputs.whole)]}

    def unpack(self, tensors: dict[str, Tensor]) -> Int4Weight:
        codes = tensors["qweight"].t()
        check_dtype("qweight", codes, torch.int32)
        scales = tensors["scales"].t()
        order = tensors.get("g_idx", torch.zeros(1)).long()  # of all ranks
        if not torch.equal(order, torch.arange(len(order)) // (self.group_size or len(order))):
            raise ValueError("g_idx: expected groups in order, got a permutation of them")
        zeros = unpack_nibbles("qzeros", tensors["qzeros"]).t()
        if self.symmetric is not False and is_filled(zeros, SYMMETRIC_ZERO, SYMMETRIC_ZERO - 1):
            zeros = zeros.new_full(zeros.shape, SYMMETRIC_ZERO)  # programs differ in what they write, not in the zero
        elif self.symmetric:
            raise asymmetric("qzeros", zeros, "7 in all places or 8 in all places")
        else:
            zeros = zeros.add_(self.zero_offset).bitwise_and_(15)
        return Int4Weight(codes, scales, zeros)


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


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")


# ---- what config.json says ------------------------------------------------------------------------------------------


def checkpoint_format(directory: Path) -> CheckpointFormat | GgufFormat | None:
    """How the weights of the checkpoint in a directory, or of a GGUF file, are quantized; None: they are not, or they
    are read as floats (loading.scaled_floats).

    Raises ValueError, with the name of the field, for a quantization_config that is not supported.
    """
    if is_gguf(directory):
        return gguf_format(GgufFile.open(directory))
    config = quantization_config(directory)
    if config is None or is_for_cache_alone(config) or scaled_floats(config) is not None:
        return None
    return parse_format(config)


def is_for_cache_alone(config: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a quantization_config, one of compressed-tensors, leaves the weights as they are."""
    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        return False
    return bool(config.get("kv_cache_scheme")) and not config.get("config_groups")


def parse_format(config: Any) -> CheckpointFormat:
    """What a quantization_config says of weights. Raises as `checkpoint_format` does."""
    if not isinstance(config, dict):
        raise ValueError(f"quantization_config: expected an object, got {config!r:.80}")
    match expect(config, "quant_method", "compressed-tensors", "gptq", "awq", *METHODS):
        case "gptq":
            expect(config, "bits", 4)
            expect(config, "desc_act", False, default=False)
            expect(config, "is_marlin_format", False, default=False)
            expect(config, "dynamic", None, {}, default=None)  # other formats for some of the layers
            # "format" is the name that some programs give the field.
            version = expect(config, "checkpoint_format", "gptq", "gptq_v2", default=config.get("format", "gptq"))
            expect(config, "format", version, default=version)
            return Gptq(group_size_of(config), zero_offset=1 if version == "gptq" else 0, symmetric=sym_of(config))
        case "awq":
            expect(config, "bits", 4)
            expect(config, "version", "gemm", "GEMM", default="gemm")
            expect(config, "zero_point", True, default=True)
            return Awq(group_size_of(config), symmetric=sym_of(config))
        case _:
            return compressed_format(config)


def compressed_format(config: dict[str, Any]) -> CheckpointFormat:
    """The format of compressed-tensors: one group of layers, whose weights are quantized in one of two ways."""
    groups = section(config, "config_groups")
    if len(groups) != 1:
        raise ValueError(f"quantization_config: config_groups: expected one group of layers, got {len(groups)}")
    group = section(groups, next(iter(groups)))
    layout = expect(config, "format", "int-quantized", "pack-quantized", "float-quantized")
    expect(section(config, "sparsity_config"), "format", "dense", default="dense")
    expect(config, "transform_config", None, {}, default=None)
    expect(group, "output_activations", None, default=None)
    weights, rows = section(group, "weights"), section(group, "input_activations")
    expect(weights, "type", "int", default="int")
    if layout == "int-quantized":
        for arguments, strategy in ((weights, "channel"), (rows, "token")):
            expect(arguments, "num_bits", 8)
            expect(arguments, "strategy", strategy)
            expect(arguments, "symmetric", True, default=True)
        expect(rows, "type", "int", default="int")
        expect(rows, "dynamic", True, default=False)
        return CompressedInt8(None)
    if rows:
        expected = "none beside pack-quantized weights"
        raise ValueError(f"quantization_config: input_activations: expected {expected}, got {rows!r:.80}")
    expect(weights, "num_bits", 4)
    expect(weights, "actorder", None, "weight", "static", default=None)
    has_groups = expect(weights, "strategy", "group", "channel") == "group"
    symmetric = expect(weights, "symmetric", True, False, default=True)
    return CompressedInt4(group_size_of(weights) if has_groups else None, symmetric)


def sym_of(config: dict[str, Any]) -> bool | None:
    """Whether config.json says that all zeros are in the middle of the codes; None: it does not say."""
    sym = expect(config, "sym", True, False, None, default=None)
    return None if sym is None else bool(sym)


def group_size_of(config: dict[str, Any]) -> int | None:
    size = config.get("group_size")
    if size == -1:
        return None
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"quantization_config: group_size: expected -1 or an int >= 1, got {size!r}")
    return size


# ---- the weight of a layer ------------------------------------------------------------------------------------------


def is_quantized(
    layer: nn.Module, name: str, format: CheckpointFormat, tensors: Container[str]
) -> TypeGuard[SlicedLinear]:
    return isinstance(layer, SlicedLinear) and any(
        f"{part}.{format.MARKER}" in tensors for part in layer.checkpoint_parts(name)
    )


def read_weight(
    layer: SlicedLinear,
    name: str,
    format: CheckpointFormat,
    tensors: Container[str],
    read: Callable[[dict[str, list[Share]]], list[Tensor] | None],
) -> list[QuantizedWeight] | None:
    """The weight of a layer, in parts that lie one below the other; None if `read` returns None. Raises ValueError for
    tensors that the layer cannot have.

    tensors: names of all tensors in the checkpoint.
    read: returns the rank's slices of the tensors of these names; None if one is missing or misshapen.
    """
    weights = []
    parts = layer.checkpoint_parts(name)
    for part, outputs in parts.items():
        # Some tensors hold the codes of CODES_PER_INT32 outputs in one element, and ranks cannot share an element.
        to_read = outputs if outputs.splits_only_at(CODES_PER_INT32) else everything(outputs.whole)
        try:
            shapes = {
                suffix: shares
                for suffix, shares in format.shapes(to_read, layer.inputs).items()
                if suffix not in format.OPTIONAL or f"{part}.{suffix}" in tensors
            }
            if layer.bias is None and f"{part}.bias" in tensors:  # of zeros, which the first GPTQ checkpoints have
                shapes["bias"] = [to_read]
            found = read({f"{part}.{suffix}": shares for suffix, shares in shapes.items()})
            if found is None:
                continue
            by_suffix = dict(zip(shapes, found, strict=True))
            if "bias" in by_suffix and by_suffix["bias"].any():
                largest = by_suffix["bias"].abs().max()
                raise ValueError(f"bias: expected none, or zeros, got numbers up to {largest:g}")
            weight = format.unpack(by_suffix)
        except ValueError as error:
            raise ValueError(f"model: cannot read {part}: {error}") from None
        weights.append({f.name: getattr(weight, f.name) for f in fields(weight)})
        if to_read is not outputs:
            weights[-1] = {kind: outputs.of(tensor, dim=0) for kind, tensor in weights[-1].items()}
    if len(weights) < len(parts):
        return None
    by_kind = {kind: layer.parts_from_checkpoint(kind, [held[kind] for held in weights]) for kind in weights[0]}
    return [type(weight)(*tensors) for tensors in zip(*by_kind.values(), strict=True)]
