"""transformers with this package as a local repository of Hugging Face's `kernels`: attention, and layers of models."""

import os
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from kernels import (
    LocalLayerRepository,
    Mode,
    get_local_kernel,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from small_checkpoints import generate, make_model, make_prompts
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import initialization

import pagedattn_ext
from pagedattn_ext import ops

REPOSITORY = Path(pagedattn_ext.__file__).with_name("hub_kernel")
# transformers hands block tables to what has "flash" and "2" or "3" in its name. A model that lists what it is
# compatible with (gpt-oss) takes nothing else.
NAME, LISTED = "pagedattn-ext/flash-attn2", "kernels-community/vllm-flash-attn3"
os.environ["LOCAL_KERNELS"] = f"{NAME}={REPOSITORY}:{LISTED}={REPOSITORY}"

NUM_TOKENS = 20
PROMPTS = make_prompts([100, 1, 7, 90, 255, 33, 97], shared=65)
GREEDY = GenerationConfig(do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=-1)
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Mistral": {"sliding_window": 40},
    "GptOss": {"sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},  # with sinks
}


@pytest.fixture(scope="module")
def all_calls() -> Counter[str]:
    """How often transformers has called each function. It asks the kernel for its functions once."""
    kernel, calls = get_local_kernel(REPOSITORY), Counter[str]()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def count(*args: Any, **kwargs: Any) -> Any:
            calls[function.__name__] += 1
            return function(*args, **kwargs)

        return count

    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(kernel, name, counted(getattr(kernel, name)))
    return calls


@pytest.fixture
def calls(all_calls: Counter[str]) -> Counter[str]:
    all_calls.clear()
    return all_calls


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param, **KINDS[request.param])


@pytest.fixture
def expected(model: PreTrainedModel, calls: Counter[str]) -> list[list[int]]:
    tokens = [generate(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert min(len(set(each)) for each in tokens) > 3
    model.set_attn_implementation(LISTED if model._compatible_flash_implementations else NAME)
    return tokens


def generate_batch(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    config = ContinuousBatchingConfig(
        page_size=32, num_blocks=40, max_batch_tokens=64, max_requests_per_batch=4, **options
    )
    outputs = model.generate_batch(PROMPTS, GREEDY, config)
    assert {output.error for output in outputs.values()} == {None}
    return [output.generated_tokens for output in outputs.values()]


def test_attention_of_generate(model: PreTrainedModel, expected: list[list[int]], calls: Counter[str]) -> None:
    assert [generate(model, prompt, NUM_TOKENS) for prompt in PROMPTS] == expected
    assert calls.keys() == {"flash_attn_func"}


def test_attention_of_continuous_batching(
    model: PreTrainedModel, expected: list[list[int]], calls: Counter[str]
) -> None:
    assert generate_batch(model) == expected
    assert calls.keys() == {"flash_attn_varlen_func"}


def test_block_tables_of_continuous_batching(
    model: PreTrainedModel, expected: list[list[int]], calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers hands block tables over on GPUs alone. Here it believes in one, and only there."""
    if model.config.sliding_window:
        pytest.skip("transformers has no block tables for sliding windows")
    monkeypatch.setattr(initialization, "is_torch_xpu_available", lambda: True)
    assert generate_batch(model, max_blocks_per_request=10) == expected
    assert calls.keys() == {"flash_attn_varlen_func", "flash_attn_with_kvcache"}


def layers_of(*names: str) -> Any:
    return use_kernel_mapping({name: {"cpu": LocalLayerRepository(REPOSITORY, layer_name=name)} for name in names})


@torch.no_grad()
def test_rms_norm_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model("Qwen3"), torch.tensor([PROMPTS[0]])
    expected = model(ids).logits
    shapes: list[torch.Size] = []
    rms_norm = ops.rms_norm
    monkeypatch.setattr(ops, "rms_norm", lambda input, *args: (shapes.append(input.shape), rms_norm(input, *args))[1])
    with layers_of("RMSNorm"):
        model = kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, device="cpu")
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert len(shapes) == 4 * model.config.num_hidden_layers + 1  # two of a layer, and those of queries and keys


@use_kernel_forward_from_hub("SiluAndMul")
class SiluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


@torch.no_grad()
def test_silu_and_mul() -> None:
    layer, x = SiluAndMul(), torch.randn(5, 3, 38)
    expected = layer(x)
    with layers_of("SiluAndMul"):
        layer = kernelize(layer, mode=Mode.INFERENCE, device="cpu")
    assert layer.forward.__func__.__module__.endswith("layers")
    torch.testing.assert_close(layer(x), expected)
