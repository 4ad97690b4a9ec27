"""transformers' continuous batching on the paged ops: the tokens of `generate`, for many families of models. `generate`
by flash-attn's names.

With another version of transformers than the installed one:

    pip install --no-deps --target build/transformers transformers==5.19.0 psutil
    PYTHONPATH=build/transformers python -m pytest tests/test_transformers.py
"""

import copy
import functools
import importlib
import logging
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, modeling_flash_attention_utils
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.integrations import flash_attention as integration
from transformers.models.bark import modeling_bark
from transformers.models.falcon import modeling_falcon

from pagedattn_ext import flash_attn, ops
from pagedattn_ext.transformers import use_flash_attention, use_paged_attention

VOCAB_SIZE, NUM_LAYERS, NUM_NEW_TOKENS = 97, 3, 20
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=72, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
GPT2_SHAPE = dict(vocab_size=VOCAB_SIZE, n_positions=128, n_embd=48, n_head=4, n_layer=NUM_LAYERS)
OPT_SHAPE = dict(
    vocab_size=VOCAB_SIZE, max_position_embeddings=128, num_hidden_layers=NUM_LAYERS, ffn_dim=72, hidden_size=48,
    word_embed_proj_dim=48, num_attention_heads=4,
)  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
# The prefix of a config class -> its fields. Heads of 12 elements fill 16 bytes in fp32 alone, heads of 18 in no dtype.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": dict(SHAPE, head_dim=18, num_key_value_heads=1),
    "Mistral": dict(SHAPE, sliding_window=11),
    "Mixtral": dict(SHAPE, sliding_window=9, num_local_experts=4),
    "Qwen2": SHAPE,
    "Qwen3": dict(SHAPE, head_dim=16),
    "Qwen3Moe": dict(SHAPE, **EXPERTS, head_dim=16, num_experts=4),
    "Gemma2": dict(SHAPE, head_dim=16, sliding_window=9, query_pre_attn_scalar=12, attn_logit_softcapping=2.0),
    "Gemma3Text": dict(SHAPE, head_dim=16, sliding_window=9, layer_types=MIXED),
    "GptOss": dict(SHAPE, head_dim=16, sliding_window=9, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2),
    "Phi3": SHAPE,
    "Olmo2": SHAPE,
    "Granite": dict(SHAPE, attention_multiplier=0.4),
    "Cohere2": dict(SHAPE, sliding_window=9, layer_types=MIXED),
    "Glm4": dict(SHAPE, head_dim=16),
    "GPTNeoX": {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"},
    "DeepseekV3": dict(
        SHAPE, **EXPERTS, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=10, v_head_dim=14, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
    ),
    "GPT2": GPT2_SHAPE,
    "OPT": OPT_SHAPE,
}  # fmt: skip
SCARCE = ContinuousBatchingConfig(
    page_size=8, num_blocks=10, max_batch_tokens=29, max_requests_per_batch=4, max_memory_percent=0.5
)
GREEDY = GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW_TOKENS)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failing requests are logged with their traceback."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call of paged_attention."""
    rows: list[int] = []
    attend = ops.paged_attention

    def count(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(len(query))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(ops, "paged_attention", count)
    return rows


def make_model(family: str) -> PreTrainedModel:
    """With random weights: no EOS, every choice of token hangs on all of the model."""
    fields = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False)
    config_class = getattr(transformers, f"{family}Config")
    # sdpa knows no softcap, and before transformers 5.21 did not say so.
    own = dict(attn_implementation="eager") if family == "Gemma2" else {}
    model = transformers.AutoModelForCausalLM.from_config(config_class(**fields, **FAMILIES[family]), **own)
    generator = torch.Generator().manual_seed(sum(family.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.1 if name.endswith("bias") else 0.3
            if any(part in name for part in ("q_proj", "k_proj", "query_key_value", "c_attn")):
                std = 1.0  # attention that looks at few tokens
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            mean = 2.0 - family.startswith("Gemma") if is_norm else 0.0  # Gemma's norms add 1 themselves
            parameter.normal_(mean, std, generator=generator)
    return model.eval()


def make_prompts(seed: str) -> list[list[int]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 7, 16, 17, 33, 40)]
    return [*prompts, [*prompts[-1][:19], 5]]  # two whole blocks of it are in the cache already


def greedy_reference(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, GREEDY, attention_mask=torch.ones_like(ids), pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def generate_batch(model: PreTrainedModel, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    options = dict(continuous_batching_config=SCARCE, generation_config=GREEDY) | options
    outputs = model.generate_batch(prompts, **options)
    assert {output.error for output in outputs.values()} == {None}
    return [output.generated_tokens for output in outputs.values()]


def error_of(model: PreTrainedModel) -> str:
    (output,) = model.generate_batch([[1, 2, 3]], GREEDY, SCARCE).values()
    return output.error


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_generate(family: str, calls: list[int]) -> None:
    model, prompts = make_model(family), make_prompts(family)
    expected = [greedy_reference(model, prompt) for prompt in prompts]
    assert all(len(set(tokens)) > 5 for tokens in expected)
    assert calls == []
    own_attention = model.config._attn_implementation

    use_paged_attention(model)
    use_paged_attention(model)
    assert generate_batch(model, prompts) == expected
    assert len(calls) % NUM_LAYERS == 0 and len(calls) > NUM_LAYERS * NUM_NEW_TOKENS
    assert max(calls) > 4 >= min(calls)  # chunks of prompts, and steps of decode rows alone

    # Outside of continuous batching the model is as it was.
    calls.clear()
    assert model.config._attn_implementation == own_attention
    assert greedy_reference(model, prompts[-1]) == expected[-1]
    assert calls == []


def test_blocks_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """SCARCE makes transformers take running requests off the cache, and begin them anew."""
    num_times = 0
    offload = OffloadingManager.offload_requests

    def count(self: OffloadingManager) -> bool:
        nonlocal num_times
        num_times += 1
        return offload(self)

    monkeypatch.setattr(OffloadingManager, "offload_requests", count)
    model, prompts = make_model("Mistral"), make_prompts("Mistral")
    use_paged_attention(model)
    generate_batch(model, prompts)
    assert num_times > 2


@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
@pytest.mark.parametrize("family", ["Gemma3Text", "DeepseekV3"])
def test_page_sizes(family: str, page_size: int) -> None:
    model, prompts = make_model(family), make_prompts(family)[3:]
    expected = [greedy_reference(model, prompt) for prompt in prompts]
    use_paged_attention(model)
    config = copy.copy(SCARCE)
    config.page_size = page_size
    assert generate_batch(model, prompts, continuous_batching_config=config) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss", "DeepseekV3"])
def test_16_bit(family: str, dtype: torch.dtype, calls: list[int]) -> None:
    """Log probabilities are at most twice as far from those in fp32 as the model's own forward."""
    model, prompts = make_model(family).to(dtype), make_prompts(family)
    exact = copy.deepcopy(model).float()
    use_paged_attention(model)
    config = copy.copy(SCARCE)
    config.return_logprobs = True
    outputs = model.generate_batch(prompts, GREEDY, config).values()
    assert calls
    errors, own_errors = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output.generated_tokens])
        with torch.no_grad():
            logits = [m(ids[:, :-1]).logits[0, len(prompt) - 1 :].float() for m in (model, exact)]
        own, expected = (values.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]) for values in logits)
        errors.append((torch.tensor(output.logprobs) - expected[:, 0]).abs())
        own_errors.append((own - expected).abs())
    assert torch.cat(errors).mean() <= 2 * torch.cat(own_errors).mean() + torch.finfo(dtype).eps


def test_several_sequences_a_request() -> None:
    model, prompts = make_model("Mistral"), make_prompts("Mistral")[:4]
    expected = [greedy_reference(model, prompt) for prompt in prompts for _ in range(3)]
    use_paged_attention(model)
    several = GenerationConfig(do_sample=True, top_k=1, max_new_tokens=NUM_NEW_TOKENS, num_return_sequences=3)
    assert generate_batch(model, prompts, generation_config=several) == expected


def test_other_models_stay_as_they_were(calls: list[int]) -> None:
    """One of the same class, with its window and a manager of its own, at the same time."""
    ours, other = make_model("Mistral"), make_model("Mistral")
    prompts = make_prompts("Mistral")
    expected = [greedy_reference(ours, prompt) for prompt in prompts]
    use_paged_attention(ours)
    assert generate_batch(other, prompts) == expected and calls == []
    with other.continuous_batching_context_manager(GREEDY, continuous_batching_config=SCARCE) as manager:
        assert generate_batch(ours, prompts) == expected and calls
        assert other.config._attn_implementation == "sdpa"
        manager.add_request(prompts[0], max_new_tokens=NUM_NEW_TOKENS)
        assert manager.get_result(timeout=60).generated_tokens == expected[0]


def test_a_model_of_the_same_config() -> None:
    ours = make_model("Qwen2")
    other = transformers.Qwen2ForCausalLM(ours.config)
    assert other.config is ours.config
    ids = torch.tensor([[1, 2, 3]])
    use_paged_attention(ours)
    with torch.no_grad(), ours.continuous_batching_context_manager(GREEDY, continuous_batching_config=SCARCE):
        other(ids)
        assert other.config._attn_implementation == "sdpa"
    assert ours.config is other.config and all(
        each.config is other.config for each in ours.modules() if hasattr(each, "config")
    )


def test_a_copy_is_a_model_of_its_own(calls: list[int]) -> None:
    model, prompts = make_model("Mistral"), make_prompts("Mistral")[2:4]
    use_paged_attention(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.1)
    expected = [greedy_reference(copied, prompt) for prompt in prompts]
    assert expected != [greedy_reference(model, prompt) for prompt in prompts]
    assert generate_batch(copied, prompts) == expected and calls


def test_defaults() -> None:
    model, prompts = make_model("Llama"), make_prompts("Llama")
    expected = [greedy_reference(model, prompt) for prompt in prompts]
    use_paged_attention(model)
    for _ in range(2):  # the second time with the manager of the first
        outputs = model.generate_batch(prompts, max_new_tokens=NUM_NEW_TOKENS, persistent_manager=True)
        assert [output.generated_tokens for output in outputs.values()] == expected
    config = model._cached_continuous_batching_manager.continuous_batching_config
    assert len(prompts) <= config.num_blocks <= 2 * len(prompts)  # not most of the memory
    use_paged_attention(model)
    assert not hasattr(model, "_cached_continuous_batching_manager")


def test_requests_that_do_not_fit_all_at_once() -> None:
    model = make_model("Llama")
    use_paged_attention(model)
    config = ContinuousBatchingConfig(max_batch_tokens=64, max_memory_percent=0.01)
    hints = WorkloadHints(max_prompt_length=5, max_generated_length=10**6, num_requests=10**5)
    manager = model.init_continuous_batching(GREEDY, config, hints)
    manager.warmup()
    assert 0 < manager.batch_processor.cache.num_blocks < 10**6


def test_the_model_while_a_manager_runs() -> None:
    model, prompt = make_model("Qwen3"), make_prompts("Qwen3")[0]
    expected = greedy_reference(model, prompt)
    use_paged_attention(model)
    with model.continuous_batching_context_manager(GREEDY, continuous_batching_config=SCARCE) as manager:
        with pytest.raises(RuntimeError, match="without the paged cache: either the model is used while a"):
            greedy_reference(model, prompt)
        with pytest.raises(RuntimeError, match="another continuous batching manager of this model runs"):
            model.generate_batch([prompt], GREEDY, SCARCE)
        manager.add_request(prompt)
        assert manager.get_result(timeout=60).generated_tokens == expected
    assert greedy_reference(model, prompt) == expected
    assert generate_batch(model, [prompt]) == [expected]


def test_another_attention_while_a_manager_runs() -> None:
    model, prompt = make_model("Qwen2"), make_prompts("Qwen2")[0]
    use_paged_attention(model)
    with model.continuous_batching_context_manager(GREEDY, continuous_batching_config=SCARCE) as manager:
        manager.add_request(prompt)
        assert manager.get_result(timeout=60).error is None
        model.set_attn_implementation("eager")
        manager.add_request(prompt)
        assert "expected a call from each layer, got none from layers [0, 1, 2]" in manager.get_result(timeout=60).error
    assert model.config._attn_implementation == "sdpa"


def test_gradients_are_those_of_the_model() -> None:
    model = make_model("Gemma2")
    ids = torch.tensor(make_prompts("Gemma2")[3:4])
    model(ids, labels=ids).loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    use_paged_attention(model)
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(page_size=12), "page_size: expected a power of two from 4 to 256, got 12"),
        (dict(page_size=512), "page_size: expected a power of two from 4 to 256, got 512"),
        (dict(use_cuda_graph=True), "use_cuda_graph: expected None or False, got True"),
        (dict(use_cuda_graph=(False, True)), r"use_cuda_graph: expected None or False, got \(False, True\)"),
        (
            dict(default_compile_level=1),
            r"default_compile_level: expected nothing \(torch.compile is not supported\), got 1",
        ),
        (dict(varlen_compile_config={}), "varlen_compile_config: expected nothing"),
    ],
)
def test_wrong_option(options: dict[str, Any], message: str) -> None:
    model = make_model("Qwen2")
    use_paged_attention(model)
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[1, 2, 3]], GREEDY, ContinuousBatchingConfig(**options))
    assert model.config._attn_implementation == "sdpa"


def test_options_within_the_generation_config() -> None:
    model = make_model("Qwen2")
    use_paged_attention(model)
    greedy = copy.deepcopy(GREEDY)
    greedy.continuous_batching_config = ContinuousBatchingConfig(page_size=12)
    with pytest.raises(ValueError, match="page_size: expected a power of two from 4 to 256, got 12"):
        model.generate_batch([[1, 2, 3]], greedy)


def test_wrong_dtype() -> None:
    model = make_model("Qwen2").double()
    use_paged_attention(model)
    with pytest.raises(ValueError, match=r"expected float32, float16 or bfloat16, got torch\.float64"):
        model.generate_batch([[1, 2, 3]], GREEDY, SCARCE)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.MambaConfig(hidden_size=16, vocab_size=7), "attention in every layer, got MambaForCausalLM"),
        (
            transformers.Lfm2Config(**SHAPE | dict(layer_types=["conv", "full_attention", "conv"])),
            "attention in every layer, got Lfm2ForCausalLM with conv",
        ),
        (
            transformers.BloomConfig(hidden_size=16, n_head=2, n_layer=1, vocab_size=7),
            "attention without masks, through transformers' AttentionInterface, got BloomForCausalLM",
        ),
        (
            transformers.LlamaConfig(**SHAPE | dict(head_dim=520)),
            "a head size of at most 512, got 520",
        ),
        (
            transformers.Gemma4TextConfig(
                vocab_size=7, vocab_size_per_layer_input=7, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                layer_types=["sliding_attention", "full_attention"],
            ),
            "layers that are alike, got Gemma4ForCausalLM, whose layers differ in head_dim",
        ),
    ],
)  # fmt: skip
def test_wrong_model(config: transformers.PreTrainedConfig, message: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"use_paged_attention: model: expected {message}"):
        use_paged_attention(model)


def test_wrong_kind_of_model() -> None:
    t5 = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=7)
    with pytest.raises(ValueError, match="expected a decoder, got T5ForConditionalGeneration, an encoder-decoder"):
        use_paged_attention(transformers.T5ForConditionalGeneration(t5))
    with pytest.raises(ValueError, match=r"expected a model that generates \(...ForCausalLM\), got LlamaModel"):
        use_paged_attention(transformers.LlamaModel(transformers.LlamaConfig(**SHAPE)))
    for wrong in ("a-model", None, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=f"expected a transformers.PreTrainedModel, got {type(wrong).__name__}"):
            use_paged_attention(wrong)


def test_wrong_attention() -> None:
    """What only shows when the model runs, as the error of each request."""
    bidirectional = make_model("Llama")
    bidirectional.model.layers[1].self_attn.is_causal = False
    elsewhere = make_model("Qwen2")
    elsewhere.model.layers[1].self_attn.config = copy.deepcopy(elsewhere.config)
    heads = make_model("Llama")
    heads.config.num_key_value_heads = 2
    twice = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SHAPE))  # for each half of its values
    for model, message in (
        (bidirectional, "pagedattn_flash: expected causal attention, got is_causal = False at layer 1"),
        (elsewhere, "pagedattn_flash: expected a call from each layer, got none from layers [1]"),
        (heads, "pagedattn_flash: key: expected 2 heads of at most 20 elements, got shape [1, 1, 3, 18] at layer 0"),
        (twice, "pagedattn_flash: expected one call from each layer in a step, got two from layer 0"),
    ):
        use_paged_attention(model)
        assert error_of(model) == message
        assert model.config._attn_implementation == "sdpa"


def test_the_ops_need_no_transformers() -> None:
    program = "import sys; sys.modules['transformers'] = None; import pagedattn_ext; pagedattn_ext.ops.rms_norm"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the functions that run, after `use_flash_attention`, whose work is undone afterwards."""
    table = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    for version, asked in [*table.items()]:
        monkeypatch.setitem(table, version, dict(asked))
    for name, function in [*transformers.AttentionInterface._global_mapping.items()]:
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, name, function)
    for name in ("_lazy_imports", "_loaded_implementation"):
        monkeypatch.setattr(modeling_flash_attention_utils, name, getattr(modeling_flash_attention_utils, name))
    monkeypatch.setattr(integration, "get_target_dtype", integration.get_target_dtype)
    for modeling in (modeling_bark, modeling_falcon):
        for name in ("_flash_attention_forward", "get_target_dtype"):
            monkeypatch.setattr(modeling, name, None, raising=False)
    monkeypatch.setattr(transformers.GPTNeoPreTrainedModel, "_supports_flash_attn", True)
    called: set[str] = set()

    def seen(function: Any) -> Any:
        @functools.wraps(function)  # transformers looks at its parameters
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(function.__name__)
            return function(*args, **kwargs)

        return call

    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        monkeypatch.setattr(flash_attn, name, seen(getattr(flash_attn, name)))
    use_flash_attention()
    return called


@torch.inference_mode()
@pytest.mark.parametrize(("name", "family"), [("flash_attention_2", "Mistral"), ("flash_attention_3", "Qwen3")])
def test_flash_attention_by_name(name: str, family: str, flash_attention: set[str]) -> None:
    """One prompt, and prompts that are padded on the left."""
    model, prompts = make_model(family), make_prompts(family)
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    tokens = []
    for implementation in ("sdpa", name):
        model.set_attn_implementation(implementation)
        padded = model.generate(ids, GREEDY, attention_mask=mask, pad_token_id=0)[:, length:].tolist()
        tokens.append([greedy_reference(model, prompts[-1]), *padded])
    assert tokens[0] == tokens[1]
    assert flash_attention == {"flash_attn_func", "flash_attn_varlen_func"}


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [4, 11])
def test_flash_attention_to_an_encoder(num_rows: int, flash_attention: set[str]) -> None:
    """The rows of the decoder are all there, wherever the prompts of the encoder are padded."""
    config = transformers.BartConfig(
        vocab_size=VOCAB_SIZE, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=72, decoder_ffn_dim=72, max_position_embeddings=64, init_std=0.3,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    ids, rows = torch.arange(33).view(3, 11), torch.arange(3 * num_rows).view(3, num_rows)
    mask = torch.ones_like(ids)
    mask[0, 7:] = mask[1, :8] = 0
    logits = []
    for implementation in ("sdpa", "flash_attention_2"):
        model.set_attn_implementation(implementation)
        logits.append(model(ids, mask, rows).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert "flash_attn_varlen_func" in flash_attention


# GPT-2 has no nn.Linear in its attention; Falcon and Bark call flash-attn past transformers' AttentionInterface.
UNUSUAL_CALLS = {
    "GPT2LMHeadModel": dict(GPT2_SHAPE, initializer_range=0.3),
    "FalconForCausalLM": dict(
        vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3
    ),
    "BarkSemanticModel": dict(
        input_vocab_size=VOCAB_SIZE, output_vocab_size=VOCAB_SIZE, hidden_size=48, num_layers=2, num_heads=4
    ),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", UNUSUAL_CALLS)
def test_flash_attention_of_models_with_calls_of_their_own(name: str, flash_attention: set[str]) -> None:
    """In fp32, with a prompt that is padded on the left."""
    model_class = getattr(transformers, name)
    ids, mask = torch.arange(22).view(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    logits = []
    for implementation in ("eager", "flash_attention_2"):
        torch.manual_seed(0)
        config = model_class.config_class(**UNUSUAL_CALLS[name])
        model = model_class._from_config(config, attn_implementation=implementation).eval()
        logits.append(model(ids, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert flash_attention == {"flash_attn_varlen_func"}


def test_flash_attention_without_the_windows_of_gpt_neo(flash_attention: set[str]) -> None:
    with pytest.raises(ValueError, match=r"^GPTNeo\w+ does not support Flash Attention 2"):
        transformers.GPTNeoForCausalLM._from_config(
            transformers.GPTNeoConfig(
                vocab_size=VOCAB_SIZE, num_layers=2, attention_types=[[["global", "local"], 1]], hidden_size=48,
                num_heads=4,
            ),
            attn_implementation="flash_attention_2",
        )  # fmt: skip


@pytest.mark.parametrize("version", ["4.57.1", "5.18.0", "5.25.0.dev0", "6.0.0"])
def test_wrong_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    monkeypatch.delitem(sys.modules, "pagedattn_ext.transformers")
    how = re.escape('(pip install "transformers<5.25")')
    message = f"^pagedattn_ext.transformers: expected transformers 5.19 to 5.24 {how}, got {version}$"
    with pytest.raises(ImportError, match=message):
        importlib.import_module("pagedattn_ext.transformers")
