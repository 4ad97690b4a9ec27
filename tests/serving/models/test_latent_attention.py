"""MLA models on a cache of latents: the results of expanded keys and values, and what the engine does with a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL
from engine_runs import run, token_ids
from test_partition import on_one
from test_transformers_models import GREEDY, make_model, model_of, prompts_of, references
from transformers import PreTrainedModel

from pagedattn_ext.ops import mla_attention
from pagedattn_serve.calibration import calibrate_kv_scales
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.models import latent_attention
from pagedattn_serve.models.linear import Int8Linear, PackedLinear
from pagedattn_serve.sampling_params import SamplingParams


def save(directory: Path, model_type: str) -> tuple[str, PreTrainedModel]:
    model = make_model(model_type)
    model.save_pretrained(directory)
    return str(directory), model


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minicpm3"])
def test_logits_are_those_of_expanded_keys_and_values(tmp_path: Path, model_type: str) -> None:
    _, model = save(tmp_path, model_type)
    prompts = prompts_of(model_type, (1, 7, 33))
    _, logits = on_one(tmp_path, prompts, 1)
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def test_a_token_takes_a_latent_and_a_rotary_part(tmp_path: Path) -> None:
    """And no value, of the 4 heads of which each expanded key would have 24 numbers."""
    path, _ = save(tmp_path, "deepseek_v2")
    cache_engine = LLMEngine(path, num_blocks=3, swap_space=1).model_runner.cache_engine
    for keys, values in [cache[:2] for cache in cache_engine.kv_caches] + cache_engine.host_caches:
        assert keys.shape[1:] == (16, 16 + 8)
        assert values.numel() == 0


def test_swapped_forks_and_prefixes_found_again(tmp_path: Path) -> None:
    """Three samples of a prompt share its blocks, are swapped out and in, and have the tokens of a roomy cache."""
    path, model = save(tmp_path, "minicpm3")
    prompts = prompts_of("forks", (20, 33, 9))
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=12)

    def samples(engine: LLMEngine) -> list[list[tuple[int, ...]]]:
        outputs = run(engine, prompts, params)
        return [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]

    roomy = LLMEngine(path)
    small = LLMEngine(path, **SMALL | {"num_blocks": 10, "max_num_seqs": 9}, swap_space=1)
    assert samples(small) == samples(roomy)
    assert small.stats().num_swaps > 0
    cached = LLMEngine(path, enable_prefix_caching=True, block_size=8)
    for _ in range(2):
        assert token_ids(run(cached, prompts, GREEDY)) == references(model, prompts)
    assert cached.stats().num_found_tokens > 0


def test_layers_of_the_heads_are_packed_and_quantized(tmp_path: Path) -> None:
    """A layer to absorb keys and a layer for values, of each of 4 heads in 2 layers."""
    path, _ = save(tmp_path, "deepseek_v3")
    for quantization, kind in ((None, PackedLinear), ("int8", Int8Linear)):
        engine = LLMEngine(path, quantization=quantization)
        modules = dict(model_of(engine).model.named_modules())
        of_heads = [
            type(module) for name, module in modules.items() if ".kv_b_proj.keys." in name or ".values." in name
        ]
        assert of_heads == [kind] * 16
        assert len(token_ids(run(engine, [[1, 2, 3]], GREEDY))[0]) == 20


def test_half_precision(tmp_path: Path) -> None:
    path, _ = save(tmp_path, "minicpm3")
    prompts = prompts_of("half", tuple(range(1, 21)))
    params = SamplingParams(temperature=0, max_tokens=2)
    expected = token_ids(run(LLMEngine(path), prompts, params))
    actual = token_ids(run(LLMEngine(path, dtype="bfloat16", **SMALL), prompts, params))
    assert sum(a[0] == b[0] for a, b in zip(actual, expected, strict=True)) >= 15


def test_what_a_cache_of_latents_does_not_have_is_refused(tmp_path: Path) -> None:
    path, _ = save(tmp_path, "minicpm3")
    with pytest.raises(
        ValueError, match=r"^kv_cache_dtype: expected auto, as the cache holds latents \(MLA\), got float8"
    ):
        LLMEngine(path, kv_cache_dtype="fp8")
    with pytest.raises(
        ValueError, match=r"^model: expected one that keeps keys and values, .* got one that keeps latents"
    ):
        calibrate_kv_scales(path, [[1, 2, 3]], kv_cache_dtype="fp8")


def test_wrong_latents_are_found_when_the_weights_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(*args: Any, scale: float, **options: Any) -> Any:
        return mla_attention(*args, scale=1.0, **options)

    path, _ = save(tmp_path, "minicpm3")
    monkeypatch.setattr(latent_attention.ops, "mla_attention", unscaled)
    with pytest.raises(ValueError, match="its logits are not those that it has with its own attention"):
        LLMEngine(path)
