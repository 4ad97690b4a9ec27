"""Scales of fp8 caches, (k_scale, v_scale) of each layer with a cache of its own: as checkpoints name them, and as
users give them.
"""

import math
import re
import struct
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from pagedattn_serve.config import parse_json, read_text
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from torch import Tensor  # only for a type: the command line checks a file before torch is imported

KVScales = tuple[tuple[float, float], ...]

# Names of scales in checkpoints: k_scale and v_scale of the attention (compressed-tensors); output_scale of the two
# projections (first versions of compressed-tensors, and Quark); k_scale and v_scale within projections (ModelOpt);
# kv_scale, one for keys and values (AutoFP8).
SCALE_NAME = re.compile(
    r"\.(\d+)\..*?(?:attn|attention)\."
    r"(?:(?:(?:attn|qkv_proj)\.)?([kv])_scale|([kv])_proj\.output_scale|([kv])_proj\.[kv]_scale|(kv)_scale)$"
)


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is such a scale."""
    return SCALE_NAME.search(name) is not None


def scales_in_checkpoint(tensors: Iterable[tuple[str, "Tensor"]], layers: Sequence[int]) -> KVScales | None:
    """The scales of these layers among a checkpoint's tensors; None if there are none. Raises ValueError if some are
    missing, or if a scale is not one number."""
    found: dict[tuple[int, str], float] = {}
    for name, tensor in tensors:
        if match := SCALE_NAME.search(name):
            if tensor.numel() != 1:
                raise ArgumentError("kv_scales", f"one number in {name} of the checkpoint", list(tensor.shape))
            for letter in "".join(filter(None, match.groups()[1:])):
                found[int(match[1]), letter] = float(tensor)
    if not found:
        return None
    wanted = [(layer, letter) for layer in layers for letter in "kv"]
    if missing := [f"{letter}_scale of layer {layer}" for layer, letter in wanted if (layer, letter) not in found]:
        raise ArgumentError(
            "kv_scales", f"two for each of {len(layers)} layers in the checkpoint, but {missing[0]} is missing"
        )
    return check_scales([(found[layer, "k"], found[layer, "v"]) for layer in layers], len(layers))


def given_scales(kv_scales: Any, num_layers: int | None) -> KVScales:
    """What a user gives: a pair for all layers, a list of one a layer, or a JSON file with either.

    num_layers: None, if the model is not known yet, takes any number; of a pair, once.

    The file may also be what vLLM's quantization_param_path took: {"kv_cache": {"scaling_factor": {"0": {layer:
    scale}}}}, with one scale for keys and values.

    Raises ValueError for another number of layers and for a scale that is not positive and finite in fp32, TypeError
    for anything else, OSError for a file that cannot be read.
    """
    if isinstance(kv_scales, str | PathLike):
        file, text = kv_scales, read_text("kv_scales", kv_scales)
        try:
            kv_scales = parse_json(text)
        except ValueError as error:
            raise ArgumentError("kv_scales", f"JSON in {file}", error) from None
        if isinstance(kv_scales, dict):
            kv_scales = scales_of_vllm(kv_scales, file)
    if is_pair(kv_scales):
        kv_scales = [kv_scales] * (num_layers or 1)
    return check_scales(kv_scales, num_layers)


def scales_of_vllm(content: dict[str, Any], file: str | PathLike[str]) -> list[tuple[Any, Any]]:
    try:
        [of_layers] = content["kv_cache"]["scaling_factor"].values()  # of one process
        return [(of_layers[str(layer)],) * 2 for layer in range(len(of_layers))]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ArgumentError("kv_scales", f"kv_cache.scaling_factor.0 with a number a layer in {file}") from None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))


def check_scales(kv_scales: Any, num_layers: int | None) -> KVScales:
    if not isinstance(kv_scales, list | tuple) or not all(map(is_pair, kv_scales)):
        raise ArgumentTypeError(
            "kv_scales",
            "a pair of numbers (k_scale, v_scale), a list of one a layer, or a JSON file",
            f"{kv_scales!r:.80}",
        )
    if num_layers is not None and len(kv_scales) != num_layers:
        raise ArgumentError("kv_scales", f"a pair for each of {num_layers} layers", len(kv_scales))
    for layer, pair in enumerate(kv_scales):
        for scale in pair:
            rounded = to_float32(scale)  # what the ops take
            if not (rounded > 0 and math.isfinite(rounded)):
                raise ArgumentError("kv_scales", "positive and finite numbers", f"{scale} in layer {layer}")
    return tuple((float(k_scale), float(v_scale)) for k_scale, v_scale in kv_scales)


def to_float32(number: float) -> float:
    try:
        [rounded] = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        return math.inf
    return float(rounded)
