"""Quantized copies of checkpoints: what is in them, that they load as the original does with quantization, what is
refused, and that nothing half-written is left."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_config, make_model
from quantized_checkpoints import SHAPES, assert_same_tensors, pack
from safetensors.torch import load_file

from pagedattn_ext import ops
from pagedattn_serve.cli import main
from pagedattn_serve.loading import quantize
from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.loading.quantize import quantize_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model("llama-gqa", **SHAPES["llama-gqa"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def assert_same_model(one: Path, other: Path, **options: Any) -> None:
    assert_same_tensors(load_model(one, **options), load_model(other, **options))


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("name", SHAPES)
def test_loads_as_the_original_with_quantization(tmp_path: Path, name: str, format: str) -> None:
    """Bit for bit, in every family: would catch rows in another order, and a zero that is off by one."""
    make_model(name, **SHAPES[name]).save_pretrained(tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", format)
    assert_same_model(tmp_path / "out", tmp_path / "model", quantization=format)


def test_layers_that_are_no_whole_groups_stay(tmp_path: Path) -> None:
    """Of 48 inputs. They are named, and quantized to 8 bits when they are loaded; so is the last layer."""
    make_model("llama-gqa").save_pretrained(tmp_path / "model")
    quantized, all_layers = quantize_checkpoint(tmp_path / "model", tmp_path / "out", "int4")
    assert (quantized, all_layers) == (0, 15)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(config["ignore"]) == 15 and "model.layers.0.mlp.up_proj" in config["ignore"]
    assert_same_model(tmp_path / "out", tmp_path / "model", quantization="int4")


def test_the_tensors_of_a_layer(model: Path, tmp_path: Path) -> None:
    """As the format has them: codes along inputs and zeros along outputs, eight in an int32."""
    quantize_checkpoint(model, tmp_path / "int4", "int4")
    quantize_checkpoint(model, tmp_path / "int8", "int8")
    original, int4, int8 = (
        load_file(path / "model.safetensors") for path in (model, tmp_path / "int4", tmp_path / "int8")
    )
    name = "model.layers.1.mlp.down_proj"
    codes, scales, zeros = ops.quantize_weight_int4(original[f"{name}.weight"])
    assert torch.equal(int4[f"{name}.weight_packed"], pack(codes.int()))
    assert torch.equal(int4[f"{name}.weight_zero_point"], pack(zeros.int().t()).t())
    assert torch.equal(int4[f"{name}.weight_scale"], scales.half())
    assert int4[f"{name}.weight_shape"].tolist() == [64, 128] and f"{name}.weight" not in int4
    codes, scales = ops.quantize_weight_int8(original[f"{name}.weight"])
    assert torch.equal(int8[f"{name}.weight"], codes) and torch.equal(int8[f"{name}.weight_scale"], scales[:, None])
    for untouched in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"):
        assert torch.equal(int4[untouched], original[untouched])


def test_other_files_come_along(model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "pytorch_model.bin", ".gitattributes"):
        (model / name).write_text(name)
    (tmp_path / "out").mkdir()  # empty
    assert main(["quantize", str(model), str(tmp_path / "out"), "--format", "int8"]) == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    expected = {"tokenizer.json", "chat_template.jinja", "LICENSE", "config.json", "generation_config.json"}
    assert names == expected | {"model.safetensors"}


def test_several_files(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "SHARD_BYTES", 20_000)
    quantize_checkpoint(model, tmp_path / "out", "int4")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert_same_model(tmp_path / "out", model, quantization="int4")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_is_left_of_what_was_not_finished(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    calls = []

    def fail(*_: object, **__: object) -> None:
        calls.append(list(tmp_path.iterdir()))
        raise error

    monkeypatch.setattr(quantize, "write_json", fail)
    assert main(["quantize", str(model), str(tmp_path / "out"), "--format", "int4"]) == (
        1 if isinstance(error, OSError) else 130
    )
    assert len(calls[0]) == 2  # something had been written
    assert list(tmp_path.iterdir()) == [model]


def test_refusals(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(
            ValueError, match=r"^out: expected a directory that is empty or does not exist, got .*in use"
        ):
            quantize_checkpoint(model, out, "int4")
    with pytest.raises(ValueError, match=r"^out: expected a directory within one that exists"):
        quantize_checkpoint(model, tmp_path / "no" / "out", "int4")
    with pytest.raises(ValueError, match=r"^format: expected int4 or int8, got 'int2'"):
        quantize_checkpoint(model, tmp_path / "out", "int2")
    quantize_checkpoint(model, tmp_path / "out", "int8")
    with pytest.raises(
        ValueError, match=r"^model: expected a checkpoint that is not quantized, got int8 of compressed"
    ):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again", "int8")
    change_config(model, architectures=["PhiForCausalLM"], model_type="phi")
    with pytest.raises(ValueError, match=r"^model: expected a family that has a file here, .* got PhiForCausalLM"):
        quantize_checkpoint(model, tmp_path / "again", "int8")


def test_a_weight_that_cannot_be_quantized(tmp_path: Path) -> None:
    """It is named as the checkpoint names it."""
    network = make_model("llama-gqa", **SHAPES["llama-gqa"])
    with torch.no_grad():
        network.model.layers[1].self_attn.k_proj.weight[3, 3] = torch.nan
    network.save_pretrained(tmp_path / "model")
    message = "model: model.layers.1.self_attn.k_proj: weight: expected elements between -1e+30 and 1e+30, got nan"
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
