"""Scales of fp8 caches: as checkpoints name them, and in each form in which they can be given."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedattn_serve.loading.kv_scales import given_scales, is_kv_scale, scales_in_checkpoint

LAYER = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.k_scale",
        f"{LAYER}.v_scale",
        f"{LAYER}.attn.k_scale",
        f"{LAYER}.kv_scale",
        f"{LAYER}.k_proj.output_scale",
        f"{LAYER}.v_proj.output_scale",
        f"{LAYER}.k_proj.k_scale",
        f"{LAYER}.v_proj.v_scale",
        f"{LAYER}.qkv_proj.v_scale",
        "h.11.attn.k_scale",
        "transformer.h.0.self_attention.v_scale",
    ],
)
def test_names_of_scales(name: str) -> None:
    assert is_kv_scale(name)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.k_proj.weight",
        f"{LAYER}.k_proj.weight_scale",
        f"{LAYER}.k_proj.input_scale",
        f"{LAYER}.q_proj.output_scale",
        f"{LAYER}.q_scale",
        f"{LAYER}.k_scale.weight",
        "model.layers.1.mlp.k_scale",
        "self_attn.k_scale",
    ],
)
def test_names_of_other_tensors(name: str) -> None:
    assert not is_kv_scale(name)


def named(*endings: str) -> list[tuple[str, Tensor]]:
    """Scales 0.5, 1, 1.5, ... with these endings in two layers; other tensors among them."""
    names = [f"model.layers.{layer}.self_attn.{ending}" for layer in (1, 0) for ending in endings]
    scales = [(name, torch.tensor(0.5 * (i + 1))) for i, name in enumerate(names)]
    return [(f"{LAYER}.k_proj.weight", torch.ones(4, 4)), *scales]


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        (("k_scale", "v_scale"), ((1.5, 2.0), (0.5, 1.0))),
        (("v_scale", "k_scale"), ((2.0, 1.5), (1.0, 0.5))),
        (("k_proj.output_scale", "v_proj.output_scale"), ((1.5, 2.0), (0.5, 1.0))),
        (("k_proj.k_scale", "v_proj.v_scale"), ((1.5, 2.0), (0.5, 1.0))),
        (("kv_scale",), ((1.0, 1.0), (0.5, 0.5))),
        ((), None),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_in_a_checkpoint(
    endings: tuple[str, ...], expected: object, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = [
        (name, tensor.view(shape).to(dtype) if tensor.dim() == 0 else tensor) for name, tensor in named(*endings)
    ]
    assert scales_in_checkpoint(tensors, range(2)) == expected


@pytest.mark.parametrize(
    ("tensors", "num_layers", "message"),
    [
        (named("k_scale"), 2, "expected two for each of 2 layers in the checkpoint, but v_scale of layer 0 is missing"),
        (named("k_scale", "v_scale"), 3, "but k_scale of layer 2 is missing"),
        ([(f"{LAYER}.k_scale", torch.ones(8, 1, 1))], 2, rf"expected one number in {LAYER}.k_scale .*got \[8, 1, 1\]"),
        ([("h.0.attn.kv_scale", torch.tensor(0.0))], 1, "expected positive and finite numbers, got 0.0 in layer 0"),
    ],
)
def test_wrong_scales_in_a_checkpoint(tensors: list[tuple[str, Tensor]], num_layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^kv_scales: .*{message}"):
        scales_in_checkpoint(tensors, range(num_layers))


FORMS: list[tuple[Any, Any]] = [
    ((0.5, 2), ((0.5, 2.0),) * 2),
    ([0.5, 2], ((0.5, 2.0),) * 2),
    ([(0.5, 2), [1, 0.25]], ((0.5, 2.0), (1.0, 0.25))),
    (((0.5, 2), (1, 0.25)), ((0.5, 2.0), (1.0, 0.25))),
]


@pytest.mark.parametrize(("given", "expected"), FORMS)
def test_given_scales(given: Any, expected: object, tmp_path: Path) -> None:
    assert given_scales(given, 2) == expected
    file = tmp_path / "scales.json"
    file.write_text(json.dumps(given))
    assert given_scales(file, 2) == given_scales(str(file), 2) == expected


def test_a_file_of_vllm(tmp_path: Path) -> None:
    file = tmp_path / "kv_cache_scales.json"
    factors = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"1": 0.25, "0": 0.5}}}
    file.write_text(json.dumps({"model_type": "llama", "kv_cache": factors}))
    assert given_scales(file, 2) == ((0.5, 0.5), (0.25, 0.25))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([(1, 1)], ValueError, "expected a pair for each of 3 layers, got 1"),
        ([(1, 1)] * 4, ValueError, "expected a pair for each of 3 layers, got 4"),
        ([], ValueError, "expected a pair for each of 3 layers, got 0"),
        ((1, 0), ValueError, "expected positive and finite numbers, got 0 in layer 0"),
        ([(1, 1), (1, -0.5), (1, 1)], ValueError, "got -0.5 in layer 1"),
        ((1, float("nan")), ValueError, "got nan"),
        ((float("inf"), 1), ValueError, "got inf"),
        ((1e-60, 1), ValueError, "got 1e-60"),  # zero in fp32
        ((1, 1e60), ValueError, "got 1e.60"),
        (0.5, TypeError, "expected a pair of numbers .*, got 0.5"),
        ((1, 1, 1), TypeError, "expected a pair"),
        ((True, 1), TypeError, "expected a pair"),
        ([("1", 1)] * 3, TypeError, "expected a pair"),
    ],
)
def test_wrong_scales(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^kv_scales: .*{message}"):
        given_scales(given, 3)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", ValueError, "expected JSON in .*scales.json"),
        ("{}", ValueError, r"expected kv_cache.scaling_factor.0 .* in .*scales.json"),
        ('{"kv_cache": {"scaling_factor": {"0": {"0": 1}, "1": {"0": 1}}}}', ValueError, "scaling_factor.0"),
        ('{"kv_cache": {"scaling_factor": {"0": {"0": "x"}}}}', TypeError, "expected a pair"),
        ("[1, 2, 3]", TypeError, "expected a pair"),
        ("[1, NaN]", ValueError, "got nan"),
    ],
)
def test_wrong_files(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text(text)
    with pytest.raises(error, match=f"^kv_scales: .*{message}"):
        given_scales(file, 1)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"scales\.json"):
        given_scales(tmp_path / "scales.json", 1)
