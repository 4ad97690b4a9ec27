"""vLLM's CPU wheel with the attention of `pagedattn_ext.vllm_plugin`: the tokens of vLLM's own attention."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ |= {
    "PAGEDATTN_VLLM": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model runs in this process, where its layers can be looked at
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

from checkpoints import make_prompts, save_model
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from pagedattn_ext import ops, vllm_plugin
from pagedattn_ext.vllm_backend import PagedAttentionBackend, PagedAttentionImpl

BLOCK_SIZE, CHUNK, SHARED = 32, 48, 65
PROMPTS = make_prompts([100, 1, 7, 90, 255, 33, 97, 66], shared=SHARED)
GREEDY = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Mistral": {"sliding_window": 40},
    "Gemma2": {
        "tie_word_embeddings": True,
        "sliding_window": 40,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


@pytest.fixture(scope="module", params=MODELS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine that chunks prompts, finds prefixes, and preempts: not all of PROMPTS fit into its cache at once."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_model(directory, request.param, **MODELS[request.param])
    yield LLM(
        str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=320,
        num_gpu_blocks_override=20,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=6,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
    )
    cleanup_dist_env_and_memory()


def attention_layers(llm: LLM) -> list[Any]:
    return list(llm.llm_engine.vllm_config.compilation_config.static_forward_context.values())


def generate(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """The tokens for each prompt, and how many of a prompt's tokens were found in the cache."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


def test_tokens_of_its_own_attention(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    attend = ops.paged_attention

    def count(query: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(query))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(ops, "paged_attention", count)
    assert {type(layer.impl) for layer in attention_layers(llm)} == {PagedAttentionImpl}
    tokens, found = generate(llm)
    assert sum(rows) > len(attention_layers(llm)) * sum(map(len, PROMPTS)) / 2
    assert max(rows) == CHUNK  # longer prompts came in chunks
    assert max(found) == SHARED // BLOCK_SIZE * BLOCK_SIZE

    rows.clear()
    for layer in attention_layers(llm):
        layer.impl.__class__ = CPUAttentionBackendImpl
    assert llm.reset_prefix_cache()
    assert generate(llm) == (tokens, found)
    assert not rows
    assert min(len(set(each)) for each in tokens) > 3


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    AttentionBackendEnum.CPU_ATTN.clear_override()
    monkeypatch.setenv("PAGEDATTN_VLLM", "0")
    vllm_plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is not PagedAttentionBackend
    monkeypatch.setenv("PAGEDATTN_VLLM", "1")
    vllm_plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is PagedAttentionBackend
