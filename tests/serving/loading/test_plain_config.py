"""config.json without transformers: what models read is what AutoConfig says, or AutoConfig is asked."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, SHAPES, VARIANTS
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from pagedattn_serve.loading.directory import FIELDS, read_plain_config
from pagedattn_serve.loading.loader import NATIVE, TORCH_DTYPES
from pagedattn_serve.models.llama import sliding_window_of_layer
from pagedattn_serve.models.partition import SINGLE
from pagedattn_serve.models.rope import rope_parameters

ARCHITECTURES = {
    "bloom": "BloomForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "opt": "OPTForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What `compare` compares by what it means, as each side may write it in its own way.
COMPARED_BY_MEANING = {
    *("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"),
    *("head_dim", "layer_types", "sliding_window", "use_sliding_window", "dtype", "torch_dtype"),
}
# Fields that transformers writes, or wrote, and values that they may have; None stands for null.
VALUES: dict[str, list[Any]] = {
    "activation_function": ["gelu", "relu", None],
    "apply_residual_connection_post_layernorm": [True, False, None],
    "attention_bias": [True, False, None, 1],
    "do_layer_norm_before": [True, False],
    "dtype": ["float32", "float16", "bfloat16", "float64", None],
    "enable_bias": [True, False],
    "head_dim": [6, 8, None],
    "hidden_act": ["gelu", "silu"],
    "hidden_size": [48, 50],
    "layer_norm_elementwise_affine": [True, False],
    "layer_norm_epsilon": [1e-6, 1],
    "layer_types": [["full_attention", "sliding_attention"], None],
    "max_position_embeddings": [64, None],
    "max_window_layers": [1],
    "mlp_bias": [True, False],
    "n_embd": [24, None],
    "n_embed": [40, None],
    "n_head": [2],
    "n_inner": [30, None],
    "n_layer": [1],
    "n_positions": [64],
    "num_attention_heads": [2, 4],
    "num_hidden_layers": [2],
    "num_key_value_heads": [1, 2, None],
    "original_max_position_embeddings": [32, None],
    "pretraining_tp": [1, 2, None],
    "rms_norm_eps": [1e-5, 1, None],
    "_remove_final_layer_norm": [True, False],
    "rope_theta": [500.0, 10000, 0, None],
    "scale_attn_by_inverse_layer_idx": [True, False],
    "scale_attn_weights": [True, False],
    "seq_length": [64, None],
    "sliding_window": [7, None],
    "slow_but_exact": [True, False],
    "tie_word_embeddings": [True, False, None],
    "torch_dtype": ["float32", "bfloat16", None],
    "use_sliding_window": [True, False],
    "vocab_size": [97],
    "word_embed_proj_dim": [20, None],
}
ROPE: list[Any] = [
    None,
    {},
    {"rope_type": "default"},
    {"rope_theta": 300.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear"},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 77},
    {"rope_type": None, "type": "dynamic", "factor": 3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": None},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0},
    {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0], "factor": 2.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 5.0}, "sliding_attention": {"rope_type": "default"}},
]


def fields_of(name: str) -> dict[str, Any]:
    """The config.json of one of VARIANTS, as transformers writes it."""
    config_class, fields = VARIANTS[name]
    config = config_class(**{**SHAPES[config_class], **json.loads(json.dumps(fields))})
    config.architectures = [ARCHITECTURES[config.model_type]]
    written: dict[str, Any] = json.loads(config.to_json_string())
    return written


def auto_config(fields: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fields))
        return AutoConfig.from_pretrained(directory)


def compare(plain: Any, auto: Any) -> None:
    for name in vars(plain).keys() - COMPARED_BY_MEANING:
        assert getattr(plain, name) == getattr(auto, name, None), name
        assert type(getattr(plain, name)) is type(getattr(auto, name, None)), name
    dtype = auto.dtype if hasattr(auto, "dtype") else auto.torch_dtype
    assert TORCH_DTYPES.get(plain.dtype) == dtype
    if not hasattr(plain, "rms_norm_eps"):
        return
    assert plain.head_dim == (getattr(auto, "head_dim", None) or auto.hidden_size // auto.num_attention_heads)
    for layer in range(plain.num_hidden_layers):
        assert sliding_window_of_layer(plain, layer) == sliding_window_of_layer(auto, layer)
    try:
        expected = rope_parameters(auto)
    except ValueError as error:
        with pytest.raises(ValueError) as own:
            rope_parameters(plain)
        assert str(own.value) == str(error)
    else:
        own_parameters = rope_parameters(plain)
        expected.pop("type", None), own_parameters.pop("type", None)
        assert own_parameters == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_what_transformers_writes_is_plain(name: str) -> None:
    """But for models some of whose layers have windows, and for heads that transformers itself may refuse."""
    fields = fields_of(name)
    plain = read_plain_config(fields)
    if fields.get("use_sliding_window"):
        assert plain is None
        return
    assert plain is not None
    compare(plain, auto_config(fields))


class Recorder:
    """A config that notes which attributes are asked for."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._config, name)


@pytest.mark.parametrize("name", VARIANTS)
def test_all_that_models_read_is_compared(name: str) -> None:
    fields = fields_of(name)
    config = Recorder(auto_config(fields))
    with torch.device("meta"):
        NATIVE[fields["architectures"][0]](config, torch.float32, SINGLE)
    known = {*FIELDS[fields["model_type"]], "model_type", "architectures"} | COMPARED_BY_MEANING
    assert config.names <= known
    assert {"vocab_size", "hidden_size", "tie_word_embeddings"} <= config.names


def check(fields: dict[str, Any]) -> bool:
    """Whether the fields are plain. Fails if they are not what transformers makes of them."""
    plain = read_plain_config(copy.deepcopy(fields))
    if plain is None:
        return False
    try:
        auto = auto_config(fields)
    except (KeyError, ValueError):  # a parameter of the scaling is missing, which models say as well
        with pytest.raises(ValueError, match="expected one for rope_type"):
            rope_parameters(plain)
    else:
        compare(plain, auto)
    return True


@pytest.mark.parametrize("name", FAMILIES)
def test_a_change_of_one_field(name: str) -> None:
    """A field is missing, null, of another type, given twice, or of another family."""
    fields = fields_of(name)
    changed = [{**fields, field: value} for field, values in VALUES.items() for value in values]
    changed += [{field: value, **fields} for field, values in VALUES.items() if field not in fields for value in values]
    if "rope_parameters" in fields:
        changed += [{**fields, "rope_parameters": rope} for rope in ROPE]
        changed += [{**fields, "rope_parameters": None, "rope_scaling": rope} for rope in ROPE]
        changed += [{**fields, "rope_parameters": None, "rope_theta": theta} for theta in VALUES["rope_theta"]]
    changed += [{other: fields[other] for other in fields if other != field} for field in fields]
    num_plain = sum(map(check, changed))
    assert len(changed) // 2 < num_plain < len(changed)


@given(
    name=st.sampled_from(list(VARIANTS)),
    changes=st.dictionaries(st.sampled_from(list(VALUES)), st.integers(0, 4), max_size=4),
    rope=st.dictionaries(st.sampled_from(["rope_parameters", "rope_scaling"]), st.sampled_from(ROPE), max_size=2),
    removed=st.sets(st.sampled_from([*VALUES, "rope_parameters"]), max_size=3),
)
def test_changes_of_several_fields(name: str, changes: dict[str, int], rope: dict[str, Any], removed: set[str]) -> None:
    fields = {field: value for field, value in fields_of(name).items() if field not in removed}
    fields |= {field: VALUES[field][i % len(VALUES[field])] for field, i in changes.items()}
    check(fields | (rope if "rope_parameters" in fields_of(name) else {}))


@pytest.mark.parametrize("model_type", FIELDS)
def test_a_file_that_says_little_is_left_to_transformers(model_type: str) -> None:
    """As its defaults are in transformers alone."""
    assert read_plain_config({"model_type": model_type, "architectures": [ARCHITECTURES[model_type]]}) is None


def test_what_is_not_plain() -> None:
    fields = fields_of("llama-gqa")
    assert read_plain_config(fields) is not None
    for other in (
        {"model_type": "phi3"},
        {"model_type": ["llama"]},
        {"per_layer_config": {"0": {"hidden_size": 40}}},
        {"configuration_files": ["config.4.0.0.json"]},
        {"partial_rotary_factor": 0.5},
        {"head_dim": 7},
        {"num_attention_heads": 5},
        {"rope_scaling": "linear"},
        {"torch_dtype": "float64", "dtype": None},
        {"vocab_size": True},
    ):
        assert read_plain_config(fields | other) is None, other
    assert read_plain_config(fields_of("mistral") | {"layer_types": ["full_attention"] * 2}) is None
