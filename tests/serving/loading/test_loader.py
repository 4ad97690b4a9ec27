"""From a directory to a model: every tensor in its place, or an error that says what is wrong."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    FAMILIES,
    VARIANTS,
    Checkpoint,
    change_config,
    convert_to_bin,
    greedy_references,
    make_model,
    remove_prefix,
)
from engine_runs import run, token_ids
from quantized_checkpoints import assert_same_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.loader import build_model, load_model
from pagedattn_serve.loading.weights import load_weights
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.sampling_params import SamplingParams

Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
OPT_LAYER = "model.decoder.layers.0"
BLOOM_LAYER = "transformer.h.0"
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = [[5], [(3 * i) % 97 for i in range(30)]]
TIED = [name for name in VARIANTS if make_model(name).config.tie_word_embeddings]

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """save(name, **overrides) is a directory with that checkpoint, for the test to spoil."""

    def save(name: str, **overrides: Any) -> Path:
        make_model(name, **overrides).save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def load_unpacked(directory: str | Path, dtype: str = "auto") -> NativeCausalLM:
    """The model as it is before its linear layers are packed."""
    model = build_model(directory, dtype)
    assert isinstance(model, NativeCausalLM)
    load_weights(model, Path(directory), "cpu")
    return model


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # no two in the same memory
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def generate(directory: Path, dtype: str = "auto") -> list[list[int]]:
    return token_ids(run(LLMEngine(str(directory), dtype=dtype), PROMPTS, GREEDY))


def reference(model: PreTrainedModel) -> list[list[int]]:
    return greedy_references(model, PROMPTS, 24)


def expect_misfit(directory: Path, *problems: str) -> None:
    with pytest.raises(ValueError, match="do not fit") as error:
        load_model(str(directory))
    assert str(directory) in str(error.value)
    for problem in problems:
        assert problem in str(error.value)


# ---- every tensor in its place --------------------------------------------------------------------------------------


def test_every_weight_is_the_checkpoint_s(checkpoint: Checkpoint) -> None:
    """Fused layers are those of the checkpoint one after the other; GPT-2's are transposed, BLOOM's heads sorted."""
    model = load_unpacked(checkpoint.path)
    config = checkpoint.model.config
    expected = checkpoint.model.state_dict()
    assert not load_model(checkpoint.path).training
    for name, parameter in model.named_parameters():
        parts = [
            name.replace("qkv_proj", f"{part}_proj").replace("gate_up_proj", f"{part}_proj")
            for part in ("q", "k", "v", "gate", "up")
        ]
        weight = torch.cat([expected[part] for part in dict.fromkeys(parts) if part in expected])
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            weight = weight.t()
        if ".query_key_value." in name:
            heads = weight.unflatten(0, (config.n_head, 3, -1))
            weight = torch.cat([heads[:, i].flatten(0, 1) for i in range(3)])
        torch.testing.assert_close(parameter, weight, rtol=0, atol=0)
        assert not parameter.requires_grad and parameter.is_contiguous()
    sizes = {parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}
    assert sum(sizes.values()) == sum(parameter.numel() for parameter in checkpoint.model.parameters())
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    assert (model.lm_head.weight is embeddings[0].weight) == config.tie_word_embeddings


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("prefix", ["with prefix", "without prefix"])
def test_forms_of_a_checkpoint(save: Save, name: str, form: str, prefix: str) -> None:
    directory = save(name)
    expected = load_model(str(directory)).state_dict()
    if prefix == "without prefix":
        remove_prefix(make_model(name), directory)
    if form == "bin":
        convert_to_bin(directory)
    actual = load_model(str(directory)).state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_copy_of_tied_embeddings_is_accepted(save: Save, name: str, form: str) -> None:
    directory = save(name)
    weight = make_model(name).lm_head.weight
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    change_weights(directory, lambda tensors: tensors.update({"lm_head.weight": weight}))
    if form == "bin":
        convert_to_bin(directory)
    assert torch.equal(load_unpacked(directory).lm_head.weight, weight)


def test_tensors_that_are_no_parameters_are_passed_over(save: Save) -> None:
    directory = save("llama-gqa")
    expected = load_model(str(directory))
    change_weights(
        directory, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(10)})
    )
    assert_same_tensors(load_model(str(directory)), expected)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-gqa", "opt-350m", "bloom"])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_sharded_checkpoints(tmp_path: Path, name: str, form: str) -> None:
    """With the index and without it; a shard that the index names and that is not there has its name in the error."""
    model = make_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    if form == "bin":
        convert_to_bin(tmp_path)
    shards = sorted(tmp_path.glob(f"*.{form}"))
    [index] = tmp_path.glob(f"*.{form}.index.json")
    assert len(shards) > 3
    expected = reference(model)
    assert generate(tmp_path) == expected
    shards[1].rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(shards[1].name)} in .*{re.escape(index.name)}"):
        load_model(str(tmp_path))
    index.unlink()
    expect_misfit(tmp_path, "missing ")
    (tmp_path / "elsewhere").rename(shards[1])
    assert generate(tmp_path) == expected


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_safetensors_are_preferred(tmp_path: Path, shard_size: str) -> None:
    """Whatever lies beside them."""
    model = make_model("llama-gqa")
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    torch.save({"nonsense": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"nonsense": "nowhere.bin"}}')
    save_file({"nonsense": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert generate(tmp_path) == reference(model)


def test_the_format_of_torch_before_1_6(save: Save) -> None:
    directory = save("llama-gqa")
    convert_to_bin(directory)
    file = directory / "pytorch_model.bin"
    torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    assert generate(directory) == reference(make_model("llama-gqa"))


def test_a_bin_as_torch_saves_a_state_dict(save: Save) -> None:
    """Tied weights in the same memory, parameters among the tensors."""
    directory = save("gpt2")
    (directory / "model.safetensors").unlink()
    model = make_model("gpt2")
    tensors = dict(model.named_parameters()) | {"lm_head.weight": model.lm_head.weight}
    torch.save(tensors, directory / "pytorch_model.bin")
    assert generate(directory) == reference(model)


class Code:
    """What a pickle must not run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["zip", "old", "pickle"])
def test_a_bin_that_holds_code(save: Save, form: str) -> None:
    directory = save("llama-gqa")
    content = {**load_file(directory / "model.safetensors"), "code": Code(directory / "it_ran")}
    (directory / "model.safetensors").unlink()
    file = directory / "pytorch_model.bin"
    if form == "pickle":
        file.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(
        ValueError, match=f"^model: cannot read the weights in {re.escape(str(file))}: [^\n]+$"
    ) as error:
        load_model(str(directory))
    assert "weights_only" not in str(error.value)  # torch's own advice is to run the code
    assert not (directory / "it_ran").exists()


@pytest.mark.parametrize("content", [[torch.zeros(2)], torch.zeros(2), None], ids=["list", "tensor", "none"])
def test_a_bin_that_is_no_dict(save: Save, content: object) -> None:
    directory = save("llama-gqa")
    (directory / "model.safetensors").unlink()
    torch.save(content, directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match=re.escape(str(directory / "pytorch_model.bin"))):
        load_model(str(directory))


def test_a_bin_with_something_else_than_a_tensor(save: Save) -> None:
    directory = save("llama-gqa")
    convert_to_bin(directory)
    file = directory / "pytorch_model.bin"
    torch.save({**torch.load(file), "model.norm.weight": 5}, file)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_model(str(directory))


def test_a_bin_of_a_training_run(save: Save) -> None:
    """The state dict one level down: its names are not found, and those that are there are told."""
    directory = save("llama-gqa")
    convert_to_bin(directory)
    file = directory / "pytorch_model.bin"
    torch.save({"state_dict": torch.load(file), "epoch": 3}, file)
    expect_misfit(directory, "missing model.embed_tokens.weight", "and ")


def test_no_directory_config_or_weights(save: Save, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json, got .*nowhere"):
        load_model(str(tmp_path / "nowhere"))
    directory = save("llama-gqa")
    (directory / "model.safetensors").rename(directory / "training_args.bin")
    message = rf"model\.safetensors or pytorch_model\.bin in {re.escape(str(directory))}"
    with pytest.raises(FileNotFoundError, match=message):
        load_model(str(directory))
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(str(directory))


# What some servers answer in place of a file is read as pickled, and fails in many ways.
ANSWERS = [b"error code: 1020", b"repository not found\n", b"upstream request timeout"]


@pytest.mark.parametrize("keep", ["nothing", "garbage", "header", "half", *ANSWERS])
@pytest.mark.parametrize("file_name", ["model.safetensors", "pytorch_model.bin"])
def test_corrupt_weights(save: Save, file_name: str, keep: str | bytes) -> None:
    directory = save("llama-gqa")
    if file_name == "pytorch_model.bin":
        convert_to_bin(directory)
    file = directory / file_name
    content = file.read_bytes()
    kept = {"nothing": b"", "garbage": b"x" * 5000, "header": content[:20], "half": content[:-5000]}
    file.write_bytes(keep if isinstance(keep, bytes) else kept[keep])
    with pytest.raises(ValueError, match=f"cannot read the weights in {re.escape(str(file))}: [^\n]+$") as error:
        load_model(str(directory))
    assert "weights_only" not in str(error.value)


# ---- base models -----------------------------------------------------------------------------------------------------


BASE_MODELS = ["llama-mqa-tied-bias", "qwen2-tied", "qwen3-tied-bias-sliding", "gpt2", "opt-125m", "opt-350m", "bloom"]


@pytest.mark.parametrize("name", BASE_MODELS)
def test_a_base_model_generates_with_its_tied_embedding(tmp_path: Path, name: str) -> None:
    """As AutoModelForCausalLM does with it."""
    model = make_model(name)
    model.base_model.save_pretrained(tmp_path)
    change_config(tmp_path, architectures=[type(model.base_model).__name__])
    assert not any(tensor.startswith("lm_head") for tensor in load_file(tmp_path / "model.safetensors"))
    assert generate(tmp_path) == reference(model)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral", "gpt2-inner-untied"])
def test_a_base_model_without_a_head(tmp_path: Path, name: str) -> None:
    """It gives embeddings alone; but an architecture with a head lacks the head."""
    model = make_model(name)
    model.base_model.save_pretrained(tmp_path)
    engine = LLMEngine(str(tmp_path), num_blocks=8)
    with pytest.raises(
        ValueError, match=r"model: expected one with a head \(lm_head\), to generate, got one that gives"
    ):
        engine.add_request("a", [1, 2])
    assert not engine.has_unfinished_requests()
    change_config(tmp_path, architectures=[type(model).__name__])
    expect_misfit(tmp_path, "missing lm_head.weight, which config.json does not tie to the embedding")


# ---- tensors that do not fit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-gqa", K),
        ("llama-gqa", "model.layers.1.mlp.up_proj.weight"),
        ("llama-gqa", "lm_head.weight"),
        ("qwen2-tied", "model.layers.1.self_attn.v_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("opt-125m", f"{OPT_LAYER}.self_attn.v_proj.bias"),
        ("opt-125m", "model.decoder.final_layer_norm.weight"),
        ("opt-350m", "model.decoder.project_in.weight"),
        ("opt-projected-untied", "lm_head.weight"),
        ("bloom", f"{BLOOM_LAYER}.self_attention.query_key_value.bias"),
        ("bloom", "transformer.word_embeddings_layernorm.weight"),
        ("bloom-post-norm", "lm_head.weight"),
    ],
)
def test_missing_and_unexpected_tensors(save: Save, model: str, name: str) -> None:
    directory = save(model)
    other = name.replace("weight", "wait").replace("bias", "bios")
    change_weights(directory, lambda tensors: tensors.update({other: tensors.pop(name)}))
    expect_misfit(directory, f"missing {name}", f"unexpected {other}")


def test_many_problems_are_counted(save: Save) -> None:
    directory = save("gpt2")
    change_weights(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".h.1." in name])
    expect_misfit(directory, "missing transformer.h.1.ln_1.weight", "and 4 more")  # 12 to a layer, 8 are shown


@pytest.mark.parametrize(
    ("model", "fields", "problem"),
    [
        ("llama-gqa", dict(num_hidden_layers=1), "unexpected model.layers.1."),
        ("llama-gqa", dict(num_hidden_layers=3), "missing model.layers.2."),
        ("llama-gqa", dict(num_key_value_heads=4), f"{K}: expected [80, 48], got [40, 48]"),
        ("llama-mqa-tied-bias", dict(attention_bias=False), "unexpected model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", dict(attention_bias=True), "missing model.layers.0.self_attn.q_proj.bias"),
        ("opt-125m", dict(enable_bias=False), f"unexpected {OPT_LAYER}.fc1.bias"),
        ("opt-125m", dict(layer_norm_elementwise_affine=False), f"unexpected {OPT_LAYER}.final_layer_norm.bias"),
        ("opt-125m", dict(_remove_final_layer_norm=True), "unexpected model.decoder.final_layer_norm.bias"),
        ("opt-350m", dict(do_layer_norm_before=True), "missing model.decoder.final_layer_norm.weight"),
        ("opt-350m", dict(word_embed_proj_dim=48), "unexpected model.decoder.project_in.weight"),
        ("bloom", dict(tie_word_embeddings=False), "missing lm_head.weight"),
    ],
)
def test_a_config_of_another_model(save: Save, model: str, fields: dict[str, Any], problem: str) -> None:
    directory = save(model)
    change_config(directory, **fields)
    expect_misfit(directory, problem)


@pytest.mark.parametrize(
    ("model", "name", "shape"),
    [
        ("llama-gqa", "model.embed_tokens.weight", [97, 47]),
        ("llama-gqa", "model.norm.weight", [47]),
        ("llama-gqa", "model.layers.1.mlp.down_proj.weight", [72, 48]),  # transposed
        ("llama-gqa", K, [20, 48]),
        ("llama-gqa", K, [40, 47]),
        ("llama-gqa", K, [40]),
        ("mistral", "model.layers.1.self_attn.o_proj.weight", [108, 54]),  # transposed
        ("qwen2-tied", "model.layers.0.self_attn.k_proj.bias", [42]),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight", [44]),
        ("gpt2", "transformer.wpe.weight", [64, 48]),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", [144, 48]),  # transposed
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", [1, 48, 192]),
        ("gpt2", "transformer.h.0.mlp.c_fc.bias", [1]),
        ("opt-125m", "model.decoder.embed_positions.weight", [128, 39]),  # without the two rows of the padding
        ("opt-125m", f"{OPT_LAYER}.self_attn.v_proj.bias", [1]),
        ("opt-125m", f"{OPT_LAYER}.self_attn.q_proj.weight", [39, 13]),
        ("opt-350m", "model.decoder.project_out.weight", [48, 20]),  # transposed
        ("bloom", f"{BLOOM_LAYER}.self_attention.query_key_value.weight", [55, 165]),  # transposed
        ("bloom", f"{BLOOM_LAYER}.self_attention.query_key_value.weight", [165]),
        ("bloom", f"{BLOOM_LAYER}.self_attention.query_key_value.bias", [3, 55]),
    ],
)
def test_misshapen_tensors(save: Save, model: str, name: str, shape: list[int]) -> None:
    directory = save(model)
    expected = list(load_file(directory / "model.safetensors")[name].shape)
    change_weights(directory, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    expect_misfit(directory, f"{name}: expected {expected}, got {shape}")


def test_fused_parts_are_checked_one_by_one(save: Save) -> None:
    """Query rows in the place of key rows: the sum is right, the model would be wrong."""
    directory = save("llama-gqa")
    change_weights(directory, lambda tensors: tensors.update({Q: torch.zeros(40, 48), K: torch.zeros(80, 48)}))
    expect_misfit(directory, Q, K)


@pytest.mark.parametrize("dtype", ["int8", "bool", "float8_e4m3fn", "complex64"])
@pytest.mark.parametrize("is_native", [True, False])
def test_codes_without_a_quantization_config(save: Save, is_native: bool, dtype: str) -> None:
    """They would be wrong numbers. Masks and positions that old checkpoints have are no weights."""
    directory = save("llama-gqa")
    if not is_native:
        change_config(directory, architectures=["OlmoForCausalLM"], model_type="olmo")
    change_weights(directory, lambda tensors: tensors.update({Q: tensors[Q].to(getattr(torch, dtype))}))
    with pytest.raises(ValueError, match=rf"model: expected {Q} in floats of 16 bits or more, .*, got torch.{dtype}"):
        load_model(str(directory))


@pytest.mark.parametrize("name", ["qwen2-tied", "gpt2", "opt-350m", "bloom"])
def test_a_head_that_is_not_the_embedding_although_the_config_ties_them(save: Save, name: str) -> None:
    """Hugging Face takes the head, with a warning; the embedding in its place, without a word, would be worse."""
    directory = save(name)
    change_weights(
        directory, lambda tensors: tensors.update({"lm_head.weight": make_model(name).lm_head.weight.roll(1, 0)})
    )
    assert generate(directory) == reference(AutoModelForCausalLM.from_pretrained(directory))


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("llama-gqa", dict(architectures=["BertModel"]), "architecture: .*, got BertModel: it is not the .*'llama'"),
        ("llama-gqa", dict(architectures=None), "architecture: .*, got none: "),
        ("llama-gqa", dict(model_type="no_such_model"), "no_such_model"),
        ("llama-gqa", dict(hidden_act="relu6"), "hidden_act: expected .*silu.*, got 'relu6'"),
        ("mistral", dict(hidden_act="tanh"), "hidden_act: expected .*silu.*, got 'tanh'"),
        ("gpt2", dict(activation_function="silu"), "activation_function: expected .*gelu_new.*, got 'silu'"),
        ("opt-125m", dict(activation_function="xielu"), "activation_function: expected .*relu.*, got 'xielu'"),
        (
            "qwen3",
            dict(rope_parameters=None, rope_scaling=dict(type="proportional", factor=2.0)),
            "rope_type: .*'proportional'",
        ),
        (
            "bloom",
            dict(slow_but_exact=True, pretraining_tp=2),
            "slow_but_exact: expected false with pretraining_tp 2, got true",
        ),
        ("llama-gqa", dict(quantization_config=dict(quant_method="gptq", bits=4)), "quantization_config"),
        ("llama-gqa", dict(is_causal=False), "model: expected one .*, got is_causal false in .*config.json"),
    ],
)
def test_unsupported_options(save: Save, model: str, fields: dict[str, Any], message: str) -> None:
    directory = save(model)
    change_config(directory, **fields)
    with pytest.raises(ValueError, match=message):
        load_model(str(directory))


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("llama-gqa", dict(num_hidden_layers=0), "num_hidden_layers: expected an int >= 1 in .*config.json, got 0"),
        ("llama-gqa", dict(num_hidden_layers=-2), "num_hidden_layers: .*, got -2"),
        ("llama-gqa", dict(num_hidden_layers="2"), "num_hidden_layers: .*, got '2'"),
        ("llama-gqa", dict(num_attention_heads=0), "num_attention_heads: .*, got 0"),
        ("llama-gqa", dict(num_attention_heads=4.0), "num_attention_heads: .*, got 4.0"),
        ("llama-gqa", dict(num_key_value_heads=3), "num_key_value_heads: expected a divisor of .* 4, got 3"),
        ("llama-gqa", dict(num_key_value_heads=0), "num_key_value_heads: .*, got 0"),
        ("llama-gqa", dict(hidden_size=[48]), r"hidden_size: .*, got \[48\]"),
        ("llama-gqa", dict(head_dim=-20), "head_dim: .*, got -20"),
        ("llama-gqa", dict(vocab_size=True), "vocab_size: .*, got True"),
        ("llama-gqa", dict(max_position_embeddings=0), "max_position_embeddings: .*, got 0"),
        ("llama-gqa", dict(intermediate_size="big"), "intermediate_size: .*, got 'big'"),
        ("llama-gqa", dict(rms_norm_eps="small"), "model: cannot read .*config.json: .*rms_norm_eps.*"),
        ("llama-gqa", dict(rms_norm_eps=-1.0), "rms_norm_eps: expected a number >= 0, got -1.0"),
        ("mistral", dict(rms_norm_eps=float("nan")), "rms_norm_eps: expected a number >= 0, got nan"),
        ("gpt2", dict(layer_norm_epsilon=float("nan")), "layer_norm_epsilon: expected a number >= 0, got nan"),
        ("bloom", dict(layer_norm_epsilon=-1e-5), "layer_norm_epsilon: expected a number >= 0, got -1e-05"),
        ("llama-gqa", dict(dtype="float7"), "model: cannot read .*config.json: .*float7"),
        ("llama-gqa", dict(architectures="LlamaForCausalLM"), "architectures: .*, got 'LlamaForCausalLM'"),
        ("gpt2", dict(n_layer=0), "n_layer: .*, got 0"),
        ("gpt2", dict(n_head=5), "num_attention_heads: expected a divisor of hidden_size 48, got 5"),
        ("opt-125m", dict(ffn_dim=0), "ffn_dim: .*, got 0"),
        ("bloom", dict(n_head=4), "num_attention_heads: expected a divisor of hidden_size 55, got 4"),
    ],
)
def test_impossible_sizes(save: Save, model: str, fields: dict[str, Any], message: str) -> None:
    directory = save(model)
    change_config(directory, **fields)
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        load_model(str(directory))


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\0"])
def test_a_config_that_is_no_json_object(save: Save, content: str) -> None:
    directory = save("llama-gqa")
    (directory / "config.json").write_text(content)
    with pytest.raises(
        ValueError, match=f"^{re.escape(str(directory))}/config.json: expected a JSON object, got [^\n]*$"
    ):
        load_model(str(directory))


def test_rope_theta_of_older_configs(save: Save) -> None:
    """`rope_theta` beside `rope_scaling: null`, as transformers 4 wrote it. It is read, and it counts."""
    directory = save("llama-gqa")
    change_config(directory, rope_parameters=None, rope_theta=30.0)
    expected = reference(AutoModelForCausalLM.from_pretrained(directory))
    assert expected != reference(make_model("llama-gqa"))
    assert generate(directory) == expected


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_of_older_configs(save: Save, key: str) -> None:
    directory = save("llama-linear")
    change_config(directory, rope_parameters=None, rope_theta=10000.0, rope_scaling={key: "linear", "factor": 2.5})
    assert generate(directory) == reference(make_model("llama-linear"))


# ---- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_checkpoints_in_half_precision(save: Save, tmp_path: Path, name: str, dtype: str) -> None:
    """ "auto" is what the same dtype gives when it is made of fp32 weights; forced to fp32, it is Hugging Face's."""
    half = tmp_path / "half"
    make_model(name).to(getattr(torch, dtype)).save_pretrained(half)
    assert {str(parameter.dtype) for parameter in load_model(str(half)).parameters()} == {f"torch.{dtype}"}
    assert generate(half) == generate(save(name), dtype)
    in_fp32 = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    assert generate(half, "float32") == reference(in_fp32)


def test_dtypes(save: Save) -> None:
    directory = save("llama-gqa")
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    for name, dtype in names.items():
        for given in (name, dtype):
            assert {parameter.dtype for parameter in load_model(str(directory), given).parameters()} == {dtype}
    with pytest.raises(ValueError, match=r"dtype: expected auto, .*, got float64"):
        load_model(str(directory), torch.float64)
    for name in ("float64", "fp16", "int8", ""):
        with pytest.raises(ValueError, match=f"dtype: expected auto, .*, float, half, got {name}"):
            load_model(str(directory), name)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_auto_is_the_checkpoint_s_dtype(save: Save, field: str) -> None:
    directory = save("llama-gqa")
    for name, expected in (("bfloat16", torch.bfloat16), ("float16", torch.float16), (None, torch.float32)):
        change_config(directory, **{"dtype": None, "torch_dtype": None, field: name})
        assert load_unpacked(directory).lm_head.weight.dtype == load_model(directory).dtype == expected


def test_a_float64_checkpoint(tmp_path: Path) -> None:
    """No op takes float64, so "auto" refuses it by name or takes float32; a named dtype works."""
    make_model("llama-gqa").double().save_pretrained(tmp_path)
    assert load_unpacked(tmp_path, "float32").lm_head.weight.dtype == torch.float32
    load_model(tmp_path, "float32")
    try:
        loaded = load_unpacked(tmp_path)
    except ValueError as error:
        assert "float64" in str(error)
    else:
        assert loaded.lm_head.weight.dtype == torch.float32
