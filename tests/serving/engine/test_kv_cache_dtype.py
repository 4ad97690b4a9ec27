"""A cache in fp8 or int8 in the engine: numbers as they are stored and read, memory, and where scales come from."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, change_config, convert_to_bin, make_model
from engine_runs import run, token_ids
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pagedattn_ext import ops
from pagedattn_serve.calibration import calibrate_kv_scales, run_alone
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.engine_args import GivenScales
from pagedattn_serve.models import layers
from pagedattn_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
CACHES: dict[str, dict[str, Any]] = {name: dict(kv_cache_dtype=name, kv_scales=(0.01, 0.01)) for name in FP8}
CACHES["int8"] = dict(kv_cache_dtype="int8")
PROMPT = list(range(3, 60))
OLMO = dict(hidden_size=40, num_attention_heads=2, num_hidden_layers=2, intermediate_size=48, vocab_size=97)


@pytest.fixture(params=["llama-gqa", "gpt2", "bloom", "transformers"])
def path(request: pytest.FixtureRequest, get_checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> str:
    """Heads of 20, 12, 11 and 20 numbers, which an fp8 cache pads to 32 and 16."""
    if request.param != "transformers":
        return get_checkpoint(request.param).path
    config = AutoConfig.for_model("olmo2", **OLMO, max_position_embeddings=128, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3, generator=generator)
    model.save_pretrained(tmp_path)
    return str(tmp_path)


@torch.inference_mode()
def logits(engine: LLMEngine) -> Tensor:
    """Of PROMPT in chunks, the later of which read what the earlier have written."""
    return torch.cat(list(run_alone(engine.model_runner, PROMPT, 7)))


def round_trip(tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (tensor / scale).clamp(-largest, largest).to(dtype).float() * scale


@pytest.mark.parametrize("kv_cache_dtype", FP8)
def test_numbers_are_scaled_by_layer(path: str, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an fp32 cache into which each layer writes what its fp8 cache would give back."""
    fp8 = FP8[kv_cache_dtype]
    in_fp32 = LLMEngine(path)
    exact = logits(in_fp32)
    num_layers = in_fp32.model_runner.model.num_layers
    largest = torch.finfo(fp8).max
    scales = [(0.3 / largest * (i + 1), 0.7 / largest * (i + 1)) for i in range(num_layers)]  # some are cut off
    actual = logits(LLMEngine(path, kv_cache_dtype=kv_cache_dtype, kv_scales=scales))

    real, calls = ops.reshape_and_cache, 0

    def write(key: Tensor, value: Tensor, *caches: Tensor, k_scale: object, v_scale: object) -> None:
        nonlocal calls
        (of_keys, of_values), calls = scales[calls % num_layers], calls + 1
        real(round_trip(key, of_keys, fp8), round_trip(value, of_values, fp8), *caches)

    monkeypatch.setattr(layers.ops, "reshape_and_cache", write)
    expected = logits(in_fp32)
    difference = (actual - expected).norm() / expected.norm()
    assert difference < 1e-3 < 0.05 < (exact - expected).norm() / expected.norm()


def test_int8_numbers_are_scaled_by_token_and_head(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an fp32 cache into which each layer writes what its int8 cache would give back."""
    in_fp32 = LLMEngine(path)
    exact = logits(in_fp32)
    actual = logits(LLMEngine(path, kv_cache_dtype="int8"))
    real = ops.reshape_and_cache

    def stored(tensor: Tensor) -> Tensor:
        scale = tensor.abs().amax(-1, keepdim=True) / 127
        return (tensor / scale).round() * scale

    def write(key: Tensor, value: Tensor, *caches: Tensor, **scales: object) -> None:
        real(stored(key), stored(value), *caches)

    monkeypatch.setattr(layers.ops, "reshape_and_cache", write)
    expected = logits(in_fp32)
    difference = (actual - expected).norm() / expected.norm()
    assert difference < 1e-3 < 5e-3 < (exact - expected).norm() / expected.norm()


@pytest.mark.parametrize(("of_keys", "of_values"), [(2.0**12, 1.0), (1.0, 2.0**-14)])
def test_calibration_saves_what_scale_1_loses(
    llama: Checkpoint, tmp_path: Path, of_keys: float, of_values: float
) -> None:
    """Keys beyond the largest number, or values below the least, of a model that computes the same: so does fp8."""
    model = make_model("llama-gqa")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= of_keys
            layer.self_attn.q_proj.weight /= of_keys
            layer.self_attn.v_proj.weight *= of_values
            layer.self_attn.o_proj.weight /= of_values
    model.save_pretrained(tmp_path)
    exact = logits(LLMEngine(llama.path))

    def in_fp8(path: str, scales: GivenScales) -> Tensor:
        return logits(LLMEngine(path, kv_cache_dtype="fp8", kv_scales=scales))

    expected = in_fp8(llama.path, calibrate_kv_scales(llama.path, [PROMPT]))
    calibrated = in_fp8(str(tmp_path), calibrate_kv_scales(str(tmp_path), [PROMPT]))
    unscaled = in_fp8(str(tmp_path), (1, 1))
    torch.testing.assert_close(calibrated, expected)
    assert (unscaled - exact).norm() > 3 * (expected - exact).norm()


@pytest.mark.parametrize("kv_cache_dtype", CACHES)
def test_it_generates_under_preemption(path: str, kv_cache_dtype: str) -> None:
    """What it does with room for all."""
    options = CACHES[kv_cache_dtype]
    prompts = [PROMPT[:n] for n in (1, 5, 17, 33)]
    expected = token_ids(run(LLMEngine(path, **options), prompts, GREEDY))
    engine = LLMEngine(path, **options, num_blocks=8, block_size=8, max_num_batched_tokens=9)
    assert token_ids(run(engine, prompts, GREEDY)) == expected
    assert engine.stats().num_preemptions > 0
    dtype = {**FP8, "int8": torch.int8}[kv_cache_dtype]
    assert engine.model_runner.cache_engine.kv_caches[0].key_cache.dtype == dtype


def test_int8_scales_go_where_their_blocks_go(llama: Checkpoint) -> None:
    """Forks that write to shared blocks, beams, blocks on the host and prefix hits: the tokens of an engine with room
    for all, which shares nothing between requests."""
    forked = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20)
    beams = SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=20)
    prompts = [PROMPT[:21], PROMPT[:33], PROMPT[:21]]
    swapping: dict[str, Any] = dict(preemption_mode="swap", swap_space=1)
    for params in (forked, beams):
        expected = token_ids(
            run(LLMEngine(llama.path, kv_cache_dtype="int8", enable_prefix_caching=False), prompts, params)
        )
        engine = LLMEngine(llama.path, kv_cache_dtype="int8", num_blocks=16, block_size=8, **swapping)
        assert token_ids(run(engine, prompts, params)) == expected
        assert engine.stats().num_swaps > 0


@pytest.mark.parametrize(
    ("kv_cache_dtype", "slot_bytes"), [("auto", 20 * 4), ("fp8", 32), ("fp8_e5m2", 32), ("int8", 36)]
)
def test_memory(llama: Checkpoint, kv_cache_dtype: str, slot_bytes: int) -> None:
    """Blocks that fit: of 16 slots, 2 layers, 2 KV heads, keys and values; in int8 with a scale of 4 bytes each."""
    block_bytes = 16 * 2 * 2 * 2 * slot_bytes
    engine = LLMEngine(llama.path, kv_cache_memory=50 * block_bytes, kv_cache_dtype=kv_cache_dtype)
    assert engine.stats().num_blocks == 50
    caches = engine.model_runner.cache_engine.kv_caches
    assert sum(cache.nbytes for layer in caches for cache in layer[:2]) == 50 * block_bytes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(kv_cache_dtype="int4"), ValueError, "^kv_cache_dtype: expected auto, .*, fp8_e5m2, int8, got int4"),
        (dict(kv_cache_dtype="int8", block_size=4), ValueError, "^block_size: expected at least 8 .*, got 4"),
        (dict(kv_cache_dtype=None), ValueError, "^kv_cache_dtype: .*got None"),
        (dict(kv_cache_dtype=torch.float8_e5m2), ValueError, "^kv_cache_dtype: .*got torch.float8_e5m2"),
        (dict(kv_scales=(1, 1)), ValueError, "^kv_scales: expected None with kv_cache_dtype auto"),
        (
            dict(kv_cache_dtype="int8", kv_scales=(1, 1)),
            ValueError,
            "^kv_scales: expected None with kv_cache_dtype int8",
        ),
        (dict(kv_cache_dtype="fp8", kv_scales=[(1, 1)]), ValueError, "^kv_scales: .* each of 2 layers, got 1"),
        (dict(kv_cache_dtype="fp8", kv_scales=(1, 0)), ValueError, "^kv_scales: expected positive and finite"),
        (dict(kv_cache_dtype="fp8", kv_scales=1), TypeError, "^kv_scales: expected a pair"),
        (dict(kv_cache_dtype="fp8", kv_scales="no.json"), FileNotFoundError, "no.json"),
    ],
)
def test_wrong_options(llama: Checkpoint, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMEngine(llama.path, **options)


# --- scales of the checkpoint ---

SCALES = ((0.5, 0.25), (2.0, 4.0))


def scales_of(engine: LLMEngine) -> tuple[tuple[float, float], ...]:
    caches = engine.model_runner.cache_engine.kv_caches
    assert all(cache.k_scale is not None and cache.v_scale is not None for cache in caches)
    return tuple((float(cache.k_scale), float(cache.v_scale)) for cache in caches)  # type: ignore[arg-type]


def save_with_scales(directory: Path, model_type: str) -> str:
    if model_type == "llama":
        make_model("llama-gqa").save_pretrained(directory)
    else:
        config = AutoConfig.for_model(model_type, **OLMO, eos_token_id=None)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for layer, (k_scale, v_scale) in enumerate(SCALES):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([k_scale]).bfloat16()
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([v_scale]).bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    scheme = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
    quantization = dict(quant_method="compressed-tensors", config_groups={}, kv_cache_scheme=scheme)
    change_config(directory, quantization_config=quantization)
    return str(directory)


@pytest.mark.parametrize("model_type", ["llama", "olmo2"])
@pytest.mark.parametrize("is_bin", [False, True])
def test_scales_of_a_checkpoint(tmp_path: Path, model_type: str, is_bin: bool, caplog: Any) -> None:
    path = save_with_scales(tmp_path, model_type)
    if is_bin:
        convert_to_bin(tmp_path)
    with caplog.at_level(logging.WARNING, "pagedattn_serve"):
        engine = LLMEngine(path, kv_cache_dtype="fp8")
    assert scales_of(engine) == SCALES
    assert not [record for record in caplog.records if record.name.startswith("pagedattn")]
    assert scales_of(LLMEngine(path, kv_cache_dtype="fp8", kv_scales=(1, 3))) == ((1, 3), (1, 3))
    assert LLMEngine(path).model_runner.cache_engine.kv_caches[0].k_scale is None  # auto, and the tensors no mistake


def test_a_checkpoint_without_scales(llama: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pagedattn_serve"):
        engine = LLMEngine(llama.path, kv_cache_dtype="fp8_e5m2")
    assert engine.model_runner.cache_engine.kv_caches[0].k_scale is None
    [record] = [record for record in caplog.records if record.name.startswith("pagedattn")]
    assert "kv_cache_dtype=fp8_e5m2: keys and values are not scaled" in record.getMessage()


def test_weights_in_another_format_are_refused_beside_scales(tmp_path: Path) -> None:
    path = save_with_scales(tmp_path, "llama")
    config = dict(
        quant_method="compressed-tensors",
        format="marlin-24",
        kv_cache_scheme=dict(num_bits=8),
        config_groups={"group_0": dict(targets=["Linear"], weights=dict(num_bits=8))},
    )
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match=r"quantization_config: format: .*, got 'marlin-24'"):
        LLMEngine(path, kv_cache_dtype="fp8")
