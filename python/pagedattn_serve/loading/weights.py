"""Puts the tensors of a checkpoint's files, *.safetensors or pytorch_model*.bin, into a native model."""

import logging
import pickle
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from pagedattn_serve.loading.directory import read_json
from pagedattn_serve.loading.kv_scales import is_kv_scale
from pagedattn_serve.loading.quantized_checkpoint import CheckpointFormat, is_quantized, read_weight
from pagedattn_serve.models.causal_lm import NativeCausalLM, misfit
from pagedattn_serve.models.linear import LinearForms, give_back_freed_memory, quantized_linear
from pagedattn_serve.models.partition import Share, SlicedEmbedding, SlicedLinear, everything

# In order of preference: the file with all weights, and the index that takes its place if there are several files.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

HALF_DTYPES = (torch.float16, torch.bfloat16)

HEAD = "lm_head.weight"

logger = logging.getLogger(__name__)

Tensors = dict[str, Callable[[], Tensor]]  # by name; calling an entry reads the data of the tensor


def load_weights(
    model: NativeCausalLM,
    directory: Path,
    device: str,
    stored: CheckpointFormat | None = None,
    forms: LinearForms | None = None,
) -> None:
    """Replace every parameter of `model`, built on "meta", by the checkpoint's tensors, or the rank's slices of them.

    stored: how the checkpoint has quantized its weights, if it has.
    forms: what the linear layers become, one layer after the other, so that memory holds one layer twice at most. A
        tied lm_head keeps its form.
    """
    with OpenFiles() as open_files:
        tensors = {checkpoint_name(model, n): read for n, read in open_checkpoint(directory, open_files).items()}
        unexpected = {name for name in tensors if not name.endswith(model.NOT_PARAMETERS) and not is_kv_scale(name)}
        problems: list[str] = []
        parameters = dict(model.named_parameters())  # tied ones appear once, under the embedding's name

        def read(shapes: dict[str, list[Share]]) -> list[Tensor] | None:
            unexpected.difference_update(shapes)
            return read_tensors(tensors, shapes, problems)

        def load_layer(layer_name: str, names: Iterable[str]) -> None:
            layer = model.get_submodule(layer_name)
            is_packed = forms is not None and isinstance(layer, SlicedLinear)
            quantized, weight = None, []  # parts of a weight that is packed
            for name in names:
                kind = name.removeprefix(f"{layer_name}.")
                if stored is not None and kind == "weight" and is_quantized(layer, layer_name, stored, tensors):
                    quantized = read_weight(layer, layer_name, stored, tensors, read)
                elif (found := read(checkpoint_shapes(layer, layer_name, kind))) is not None and not problems:
                    parts = layer.parts_from_checkpoint(kind, found) if isinstance(layer, SlicedLinear) else found
                    # Packed layers take weights of any dtype, so 16-bit weights keep their dtype, whatever the model's.
                    kept = HALF_DTYPES if is_packed else ()
                    parts = [part.to(device, part.dtype if part.dtype in kept else model.dtype) for part in parts]
                    if is_packed and kind == "weight":
                        weight = parts
                    else:
                        set_parameter(model, name, parts[0].contiguous() if len(parts) == 1 else torch.cat(parts))
            if not isinstance(layer, SlicedLinear):
                return
            if not layer.adds_bias:
                layer.register_parameter("bias", None)
            if forms is not None and not problems:
                packed = quantized_linear(quantized, layer.bias) if quantized else forms.pack(layer_name, layer, weight)
                model.set_submodule(layer_name, packed)

        # disable=None shows the bar only on a terminal.
        bar = tqdm(parameters, desc="Loading weights", disable=None, leave=False)
        for layer_name, names in groupby(bar, lambda name: name.rpartition(".")[0]):
            load_layer(layer_name, names)
            open_files.close()
            give_back_freed_memory()
        if HEAD in unexpected and not problems:  # its embeddings are tied
            unexpected.discard(HEAD)
            load_own_head(model, tensors[HEAD]().to(device, model.dtype))
    problems += [f"unexpected {name}" for name in sorted(unexpected)]
    if problems == [f"missing {HEAD}"]:
        problems[0] += ", which config.json does not tie to the embedding: a model without its head cannot generate"
    if problems:
        raise ValueError(misfit(directory, type(model).__name__, problems))


def load_own_head(model: NativeCausalLM, weight: Tensor) -> None:
    """For a checkpoint with an lm_head although the config ties it: mostly a copy; if not, it becomes the head.

    weight: of the whole vocabulary.
    """
    weight = model.lm_head.outputs.of(weight, dim=0)
    if not torch.equal(weight, model.lm_head.weight):
        logger.warning("lm_head.weight differs from the embedding, so they are not tied as config.json has it")
        model.lm_head.weight = nn.Parameter(weight.contiguous(), requires_grad=False)


# ---- files ----------------------------------------------------------------------------------------------------------


class OpenFiles:
    """The *.safetensors files that tensors are read from. After `close`, the next tensor opens its file again.

    Pages of a file that were read count as memory of the process until the file is closed and its tensors are gone.
    """

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self, file: Path) -> list[str]:
        names: list[str] = self._opened(file).keys()
        return names

    def read(self, file: Path, name: str) -> Tensor:
        tensor: Tensor = self._opened(file).get_tensor(name)
        return tensor

    def close(self) -> None:
        self._open.clear()

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


def open_checkpoint(directory: Path, open_files: OpenFiles) -> Tensors:
    """Every tensor of the checkpoint, memory-mapped where the format allows it."""
    tensors: Tensors = {}
    for file in weight_files(directory):
        try:
            if file.suffix == ".safetensors":
                tensors |= {name: partial(open_files.read, file, name) for name in open_files.names(file)}
            else:
                # Before torch 1.6 it was another format, which cannot be mapped.
                mmap = zipfile.is_zipfile(file)
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
                if not isinstance(state, dict):
                    raise ValueError(f"expected a dict of tensors, got {type(state).__name__}")
                tensors |= {name: lambda t=tensor: t for name, tensor in state.items()}
        except pickle.UnpicklingError:  # its message advises to run the code in the file
            raise ValueError(
                f"model: cannot read the weights in {file}: expected tensors, as torch saves them, got something else"
            ) from None
        except (SafetensorError, EOFError, RuntimeError, ValueError) as error:
            reason = str(error).strip().split("\n")[0] or "it ends too early"
            raise ValueError(f"model: cannot read the weights in {file}: {reason}") from None
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights, safetensors if there are any."""
    for name in WEIGHT_FILES:
        index = directory / f"{name}.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ValueError(f"weight_map: expected the files of tensors in {index}, got {weight_map!r:.80}")
            files = [directory / file for file in sorted(set(weight_map.values()))]
            for file in files:
                if not file.is_file():
                    raise FileNotFoundError(f"model: expected {file.name} in {directory}, as {index.name} names it")
            return files
        if (directory / name).is_file():
            return [directory / name]
    # Files of any other name are shards without an index.
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        if files := sorted(directory.glob(pattern)):
            return files
    raise FileNotFoundError(f"model: expected {' or '.join(WEIGHT_FILES)} in {directory}, found neither")


# ---- from the checkpoint's tensors to parameters ---------------------------------------------------------------------


def checkpoint_name(model: NativeCausalLM, name: str) -> str:
    """The name of a checkpoint's tensor with the prefix that some checkpoints leave out."""
    return name if name.startswith((model.PREFIX, "lm_head.")) else model.PREFIX + name


def checkpoint_shapes(layer: nn.Module, layer_name: str, kind: str) -> dict[str, list[Share]]:
    """The checkpoint's tensors that make up the parameter `kind` of a layer, in order: what the rank holds of each of
    their axes, by name."""
    if isinstance(layer, SlicedLinear | SlicedEmbedding):
        return layer.checkpoint_shapes(layer_name, kind)
    return {f"{layer_name}.{kind}": [everything(size) for size in layer.get_parameter(kind).shape]}


def read_tensors(tensors: Tensors, shapes: dict[str, list[Share]], problems: list[str]) -> list[Tensor] | None:
    """The rank's slices of the named tensors; None if some are missing or misshapen, which are added to `problems`."""
    found = []
    for name, shares in shapes.items():
        shape = [share.whole for share in shares]
        if name not in tensors:
            problems.append(f"missing {name}")
            continue
        tensor = tensors[name]()
        if isinstance(tensor, Tensor) and list(tensor.shape) == shape:
            for dim, share in enumerate(shares):
                tensor = share.of(tensor, dim)
            found.append(tensor)
        else:
            found_instead = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            problems.append(f"{name}: expected {shape}, got {found_instead}")
    return found if len(found) == len(shapes) else None


def set_parameter(model: NativeCausalLM, name: str, weight: Tensor) -> None:
    """Replace a parameter wherever it is used; a tied parameter is used in two places."""
    old = model.get_parameter(name)
    new = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, attribute, new)
