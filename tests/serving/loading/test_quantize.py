"""Quantized copies of checkpoints: what is in them, that they load as the original does with quantization, what is
refused, and that nothing half-written is left."""

import json
import re
import resource
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_config, convert_to_bin, make_model, remove_prefix
from engine_runs import run
from hypothesis import given, reject
from hypothesis import strategies as st
from quantized_checkpoints import SHAPES, assert_same_tensors, pack
from safetensors.torch import load_file, save_file

from pagedattn_ext import ops
from pagedattn_serve.cli import main
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.loading import quantize
from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.loading.quantize import quantize_checkpoint
from pagedattn_serve.sampling_params import SamplingParams


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


FORMS = ["safetensors", "shards", "bin", "shards of bin", "a state dict"]
DTYPES = ["float32", "float16", "bfloat16", "float64"]
WIDTHS = [8, 24, 32, 40, 64, 96]  # 32 inputs are one group; 40 are none


@dataclass(frozen=True)
class Drawn:
    """A checkpoint, and how it is loaded."""

    name: str
    fields: dict[str, Any]
    dtypes: list[str]  # of its tensors, in turns
    form: str
    has_prefix: bool
    quantization: str
    dtype: str


@st.composite
def checkpoints(draw: st.DrawFn) -> Drawn:
    """Of every family. Widths of layers are the vocabulary's now and then."""
    name = draw(st.sampled_from(["llama-gqa", "qwen2-tied", "qwen3", "gpt2", "opt-125m", "opt-350m", "bloom"]))
    hidden, inner, vocab = (draw(st.sampled_from(WIDTHS)) for _ in range(3))
    vocab = draw(st.sampled_from([vocab, inner, hidden, 2 * hidden, 3 * hidden]))
    fields: dict[str, Any] = dict(vocab_size=vocab, tie_word_embeddings=draw(st.booleans()))
    if name == "gpt2":
        fields |= dict(n_embd=hidden, n_head=4, n_inner=inner)
    elif name == "bloom":
        fields |= dict(hidden_size=hidden, n_head=4)
    elif name.startswith("opt"):
        fields |= dict(hidden_size=hidden, num_attention_heads=4, ffn_dim=inner)
    else:
        fields |= dict(hidden_size=hidden, intermediate_size=inner, num_attention_heads=4, num_key_value_heads=2)
        fields |= dict(head_dim=draw(st.sampled_from([8, 10])))
    return Drawn(
        name,
        fields,
        draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3)),
        draw(st.sampled_from(FORMS)),
        draw(st.booleans()),
        draw(st.sampled_from(["int4", "int8"])),
        draw(st.sampled_from(["auto", "float32", "float16", "bfloat16"])),
    )


def save(drawn: Drawn, directory: Path) -> None:
    network = make_model(drawn.name, **drawn.fields)
    for parameter, dtype in zip(network.parameters(), cycle(drawn.dtypes), strict=False):
        parameter.data = parameter.data.to(getattr(torch, dtype))
    network.save_pretrained(directory, max_shard_size="8KB" if "shards" in drawn.form else "1GB")
    change_config(directory, dtype=drawn.dtypes[0])
    if not drawn.has_prefix and "shards" not in drawn.form:
        remove_prefix(network, directory)
    if "bin" in drawn.form:
        convert_to_bin(directory)
    if drawn.form == "a state dict":  # tied weights are in the same memory
        (directory / "model.safetensors").unlink()
        torch.save(dict(network.state_dict()), directory / "pytorch_model.bin")


def check_promise(drawn: Drawn, directory: Path) -> None:
    """OUT is MODEL, bit for bit, if both are loaded with the same options."""
    save(drawn, directory / "model")
    quantize_checkpoint(directory / "model", directory / "out", drawn.quantization)
    assert_same_model(directory / "out", directory / "model", quantization=drawn.quantization, dtype=drawn.dtype)


def llama(**options: Any) -> Drawn:
    """Of 32 inputs, which are one group. options: fields of Drawn, or of the config."""
    drawn = Drawn("llama-gqa", LLAMA, ["float32"], "safetensors", True, "int4", "auto")
    fields = {name: options.pop(name) for name in list(options) if name not in Drawn.__dataclass_fields__}
    return replace(drawn, fields=LLAMA | fields, **options)


LLAMA = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=False,
)
WIDE = dict(hidden_size=64, head_dim=16)  # two groups of inputs
SEEN = {
    "32 inputs": llama(),
    "8 outputs": llama(**WIDE, intermediate_size=8),
    "an MLP of less than a group": llama(**WIDE, intermediate_size=24),
    "fp32 loaded in bf16": llama(**WIDE, dtype="bfloat16"),
    "fp32 loaded in fp16, in 8 bits": llama(dtype="float16", quantization="int8"),
    "fp32 in a config of bf16": llama(**WIDE, dtypes=["bfloat16", "float32"]),
    "fp64": llama(**WIDE, dtypes=["float64"]),
    "an MLP as wide as the vocabulary": llama(**WIDE, vocab_size=96, intermediate_size=48),
    "queries, keys and values as wide as the vocabulary": llama(**WIDE, vocab_size=128, intermediate_size=96),
    "the rows as wide as the vocabulary": llama(**WIDE, vocab_size=64, intermediate_size=96),
    "tied, as torch saves it": llama(tie_word_embeddings=True, form="a state dict", quantization="int8"),
}


@pytest.mark.parametrize("case", SEEN)
def test_loads_as_the_original_in_cases_that_did_not(tmp_path: Path, case: str) -> None:
    check_promise(SEEN[case], tmp_path)


def test_a_bin_whose_tensors_share_memory(tmp_path: Path) -> None:
    """A head that is not tied and yet the embedding, norms that lie one behind the other, weights in another order."""
    network = make_model("llama-gqa", **LLAMA)
    network.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    tensors = network.state_dict()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    norms = [name for name in tensors if "norm" in name]
    tensors |= zip(norms, torch.stack([tensors[name] for name in norms]), strict=True)
    tensors |= {name: tensor.t().contiguous().t() for name, tensor in tensors.items() if "_proj" in name}
    torch.save(dict(tensors), tmp_path / "model" / "pytorch_model.bin")
    for format in ("int8", "int4"):
        quantize_checkpoint(tmp_path / "model", tmp_path / format, format)
        assert_same_model(tmp_path / format, tmp_path / "model", quantization=format)


@given(checkpoints())
def test_loads_as_the_original_whatever_its_shape(tmp_path_factory: pytest.TempPathFactory, drawn: Drawn) -> None:
    """Would catch a head that is known by its size, codes that hang on the dtype of the model, and tensors that files
    cannot have."""
    try:
        check_promise(drawn, tmp_path_factory.mktemp("drawn"))
    except ArgumentError as error:
        assert "linear layers whose in_features are multiples of 32, got none" in str(error)
        reject()


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_tokens_and_logprobs_are_the_original_s(tmp_path: Path, format: str) -> None:
    """In another dtype than the checkpoint's, with layers as wide as the vocabulary."""
    fields = dict(hidden_size=64, head_dim=16, intermediate_size=96, vocab_size=96)
    make_model("llama-gqa", **fields).save_pretrained(tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", format)
    mine, wanted = (
        run(
            LLMEngine(tmp_path / path, quantization=format, dtype="bfloat16"),
            [[5], [1, 2, 3]],
            SamplingParams(temperature=0, max_tokens=8, logprobs=3),
        )
        for path in ("out", "model")
    )
    for own, other in zip(mine, wanted, strict=True):
        assert own.outputs[0].token_ids == other.outputs[0].token_ids
        assert own.outputs[0].logprobs == other.outputs[0].logprobs


def test_layers_that_are_no_whole_groups_stay(tmp_path: Path) -> None:
    """Of 48 inputs. They are named, and quantized to 8 bits when they are loaded; so is the last layer."""
    make_model("llama-gqa", intermediate_size=64).save_pretrained(tmp_path / "model")
    quantized, all_layers = quantize_checkpoint(tmp_path / "model", tmp_path / "out", "int4")
    assert (quantized, all_layers) == (2, 15)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(config["ignore"]) == 13 and "model.layers.0.mlp.up_proj" in config["ignore"]
    assert_same_model(tmp_path / "out", tmp_path / "model", quantization="int4")


def test_what_other_readers_of_the_format_go_by() -> None:
    """Weights have their scales already. Rows of inputs get theirs as they come, where they are quantized."""
    int4, int8 = (quantize.quantization_config(format, [])["config_groups"]["group_0"] for format in ("int4", "int8"))
    assert (int4["weights"]["dynamic"], int4["input_activations"]) == (False, None)
    assert (int8["weights"]["dynamic"], int8["input_activations"]["dynamic"]) == (False, True)


def test_a_model_none_of_whose_layers_can_be_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before its tensors are looked for."""
    make_model("llama-gqa").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--format", "int4"]) == 1
    expected = "MODEL: expected linear layers whose in_features are multiples of 32, got none"
    assert capsys.readouterr().err.endswith(f"pagedattn: error: {expected}\n")


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
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & tmp_path.joinpath("out").stat().st_mode}  # safetensors lets only its own user read a file
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


@pytest.mark.parametrize(
    ("tensors", "is_tied", "message"),
    [
        ({"model.extra": [1]}, False, r"unexpected model\.extra"),
        ({"lm_head.weight": [50, 64]}, True, r"lm_head\.weight: expected \[97, 64\], got \[50, 64\]"),
        (
            {"norm.weight": [64]},
            False,
            r"expected one tensor model\.norm\.weight, got two, model\.norm\.\S* and norm\.",
        ),
    ],
)
def test_tensors_that_are_not_the_model_s(
    model: Path, tmp_path: Path, tensors: dict[str, list[int]], is_tied: bool, message: str
) -> None:
    """Refused as they are when the model is loaded, and not copied."""
    file = model / "model.safetensors"
    others = {name: torch.ones(shape) for name, shape in tensors.items()}
    save_file(load_file(file) | others, file, metadata={"format": "pt"})
    change_config(model, tie_word_embeddings=is_tied)
    with pytest.raises(ValueError, match=message):
        load_model(model)
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(model, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_where_out_may_lie(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the model itself, behind a link to an empty directory, and as the working directory."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for out, where in ((model / "out", model / "out"), (tmp_path / "link", tmp_path / "empty"), (".", Path.cwd())):
        quantize_checkpoint(model, out, "int8")
        assert_same_model(where, model, quantization="int8")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    with pytest.raises(ValueError, match=r"^out: expected a directory that is no mount point, .* got .*mounted$"):
        quantize_checkpoint(model, tmp_path / "mounted", "int8")
    with pytest.raises(TypeError, match=r"^out: expected a directory as a string or a path, got int"):
        quantize_checkpoint(model, 3, "int8")  # type: ignore[arg-type]


def test_a_disk_that_is_full(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While tensors are written: one line, and nothing is left."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        status = main(["quantize", str(model), str(tmp_path / "out"), "--format", "int8"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1
    assert re.fullmatch(r"pagedattn: error: out: cannot write [^\n]*\n", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [model]


def test_a_disk_that_says_late_that_it_is_full(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As networks' disks do, which have taken all that was written. OUT has its name after that."""

    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        quantize_checkpoint(model, tmp_path / "out", "int8")
    assert list(tmp_path.iterdir()) == [model]


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
