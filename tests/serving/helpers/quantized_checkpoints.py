"""Quantized checkpoints of tiny models as other programs write them, and models in fp32 that compute the same."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import change_config, make_model
from reference import int4_rows, int8_rows
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
# Sizes that groups of 32 divide.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-gqa": dict(hidden_size=64, head_dim=16, intermediate_size=128),
    "gpt2": dict(n_embd=64),
    "bloom-8-heads": {},
}
COMPRESSED = dict(quant_method="compressed-tensors", quantization_status="compressed", ignore=["lm_head"])
ROWS_OF_8_BITS = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)


def compressed(form: str, rows: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    weights = dict(type="int", symmetric=True, dynamic=False, actorder=None, group_size=None) | weights
    group = dict(targets=["Linear"], weights=weights, input_activations=rows, output_activations=None)
    return COMPRESSED | dict(format=form, config_groups=dict(group_0=group))


INT8 = compressed("int-quantized", ROWS_OF_8_BITS, num_bits=8, strategy="channel")
GPTQ = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True)
AWQ = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm")
# By name: a quantization_config.
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": INT8,
    "int4": compressed("pack-quantized", None, num_bits=4, strategy="group", group_size=32),
    "int4-zeros": compressed("pack-quantized", None, num_bits=4, strategy="group", group_size=32, symmetric=False),
    "int4-channel": compressed("pack-quantized", None, num_bits=4, strategy="channel"),
    "gptq": GPTQ,
    "gptq-zeros-64": GPTQ | dict(sym=False, group_size=64),
    "gptq-row": GPTQ | dict(sym=False, group_size=-1),
    "gptq-v2": GPTQ | dict(sym=False, checkpoint_format="gptq_v2"),
    "gptq-8-bits": GPTQ | dict(bits=8),
    "gptq-8-bits-zeros": GPTQ | dict(bits=8, sym=False, checkpoint_format="gptq_v2"),
    "gptq-act-order": GPTQ | dict(desc_act=True),
    "int8-packed": compressed("pack-quantized", None, num_bits=8, strategy="channel"),
    "int8-packed-zeros": compressed(
        "pack-quantized", None, num_bits=8, strategy="group", group_size=32, symmetric=False
    ),
    "int4-act-order": compressed("pack-quantized", None, num_bits=4, strategy="group", group_size=32, actorder="group"),
    "awq": AWQ,
    "awq-64": AWQ | dict(group_size=64, version="GEMM"),
}


def save_quantized(
    directory: Path,
    name: str,
    config: dict[str, Any],
    leave: Callable[[str], bool] = lambda name: False,
    **overrides: Any,
) -> PreTrainedModel:
    """One of VARIANTS, in its SHAPES but for `overrides`, with its linear layers quantized, but for lm_head and those
    to `leave`.

    Returns the model with the weights that the checkpoint stands for.
    """
    return save_quantized_model(make_model(name, **{**SHAPES[name], **overrides}), directory, config, leave)


def save_quantized_model(
    model: PreTrainedModel,
    directory: Path,
    config: dict[str, Any],
    leave: Callable[[str], bool] = lambda name: False,
) -> PreTrainedModel:
    """As `save_quantized`, of any model."""
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for layer_name, layer in linear_layers(model).items():
        if not leave(layer_name) and layer_name != "lm_head":
            packed, weight = quantize(matrix(layer), config)
            del tensors[f"{layer_name}.weight"]
            tensors |= {f"{layer_name}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
            set_matrix(layer, weight)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=json.loads(json.dumps(config)))
    return model


def quantize_saved(directory: Path, config: dict[str, Any], are_quantized: Callable[[str], bool]) -> None:
    """Quantize the weights of a checkpoint that have such names."""
    tensors = load_file(directory / "model.safetensors")
    for name in filter(are_quantized, list(tensors)):
        packed, _ = quantize(tensors.pop(name), config)
        tensors |= {name.removesuffix("weight") + suffix: tensor.contiguous() for suffix, tensor in packed.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=config)


def quantize_inputs(model: PreTrainedModel, group_size: Callable[[str, nn.Module], int | None]) -> PreTrainedModel:
    """A copy of the model whose linear layers see rows as linear_int4 rounds them, beside groups of such a size; None:
    as linear_int8 does; 0: not rounded."""
    model = copy.deepcopy(model)
    for name, layer in linear_layers(model).items():
        size = group_size(name, layer)
        if size != 0:
            round_rows = int8_rows if size is None else partial(int4_rows, group_size=size)
            layer.register_forward_pre_hook(lambda _, inputs, round_rows=round_rows: (round_rows(inputs[0]),))
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a loaded model, by name."""
    return {
        f"{name}.{attribute}": value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def assert_same_tensors(one: nn.Module, other: nn.Module) -> None:
    """Of two loaded models, bit for bit."""
    mine, wanted = tensors_of(one), tensors_of(other)
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}


def matrix(layer: nn.Module) -> Tensor:
    """[out_features, in_features]."""
    weight = layer.get_parameter("weight").detach()
    return weight.t() if isinstance(layer, Conv1D) else weight


def set_matrix(layer: nn.Module, weight: Tensor) -> None:
    layer.weight = nn.Parameter(weight.t().contiguous() if isinstance(layer, Conv1D) else weight)


def quantize(weight: Tensor, config: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer, by the ends of their names, and the weight that they mean."""
    method = config["quant_method"]
    arguments = config["config_groups"]["group_0"]["weights"] if method == "compressed-tensors" else config
    if config.get("format") == "int-quantized":
        scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        codes = (weight / scales.float()).round().clamp(-128, 127)
        return dict(weight=codes.to(torch.int8), weight_scale=scales), codes * scales.float()
    size, bits = arguments["group_size"], arguments.get("bits", arguments.get("num_bits"))
    most = (1 << bits) - 1
    # With "act order", the inputs of a group do not lie beside each other.
    is_in_order = not arguments.get("desc_act") and arguments.get("actorder") != "group"
    places = torch.arange(weight.shape[1])
    if not is_in_order:
        places = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    groups = weight[:, places].reshape(len(weight), -1, weight.shape[1] if size in (None, -1) else size)
    if arguments.get("symmetric", arguments.get("sym", False)):
        scales, zeros = (groups.abs().amax(-1) / (most // 2)).half(), torch.full(groups.shape[:2], most // 2 + 1)
    else:
        scales = ((groups.amax(-1) - groups.amin(-1)) / most).half()
        zeros = (-groups.amin(-1) / scales.float()).round().clamp(0, most).int()
    steps = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    meant = ((steps - zeros[..., None]) * scales.float()[..., None]).flatten(1)[:, places.argsort()]
    codes = steps.int().flatten(1)[:, places.argsort()]
    order = (places.argsort() // groups.shape[2]).int()
    match method:
        case "gptq":
            offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
            stored = (zeros - offset) % (most + 1)
            packed = dict(qweight=pack(codes, bits).t(), qzeros=pack(stored.t(), bits), scales=scales.t(), g_idx=order)
        case "awq":
            qweight, qzeros = (
                pack(x.t().reshape(x.shape[1], -1, 8)[..., AWQ_ORDER].flatten(1)) for x in (codes, zeros)
            )
            packed = dict(qweight=qweight, qzeros=qzeros, scales=scales.t())
        case _:
            packed = dict(weight_packed=pack(codes, bits), weight_scale=scales, weight_shape=torch.tensor(weight.shape))
            if not arguments["symmetric"]:
                packed["weight_zero_point"] = pack(zeros.t(), bits).t()
            if not is_in_order:
                packed["weight_g_idx"] = order
    return packed, meant


def pack(codes: Tensor, bits: int = 4) -> Tensor:
    """[n, 32 / bits * k] numbers of so many bits to int32 [n, k], the first in the lowest bits."""
    words = (codes.reshape(len(codes), -1, 32 // bits).long() << torch.arange(0, 32, bits)).sum(-1)
    return words.to(torch.uint32).view(torch.int32)
