"""Writes a quantized copy of a checkpoint, in the format of compressed-tensors."""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from pagedattn_serve.config import QUANTIZATIONS
from pagedattn_serve.errors import ArgumentError, op_errors_about, shown
from pagedattn_serve.loading.checkpoint_files import (
    NAMED_BY_CONFIG,
    OpenFiles,
    is_same,
    open_checkpoint,
    warn_of_other_weights,
)
from pagedattn_serve.loading.checkpoint_formats import row_bytes
from pagedattn_serve.loading.directory import directory_to_write, model_directory, read_json
from pagedattn_serve.loading.gguf_file import is_gguf
from pagedattn_serve.loading.loader import build_model
from pagedattn_serve.loading.quantized_checkpoint import checkpoint_format, is_for_cache_alone
from pagedattn_serve.loading.weights import HEAD, CheckpointTensors, checkpoint_shapes
from pagedattn_serve.models.layers import TransposedLinear
from pagedattn_serve.models.linear import give_back_freed_memory
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.models.partition import SlicedLinear
from pagedattn_serve.models.quantization import CODES_PER_INT32, GROUP_SIZE, quantizable, quantize_int4, quantize_int8
from pagedattn_serve.progress import reported

SHARD_BYTES = 4 << 30  # of tensors in a file; so many are in memory at once
# Files beside the weights that a copy has, too: tokenizer, chat template, defaults of generation, license.
COPIED = frozenset({".json", ".jinja", ".model", ".txt", ".tiktoken", ".md", ""})


def quantize_checkpoint(model: str | PathLike[str], out: str | PathLike[str], format: str) -> tuple[int, int]:
    """Write the model, with its linear layers in 4 or 8 bits, into the directory `out`.

    On one rank the copy gives the tokens and logprobs of the model, bit for bit, if both are loaded with `format` as
    their quantization, and with the same dtype and other options.

    The last layer is not quantized, and in 4 bits neither is a layer whose in_features are no multiple of GROUP_SIZE.
    All is written beside `out` first. So an interrupt or an error leaves nothing.

    model: as `load_model` takes it, not quantized, of a family that has a file of its own.
    out: does not exist, or is an empty directory.
    format: "int4" or "int8".

    Returns how many layers of the checkpoint are quantized, and how many linear layers it has. Raises what `load_model`
    raises, and ValueError for an `out` that is in use, for a model that is quantized, for a model that runs through
    transformers, for one none of whose layers can be quantized, and for weights that cannot.
    """
    if format not in QUANTIZATIONS:
        raise ArgumentError("format", " or ".join(sorted(QUANTIZATIONS)), shown(format))
    directory, out = directory_to_quantize(model), directory_to_write(out)
    if (stored := checkpoint_format(directory)) is not None:
        raise ArgumentError("model", "a checkpoint that is not quantized", f"{stored.QUANTIZATION} of {stored.METHOD}")
    network = build_model(directory)
    if not isinstance(network, NativeCausalLM):
        raise ArgumentError(
            "model",
            "a family that has a file here, as others run through transformers",
            network.architecture,
        )
    if all(stays(network, name, layer, format) for name, layer in sliced_layers(network).items()):
        raise ArgumentError("model", f"linear layers whose in_features are multiples of {GROUP_SIZE}", "none")
    warn_of_other_weights(directory)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        copy = Path(temporary) / out.name
        copy.mkdir()
        copy_other_files(directory, copy)
        left = write_tensors(network, directory, copy, format)
        config = read_json(directory / "config.json")
        config.pop(NAMED_BY_CONFIG, None)
        before = config.pop("quantization_config", None)
        of_cache = before if is_for_cache_alone(before) else {}
        config["quantization_config"] = of_cache | quantization_config(format, left)
        write_json(copy / "config.json", config)
        for file in copy.iterdir():
            write_to_disk(file)
        os.replace(copy, out)
    num_layers = sum(len(layer.checkpoint_parts(name)) for name, layer in sliced_layers(network).items())
    return num_layers - len(left), num_layers


def directory_to_quantize(model: str | PathLike[str]) -> Path:
    """As `model_directory`. Raises ArgumentError for a GGUF file."""
    directory = model_directory(model)
    if is_gguf(directory):
        expected = "a directory with a config.json: the option `quantization` quantizes GGUF files as they are loaded"
        raise ArgumentError("model", expected, directory)
    return directory


def copy_other_files(directory: Path, copy: Path) -> None:
    for file in directory.iterdir():
        is_wanted = file.suffix in COPIED and not file.name.startswith(".") and not file.name.endswith(".index.json")
        if is_wanted and file.is_file() and file.name != "config.json":
            shutil.copyfile(file, copy / file.name)


def write_to_disk(file: Path) -> None:
    """Wait until the file is on the disk. So a copy that has its name is whole, whatever happens to the machine; and
    some disks say only now that they are full."""
    with file.open("rb") as opened:
        os.fsync(opened)


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ---- tensors --------------------------------------------------------------------------------------------------------


def write_tensors(model: NativeCausalLM, directory: Path, copy: Path, format: str) -> list[str]:
    """Write the checkpoint's tensors, in files of up to SHARD_BYTES. Returns the names of linear layers that are not
    quantized."""
    left: list[str] = []
    shards: list[list[str]] = []
    with OpenFiles() as open_files:
        shard: dict[str, Tensor] = {}
        for tensors in quantized_tensors(model, directory, open_files, format, left):
            if shard and num_bytes(shard) + num_bytes(tensors) > SHARD_BYTES:
                write_shard(shard, copy, shards)
                shard = {}
            shard |= tensors
        write_shard(shard, copy, shards)
    if len(shards) == 1:
        os.replace(shard_file(copy, 1, 0), copy / "model.safetensors")
        return left
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = shard_file(copy, i, len(shards))
        os.replace(shard_file(copy, i, 0), file)
        weight_map |= dict.fromkeys(names, file.name)
    total_size = sum(file.stat().st_size for file in copy.glob("*.safetensors"))
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(copy / "model.safetensors.index.json", index)
    return left


def num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def shard_file(copy: Path, number: int, num_shards: int) -> Path:
    return copy / f"model-{number:05}-of-{num_shards:05}.safetensors"


def write_shard(shard: dict[str, Tensor], copy: Path, shards: list[list[str]]) -> None:
    shards.append(list(shard))
    file = shard_file(copy, len(shards), 0)
    try:
        save_file(shard, file, metadata={"format": "pt"})
    except SafetensorError as error:  # of the disk, as its tensors are ours
        raise OSError(f"out: cannot write {file}: {error}") from None
    file.chmod(stat.S_IMODE(copy.stat().st_mode) & 0o666)  # safetensors lets nobody else read it


def quantized_tensors(
    model: NativeCausalLM, directory: Path, open_files: OpenFiles, format: str, left: list[str]
) -> Iterator[dict[str, Tensor]]:
    """The checkpoint's tensors by the names of the copy: those of a linear layer at a time, and one of the others.

    left: gets the names of the linear layers that are not quantized.
    """
    checkpoint = CheckpointTensors(model, open_checkpoint(directory, open_files))
    check_tensors(model, directory, checkpoint)
    tensors, own_names = checkpoint.tensors, checkpoint.own_names
    for name, layer in reported(sliced_layers(model).items(), "Quantizing", report=None):
        for part in layer.checkpoint_parts(name):
            own_name = own_names[f"{part}.weight"].removesuffix(".weight")
            if stays(model, name, layer, format):
                left.append(own_name)
                continue
            weight = quantizable(tensors.pop(f"{part}.weight")())
            with op_errors_about(f"model: {part}"):
                packed = compressed(weight.t() if isinstance(layer, TransposedLinear) else weight, format)
            yield {f"{own_name}.{suffix}": tensor for suffix, tensor in packed.items()}
            open_files.close()
            give_back_freed_memory()
    for name, read in tensors.items():
        # Some files have tensors in the same memory, which the copy must not have.
        yield {own_names[name]: read().detach().clone(memory_format=torch.contiguous_format)}
        open_files.close()


def stays(model: NativeCausalLM, name: str, layer: SlicedLinear, format: str) -> bool:
    """Whether a linear layer is not quantized."""
    return name == model.head or (format == "int4" and layer.in_features % GROUP_SIZE > 0)


def check_tensors(model: NativeCausalLM, directory: Path, checkpoint: CheckpointTensors) -> None:
    """Raises ValueError, as `load_weights` does, unless they are the model's. Leaves out a head that is a copy of the
    embedding where config.json ties the two."""
    head = None
    for name, parameter in model.named_parameters():
        layer_name, _, kind = name.rpartition(".")
        found = checkpoint.read(checkpoint_shapes(model.get_submodule(layer_name), layer_name, kind))
        if found and parameter is model.lm_head.weight:
            head = found[0]
    own_head = checkpoint.read_own_head()
    checkpoint.check(directory)
    if is_same(head, own_head):
        del checkpoint.tensors[HEAD]


def sliced_layers(model: nn.Module) -> dict[str, SlicedLinear]:
    """The linear layers by name. A head that is tied to the embedding has no weight of its own."""
    own = dict(model.named_parameters())
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, SlicedLinear) and f"{name}.weight" in own
    }


# ---- compressed-tensors: what loading.quantized_checkpoint reads ----------------------------------------------------


def compressed(weight: Tensor, format: str) -> dict[str, Tensor]:
    """The tensors of a layer, by the ends of their names. Raises ValueError for a weight that cannot be quantized."""
    if format == "int8":
        of_8_bits = quantize_int8(weight)
        return {"weight": of_8_bits.codes, "weight_scale": of_8_bits.scales[:, None]}
    quantized = quantize_int4(weight)
    padding = -len(weight) % CODES_PER_INT32
    zeros = nn.functional.pad(quantized.zeros, (0, 0, 0, padding))
    return {
        "weight_packed": pack_nibbles(quantized.codes),
        "weight_scale": quantized.scales,
        "weight_zero_point": pack_nibbles(zeros.t()).t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [n, 8 * k] to int32 [n, k], the lowest four bits first."""
    return row_bytes(codes[:, ::2] | codes[:, 1::2] << 4, torch.int32)


def quantization_config(format: str, left: list[str]) -> dict[str, Any]:
    """left: linear layers that are not quantized."""
    weights = {"type": "int", "dynamic": False, "actorder": None, "observer": "minmax"}
    rows = None
    if format == "int4":
        weights |= {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": GROUP_SIZE}
    else:
        weights |= {"num_bits": 8, "symmetric": True, "strategy": "channel", "group_size": None}
        rows = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if format == "int4" else "int-quantized",
        "quantization_status": "compressed",
        "ignore": sorted({*left, NativeCausalLM.head}),
        "config_groups": {"group_0": group},
    }
