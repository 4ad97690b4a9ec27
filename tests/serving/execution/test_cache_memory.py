"""How large the cache is: blocks from bytes, the largest step there can be, and what that step leaves of a device."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.config import DEFAULT_WATERMARK, UNBOUNDED, CacheConfig, SchedulerConfig
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.execution.engine_setup import (
    choose_num_blocks,
    choose_num_host_blocks,
    cuda_memory,
    largest_batch,
    num_useful_blocks,
)
from pagedattn_serve.execution.model_runner import ModelRunner
from pagedattn_serve.loading.loader import build_model, load_model
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.scheduling.sequence import TableArray

# llama-gqa, a slot: keys and values of 2 layers, 2 KV heads, 20 numbers a head (24 in 16 bits, for 16 bytes).
SLOT_BYTES = {"float32": 2 * 2 * 2 * 20 * 4, "float16": 2 * 2 * 2 * 24 * 2, "bfloat16": 2 * 2 * 2 * 24 * 2}
PLENTY = 10**9


@pytest.fixture(scope="module")
def model(llama: Checkpoint) -> CausalLM:
    return load_model(llama.path)


@pytest.mark.parametrize("dtype", SLOT_BYTES)
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_blocks_that_fit(llama: Checkpoint, dtype: str, block_size: int) -> None:
    model, block_bytes = build_model(llama.path, dtype), SLOT_BYTES[dtype] * block_size
    assert choose_num_blocks(model, block_bytes, block_size, PLENTY) == 1
    assert choose_num_blocks(model, 7 * block_bytes - 1, block_size, PLENTY) == 6
    assert choose_num_blocks(model, 7 * block_bytes, block_size, PLENTY) == 7
    with pytest.raises(ValueError, match=f"kv_cache_memory: .*one block, {block_bytes} bytes, got {block_bytes - 1}"):
        choose_num_blocks(model, block_bytes - 1, block_size, PLENTY)
    for kv_cache_dtype in ("fp8", "fp8_e5m2"):  # 32 numbers a head, whatever the model's dtype
        assert choose_num_blocks(model, 7 * 2 * 2 * 2 * 32 * block_size, block_size, PLENTY, kv_cache_dtype) == 7


@pytest.mark.parametrize("at_most", [1, 2, 10])
def test_no_more_blocks_than_are_of_use(llama: Checkpoint, at_most: int) -> None:
    model = build_model(llama.path)
    assert choose_num_blocks(model, 10**12, 16, at_most) == at_most
    assert choose_num_blocks(model, 3 * 16 * SLOT_BYTES["float32"], 16, at_most) == min(at_most, 3)


@given(max_num_seqs=st.integers(1, 300), max_model_len=st.integers(2, 300), block_size=st.sampled_from([8, 16, 64]))
def test_useful_blocks_are_enough_and_not_one_more(max_num_seqs: int, max_model_len: int, block_size: int) -> None:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    held = max_num_seqs * math.ceil(max_model_len / block_size)

    def beside_watermark(num_blocks: int) -> int:
        return num_blocks - math.ceil(num_blocks * DEFAULT_WATERMARK)

    num_blocks = num_useful_blocks(config, CacheConfig(num_blocks=1, block_size=block_size))
    assert beside_watermark(num_blocks) >= held > beside_watermark(num_blocks - 1)


def cache(swap_space: float, kv_cache_dtype: str = "auto") -> CacheConfig:
    return CacheConfig(num_blocks=UNBOUNDED, swap_space=swap_space, kv_cache_dtype=kv_cache_dtype)


def test_host_blocks(llama: Checkpoint) -> None:
    model, block_bytes = build_model(llama.path), 16 * SLOT_BYTES["float32"]
    config = SchedulerConfig(max_num_seqs=3, max_model_len=33)
    assert choose_num_host_blocks(model, config, cache(0), 9) == 0
    seven = 7.5 * block_bytes / 2**30
    assert choose_num_host_blocks(model, config, cache(seven), 9) == 7
    assert choose_num_host_blocks(model, config, cache(seven, "fp8"), 9) == 9  # 32 bytes a head, not 80
    assert choose_num_host_blocks(model, config, cache(4), 100) == 3 * 3  # what three sequences hold
    assert choose_num_host_blocks(model, config, cache(4), 5) == 5
    assert LLMEngine(llama.path, num_blocks=48).stats().num_host_blocks == 48


@pytest.mark.parametrize(("memory", "error"), [(0, ValueError), (-1, ValueError), (1e9, TypeError), (True, TypeError)])
def test_wrong_memory(memory: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="kv_cache_memory"):
        CacheConfig(num_blocks=UNBOUNDED, kv_cache_memory=memory)


configs = st.builds(
    SchedulerConfig,
    max_model_len=st.integers(2, 300),
    max_num_seqs=st.integers(1, 60),
    max_num_batched_tokens=st.integers(1, 700),
)


@given(config=configs, block_size=st.sampled_from([8, 16, 32, 64]))
def test_the_largest_batch_is_within_the_limits_and_reaches_them(config: SchedulerConfig, block_size: int) -> None:
    batch = largest_batch(config, CacheConfig(num_blocks=1, block_size=block_size))
    assert len(batch.sequences) == min(config.max_num_seqs, config.max_num_batched_tokens)
    assert batch.num_tokens <= config.max_num_batched_tokens
    tables = [blocks for *_, blocks in batch.table_writes]
    assert [place for *place, _ in batch.table_writes] == [[0, i, 0] for i in range(len(batch.sequences))]
    blocks = [block for table in tables for block in table]
    assert sorted(blocks) == list(range(len(blocks)))  # no block twice, none between them without use
    lengths = {scheduled.num_new_tokens for scheduled in batch.sequences}
    for scheduled, table in zip(batch.sequences, tables, strict=True):
        sequence = scheduled.sequence
        assert scheduled.num_samples == 1 and 0 < sequence.num_tokens == scheduled.num_new_tokens < config.max_model_len
        assert len(table) == -(-sequence.num_tokens // block_size)
        assert not sequence.sampling.sampling_params.greedy
    # One token more for each would be too many.
    is_longest = lengths == {config.max_model_len - 1}
    assert is_longest or batch.num_tokens + len(batch.sequences) > config.max_num_batched_tokens


@pytest.mark.parametrize(
    "limits",
    [
        dict(max_model_len=128),
        dict(max_model_len=128, max_num_seqs=3),
        dict(max_model_len=128, max_num_seqs=200, max_num_batched_tokens=150),
        dict(max_model_len=2, max_num_seqs=9),
        dict(max_model_len=128, max_num_seqs=1, max_num_batched_tokens=1),
    ],
)
@pytest.mark.parametrize("block_size", [8, 64])
def test_the_largest_batch_runs(model: CausalLM, limits: dict[str, int], block_size: int) -> None:
    config = SchedulerConfig(**limits)
    batch = largest_batch(config, CacheConfig(num_blocks=1, block_size=block_size))
    num_blocks = sum(len(blocks) for *_, blocks in batch.table_writes)
    cache_config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
    tables = TableArray(config, cache_config)
    for write in batch.table_writes:
        tables.write(*write)
    output = ModelRunner(model, cache_config, tables, "cpu", seed=0).execute(batch)
    assert len(output.token_ids) == len(batch.sequences)
    assert all(map(torch.isfinite, torch.tensor(output.logprobs)))


# --- what is left of a CUDA device: the sum, with a device that is made up and the step on the CPU ---

MIB = 1 << 20
TOTAL, OF_OTHERS, PEAK, RESERVED = 1000 * MIB, 100 * MIB, 300 * MIB, 350 * MIB
CONFIG = SchedulerConfig(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=256)  # 4 times 64 tokens


@pytest.fixture
def made_up_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hold OF_OTHERS; this process has RESERVED, of which PEAK was in use, the cache of the step included."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - OF_OTHERS - RESERVED, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: RESERVED)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: PEAK)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_what_a_device_leaves(made_up_device: None, model: CausalLM, block_size: int) -> None:
    of_step = 4 * 64 * SLOT_BYTES["float32"]
    for share in (0.9, 1.0, 0.41):
        cache_config = CacheConfig(num_blocks=UNBOUNDED, block_size=block_size, gpu_memory_utilization=share)
        left = cuda_memory(model, CONFIG, cache_config, "cpu")
        assert left == int(TOTAL * share) - OF_OTHERS - (PEAK - of_step)
    of_step = 4 * 64 * 2 * 2 * 2 * 32
    cache_config = replace(cache_config, gpu_memory_utilization=1.0, kv_cache_dtype="fp8")
    assert cuda_memory(model, CONFIG, cache_config, "cpu") == TOTAL - OF_OTHERS - (PEAK - of_step)


def test_nothing_left(made_up_device: None, model: CausalLM) -> None:
    message = "gpu_memory_utilization: expected more than 0.40, what the model needs without a cache, got 0.39"
    with pytest.raises(ValueError, match=message):
        cuda_memory(model, CONFIG, CacheConfig(num_blocks=UNBOUNDED, gpu_memory_utilization=0.39), "cpu")
