"""nano-vllm's engine on a CPU, by the substitutions of `nano_vllm_on_cpu`: the tokens of transformers' `generate`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nano_vllm_on_cpu  # noqa: F401, before nanovllm
import pytest
from nanovllm import LLM, SamplingParams
from nanovllm.layers import attention
from small_checkpoints import generate, make_prompts, save_model

BLOCK_SIZE = 256  # the smallest that it takes
BATCHES = [
    make_prompts([300, 1, 7, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 517]),
    make_prompts([300, BLOCK_SIZE + 1, 517], shared=BLOCK_SIZE + 4),  # of their first block, all but one find the cache
]
GREEDY = SamplingParams(top_k=1, max_tokens=20)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often attention ran: on prompts, on prompts behind a prefix from the cache, on single tokens."""
    counts = {"prompts": 0, "prefixes": 0, "tokens": 0}
    prompts, tokens = attention.flash_attn_varlen_func, attention.flash_attn_with_kvcache

    def count_prompts(*args: Any, **kwargs: Any) -> Any:
        counts["prompts" if kwargs["block_table"] is None else "prefixes"] += 1
        return prompts(*args, **kwargs)

    def count_tokens(*args: Any, **kwargs: Any) -> Any:
        counts["tokens"] += 1
        return tokens(*args, **kwargs)

    monkeypatch.setattr(attention, "flash_attn_varlen_func", count_prompts)
    monkeypatch.setattr(attention, "flash_attn_with_kvcache", count_tokens)
    return counts


def test_tokens_of_generate(tmp_path: Path, calls: dict[str, int]) -> None:
    model = save_model(tmp_path)
    tokenizer = SimpleNamespace(eos_token_id=-1, decode=str)
    llm = LLM(str(tmp_path), tokenizer=tokenizer, enforce_eager=True, max_model_len=1024, max_num_batched_tokens=1024)
    for prompts in BATCHES:
        expected = [generate(model, prompt, GREEDY.max_tokens) for prompt in prompts]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == expected
        assert min(len(set(tokens)) for tokens in expected) > 5
    assert all(calls.values())
