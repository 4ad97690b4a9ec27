"""GGUF files: the weights, names, metadata and forms of layers, against the same weights in a directory."""

import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import greedy_references, make_model
from engine_runs import run, token_ids
from gguf_files import make_gemma, write_gguf
from quantized_checkpoints import assert_same_tensors
from transformers import PreTrainedModel

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.directory import model_directory
from pagedattn_serve.loading.gguf_file import GgufFile
from pagedattn_serve.loading.gguf_model import family_of, gguf_config
from pagedattn_serve.loading.loader import build_model, describe_linear_layers, linear_forms, load_model
from pagedattn_serve.loading.quantized_checkpoint import checkpoint_format
from pagedattn_serve.models.linear import Int4Linear, Int8Linear, PackedLinear
from pagedattn_serve.models.partition import Partition
from pagedattn_serve.models.quantization import Int4Weight
from pagedattn_serve.models.transformers_slices import Alone
from pagedattn_serve.sampling_params import SamplingParams

PROMPTS = [[5, 3, 90, 11, 7], [1], [8] * 20 + [2, 4]]
LLAMA = dict(hidden_size=64, head_dim=16, intermediate_size=96)
BLOCKS_OF_256 = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1)


def tokens_of(file: Path) -> list[list[int]]:
    engine = LLMEngine(file, dtype="float32", num_blocks=20, block_size=8)
    return token_ids(run(engine, PROMPTS, SamplingParams(temperature=0, max_tokens=8)))


def make(name: str, **fields: Any) -> PreTrainedModel:
    return make_gemma(name, **fields) if name.startswith("gemma") else make_model(name, **fields)


# Families and their switches, with the type of the matrices.
FLOATS = {
    "llama-gqa": "f16",
    "llama-mqa-tied-bias": "f32",
    "llama-linear": "bf16",
    "llama-yarn": "f32",
    "mistral": "f32",
    "qwen2-tied": "bf16",
    "qwen3": "f16",
    "gemma": "f32",
    "gemma2": "f32",
    "gemma3_text": "f16",
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_give_the_tokens_of_hugging_face(tmp_path: Path, name: str) -> None:
    model = write_gguf(tmp_path / "m.gguf", make(name), FLOATS[name])
    assert tokens_of(tmp_path / "m.gguf") == greedy_references(model, PROMPTS, 8)
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    assert build_model(tmp_path / "m.gguf").dtype == dtypes[FLOATS[name]]


def test_rope_factors(tmp_path: Path) -> None:
    """Files of LLaMA 3.1 have the scaling as a tensor."""
    model = make_model("llama-llama3")
    frequencies = model.model.rotary_emb.inv_freq
    plain = 1 / 500000.0 ** (torch.arange(0, 26, 2) / 26)
    factors = {"rope_freqs.weight": (plain / frequencies).numpy()}
    write_gguf(tmp_path / "m.gguf", model, more=factors)
    assert tokens_of(tmp_path / "m.gguf") == greedy_references(model, PROMPTS, 8)


def test_yarn_as_the_file_has_it(tmp_path: Path) -> None:
    rope = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
    model = make_model("llama-gqa", **LLAMA, rope_parameters=rope | dict(beta_fast=4.0, beta_slow=2.0))
    betas = {"llama.rope.scaling.yarn_beta_fast": 4.0, "llama.rope.scaling.yarn_beta_slow": 2.0}
    neutral = {"llama.rope.scaling.yarn_ext_factor": 1.0, "llama.rope.scaling.yarn_attn_factor": 1.0}
    write_gguf(tmp_path / "m.gguf", model, **betas, **neutral)
    scaling = gguf_config(GgufFile.open(tmp_path / "m.gguf"))["rope_parameters"]
    assert scaling == {name: model.config.rope_parameters[name] for name in scaling} and "beta_fast" in scaling
    without_factor = {"llama.rope.scaling.factor": None, "llama.rope.scaling.attn_factor": 2.0}
    write_gguf(tmp_path / "2.gguf", model, **without_factor)
    scaling = gguf_config(GgufFile.open(tmp_path / "2.gguf"))["rope_parameters"]
    assert (scaling["factor"], scaling["attention_factor"]) == (1.0, 2.0)
    load_model(tmp_path / "2.gguf")
    write_gguf(tmp_path / "3.gguf", model, **{"llama.rope.scaling.attn_factor": 0.5})
    scaling = gguf_config(GgufFile.open(tmp_path / "3.gguf"))["rope_parameters"]
    assert scaling["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))  # llama.cpp has both factors


def test_numbers_that_say_nothing(tmp_path: Path) -> None:
    """A file in one part, and a cap of 0, which is none."""
    for name, value in {"split.count": 1, "gemma3.final_logit_softcapping": 0.0}.items():
        model = make_gemma("gemma3_text")
        write_gguf(tmp_path / "without.gguf", model)
        write_gguf(tmp_path / "with.gguf", model, **{name: value})
        assert tokens_of(tmp_path / "with.gguf") == tokens_of(tmp_path / "without.gguf"), name


def test_most_weights_are_quantized_in_several_types(tmp_path: Path) -> None:
    """Catches floats that are more than each of the types, and not more than all."""
    write_gguf(
        tmp_path / "m.gguf",
        make_model("llama-gqa", **LLAMA, vocab_size=400),
        lambda name: "q5_0" if "ffn" in name else "q8_0" if "attn" in name else "f16",
    )
    assert build_model(tmp_path / "m.gguf").dtype == torch.float32


def test_the_older_name_of_a_linear_scaling(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_model("llama-gqa", **LLAMA), **{"llama.rope.scale_linear": 4.0})
    scaling = gguf_config(GgufFile.open(tmp_path / "m.gguf"))["rope_parameters"]
    assert (scaling["rope_type"], scaling["factor"]) == ("linear", 4.0)


def test_a_window_of_no_tokens_is_none(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_model("llama-gqa", **LLAMA), **{"llama.attention.sliding_window": 0})
    assert load_model(tmp_path / "m.gguf").architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("name", "num_layers", "hidden_size", "expected"), [("gemma2", 46, 4608, 144), ("gemma3", 62, 5376, 168)]
)
def test_how_the_largest_models_scale_their_queries(
    name: str, num_layers: int, hidden_size: int, expected: int
) -> None:
    """Gemma 2 and 3 with 27 billion weights, as their config.json has it. No file says so."""
    fields = {"embedding_length": hidden_size, "feed_forward_length": 1, "context_length": 8192}
    attention = {"sliding_window": 8, "head_count": 32, "key_length": 128, "layer_norm_rms_epsilon": 1e-6}
    for count, scalar in ((num_layers, expected), (num_layers - 1, 128)):
        metadata = {f"{name}.{key}": value for key, value in (fields | {"block_count": count}).items()}
        metadata |= {f"{name}.attention.{key}": value for key, value in attention.items()}
        file = GgufFile(Path("m.gguf"), metadata | {"general.architecture": name}, {})
        assert family_of(file)(file)["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize(("pattern", "windows"), [(3, [1, 1, 0]), (1, [0, 0, 0]), ([False, True, True], [0, 1, 1])])
def test_which_layers_have_windows(tmp_path: Path, name: str, pattern: Any, windows: list[int]) -> None:
    """As the file says: every so many layers one sees all tokens, or of each layer whether it has a window."""
    kinds = ["sliding_attention" if has_window else "full_attention" for has_window in windows]
    model = make_gemma(name, num_hidden_layers=3, layer_types=kinds)
    key = f"{name.removesuffix('_text')}.attention.sliding_window_pattern"
    write_gguf(tmp_path / "m.gguf", model, **{key: pattern})
    assert gguf_config(GgufFile.open(tmp_path / "m.gguf"))["layer_types"] == kinds
    assert tokens_of(tmp_path / "m.gguf") == greedy_references(model, PROMPTS, 8)


# ---- forms of layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "kind"),
    [
        ("llama-gqa", LLAMA, "q8_0"),
        ("llama-gqa", LLAMA | dict(tie_word_embeddings=True), "q4_1"),
        ("qwen2-tied", dict(hidden_size=96, intermediate_size=64), "q8_0"),
        ("gemma3_text", {}, "q8_0"),
    ],
)
def test_scales_or_minima_that_int8_rows_take(tmp_path: Path, name: str, fields: dict[str, Any], kind: str) -> None:
    """Also of a last layer that is tied to the embedding."""
    write_gguf(tmp_path / "m.gguf", make(name, **fields), kind).save_pretrained(tmp_path / "dir")
    model = load_model(tmp_path / "m.gguf")
    assert isinstance(model.get_submodule(model.head), Int8Linear)
    assert_same_tensors(model, load_model(tmp_path / "dir", quantization="int8"))


@pytest.mark.parametrize("rank", [0, 1, None])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_slices_of_ranks(tmp_path: Path, rank: int | None, quantization: str | None) -> None:
    """q6_k in the layer that ranks split by inputs: its blocks of 256 are longer than a rank's inputs."""
    partition = Partition() if rank is None else Partition(rank, 2, Alone(rank, 2))

    def type_of(name: str) -> str:
        return "q6_k" if quantization and ("down" in name or "output" in name) else "q8_0"

    model = make_model("llama-gqa", **BLOCKS_OF_256, head_dim=64)
    write_gguf(tmp_path / "m.gguf", model, type_of).save_pretrained(tmp_path / "dir")
    one, other = (
        load_model(path, quantization=of, partition=partition)
        for path, of in ((tmp_path / "m.gguf", quantization), (tmp_path / "dir", "int8"))
    )
    assert_same_tensors(one, other)


def unpacked_q4_0(file: Path, *names: str) -> Int4Weight:
    """The codes and scales of weights, one below the other, by the package's own reader."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    blocks = np.concatenate([np.array(tensors[name].data) for name in names])
    blocks = blocks.reshape(len(blocks), -1, 18)
    scales = torch.from_numpy(blocks[..., :2].copy().view(np.float16)[..., 0].copy())
    codes = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1).reshape(len(blocks), -1)
    return Int4Weight(torch.from_numpy(codes), scales, torch.full(scales.shape, 8, dtype=torch.uint8))


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_codes_of_4_bits_stay(tmp_path: Path, quantization: str | None) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, make_model("qwen3", **LLAMA), "q4_0")
    model = load_model(file, quantization=quantization)
    down, up = "blk.1.ffn_down.weight", ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight")
    for name, weight in [
        ("model.layers.1.mlp.down_proj", unpacked_q4_0(file, down)),
        ("model.layers.1.mlp.gate_up_proj", unpacked_q4_0(file, *up)),
        ("lm_head", unpacked_q4_0(file, "output.weight")),
    ]:
        layer = model.get_submodule(name)
        assert isinstance(layer, Int4Linear)
        assert torch.equal(layer.packed_weight, Int4Linear(weight, None).packed_weight)


def test_fewer_bits_than_the_file_has(tmp_path: Path) -> None:
    """The weights are quantized anew, as an option says."""
    write_gguf(tmp_path / "m.gguf", make_model("llama-gqa", **LLAMA), "q8_0")
    for quantization, form in ((None, Int8Linear), ("int4", Int4Linear)):
        model = load_model(tmp_path / "m.gguf", quantization=quantization)
        assert isinstance(model.get_submodule("model.layers.1.mlp.down_proj"), form)


def test_4_bits_give_the_logits_of_floats(tmp_path: Path) -> None:
    """Queries and keys of LLaMA, whose rows are permuted in blocks. Rows of 8 bits explain the rest."""
    for name in ("llama-gqa", "gemma3_text"):
        file = tmp_path / f"{name}.gguf"
        model = write_gguf(file, make(name, **(LLAMA if name == "llama-gqa" else {})), "q4_0")
        model.save_pretrained(tmp_path / name)
        of_codes, of_floats = load_model(file), load_model(tmp_path / name)
        forms = {type(layer) for layer in of_codes.modules()}
        assert Int4Linear in forms and PackedLinear not in forms
        for part in ("self_attn.qkv_proj", "mlp.down_proj") if name == "llama-gqa" else ("self_attn.q_proj",):
            prefix = "model.layers.1" if name == "llama-gqa" else "model.model.layers.1"
            one, other = (each.get_submodule(f"{prefix}.{part}") for each in (of_codes, of_floats))
            rows = torch.randn(7, one.packed_weight.shape[1] * 32)
            expected = other(rows)
            assert (one(rows) - expected).norm() < 0.01 * expected.norm()


def test_a_layer_has_the_bits_of_its_widest_part(tmp_path: Path) -> None:
    def type_of(name: str) -> str:
        by_part = {"attn_v": "q8_0", "ffn_up": "q6_k", "ffn_down": "q4_k", "attn_output": "f16"}
        return next((kind for part, kind in by_part.items() if part in name), "q4_0")

    file = tmp_path / "m.gguf"
    write_gguf(file, make_model("llama-gqa", **BLOCKS_OF_256, head_dim=64), type_of)
    model = load_model(file)
    layer = model.get_submodule("model.layers.0")
    forms = [type(layer.get_submodule(name)) for name in ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")]
    assert forms == [Int8Linear, PackedLinear, PackedLinear]
    assert isinstance(model.lm_head, Int4Linear)
    plain, stored = build_model(file), checkpoint_format(file)
    words = describe_linear_layers(plain, stored, linear_forms(plain, stored, None))
    assert "5 q4_0 as int4" in words and "1 q8_0 as int8" in words and "1 q6_k as floats" in words
    assert "int8, a scale" in describe_linear_layers(plain, stored, linear_forms(plain, stored, "int8"))


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, make_model("llama-gqa", **LLAMA), "q8_0", tokenizer={"tokenizer.ggml.tokens": ["a", "b"] * 40})
    return path


def test_a_file_that_is_cut_off(file: Path, tmp_path: Path) -> None:
    """Anywhere: an error that names the file, and no other."""
    whole = file.read_bytes()
    begin = min(place.begin for place in GgufFile.open(file).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [*range(1, begin, 7), begin, begin + 100, len(whole) // 2]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"^model: cannot read .*cut\.gguf: (it is cut off|expected the bytes)"):
            build_model(cut)


def test_bytes_that_are_not_those_of_the_format(file: Path, tmp_path: Path) -> None:
    """One byte of what comes before the tensors is another: an error of ours, or none."""
    whole = bytearray(file.read_bytes())
    begin = min(place.begin for place in GgufFile.open(file).tensors.values())
    other = tmp_path / "other.gguf"
    for place in range(0, begin, 29):
        content = whole.copy()
        content[place] ^= 0xFF
        other.write_bytes(content)
        try:
            build_model(other)
            checkpoint_format(other)
        except (ValueError, TypeError) as error:
            assert "other.gguf" in str(error) or ": expected" in str(error), error


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "the file is empty"),
        (b"GGUX" + bytes(60), "expected the bytes b'GGUF' at its beginning, got b'GGUX'"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(60), "expected version 2 or 3 of the format, got 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(60), "a file of the other byte order"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 60, "cut off after 68 bytes"),
    ],
)
def test_what_is_no_such_file(tmp_path: Path, content: bytes, error: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=error) as raised:
        load_model(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(raised.value)


def test_a_file_by_another_name(file: Path, tmp_path: Path) -> None:
    """Such as in a cache that names files by their digests."""
    (tmp_path / "blob").write_bytes(file.read_bytes())
    assert load_model(tmp_path / "blob").architecture == "LlamaForCausalLM"


def test_files_that_are_not_there(file: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model: expected a GGUF file that exists, got .*nowhere\.gguf"):
        model_directory(file.parent / "nowhere.gguf")
    with pytest.raises(FileNotFoundError, match=r"where a file of it can be the model: m\.gguf"):
        model_directory(file.parent)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"general.architecture": "mamba"}, "expected llama or .* in .*m.gguf, got 'mamba'"),
        (dict(without={"blk.1.ffn_up.weight"}), "missing model.layers.1.mlp.up_proj.weight"),
        (dict(without={"token_embd.weight"}), "it has no tensor token_embd.weight"),
        (
            dict(without={"blk.0.ffn_up.weight"}, more={"blk.0.ffn_up.weight": np.zeros((96, 0), np.float32)}),
            r"expected rows of whole blocks of 1 of blk.0.ffn_up.weight, got \[96, 0\]",
        ),
        (dict(more={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}), "blk.0.attn_sinks.weight has no place"),
        ({"llama.expert_count": 8}, "llama.expert_count: expected none in .*m.gguf.*, got 8"),
        ({"split.count": 3}, "split.count: expected one file"),
        ({"llama.attention.causal": False}, "llama.attention.causal: expected true in .*m.gguf.*, got false"),
        ({"llama.block_count": None}, "llama.block_count: expected int in the metadata of .*m.gguf, got None"),
        ({"llama.block_count": "two"}, "llama.block_count: expected int in the metadata of .*m.gguf, got 'two'"),
        ({"llama.attention.head_count_kv": [1, 2]}, r"llama.attention.head_count_kv: expected int .*, got \[1, 2\]"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count: expected an int >= 1"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length: expected 16, the size of a key"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: expected 16, all of a head"),
        ({"llama.rope.scaling.type": "longrope"}, "expected none, linear or yarn in .*m.gguf, got 'longrope'"),
        ({"llama.rope.scaling.factor": -2.0}, "llama.rope.scaling.factor: expected a number >= 0 in .*m.gguf, got -2"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor: expected 0, or none, in .*m.gguf, got 0.5"),
        ({"llama.rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor: expected 1, or none, in .*m.gguf, got 2"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier: expected 0, or none, in .*, got 0.1"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "scaling.attn_factor: expected 1, or none, in .*m.gguf, got 0.5"),
        ({"general.alignment": 0}, "expected a general.alignment of 1 byte or more, got 0"),
    ],
)
def test_what_has_no_home_here(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    model = make_model("llama-gqa", **LLAMA)
    if "general.architecture" in options:
        model.config.model_type = options.pop("general.architecture")
        model.config.architectures = None
    with pytest.raises(ValueError, match=error):
        write_gguf(tmp_path / "m.gguf", model, **options)
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("rope.freq_base_swa", 500.0, "gemma2.rope.freq_base_swa: expected 10000, that of all layers, in .*, got 500"),
        ("attention.sliding_window_pattern", 0, "pattern: expected an int >= 1, or a bool for each of 2 .*, got 0"),
        ("attention.sliding_window_pattern", [True], r"expected an int >= 1, or a bool for each of 2 .*, got \[True\]"),
        ("attention.sliding_window_pattern", [2, 1], r"expected an int >= 1, or a bool for each of 2 .*, got \[2, 1\]"),
    ],
)
def test_windows_that_have_no_home_here(tmp_path: Path, field: str, value: Any, error: str) -> None:
    write_gguf(tmp_path / "m.gguf", make_gemma("gemma2"), **{f"gemma2.{field}": value})
    with pytest.raises(ValueError, match=error):
        load_model(tmp_path / "m.gguf")


def test_types_that_cannot_be_read(tmp_path: Path, file: Path) -> None:
    model = make_model("llama-gqa", **LLAMA)
    more = {"blk.0.attn_sinks.weight": np.zeros((4, 4), np.int32)}
    write_gguf(tmp_path / "m.gguf", model, more=more)
    with pytest.raises(ValueError, match=r"m\.gguf: blk.0.attn_sinks.weight is of type i32, which cannot be read"):
        load_model(tmp_path / "m.gguf")
    content = file.read_bytes()
    name = b"blk.0.ffn_down.weight"
    place = content.index(name) + len(name) + 4 + 16
    (tmp_path / "m.gguf").write_bytes(content[:place] + (99).to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(ValueError, match=r"m\.gguf: blk.0.ffn_down.weight is of type 99, which the package gguf"):
        load_model(tmp_path / "m.gguf")


def test_a_number_that_cannot_be_quantized(tmp_path: Path) -> None:
    model = make_model("llama-gqa", **LLAMA)
    write_gguf(tmp_path / "m.gguf", model, "q8_0")
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    place = GgufFile.open(tmp_path / "m.gguf").tensors["blk.1.ffn_down.weight"].begin
    content[place : place + 2] = np.float16(np.nan).tobytes()
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"model: cannot read model.layers.1.mlp.down_proj: weight: expected elements"):
        load_model(tmp_path / "m.gguf")


def test_without_the_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(ImportError, match=r"model: expected the package gguf .*pip install .*python\[gguf\]"):
        load_model(file)
