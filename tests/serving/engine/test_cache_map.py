"""The engine's map of its cache: it shows what `stats` counts, at each step, whatever became of the blocks."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from checkpoints import Checkpoint

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import CacheMap
from pagedattn_serve.sampling_params import SamplingParams


def check(engine: LLMEngine) -> CacheMap:
    cache_map, stats = engine.cache_map(), engine.stats()
    assert len(cache_map.blocks) == len(cache_map.owners) == stats.num_blocks
    assert len(cache_map.host_blocks) == len(cache_map.host_owners) == stats.num_host_blocks
    assert set(cache_map.blocks) <= {"free", "used", "shared", "cached"}
    assert cache_map.blocks.count("used") + cache_map.blocks.count("shared") == stats.num_used_blocks
    assert cache_map.blocks.count("cached") == stats.num_cached_blocks
    assert cache_map.host_blocks.count("swapped") == stats.num_used_host_blocks
    states = [request.state for request in cache_map.requests]
    assert states == ["running"] * stats.num_running + ["swapped"] * stats.num_swapped + ["waiting"] * stats.num_waiting
    for block, owner in zip(cache_map.blocks, cache_map.owners, strict=True):
        assert (states[owner] == "running") if block in ("used", "shared") else owner == -1
    for block, owner in zip(cache_map.host_blocks, cache_map.host_owners, strict=True):
        assert (states[owner] == "swapped") if block == "swapped" else owner == -1
    return cache_map


def run(engine: LLMEngine) -> set[str]:
    """All that the blocks and requests ever were."""
    seen: set[str] = set()
    while engine.has_unfinished_requests():
        engine.step()
        cache_map = check(engine)
        seen.update(cache_map.blocks, cache_map.host_blocks, (request.state for request in cache_map.requests))
    return seen


def make_engine(llama: Checkpoint, **options: Any) -> LLMEngine:
    return LLMEngine(llama.path, **{"block_size": 8, "num_blocks": 12, "max_model_len": 64, **options})


def test_empty(llama: Checkpoint) -> None:
    cache_map = check(make_engine(llama))
    assert cache_map.blocks == ("free",) * 12 and cache_map.requests == ()
    with pytest.raises(FrozenInstanceError):
        cache_map.blocks = ()  # type: ignore[misc]


def test_one_request_and_what_it_leaves(llama: Checkpoint) -> None:
    engine = make_engine(llama)
    engine.add_request("a", prompt_token_ids=[1] * 20, sampling_params=SamplingParams(max_tokens=3, ignore_eos=True))
    assert check(engine).requests == (("a", "waiting", 20, 0),)
    engine.step()
    cache_map = check(engine)
    assert cache_map.requests == (("a", "running", 20, 1),)
    assert cache_map.blocks.count("used") == cache_map.owners.count(0) == 3
    run(engine)
    assert sorted(engine.cache_map().blocks) == ["cached"] * 2 + ["free"] * 10


def test_what_two_requests_share(llama: Checkpoint) -> None:
    engine = make_engine(llama)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for name in ("a", "b"):
        engine.add_request(name, prompt_token_ids=[1] * 20, sampling_params=params)
    engine.step()
    blocks = check(engine).blocks
    assert (blocks.count("shared"), blocks.count("used")) == (2, 2)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_samples_beams_and_preemption(llama: Checkpoint, mode: str) -> None:
    engine = make_engine(llama, preemption_mode=mode)
    for i, prompt in enumerate(llama.prompts):
        beams = dict(use_beam_search=True, temperature=0) if i % 2 else {}
        params = SamplingParams(n=3, max_tokens=12, ignore_eos=True, **beams)
        engine.add_request(str(i), prompt_token_ids=prompt[:20], sampling_params=params)
    seen = run(engine)
    assert {"free", "used", "shared", "cached", "waiting", "running"} <= seen
    assert ("swapped" in seen) == (mode == "swap")
    assert engine.stats().num_preemptions > 0
