"""Puts the tensors of a checkpoint into a native model."""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pagedattn_serve.errors import op_errors_about
from pagedattn_serve.loading.checkpoint_files import OpenFiles, Tensors, open_checkpoint
from pagedattn_serve.loading.checkpoint_formats import CheckpointFormat
from pagedattn_serve.loading.gguf_weights import Blocks, as_float, quantized_parts
from pagedattn_serve.loading.kv_scales import is_kv_scale
from pagedattn_serve.loading.quantized_checkpoint import is_quantized, read_weight
from pagedattn_serve.models.causal_lm import CausalLM, misfit
from pagedattn_serve.models.linear import LinearForms, give_back_freed_memory, linear_layers, quantized_linear
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.models.partition import Share, SlicedEmbedding, SlicedLinear, everything
from pagedattn_serve.models.quantization import QuantizedWeight, dequantized, quantizable
from pagedattn_serve.progress import Report, reported

# Packed layers take weights of any dtype, so 16-bit weights keep theirs, whatever the model's.
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
        parameters = dict(model.named_parameters())  # tied ones appear once, under the embedding's name
        reported_names = reported(parameters, "Loading weights", on_loading)
        for layer_name, names in groupby(reported_names, lambda name: name.rpartition(".")[0]):
            layer = model.get_submodule(layer_name)
            kinds = (name.rpartition(".")[2] for name in names)
            if forms is not None and isinstance(layer, SlicedLinear):
                packed = packed_layer(checkpoint, layer_name, layer, kinds, stored, forms, device)
                if packed is not None:
                    model.set_submodule(layer_name, packed)
            else:
                for kind in kinds:
                    set_floats(checkpoint, layer_name, kind, device)
            open_files.close()
            give_back_freed_memory()
        if (own_head := checkpoint.read_own_head()) is not None:
            load_own_head(model, floats_of(HEAD, own_head).to(device, model.dtype))
    checkpoint.check(directory)


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


def pack_whole_weights(
    model: CausalLM, weights: dict[str, Callable[[], QuantizedWeight]], dtype: torch.dtype
) -> list[str]:
    """Give linear layers of a model that transformers has loaded the weights that a checkpoint has quantized. A layer
    that transformers makes of others, or of which a rank has a slice, keeps its floats. Returns the names of such
    layers in the checkpoint.

    weights: what reads them, by the names of layers in the checkpoint, where transformers may call them otherwise:
        equal floats say which layer is which. dtype: in which transformers got the floats.
    """
    by_place: dict[str, list[str]] = {}
    for name in weights:
        by_place.setdefault(place_of(name), []).append(name)
    left = set(weights)
    for name, linear in linear_layers(model).items():
        for stored_name in left.intersection(by_place.get(place_of(name.removeprefix("model.")), ())):
            weight = weights[stored_name]()
            if torch.equal(dequantized(weight).to(dtype).to(linear.weight.dtype), linear.weight):
                bias = None if linear.bias is None else linear.bias.detach()
                with op_errors_about(f"model: cannot read {stored_name}"):
                    model.set_submodule(name, quantized_linear([weight], bias))
                left.discard(stored_name)
                give_back_freed_memory()
                break
    return sorted(left)


def place_of(name: str) -> str:
    """What is the same in all names of a layer: its place in the stack of layers."""
    _, is_in_stack, place = name.partition("layers.")
    return place if is_in_stack else name


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


# ---- the checkpoint's tensors ---------------------------------------------------------------------------------------


class CheckpointTensors:
    """A checkpoint's tensors by the names that they have in a model, and what does not fit the model.

    own_names: the names in the checkpoint, by those in the model.
    """

    def __init__(self, model: NativeCausalLM, stored: Tensors) -> None:
        self.own_names = checkpoint_names(model, stored)
        self.tensors = {name: stored[own] for name, own in self.own_names.items()}
        self.problems: list[str] = []
        self.model = model
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

    def read_parameter(self, layer_name: str, kind: str) -> dict[str, Any] | None:
        """The rank's slices of the tensors that make up the parameter `kind` of a layer, by name; None once there are
        problems."""
        shapes = checkpoint_shapes(self.model.get_submodule(layer_name), layer_name, kind)
        found = self.read(shapes)
        return None if found is None or self.problems else dict(zip(shapes, found, strict=True))

    def read_own_head(self) -> Tensor | None:
        """The lm_head of a checkpoint that has one although config.json ties it to the embedding, once all parameters
        are read; None if there is none, or if there are problems."""
        if HEAD not in self._unread or self.problems:
            return None
        found = self.read(checkpoint_shapes(self.model.lm_head, self.model.head, "weight"))
        return found[0] if found else None

    def check(self, directory: Path) -> None:
        """Raise ValueError if there are problems, or tensors that nothing has read."""
        problems = self.problems + [f"unexpected {name}" for name in sorted(self._unread)]
        if problems == [f"missing {HEAD}"]:
            problems[0] += ", which config.json does not tie to the embedding"
        if problems:
            raise ValueError(misfit(directory, type(self.model).__name__, problems))


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


# ---- from tensors to parameters -------------------------------------------------------------------------------------


def packed_layer(
    checkpoint: CheckpointTensors,
    name: str,
    layer: SlicedLinear,
    kinds: Iterable[str],
    stored: CheckpointFormat | None,
    forms: LinearForms,
    device: str,
) -> nn.Module | None:
    """The layer in its form, of the checkpoint's weight and bias; None if there are problems. kinds: of its
    parameters."""
    quantized: Sequence[QuantizedWeight] | None = None
    floats: Sequence[Tensor] = ()
    for kind in kinds:
        if kind != "weight":
            set_floats(checkpoint, name, kind, device, HALF_DTYPES)
        elif stored is not None and is_quantized(layer, name, stored, checkpoint.tensors):
            quantized = read_weight(layer, name, stored, checkpoint.tensors, checkpoint.read)
        else:
            quantized, floats = read_parts(checkpoint, name, layer, forms, device)
    if checkpoint.problems:
        return None
    return quantized_linear(quantized, layer.bias) if quantized else forms.pack(name, layer, floats)


def read_parts(
    checkpoint: CheckpointTensors, name: str, layer: SlicedLinear, forms: LinearForms, device: str
) -> tuple[Sequence[QuantizedWeight] | None, Sequence[Tensor]]:
    """The weight of a layer, in parts that lie one below the other: quantized, if a GGUF file has it in the layer's
    form; else as the floats that become this form. Neither, if there are problems."""
    found = checkpoint.read_parameter(name, "weight")
    if found is None:
        return None, ()
    quantized = in_its_form(name, list(found.values()), forms)
    if quantized is not None:
        return quantized, ()
    parts = float_parts(layer, "weight", found)
    if forms.quantization is not None:
        return None, [quantizable(part).to(device) for part in parts]
    return None, [as_dtype(part, checkpoint.model.dtype, HALF_DTYPES, device) for part in parts]


def in_its_form(name: str, parts: Sequence[Tensor | Blocks], forms: LinearForms) -> Sequence[QuantizedWeight] | None:
    """As `quantized_parts`, of the layer called `name`."""
    with op_errors_about(f"model: cannot read {name}"):
        return quantized_parts(parts, forms.quantization)


def set_floats(
    checkpoint: CheckpointTensors, layer_name: str, kind: str, device: str, kept: Sequence[torch.dtype] = ()
) -> None:
    """Replace the parameter `kind` of a layer, unless there are problems. kept: dtypes that are not converted to that
    of the model."""
    model = checkpoint.model
    layer = model.get_submodule(layer_name)
    found = checkpoint.read_parameter(layer_name, kind)
    if found is None:
        return
    parts = [as_dtype(part, model.dtype, kept, device) for part in float_parts(layer, kind, found)]
    if kind == "bias" and isinstance(layer, SlicedLinear) and not layer.adds_bias:
        layer.register_parameter("bias", None)
    else:
        set_parameter(model, f"{layer_name}.{kind}", parts[0].contiguous() if len(parts) == 1 else torch.cat(parts))


def set_parameter(model: NativeCausalLM, name: str, weight: Tensor) -> None:
    """Replace a parameter wherever it is used; a tied parameter is used in two places."""
    old = model.get_parameter(name)
    new = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, attribute, new)


def float_parts(layer: nn.Module, kind: str, found: dict[str, Any]) -> list[Tensor]:
    """The parameter `kind` of a layer in parts that lie one below the other. found: as `read_parameter` gives it."""
    floats = [floats_of(*each) for each in found.items()]
    return layer.parts_from_checkpoint(kind, floats) if isinstance(layer, SlicedLinear) else floats


def as_dtype(part: Tensor, dtype: torch.dtype, kept: Sequence[torch.dtype], device: str) -> Tensor:
    """On the device, and in this dtype, if its own is none of `kept`."""
    return part.to(device, part.dtype if part.dtype in kept else dtype)


def floats_of(name: str, tensor: Tensor | Blocks) -> Tensor:
    """The numbers of a weight. Raises as `refuse_codes` does."""
    found = as_float(tensor)
    refuse_codes(name, found)
    return found


def refuse_codes(name: str, weight: Tensor) -> None:
    """Raise ValueError for a weight of integers, or of floats of 8 bits: codes that mean something by scales which
    config.json does not know."""
    if not weight.is_floating_point() or weight.itemsize == 1:
        raise ValueError(
            f"model: expected {name} in floats of 16 bits or more, as config.json has no quantization_config for it, "
            f"got {weight.dtype}"
        )
