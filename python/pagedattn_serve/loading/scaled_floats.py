"""Checkpoints whose weights are floats of 8 or 4 bits with scales. They are read as the floats that they stand for, in
the dtype of config.json: no layer multiplies in floats of 8 bits. Rows stay floats, too.

The tensors say which weights these are: those with scales beside them. So there is no list of names of layers that a
checkpoint leaves as they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagedattn_serve.config import DTYPES
from pagedattn_serve.loading.quantization_config import expect, section

Tensors = dict[str, Callable[[], Tensor]]

METHODS = ("fp8", "fbgemm_fp8", "modelopt", "mxfp4")
SCALES = ("_scale_inv", "_scale")  # what follows the name of a weight in that of its scales: all are factors
DEFAULT_BLOCK = 128, 128  # of transformers, where a config says none
OF_ROWS = ("input_scale", "input_scale_ub", "activation_scale")  # for programs that round rows, too
# The numbers of MXFP4 (Open Compute Project, "OCP Microscaling Formats", 2023), by their code of 4 bits.
MXFP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(slots=True, frozen=True)
class ScaledFloats:
    """block: rows and columns of a weight that share a scale, where scales are a matrix; None: DEFAULT_BLOCK if that
    fits, else as the sizes of both matrices say."""

    block: tuple[int, int] | None = None

    def open(self, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        """The tensors of the floats, read as `dtype`, in place of those of codes and scales."""
        opened = dict(tensors)
        for name in tensors:
            weight, suffix = next(((name.removesuffix(end), end) for end in SCALES if name.endswith(end)), ("", ""))
            if suffix and weight in tensors:
                del opened[name]
                opened[weight] = partial(self.read, tensors, weight, name, dtype)
            elif name.endswith("_blocks") and (scales := f"{name.removesuffix('_blocks')}_scales") in tensors:
                del opened[name], opened[scales]
                opened[name.removesuffix("_blocks")] = partial(read_mxfp4, tensors, name, scales, dtype)
            elif name.rpartition(".")[2] in OF_ROWS:
                del opened[name]
        return opened

    def read(self, tensors: Tensors, name: str, name_of_scales: str, dtype: torch.dtype) -> Tensor:
        weight, scales = tensors[name](), tensors[name_of_scales]()
        check(name, weight.is_floating_point() and weight.itemsize == 1, "floats of 8 bits", weight.dtype)
        check(name_of_scales, scales.is_floating_point(), "floats", scales.dtype)
        return (weight.float() * self.factors(scales, weight.shape, name_of_scales)).to(dtype)

    def factors(self, scales: Tensor, shape: torch.Size, name: str) -> Tensor:
        """fp32, to be multiplied with a weight of this shape. Raises ValueError if the scales do not fit."""
        if scales.numel() == 1:
            return scales.float().view(())
        if scales.dim() == len(shape) - 1:
            scales = scales[..., None]
        if scales.shape == (*shape[:-1], 1):
            return scales.float()
        is_grid = scales.dim() == len(shape) and scales.numel() > 0
        check(name, is_grid, f"one scale, or {len(shape)} axes of them", list(scales.shape))
        rows, columns = shape[-2:]
        height, width = self.block or DEFAULT_BLOCK
        if self.block is None and scales.shape[-2:] != (math.ceil(rows / height), math.ceil(columns / width)):
            height, width = max(1, rows // scales.shape[-2]), max(1, columns // scales.shape[-1])
        expected = [*shape[:-2], math.ceil(rows / height), math.ceil(columns / width)]
        check(name, list(scales.shape) == expected, f"shape {expected}", list(scales.shape))
        of_rows = scales.float().repeat_interleave(height, -2)[..., :rows, :]
        return of_rows.repeat_interleave(width, -1)[..., :columns]


def read_mxfp4(tensors: Tensors, name_of_blocks: str, name_of_scales: str, dtype: torch.dtype) -> Tensor:
    """Experts of gpt-oss: bytes of two codes [experts, outputs, blocks, 16], and the exponent of each block plus 127
    [experts, outputs, blocks], become [experts, inputs, outputs]."""
    blocks, scales = tensors[name_of_blocks](), tensors[name_of_scales]()
    check(name_of_blocks, blocks.dtype == torch.uint8 and blocks.dim() == 4, "uint8 of 4 axes", described(blocks))
    check(name_of_scales, scales.dtype == torch.uint8, "uint8", scales.dtype)
    check(name_of_scales, scales.shape == blocks.shape[:-1], f"shape {list(blocks.shape[:-1])}", list(scales.shape))
    numbers = torch.tensor(MXFP4_NUMBERS)
    of_bytes = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)  # the lower four bits first
    floats = torch.empty(blocks.shape[0], 2 * blocks.shape[2] * blocks.shape[3], blocks.shape[1], dtype=dtype)
    for out, codes, exponents in zip(floats, blocks, scales, strict=True):
        factors = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
        out.copy_(functional.embedding(codes.int(), of_bytes).flatten(-2).mul_(factors[..., None]).flatten(1).t())
    return floats


def check(name: str, is_right: bool, expected: str, got: object) -> None:
    if not is_right:
        raise ValueError(f"model: cannot read {name}: expected {expected}, got {got}")


def described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


# ---- what config.json says ------------------------------------------------------------------------------------------


def dtype_of(fields: dict[str, Any]) -> torch.dtype:
    """What the model had before its weights got fewer bits: as config.json says, else bfloat16."""
    for part in (fields, section(fields, "text_config")):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, str) and name in DTYPES:
            dtype: torch.dtype = getattr(torch, DTYPES[name])
            return dtype
    return torch.bfloat16


def scaled_floats(config: Any) -> ScaledFloats | None:
    """What a quantization_config says of weights; None if it speaks of others than floats with scales. Raises
    ValueError, with the name of the field, for such floats that cannot be read."""
    if not isinstance(config, dict):
        return None
    method = config.get("quant_method")
    if method == "compressed-tensors" and config.get("format") == "float-quantized":
        return of_compressed_tensors(config)
    if method not in METHODS:
        return None
    if method == "modelopt":
        expect(config, "quant_algo", "FP8")
    return ScaledFloats(block_of(config, "weight_block_size"))


def of_compressed_tensors(config: dict[str, Any]) -> ScaledFloats:
    blocks = set()
    groups = section(config, "config_groups")
    for name in groups:
        weights = section(section(groups, name), "weights")
        expect(weights, "type", "float")
        expect(weights, "num_bits", 8)
        if expect(weights, "strategy", "tensor", "channel", "block") == "block":
            blocks.add(block_of(weights, "block_structure"))
    if len(blocks) > 1:
        raise ValueError(f"quantization_config: block_structure: expected one for all groups of layers, got {blocks}")
    return ScaledFloats(blocks.pop() if blocks else None)


def block_of(config: dict[str, Any], name: str) -> tuple[int, int] | None:
    block = config.get(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(f"quantization_config: {name}: expected two ints >= 1, got {block!r:.80}")
    return block[0], block[1]
