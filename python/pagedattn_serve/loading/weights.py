"""Puts the tensors of a checkpoint into a native model."""

import logging
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pagedattn_serve.loading.checkpoint_files import OpenFiles, Tensors, open_checkpoint
from pagedattn_serve.loading.gguf_weights import Blocks, as_float, quantized_parts
from pagedattn_serve.loading.kv_scales import is_kv_scale
from pagedattn_serve.loading.quantized_checkpoint import CheckpointFormat, is_quantized, read_weight
from pagedattn_serve.models.causal_lm import CausalLM, NativeCausalLM, misfit
from pagedattn_serve.models.linear import LinearForms, give_back_freed_memory, linear_layers, quantized_linear
from pagedattn_serve.models.partition import Share, SlicedEmbedding, SlicedLinear, everything
from pagedattn_serve.models.quantization import QuantizedWeight, quantizable
from pagedattn_serve.progress import Report, reported

HALF_DTYPES = (torch.float16, torch.bfloat16)

HEAD = "lm_head.weight"

logger = logging.getLogger(__name__)


def load_weights(
    model: NativeCausalLM,
    directory: Path,
    device: str,
    stored: CheckpointFormat | None = None,
    forms: LinearForms | None = None,
    on_loading: Report | None = None,
    dummies: Tensors | None = None,
) -> None:
    """Replace every parameter of `model`, built on "meta", by the checkpoint's tensors, or the rank's slices of them.

    stored: how the checkpoint has quantized its weights, if it has.
    forms: what the linear layers become, one layer after the other, so that memory holds one layer twice at most. A
        tied lm_head keeps its form.
    on_loading: as `load_model` takes it.
    dummies: tensors to take in place of the checkpoint's.
    """
    with OpenFiles() as open_files:
        in_files = open_checkpoint(directory, open_files) if dummies is None else dummies
        checkpoint = CheckpointTensors(model, in_files)
        tensors, problems, read = checkpoint.tensors, checkpoint.problems, checkpoint.read
        is_quantizing = forms is not None and forms.quantization is not None
        parameters = dict(model.named_parameters())  # tied ones appear once, under the embedding's name

        def load_layer(layer_name: str, names: Iterable[str]) -> None:
            layer = model.get_submodule(layer_name)
            is_packed = forms is not None and isinstance(layer, SlicedLinear)
            quantized: Sequence[QuantizedWeight] | None = None
            weight: list[Tensor] = []  # parts of a weight that is packed
            for name in names:
                kind = name.removeprefix(f"{layer_name}.")
                if stored is not None and kind == "weight" and is_quantized(layer, layer_name, stored, tensors):
                    quantized = read_weight(layer, layer_name, stored, tensors, read)
                elif (found := read(shapes := checkpoint_shapes(layer, layer_name, kind))) is not None and not problems:
                    if forms is not None and is_packed and kind == "weight":
                        quantized = in_its_form(layer_name, found, forms)
                        if quantized is not None:
                            continue
                    found = [floats_of(*each) for each in zip(shapes, found, strict=True)]
                    parts = layer.parts_from_checkpoint(kind, found) if isinstance(layer, SlicedLinear) else found
                    if is_quantizing and is_packed and kind == "weight":
                        parts = [quantizable(part).to(device) for part in parts]
                    else:
                        # Packed layers take weights of any dtype, so 16-bit weights keep theirs, whatever the model's.
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

        reported_names = reported(parameters, "Loading weights", on_loading)
        for layer_name, names in groupby(reported_names, lambda name: name.rpartition(".")[0]):
            load_layer(layer_name, names)
            open_files.close()
            give_back_freed_memory()
        if (own_head := checkpoint.read_own_head()) is not None:
            load_own_head(model, floats_of(HEAD, own_head).to(device, model.dtype))
    checkpoint.check(directory)


def floats_of(name: str, tensor: Tensor | Blocks) -> Tensor:
    """The numbers of a weight. Raises ValueError for integers and for floats of 8 bits, which mean something by scales
    that config.json does not know."""
    found = as_float(tensor)
    if not found.is_floating_point() or found.itemsize == 1:
        raise ValueError(
            f"model: expected {name} in floats of 16 bits or more, as config.json has no quantization_config for it, "
            f"got {found.dtype}"
        )
    return found


def in_its_form(name: str, parts: Sequence[Tensor | Blocks], forms: LinearForms) -> Sequence[QuantizedWeight] | None:
    """As `quantized_parts`, of the layer called `name`."""
    try:
        return quantized_parts(parts, forms.quantization)
    except ValueError as error:
        raise ValueError(f"model: cannot read {name}: {str(error).partition(': ')[2]}") from None


def pack_as_stored(model: CausalLM, tensors: Tensors, forms: LinearForms) -> None:
    """Give linear layers of floats the form in which a GGUF file has them: the last layer, if it is tied to the
    embedding, and all layers of a model that transformers has loaded. A layer of which a rank has a slice stays, unless
    the slice is ours.

    tensors: of the file, by the names that they have in the model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # the embedding's for both
    for name, linear in linear_layers(model).items():
        weight_name = names[id(linear.weight)]
        weight = tensors[weight_name]() if weight_name in tensors else None
        if isinstance(weight, Blocks) and isinstance(linear, SlicedLinear):
            weight = linear.inputs.of(linear.outputs.of(weight, 0), 1)
        if isinstance(weight, Blocks) and weight.shape == linear.weight.shape:
            quantized = in_its_form(name, [weight], forms)
            if quantized is not None:
                bias = None if linear.bias is None else linear.bias.detach()
                model.set_submodule(name, quantized_linear(quantized, bias))
                give_back_freed_memory()


def lacks_head(model: NativeCausalLM, directory: Path) -> bool:
    """Whether a checkpoint has nothing that could be the head of its model."""
    if HEAD not in dict(model.named_parameters()):  # it is tied to the embedding
        return False
    with OpenFiles() as open_files:
        return HEAD not in open_checkpoint(directory, open_files)


def load_own_head(model: NativeCausalLM, weight: Tensor) -> None:
    """For a checkpoint with an lm_head although the config ties it: mostly a copy; if not, it becomes the head."""
    if not torch.equal(weight, model.lm_head.weight):
        logger.warning("lm_head.weight differs from the embedding, so they are not tied as config.json has it")
        model.lm_head.weight = nn.Parameter(weight.contiguous(), requires_grad=False)


# ---- from the checkpoint's tensors to parameters ---------------------------------------------------------------------


class CheckpointTensors:
    """A checkpoint's tensors by the names that they have in a model, and what does not fit the model.

    own_names: the names in the checkpoint, by those in the model.
    """

    def __init__(self, model: NativeCausalLM, stored: Tensors) -> None:
        self.own_names = checkpoint_names(model, stored)
        self.tensors = {name: stored[own] for name, own in self.own_names.items()}
        self.problems: list[str] = []
        self._model = model
        self._unread = {name for name in self.tensors if not is_passed_over(model, name)}

    def read(self, shapes: dict[str, list[Share]]) -> list[Any] | None:
        """The rank's slices of the named tensors; None if some are missing or misshapen, which are added to
        `problems`."""
        self._unread.difference_update(shapes)
        found = []
        for name, shares in shapes.items():
            shape = [share.whole for share in shares]
            if name not in self.tensors:
                self.problems.append(f"missing {name}")
                continue
            tensor = self.tensors[name]()
            if isinstance(tensor, Tensor | Blocks) and list(tensor.shape) == shape:
                for dim, share in enumerate(shares):
                    tensor = share.of(tensor, dim)
                found.append(tensor)
            else:
                found_instead = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                self.problems.append(f"{name}: expected {shape}, got {found_instead}")
        return found if len(found) == len(shapes) else None

    def read_own_head(self) -> Tensor | None:
        """The lm_head of a checkpoint that has one although config.json ties it to the embedding, once all parameters
        are read; None if there is none, or if there are problems."""
        if HEAD not in self._unread or self.problems:
            return None
        found = self.read(checkpoint_shapes(self._model.lm_head, self._model.head, "weight"))
        return found[0] if found else None

    def check(self, directory: Path) -> None:
        """Raise ValueError if there are problems, or tensors that nothing has read."""
        problems = self.problems + [f"unexpected {name}" for name in sorted(self._unread)]
        if problems == [f"missing {HEAD}"]:
            problems[0] += ", which config.json does not tie to the embedding"
        if problems:
            raise ValueError(misfit(directory, type(self._model).__name__, problems))


def checkpoint_names(model: NativeCausalLM, names: Iterable[str]) -> dict[str, str]:
    """Names of a checkpoint's tensors, by the same with the prefix that some checkpoints leave out.

    Raises ValueError for a checkpoint that has one tensor under both.
    """
    own_names: dict[str, str] = {}
    for own in names:
        name = own if own.startswith((model.PREFIX, "lm_head.")) else model.PREFIX + own
        if (other := own_names.setdefault(name, own)) != own:
            raise ValueError(f"model: expected one tensor {name}, got two, {' and '.join(sorted((own, other)))}")
    return own_names


def is_passed_over(model: NativeCausalLM, name: str) -> bool:
    """Whether a tensor in the checkpoint is no parameter, and may be there."""
    is_score = not model.head and name == f"{model.PREFIX}score.weight"
    return name.endswith(model.NOT_PARAMETERS) or name.startswith(model.elsewhere) or is_kv_scale(name) or is_score


def checkpoint_shapes(layer: nn.Module, layer_name: str, kind: str) -> dict[str, list[Share]]:
    """The checkpoint's tensors that make up the parameter `kind` of a layer, in order: what the rank holds of each of
    their axes, by name."""
    if isinstance(layer, SlicedLinear | SlicedEmbedding):
        return layer.checkpoint_shapes(layer_name, kind)
    return {f"{layer_name}.{kind}": [everything(size) for size in layer.get_parameter(kind).shape]}


def set_parameter(model: NativeCausalLM, name: str, weight: Tensor) -> None:
    """Replace a parameter wherever it is used; a tied parameter is used in two places."""
    old = model.get_parameter(name)
    new = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, attribute, new)
