"""Models without a file of their own: transformers' forward in the engine, equal to `generate`, or refused."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm.std
import transformers
from checkpoints import (
    MAX_LEN,
    SMALL,
    TOKENIZER_SIZE,
    VOCAB_SIZE,
    change_config,
    convert_to_bin,
    greedy_reference,
    make_tokenizer,
)
from engine_runs import run, token_ids
from safetensors.torch import load_file, save_file
from test_interrupts import OF_PROGRESS, Places, in_another_thread
from test_progress import on_terminal
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.utils import logging as transformers_logging

from pagedattn_serve.cli import main
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.generation_config import eos_token_ids
from pagedattn_serve.loading.loader import build_model, load_model
from pagedattn_serve.models import transformers_model
from pagedattn_serve.models.linear import Int4Linear, Int8Linear, LinearForms, PackedLinear, pack_linear_layers
from pagedattn_serve.models.transformers_model import TransformersCausalLM
from pagedattn_serve.models.transformers_trial import NO_POSITIONS, Refusal, TrialMask, check_mask
from pagedattn_serve.sampling_params import SamplingParams

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
LENGTHS = (1, 7, 17, 33, 40, 5)

SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_LEN,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
MLA: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
    head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1,
    first_k_dense_replace=1, n_shared_experts=1,
)  # fmt: skip
LAYERS: dict[str, Any] = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=11)
# What each adds to LLaMA: softcaps and windows, sinks, experts, values narrower than keys, other norms and embeddings.
MODELS: dict[str, dict[str, Any]] = {
    "bart": dict(  # which asks its cache for positions
        d_model=48, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=72, forced_eos_token_id=None,
    ),
    "cohere": dict(logit_scale=0.3),
    "cohere2": dict(**LAYERS, head_dim=12),
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "ernie4_5": dict(head_dim=14),
    "exaone4": LAYERS,
    "gemma": dict(head_dim=16),
    "gemma2": dict(**LAYERS, head_dim=18, query_pre_attn_scalar=9, attn_logit_softcapping=3.0),
    "gemma3_text": dict(**LAYERS, head_dim=16),
    "gemma3n_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4, num_kv_shared_layers=2,
        sliding_window=11, head_dim=16, intermediate_size=[72] * 4, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE, laurel_rank=4, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "gemma4_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2, num_hidden_layers=4, num_kv_shared_layers=2,
        sliding_window=11, head_dim=16, global_head_dim=512, num_global_key_value_heads=1, attention_k_eq_v=True,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB_SIZE, enable_moe_block=True, num_experts=4,
        top_k_experts=2, moe_intermediate_size=24,
    ),
    "glm4": dict(head_dim=12),
    "glm4_moe_lite": MLA,
    "gpt_bigcode": dict(n_inner=72, n_positions=MAX_LEN),
    "gpt_neox": dict(rotary_pct=0.5),
    "gpt_oss": dict(**LAYERS, **EXPERTS, head_dim=16),
    "granite": dict(logits_scaling=3.0, embedding_multiplier=2.0),
    "granitemoe": EXPERTS,
    "llama4_text": dict(
        **EXPERTS, num_hidden_layers=4, head_dim=12, intermediate_size_mlp=72, moe_layers=[1, 3],
        attention_chunk_size=11, floor_scale=8, attn_scale=0.5,
    ),
    "mimo_v2_flash": dict(
        **LAYERS, head_dim=16, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        num_key_value_heads=1,
    ),
    "minicpm3": dict(num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16),
    "mixtral": dict(**EXPERTS, sliding_window=13),
    "nemotron": dict(head_dim=12),
    "olmo2": {},
    "olmo3": LAYERS,
    "olmoe": EXPERTS,
    "phi": {},
    "phi3": dict(sliding_window=25),
    "qwen2_moe": dict(**EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_moe": dict(**EXPERTS, head_dim=16),
    "smollm3": {},
    "stablelm": dict(partial_rotary_factor=0.5),
    "starcoder2": dict(sliding_window=12),
    "vaultgemma": dict(**LAYERS, head_dim=16, query_pre_attn_scalar=16),
}  # fmt: skip

Save = Callable[..., tuple[str, PreTrainedModel]]


def make_config(model_type: str, **fields: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SHAPE, **MODELS.get(model_type, {}), **fields})


def make_model(model_type: str, **fields: Any) -> PreTrainedModel:
    return with_random_weights(AutoModelForCausalLM.from_config(make_config(model_type, **fields)), model_type)


def with_random_weights(model: PreTrainedModel, seed: str = "") -> PreTrainedModel:
    """Random fp32 weights, norms and biases among them."""
    generator = torch.Generator().manual_seed(sum(seed.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.3, generator=generator)
    return model.eval()


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """save(model_type, **fields): a checkpoint, and its model."""

    def save(model_type: str, directory: str = "model", **fields: Any) -> tuple[str, PreTrainedModel]:
        model = make_model(model_type, **fields)
        model.save_pretrained(tmp_path / directory)
        return str(tmp_path / directory), model

    return save


def prompts_of(seed: str, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def references(model: PreTrainedModel, prompts: list[list[int]], max_tokens: int = NUM_TOKENS) -> list[list[int]]:
    return [greedy_reference(model, prompt, max_tokens) for prompt in prompts]


def greedy_after(model: PreTrainedModel, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[int]]:
    """The model's choice at each place of each output: the output, if that is greedy. It runs once for each prompt, and
    `generate` once for each token."""
    choices = []
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits
        choices.append(logits[0, len(prompt) - 1 :].argmax(-1).tolist())
    return choices


def model_of(engine: LLMEngine) -> TransformersCausalLM:
    model = engine.model_runner.model
    assert isinstance(model, TransformersCausalLM)
    return model


# ---- equal to generate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_equals_hugging_face_under_preemption(save: Save, model_type: str) -> None:
    path, model = save(model_type)
    prompts = prompts_of(model_type)
    # More at once than elsewhere, as layers with windows give blocks back.
    engine = LLMEngine(path, **SMALL | dict(max_num_seqs=len(prompts)))
    actual = token_ids(run(engine, prompts, GREEDY))
    expected = greedy_after(model, prompts, actual)
    assert actual == expected and {len(tokens) for tokens in actual} == {NUM_TOKENS}
    assert engine.stats().num_preemptions > 0
    assert model_of(engine).runs == f"through transformers {transformers.__version__}"
    # Worth comparing: no two prompts have one answer, and none says one word.
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert sum(len(set(tokens)) for tokens in expected) > 4 * len(expected)


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_part_of_a_model_that_takes_images(tmp_path: Path, tied: bool) -> None:
    """Llama 4, whose language model transformers has alone. The text part says what the whole does not: dtype and end.
    Whether embeddings are tied, the whole says."""
    text_config = {**SHAPE, **MODELS["llama4_text"], "eos_token_id": 5}
    vision = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, image_size=28)
    fields = dict(text_config=text_config, vision_config=vision, tie_word_embeddings=tied)
    model = with_random_weights(AutoModelForImageTextToText.from_config(AutoConfig.for_model("llama4", **fields)))
    model.save_pretrained(tmp_path)
    change_config(tmp_path, dtype=None, text_config=text_config | {"dtype": "bfloat16"})
    (tmp_path / "generation_config.json").unlink()
    prompts = prompts_of("images")
    engine = LLMEngine(str(tmp_path), dtype="float32", **SMALL)
    # The whole cannot generate in transformers 5.24: it asks the text part's output for images.
    assert token_ids(run(engine, prompts, GREEDY)) == references(model.language_model, prompts)
    assert build_model(tmp_path).dtype == torch.bfloat16 and eos_token_ids(tmp_path) == {5}


@pytest.mark.skipif("exaone" not in transformers.CONFIG_MAPPING, reason="transformers before 5.24 has no EXAONE")
def test_another_name_of_a_class(save: Save) -> None:
    """EXAONE is LLaMA to transformers, but for the names of its tensors. Published checkpoints name their own class."""
    path, model = save("exaone")
    prompts = prompts_of("exaone", (3, 17))
    expected = references(model, prompts)
    assert token_ids(run(LLMEngine(path), prompts, GREEDY)) == expected
    change_config(Path(path), architectures=["ExaoneForCausalLM"])
    assert token_ids(run(LLMEngine(path), prompts, GREEDY)) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "mixtral"])
def test_half_precision(save: Save, model_type: str, dtype: str) -> None:
    """It runs, preempted, and most first tokens are those of fp32."""
    path, _ = save(model_type)
    prompts = prompts_of(model_type, tuple(range(1, 21)))
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = token_ids(run(LLMEngine(path), prompts, params))
    engine = LLMEngine(path, dtype=dtype, **SMALL)
    actual = token_ids(run(engine, prompts, params))
    assert engine.model_runner.cache_engine.kv_caches[0][0].dtype == getattr(torch, dtype)
    assert sum(a[0] == b[0] for a, b in zip(actual, expected, strict=True)) >= 15


@pytest.mark.parametrize(
    ("model_type", "rope", "length"),
    [
        ("phi3", dict(rope_type="longrope", short_factor=[1.0] * 6, long_factor=[4.0] * 6), 48),
        ("olmo2", dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=MAX_LEN // 4), MAX_LEN),
        ("gemma3_text", dict(full_attention=dict(rope_type="linear", factor=8.0), sliding_attention={}), MAX_LEN),
    ],
    ids=lambda value: value.get("rope_type", "by layer") if isinstance(value, dict) else str(value),
)
def test_scaled_rotary_embeddings(save: Save, model_type: str, rope: dict[str, Any], length: int) -> None:
    """Up to the last position, beside others; where scaling looks at the longest sequence, that is where it begins."""
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        parameters.setdefault("rope_theta", 10000.0)
    options = dict(original_max_position_embeddings=length) if model_type == "phi3" else {}
    path, model = save(model_type, rope_parameters=rope, sliding_window=1000, **options)
    engine = LLMEngine(path)
    assert engine.max_model_len == length
    prompts = prompts_of(model_type, (length - 24, length // 3, 3))
    assert token_ids(run(engine, prompts, SamplingParams(temperature=0, max_tokens=24))) == references(
        model, prompts, 24
    )


def test_two_engines_take_turns(save: Save) -> None:
    """Of one family, with other weights; a step of one lies between two of the other."""
    paths, models = zip(*(save("olmo2", name, hidden_size=size) for name, size in (("a", 48), ("b", 64))), strict=True)
    engines = [LLMEngine(path, **SMALL) for path in paths]
    prompts = prompts_of("turns", (3, 20, 11))
    results: list[dict[str, list[int]]] = [{}, {}]
    for engine in engines:
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt_token_ids=prompt, sampling_params=GREEDY)
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, result in zip(engines, results, strict=True):
            result.update((output.request_id, list(output.outputs[0].token_ids)) for output in engine.step())
    for model, result in zip(models, results, strict=True):
        assert [result[str(i)] for i in range(len(prompts))] == references(model, prompts)


def test_a_model_of_transformers_beside_an_engine_is_as_it_was(save: Save) -> None:
    path, _ = save("olmo3")
    prompt = prompts_of("beside", (20,))

    def logits() -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(path)
        assert model.config._attn_implementation == "sdpa"
        with torch.inference_mode():
            return model(torch.tensor(prompt)).logits

    before = logits()
    engine = LLMEngine(path)
    run(engine, prompt, GREEDY)
    torch.testing.assert_close(logits(), before, rtol=0, atol=0)


def test_logits_of_the_rows_that_sample_and_no_others(save: Save) -> None:
    path, _ = save("olmo2")
    engine = LLMEngine(path, max_num_batched_tokens=9)
    seen: list[int] = []
    head = model_of(engine).model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[:-1].numel()))
    sampled = []
    for i, prompt in enumerate(prompts_of("logits", (20, 3))):
        engine.add_request(str(i), prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=4))
        sampled.append(len(engine.step()))
    while engine.has_unfinished_requests():
        sampled.append(len(engine.step()))
    assert seen == sampled and sampled[0] == 0 and max(sampled) == 2


def test_nothing_of_a_step_is_kept(save: Save) -> None:
    """Or the cache of a trial run would stay beside the engine's own."""
    path, _ = save("olmo2")
    engine = LLMEngine(path)
    run(engine, [[1, 2, 3]], GREEDY)
    assert model_of(engine).step.inputs is None


def test_linear_layers_are_packed_but_for_those_with_a_forward_of_their_own(save: Save) -> None:
    class Router(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return nn.functional.linear(hidden.float(), self.weight)

    path, _ = save("mixtral")
    layers = [type(module) for module in model_of(LLMEngine(path)).model.modules()]
    assert layers.count(PackedLinear) == 2 * 4 + 1 and nn.Linear not in layers  # q, k, v, o of both layers; the head
    model = nn.Sequential(nn.Linear(4, 4), Router(4, 4))
    pack_linear_layers(model, LinearForms("head", None))
    assert [type(layer) for layer in model] == [PackedLinear, Router]


@pytest.mark.parametrize(("model_type", "head"), [("olmo2", "lm_head"), ("biogpt", "output_projection")])
def test_the_last_layer_has_8_bits_whatever_the_others_size(
    save: Save, capsys: pytest.CaptureFixture[str], model_type: str, head: str
) -> None:
    """Each family gives the layer a name of its own."""
    path, _ = save(model_type, vocab_size=64, hidden_size=64, intermediate_size=64)
    layers = dict(load_model(path, quantization="int4").named_modules())
    assert type(layers.pop(f"model.{head}")) is Int8Linear
    kinds = {type(layer) for layer in layers.values()}
    assert Int4Linear in kinds and not kinds & {Int8Linear, PackedLinear}
    capsys.readouterr()
    assert main(["info", path, "--quantization", "int4"]) == 0
    assert f"{Int4Linear.FORM}; the last one {Int8Linear.FORM}" in capsys.readouterr().out


# ---- checkpoints, and the doors -------------------------------------------------------------------------------------


def test_info_reads_no_weights(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = save("deepseek_v3")
    (Path(path) / "model.safetensors").unlink()
    capsys.readouterr()
    assert main(["info", path]) == 0
    shown = {line[:15].rstrip(): line[15:] for line in capsys.readouterr().out.splitlines()}
    count = sum(parameter.numel() for parameter in model.parameters())
    assert shown["architecture"] == "DeepseekV3ForCausalLM"
    assert shown["runs"] == f"through transformers {transformers.__version__}"
    assert shown["parameters"] == f"{count:,} ({4 * count:,} bytes)"
    assert shown["heads"] == "4 query, 1 latent with a rotary part for all, of size 24"  # 16 and 8 that turn
    assert shown["cache"] == f"{2 * 24 * 4:,} bytes per token, {16 * 2 * 24 * 4:,} per block of 16"


def test_info_of_caches_that_differ(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    """And that the engine allocates: a cache for each layer that writes one, each of its own shape."""
    path, _ = save("gemma4_text")
    capsys.readouterr()
    assert main(["info", path]) == 0
    shown = {line[:15].rstrip(): line[15:] for line in capsys.readouterr().out.splitlines()}
    assert shown["layers"] == "4 (2 attend to an earlier layer's cache)"
    window, whole = "2 key-value, of size 16 (1 of 2 caches)", "1 key-value, of size 512 (1 of 2 caches)"
    assert shown["heads"] == f"4 query, {window}; {whole}"
    token_bytes = 2 * 4 * (2 * 16 + 1 * 512)
    assert shown["cache"] == f"{token_bytes:,} bytes per token, {16 * token_bytes:,} per block of 16"
    caches = LLMEngine(path, num_blocks=9).model_runner.cache_engine.kv_caches
    assert [cache.value_cache.shape for cache in caches] == [(9, 2, 16, 16), (9, 1, 512, 16)]


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("gemma3n_text", {}, [11, None]),  # also of the layers that share
        ("llama4_text", {}, [11, 11, 11, None]),
        ("phi3", {}, [25, 25]),
        ("gpt_oss", dict(layer_types=["sliding_attention"] * 2), [11, 11]),
    ],
)
def test_windows_of_caches(save: Save, model_type: str, fields: dict[str, Any], windows: list[int | None]) -> None:
    """Caches of one window form groups, of as many caches as the window with the fewest has."""
    path, _ = save(model_type, **fields)
    engine = LLMEngine(path, num_blocks=9)
    assert [shape.window for shape in model_of(engine).cache_shapes] == windows
    expected = windows if None in windows else windows[:1]
    assert engine.scheduler.block_manager.windows == tuple(expected)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_generate_on_the_command_line(save: Save, capsys: pytest.CaptureFixture[str], model_type: str) -> None:
    path, model = save(model_type, vocab_size=TOKENIZER_SIZE)
    tokenizer = make_tokenizer(Path(path))
    prompt = "the cat sat on"
    [expected] = references(model, [tokenizer(prompt).input_ids])
    capsys.readouterr()
    assert main(["generate", path, "--prompt", prompt, "--max-tokens", str(NUM_TOKENS)]) == 0
    assert capsys.readouterr().out == f"{prompt}{tokenizer.decode(expected, skip_special_tokens=True)}\n"


def test_bin_files(save: Save) -> None:
    path, model = save("olmo2")
    convert_to_bin(Path(path))
    prompts = prompts_of("bin", (5,))
    assert token_ids(run(LLMEngine(path), prompts, GREEDY)) == references(model, prompts)


def test_weights_that_do_not_fit(save: Save) -> None:
    path, _ = save("olmo2")
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(2, 3)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="do not fit Olmo2ForCausalLM") as error:
        load_model(path)
    assert path in str(error.value) and "missing model.norm.weight" in str(error.value)
    assert "model.layers.0.self_attn.q_proj.weight: expected [48, 48], got [2, 3]" in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_cannot_be_read(save: Save, name: str) -> None:
    path, _ = save("olmo2")
    (Path(path) / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_model(path)
    (Path(path) / name).write_bytes(b"x" * 500)
    with pytest.raises(ValueError, match=f"cannot read the weights in {path}/{name}: [^\n]+$") as error:
        load_model(path)
    assert "weights_only=" not in str(error.value)


# ---- refused --------------------------------------------------------------------------------------------------------

STATE = "it keeps another state between tokens than keys and values"
MASKS = "its layers do not leave their masks to transformers' attention interface"
# By model type: what differs from the defaults of its config, and why it is refused.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({}, "layer 0 attends to later tokens, too"),
    "deepseek_v32": (MLA, "it has layers of type indexed_attention"),
    "diffllama": (SHAPE, "layer 0 calls attention twice"),
    "falcon": ({}, MASKS),
    "jetmoe": (SHAPE, "its forward looks at numbers, and a trial run without weights has none"),
    "moshi": (dict(SHAPE, sliding_window=9), "its config has a sliding_window of 9, which its layers do not use"),
    "mpt": ({}, NO_POSITIONS),
    "openai-gpt": ({}, "its layers do not call transformers' attention interface"),
    "phimoe": (dict(SHAPE, **EXPERTS, sliding_window=9), "the mask of layer 0 shows something else than all earlier"),
    "recurrent_gemma": ({}, STATE),
    "rwkv": ({}, STATE),
}


def save_config(directory: Path, model_type: str, architecture: str | None = None, **fields: Any) -> str:
    """A checkpoint without weights: a model is refused before they are read."""
    config = AutoConfig.for_model(model_type, **fields)
    config.architectures = [architecture or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(directory)
    return config.architectures[0]


def expect_refusal(directory: Path, architecture: str, reason: str) -> None:
    with pytest.raises(ValueError) as error:
        build_model(str(directory))
    runs = f"through transformers {transformers_model.transformers.__version__}"
    beginning = f"architecture: expected one that can run {runs}, got {architecture}: {reason}"
    assert str(error.value).startswith(beginning) and "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(tmp_path: Path, model_type: str) -> None:
    fields, reason = REFUSED[model_type]
    expect_refusal(tmp_path, save_config(tmp_path, model_type, **fields), reason)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("t5", "T5ForConditionalGeneration"), ("whisper", "WhisperForConditionalGeneration"), ("olmo2", "Olmo2Model")],
)
def test_what_is_no_causal_lm_is_refused(tmp_path: Path, model_type: str, architecture: str) -> None:
    save_config(tmp_path, model_type, architecture)
    expect_refusal(tmp_path, architecture, f"it is not the causal language model of model_type '{model_type}'")


def test_a_rotary_embedding_that_hangs_on_the_batch_is_refused(tmp_path: Path) -> None:
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    architecture = save_config(tmp_path, "olmo2", **SHAPE, rope_parameters=rope)
    expect_refusal(tmp_path, architecture, "its rotary embedding is of type dynamic")


def test_the_progress_of_loading(
    save: Save, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is ours in place of a bar of tqdm, whose lock an interrupt leaves taken. Bars of other threads, and those of the
    same thread afterwards, are transformers' own."""
    path, _ = save("olmo2")
    capsys.readouterr()  # what was written while the checkpoint was made
    told: list[tuple[int, int]] = []
    load_model(path, on_loading=lambda done, total: told.append((done, total)))
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] > 10 and len(told) == 5
    assert capsys.readouterr().err == ""
    terminal = on_terminal(monkeypatch)
    made: list[type] = []

    def host_makes_a_bar() -> None:
        made.append(type(transformers_logging.tqdm([], disable=True)))

    def load_beside_a_host(done: int, total: int) -> None:
        in_another_thread(host_makes_a_bar)

    load_model(path, on_loading=load_beside_a_host)
    host_makes_a_bar()
    assert len(made) == 6 and all(issubclass(each, tqdm.std.tqdm) for each in made)
    with Places(files=OF_PROGRESS) as places:
        load_model(path)
    assert "Loading weights: " in terminal.getvalue()
    assert not any("tqdm" in name or "Lock" in name for name, _ in places.seen), "a bar of tqdm"
    for name in ("Progress.update", "Progress.close"):
        at = 1 + next(i for i, (place, _) in enumerate(places.seen) if place == name)
        with Places(at, OF_PROGRESS), pytest.raises(KeyboardInterrupt):
            load_model(path)
        in_another_thread(lambda: load_model(path))
    assert transformers_logging.set_tqdm_hook(None) is None


def test_transformers_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = save_config(tmp_path, "olmo2", **SHAPE)
    # That module's own: transformers puts another one in its place when it first imports its processors.
    monkeypatch.setattr(transformers_model.transformers, "__version__", "5.18.1")
    expect_refusal(tmp_path, architecture, "that takes transformers 5.19")


def test_scales_of_a_quantized_cache_are_no_quantized_weights(save: Save) -> None:
    """transformers would ask for the package of the format."""
    path, _ = save("olmo2")
    config = dict(quant_method="compressed-tensors", kv_cache_scheme=dict(num_bits=8))
    change_config(Path(path), quantization_config=config)
    assert isinstance(load_model(path), TransformersCausalLM)


def test_head_sizes_that_the_ops_do_not_have(tmp_path: Path) -> None:
    architecture = save_config(tmp_path, "gemma2", **SHAPE, head_dim=520)
    expect_refusal(tmp_path, architecture, "its heads of size 520 are larger than the ops know, up to 512")


def test_other_positions_are_found_when_the_weights_are_there(save: Save) -> None:
    """RoBERTa's own positions begin behind that of padding, so those of the engine would be others."""
    path, _ = save("roberta", is_decoder=True, pad_token_id=1)
    with pytest.raises(ValueError, match="its logits are not those that it has with its own attention"):
        load_model(path)


def test_a_wrong_attention_is_found_when_the_weights_are_there(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = save("olmo2")
    attention = transformers_model.attention
    monkeypatch.setattr(transformers_model, "attention", lambda *args, **kw: attention(*args, **kw).flip(0))
    with pytest.raises(ValueError, match="its logits are not those that it has with its own attention"):
        load_model(path)


def test_logits_that_are_no_numbers(save: Save) -> None:
    path, _ = save("cohere", logit_scale=1e39)
    with pytest.raises(ValueError, match=r"^model: expected one whose logits are finite, got NaN or infinity"):
        load_model(path)


@pytest.mark.parametrize(
    ("mask", "sliding_window", "chunk"),  # None: refused
    [
        (causal_mask_function, None, 0),
        (causal_mask_function, 5, None),
        (sliding_window_causal_mask_function(5), 5, 0),
        (sliding_window_causal_mask_function(5), 6, None),
        (sliding_window_causal_mask_function(5), None, None),
        (sliding_window_causal_mask_function(1), 1, 0),
        (chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int64, device="meta")), None, 5),
        (chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int64, device="meta")), 5, None),
        (chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64, device="meta")), None, None),
        (and_masks(causal_mask_function, sliding_window_overlay(5)), 5, 0),
        (or_masks(causal_mask_function, lambda batch, head, query, key: key < 2), None, None),
    ],
)
def test_masks(mask: Callable[..., Tensor], sliding_window: int | None, chunk: int | None) -> None:
    def check() -> int:
        return check_mask(3, TrialMask(mask, local_size=5), sliding_window)

    if chunk is not None:
        assert check() == chunk
    else:
        with pytest.raises(Refusal, match="the mask of layer 3 shows something else than "):
            check()


def test_a_mask_made_elsewhere_is_refused() -> None:
    with pytest.raises(Refusal, match="layer 3 has a mask of its own making"):
        check_mask(3, torch.ones(1, 1, 3, 3), None)
