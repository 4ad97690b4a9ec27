"""`load_format="dummy"`: a model of a config.json alone."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, change_config
from engine_runs import run, token_ids
from transformers import AutoConfig

from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [6]]


def config_alone(tmp_path: Path, source: str | Path) -> Path:
    shutil.copy(Path(source) / "config.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "opt-350m", "bloom-8-heads"])
def test_native_families_run(get_checkpoint: Callable[[str], Checkpoint], tmp_path: Path, name: str) -> None:
    """Whatever form their checkpoints have: fused, transposed, interleaved. The weights are the same each time, and
    those of a rank are a part of them."""
    path = config_alone(tmp_path, get_checkpoint(name).path)
    models = [load_model(path, load_format="dummy") for _ in range(2)]
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[each], second[each]) for each in first)
    engines = [LLMEngine(path, load_format="dummy", num_blocks=8, **options) for options in ({}, {"dtype": "bfloat16"})]
    for engine in engines:
        assert [len(ids) for ids in token_ids(run(engine, PROMPTS, GREEDY))] == [8, 8]


SHAPE: dict[str, Any] = dict(
    vocab_size=97, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, num_experts_per_tok=2, moe_intermediate_size=24,
)  # fmt: skip
FALLBACKS: dict[str, dict[str, Any]] = {
    "mixtral": dict(**SHAPE, architectures=["MixtralForCausalLM"], num_local_experts=4),
    "deepseek_v3": dict(
        **SHAPE, architectures=["DeepseekV3ForCausalLM"], q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", FALLBACKS)
def test_models_of_transformers_run(tmp_path: Path, model_type: str) -> None:
    """Their experts and latents have names of their own."""
    AutoConfig.for_model(model_type, **FALLBACKS[model_type]).save_pretrained(tmp_path)
    engine = LLMEngine(tmp_path / "config.json", load_format="dummy", num_blocks=16)
    assert [len(ids) for ids in token_ids(run(engine, PROMPTS, GREEDY))] == [8, 8]


def test_what_weights_there_are_does_not_matter(tmp_path: Path) -> None:
    """Nothing of the checkpoint is read, and the fingerprint says so."""
    path = config_alone(tmp_path, DEMO_MODEL)
    options: dict[str, Any] = dict(load_format="dummy", num_blocks=8, kv_cache_dtype="fp8", quantization="int4")
    alone, beside = LLMEngine(path, **options), LLMEngine(DEMO_MODEL, **options)
    assert token_ids(run(alone, PROMPTS, GREEDY)) == token_ids(run(beside, PROMPTS, GREEDY))
    assert alone.system_fingerprint == beside.system_fingerprint
    assert alone.system_fingerprint != LLMEngine(DEMO_MODEL, **options | {"load_format": "auto"}).system_fingerprint


def test_a_quantized_checkpoint_has_no_dummies(tmp_path: Path) -> None:
    path = config_alone(tmp_path, DEMO_MODEL)
    change_config(path, quantization_config=dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True))
    with pytest.raises(ValueError, match=r"^load_format: expected auto for a quantized checkpoint or a GGUF file, "):
        LLMEngine(path, load_format="dummy")
