"""Checkpoints whose weights come quantized: what `quantization_config` may say, and how tensors become our weights.

The tensors of a layer say whether the layer is quantized. So there is no list of names of layers that a checkpoint does
not quantize (mostly lm_head).
"""

from collections.abc import Callable, Container
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pagedattn_serve.loading.checkpoint_files import Tensors
from pagedattn_serve.loading.checkpoint_formats import (
    Awq,
    CheckpointFormat,
    CompressedInt4,
    CompressedInt8,
    Gptq,
    GptqAnew,
    PackedAnew,
    PackedInt8,
    unpack_nibbles,
)
from pagedattn_serve.loading.gguf_file import GgufFile, is_gguf
from pagedattn_serve.loading.gguf_weights import GgufFormat, gguf_format
from pagedattn_serve.loading.kv_scales import is_kv_scale
from pagedattn_serve.loading.quantization_config import expect, quantization_config, section
from pagedattn_serve.loading.scaled_floats import METHODS, scaled_floats
from pagedattn_serve.models.partition import Share, SlicedLinear, everything
from pagedattn_serve.models.quantization import CODES_PER_INT32, Int4Weight, QuantizedWeight, dequantized

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
            bits = expect(config, "bits", 4, 8)
            is_in_order = not expect(config, "desc_act", False, True, default=False)
            expect(config, "is_marlin_format", False, default=False)
            expect(config, "dynamic", None, {}, default=None)  # other formats for some of the layers
            # "format" is the name that some programs give the field.
            version = expect(config, "checkpoint_format", "gptq", "gptq_v2", default=config.get("format", "gptq"))
            expect(config, "format", version, default=version)
            size, offset, symmetric = group_size_of(config), 1 if version == "gptq" else 0, sym_of(config)
            if bits == 4 and (is_in_order or size is None):
                return Gptq(size, offset, symmetric)
            return GptqAnew(size, bits, is_in_order, offset, symmetric)
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
    bits = expect(weights, "num_bits", 4, 8)
    order = expect(weights, "actorder", None, "weight", "static", "group", "dynamic", default=None)
    has_groups = expect(weights, "strategy", "group", "channel") == "group"
    symmetric = expect(weights, "symmetric", True, False, default=True)
    size, is_in_order = group_size_of(weights) if has_groups else None, order not in ("group", "dynamic")
    if bits == 4 and (is_in_order or size is None):
        return CompressedInt4(size, symmetric)
    if symmetric and size is None:
        return PackedInt8(size)
    return PackedAnew(size, bits, is_in_order, symmetric)


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
            weight = format.weight(by_suffix)
        except ValueError as error:
            raise ValueError(f"model: cannot read {part}: {error}") from None
        weights.append({f.name: getattr(weight, f.name) for f in fields(weight)})
        if to_read is not outputs:
            weights[-1] = {kind: outputs.of(tensor, dim=0) for kind, tensor in weights[-1].items()}
    if len(weights) < len(parts):
        return None
    by_kind = {kind: layer.parts_from_checkpoint(kind, [held[kind] for held in weights]) for kind in weights[0]}
    return [type(weight)(*tensors) for tensors in zip(*by_kind.values(), strict=True)]


# ---- models that run through transformers ---------------------------------------------------------------------------


def whole_weights(tensors: Tensors, format: CheckpointFormat) -> dict[str, Callable[[], QuantizedWeight]]:
    """What reads the weight of a layer, for each layer that is quantized, by its name in the checkpoint."""
    marker = f".{format.MARKER}"
    of_layers: dict[str, Tensors] = {name.removesuffix(marker): {} for name in tensors if name.endswith(marker)}
    for name, read in tensors.items():
        layer, _, suffix = name.rpartition(".")
        if layer in of_layers:
            of_layers[layer][suffix] = read
    return {layer: partial(whole_weight, layer, reads, format) for layer, reads in of_layers.items()}


def whole_weight(name: str, reads: Tensors, format: CheckpointFormat) -> QuantizedWeight:
    """With codes in bytes. Raises ValueError for tensors that do not fit each other."""
    tensors = {suffix: read() for suffix, read in reads.items()}
    try:
        weight = format.weight(tensors)
        if isinstance(weight, Int4Weight) and weight.codes.dtype == torch.int32:
            weight = replace(weight, codes=unpack_nibbles("codes", weight.codes))
        num_outputs, num_inputs = weight.codes.shape
        for suffix, shares in format.shapes(everything(num_outputs), everything(num_inputs)).items():
            shape = [share.whole for share in shares]
            if suffix in tensors and list(tensors[suffix].shape) != shape:
                raise ValueError(f"{suffix}: expected {shape}, got {list(tensors[suffix].shape)}")
    except KeyError as error:
        raise ValueError(f"model: cannot read {name}: missing {error.args[0]}") from None
    except (ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"model: cannot read {name}: {error}") from None
    return weight


def as_floats(tensors: Tensors, weights: dict[str, Callable[[], QuantizedWeight]], dtype: torch.dtype) -> Tensors:
    """The tensors with these weights as floats, which transformers can load. weights: of `whole_weights`."""
    others = {
        name: read
        for name, read in tensors.items()
        if name.rpartition(".")[0] not in weights or name.endswith(".bias") or is_kv_scale(name)
    }
    return others | {f"{layer}.weight": partial(read_floats, read, dtype) for layer, read in weights.items()}


def read_floats(read: Callable[[], QuantizedWeight], dtype: torch.dtype) -> Tensor:
    return dequantized(read()).to(dtype)
