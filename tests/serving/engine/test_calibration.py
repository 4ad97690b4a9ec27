"""calibrate_kv_scales: from the largest keys and values, against those that Hugging Face keeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, make_model
from safetensors.torch import load_file, save_file

from pagedattn_serve import LLM, calibrate_kv_scales


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gpt2", "opt-350m"])
@pytest.mark.parametrize(("kv_cache_dtype", "largest"), [("fp8", 448), ("fp8_e4m3", 448), ("fp8_e5m2", 57344)])
def test_scales(get_checkpoint: Callable[[str], Checkpoint], name: str, kv_cache_dtype: str, largest: int) -> None:
    checkpoint = get_checkpoint(name)
    prompts = checkpoint.prompts[:6]
    scales = calibrate_kv_scales(checkpoint.path, prompts, kv_cache_dtype)
    caches = [checkpoint.model(torch.tensor([prompt]), use_cache=True).past_key_values for prompt in prompts]
    for i, pair in enumerate(scales):
        layers = [cache.layers[i] for cache in caches]
        expected = [max(layer.keys.abs().max().item() for layer in layers)]
        expected += [max(layer.values.abs().max().item() for layer in layers)]
        assert pair == pytest.approx([number / largest for number in expected], rel=1e-4)
    assert len(scales) == checkpoint.model.config.num_hidden_layers
    engine = LLM(checkpoint.path, kv_cache_dtype=kv_cache_dtype, kv_scales=scales).llm_engine
    assert engine.model_runner.cache_engine.kv_caches[1].v_scale == pytest.approx(scales[1][1])


def test_texts(text_model: str) -> None:
    assert calibrate_kv_scales(text_model, "the cat sat") == calibrate_kv_scales(text_model, ["the cat sat", "the cat"])


def test_zeros(tmp_path: Path) -> None:
    """A layer whose values are all zero is not scaled."""
    make_model("llama-gqa").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"].zero_()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    scales = calibrate_kv_scales(str(tmp_path), [[1, 2, 3]])
    assert scales[1][1] == 1 and scales[0][1] < 1


def test_not_finite(tmp_path: Path) -> None:
    make_model("llama-gqa").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^prompts: expected finite .*, got NaN or infinity in layer 1"):
        calibrate_kv_scales(str(tmp_path), [[1, 2, 3]])


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, ValueError, "prompts: expected at least one, got none"),
        ([[1], [1, 97]], {}, ValueError, r"^prompt 2 of 2: prompt_token_ids: expected an int in \[0, 96\], got 97"),
        ([[1]], dict(kv_cache_dtype="auto"), ValueError, "kv_cache_dtype: expected fp8, .*got auto"),
        ([[1]], dict(kv_cache_dtype="int8"), ValueError, "kv_cache_dtype: expected fp8, .*got int8"),
    ],
)
def test_wrong_arguments(
    llama: Checkpoint, prompts: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        calibrate_kv_scales(llama.path, prompts, **options)
