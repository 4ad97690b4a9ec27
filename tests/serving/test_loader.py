"""From a directory to a model: every tensor in its place, or an error that says what is wrong."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, greedy_reference, make_checkpoint, make_model, run, token_ids
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.models.loader import load_model
from pagedattn_serve.sampling_params import SamplingParams

Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory with a checkpoint in each of llama, tied and gpt2, to be copied before it is changed."""
    directory = tmp_path_factory.mktemp("saved")
    for name, full_name in (("llama", "llama-gqa"), ("tied", "llama-mqa-tied-bias"), ("gpt2", "gpt2")):
        make_model(full_name).save_pretrained(directory / name)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """copy(name) is a directory with that checkpoint, for the test to spoil."""
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / name))


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # no two in the same memory
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def change_config(directory: Path, **fields: Any) -> None:
    """Set fields of config.json; None removes one."""
    config = {**json.loads((directory / "config.json").read_text()), **fields}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def expect_misfit(directory: Path, *problems: str) -> None:
    with pytest.raises(ValueError, match="do not fit") as error:
        load_model(str(directory))
    assert str(directory) in str(error.value)
    for problem in problems:
        assert problem in str(error.value)


def test_every_weight_is_the_checkpoint_s(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint.path)
    expected = checkpoint.model.state_dict()
    assert not model.training
    for name, parameter in model.named_parameters():
        parts = [
            name.replace("qkv_proj", f"{part}_proj").replace("gate_up_proj", f"{part}_proj")
            for part in ("q", "k", "v", "gate", "up")
        ]
        weights = [expected[part] for part in dict.fromkeys(parts) if part in expected]
        if name.endswith(model.TRANSPOSED):
            weights = [weight.t() for weight in weights]
        torch.testing.assert_close(parameter, torch.cat(weights), rtol=0, atol=0)
        assert not parameter.requires_grad and parameter.is_contiguous()
    embedding = model.get_submodule("model.embed_tokens" if "llama" in checkpoint.path else "transformer.wte")
    assert (model.lm_head.weight is embedding.weight) == checkpoint.model.config.tie_word_embeddings


def test_sharded_means_sharded(tmp_path: Path) -> None:
    make_checkpoint("llama-mha", tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3 and (tmp_path / "model.safetensors.index.json").is_file()
    load_model(str(tmp_path))
    next(tmp_path.glob("*.safetensors")).unlink()
    expect_misfit(tmp_path, "missing model.")


def test_no_directory_config_or_weights(copy: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json, got .*nowhere"):
        load_model(str(tmp_path / "nowhere"))
    directory = copy("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=rf"\*\.safetensors in {re.escape(str(directory))}"):
        load_model(str(directory))
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(str(directory))


@pytest.mark.parametrize("keep", ["nothing", "garbage", "header", "half"])
def test_corrupt_weights(copy: Callable[[str], Path], keep: str) -> None:
    directory = copy("llama")
    file = directory / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes({"nothing": b"", "garbage": b"x" * 5000, "header": content[:20], "half": content[:-5000]}[keep])
    with pytest.raises(ValueError, match=f"cannot read the weights in {re.escape(str(directory))}"):
        load_model(str(directory))


def test_missing_and_unexpected_tensors(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.kproj.weight"] = tensors.pop(K)
        del tensors["lm_head.weight"]

    change_weights(directory, rename)
    expect_misfit(
        directory, f"missing {K}", "missing lm_head.weight", "unexpected model.layers.0.self_attn.kproj.weight"
    )


def test_many_problems_are_counted(copy: Callable[[str], Path]) -> None:
    directory = copy("gpt2")
    change_weights(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".h.1." in name])
    expect_misfit(directory, "missing transformer.h.1.ln_1.weight", "and 4 more")  # 12 to a layer, 8 are shown


def test_more_layers_than_the_config_has(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    change_config(directory, num_hidden_layers=1)
    expect_misfit(directory, "unexpected model.layers.1.")


@pytest.mark.parametrize(
    ("model", "name", "shape"),
    [
        ("llama", "model.embed_tokens.weight", [97, 47]),
        ("llama", "model.norm.weight", [47]),
        ("llama", "model.layers.1.mlp.down_proj.weight", [72, 48]),  # transposed
        ("llama", K, [20, 48]),
        ("llama", K, [40, 47]),
        ("llama", K, [40]),
        ("gpt2", "transformer.wpe.weight", [64, 48]),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", [144, 48]),  # transposed
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", [1, 48, 192]),
        ("gpt2", "transformer.h.0.mlp.c_fc.bias", [1]),
    ],
)
def test_misshapen_tensors(copy: Callable[[str], Path], model: str, name: str, shape: list[int]) -> None:
    directory = copy(model)
    change_weights(directory, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    expect_misfit(directory, name)


def test_fused_parts_are_checked_one_by_one(copy: Callable[[str], Path]) -> None:
    """Query rows in the place of key rows: the sum is right, the model would be wrong."""
    directory = copy("llama")
    change_weights(directory, lambda tensors: tensors.update({Q: torch.zeros(40, 48), K: torch.zeros(80, 48)}))
    expect_misfit(directory, Q, K)


@pytest.mark.parametrize("model", ["tied", "gpt2"])
def test_a_copy_of_tied_embeddings_is_accepted(copy: Callable[[str], Path], model: str) -> None:
    directory = copy(model)
    embedding = {"tied": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}[model]
    change_weights(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding]}))
    loaded = load_model(str(directory))
    assert torch.equal(loaded.lm_head.weight, load_file(directory / "model.safetensors")[embedding])


def test_tensors_that_are_no_parameters_are_passed_over(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    change_weights(
        directory, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(10)})
    )
    load_model(str(directory))


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("llama", dict(architectures=["BertModel"]), "architecture: expected .*LlamaForCausalLM.*, got BertModel"),
        ("llama", dict(architectures=None), "architecture: expected .*LlamaForCausalLM"),
        ("llama", dict(model_type="no_such_model"), "no_such_model"),
        ("llama", dict(hidden_act="gelu"), "hidden_act: expected 'silu', got 'gelu'"),
        ("gpt2", dict(activation_function="relu"), "activation_function: expected 'gelu_new', got 'relu'"),
        ("llama", dict(rope_parameters=None, rope_scaling=dict(type="linear", factor=2.0)), "rope_type.*'linear'"),
        (
            "llama",
            dict(
                rope_parameters=dict(
                    rope_type="llama3",
                    rope_theta=10000.0,
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=64,
                )
            ),
            "rope_type: expected 'default'.*'llama3'",
        ),
    ],
)
def test_unsupported_options(copy: Callable[[str], Path], model: str, fields: dict[str, Any], message: str) -> None:
    directory = copy(model)
    change_config(directory, **fields)
    with pytest.raises(ValueError, match=message):
        load_model(str(directory))


def test_rope_theta_of_older_configs(copy: Callable[[str], Path]) -> None:
    """`rope_theta` beside `rope_scaling: null`, as transformers 4 wrote it. It is read, and it counts."""
    directory = copy("llama")
    change_config(directory, rope_parameters=None, rope_theta=30.0)
    reference = AutoModelForCausalLM.from_pretrained(directory)
    prompt = list(range(30))
    expected = greedy_reference(reference, prompt, 20)
    assert expected != greedy_reference(make_model("llama-gqa"), prompt, 20)
    outputs = run(LLMEngine(str(directory)), [prompt], SamplingParams(temperature=0, max_tokens=20))
    assert token_ids(outputs) == [expected]


def test_dtypes(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    for name, dtype in names.items():
        assert {parameter.dtype for parameter in load_model(str(directory), name).parameters()} == {dtype}
    for name in ("float64", "fp16", "int8", ""):
        with pytest.raises(ValueError, match=f"dtype: expected auto, float32, float16, bfloat16, got {name}"):
            load_model(str(directory), name)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_auto_is_the_checkpoint_s_dtype(copy: Callable[[str], Path], field: str) -> None:
    directory = copy("llama")
    for name, expected in (("bfloat16", torch.bfloat16), ("float16", torch.float16), (None, torch.float32)):
        change_config(directory, **{"dtype": None, "torch_dtype": None, field: name})
        assert load_model(str(directory)).lm_head.weight.dtype == expected


def test_a_float64_checkpoint(tmp_path: Path) -> None:
    """No op takes float64, so "auto" refuses it by name or takes float32; a named dtype works."""
    make_model("llama-gqa").double().save_pretrained(tmp_path)
    assert load_model(str(tmp_path), "float32").lm_head.weight.dtype == torch.float32
    try:
        loaded = load_model(str(tmp_path))
    except ValueError as error:
        assert "float64" in str(error)
    else:
        assert loaded.lm_head.weight.dtype == torch.float32
