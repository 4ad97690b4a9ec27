"""How large the cache is: from bytes to blocks, and what a CUDA device has left for it."""

import math
from dataclasses import replace

import torch

from pagedattn_serve.config import DEFAULT_WATERMARK, CacheConfig, SchedulerConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.execution.cache_engine import bytes_per_block, choose_cache_dtype
from pagedattn_serve.execution.model_runner import ModelRunner
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.batch import ScheduledBatch
from pagedattn_serve.scheduling.sequence import ScheduledSequence, Sequence
from pagedattn_serve.scheduling.table_array import TableArray

DEFAULT_CPU_MEMORY = 1 << 30  # bytes; a share of the memory would take it from other programs


def num_useful_blocks(config: SchedulerConfig, block_size: int) -> int:
    """Blocks that sequences may hold at once, and the watermark beside them."""
    return math.ceil(num_held_blocks(config, block_size) / (1 - DEFAULT_WATERMARK))


def num_held_blocks(config: SchedulerConfig, block_size: int) -> int:
    """Blocks that sequences hold when as many run as may, and each is at its longest."""
    return config.max_num_seqs * -(-config.max_model_len // block_size)


def block_bytes_of(model: CausalLM, block_size: int, kv_cache_dtype: str = "auto") -> int:
    """Bytes that one block of the model's cache takes over all layers."""
    dtype = choose_cache_dtype(kv_cache_dtype, model.dtype)
    return bytes_per_block(model.num_layers, model.num_kv_heads, model.head_size, block_size, dtype)


def choose_num_blocks(model: CausalLM, memory: int, block_size: int, at_most: int, kv_cache_dtype: str = "auto") -> int:
    """Blocks that fit in `memory` bytes, but not more than `at_most`. ValueError if there is room for none."""
    block_bytes = block_bytes_of(model, block_size, kv_cache_dtype)
    if memory < block_bytes:
        raise ArgumentError("kv_cache_memory", f"at least one block, {block_bytes} bytes", memory)
    return min(memory // block_bytes, at_most)


def choose_num_host_blocks(model: CausalLM, config: SchedulerConfig, cache_config: CacheConfig, num_blocks: int) -> int:
    """Blocks that fit in `swap_space` GiB, but not more than the cache has (num_blocks), nor than sequences may hold.

    The bound is that of the PagedAttention paper (section 4.5): no request is let in that comes after a swapped-out
    request, so what is swapped out was in the cache before. But it may be more than the cache held at one time: the
    requests that stay grow into the room and are swapped out in their turn, or better priorities keep coming. Then the
    pool is full, and the next request is computed again.
    """
    block_bytes = block_bytes_of(model, cache_config.block_size, cache_config.kv_cache_dtype)
    num_host_blocks = int(cache_config.swap_space * (1 << 30)) // block_bytes
    return min(num_host_blocks, num_blocks, num_held_blocks(config, cache_config.block_size))


def cuda_memory(model: CausalLM, config: SchedulerConfig, cache_config: CacheConfig, device: str) -> int:
    """Bytes that the cache may take: the share of the device, less all that the largest step takes beside the cache.

    The largest step is run, on a cache of its own that is gone afterwards. Raises ValueError if nothing is left.
    """
    torch.cuda.reset_peak_memory_stats(device)
    batch = largest_batch(config, cache_config.block_size)
    num_blocks = max(blocks[-1] for _, _, blocks in batch.table_writes) + 1
    tables = TableArray(config, cache_config)
    for write in batch.table_writes:
        tables.write(*write)
    runner = ModelRunner(model, replace(cache_config, num_blocks=num_blocks), tables, device, seed=0)
    runner.execute(batch)
    own_cache = num_blocks * block_bytes_of(model, cache_config.block_size, cache_config.kv_cache_dtype)
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    needed = torch.cuda.max_memory_allocated(device) - own_cache + used_by_others
    del runner
    torch.cuda.empty_cache()
    share = cache_config.gpu_memory_utilization
    available = int(total * share) - needed
    if available <= 0:
        expected = f"more than {needed / total:.2f}, what the model needs without a cache"
        raise ArgumentError("gpu_memory_utilization", expected, share)
    return available


def largest_batch(config: SchedulerConfig, block_size: int) -> ScheduledBatch:
    """Prompts that fill a step to its limits: the most sequences, the most tokens, the most tokens drawn."""
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // num_seqs, config.max_model_len - 1)
    blocks_per_seq = -(-length // block_size)
    num_drafts = 0 if config.speculation is None else min(config.num_speculative_tokens, length - 1)
    batch = ScheduledBatch()
    for i in range(num_seqs):
        sequence = Sequence(f"profile-{i}", [0] * (length - num_drafts))
        tokens = sequence.prompt_token_ids, sequence.output_token_ids
        sequence.sampling = SamplingState(SamplingParams(top_p=0.9), *tokens)
        batch.sequences.append(ScheduledSequence(sequence, length - num_drafts, 1, (0,) * num_drafts))
        batch.table_writes.append((i, 0, list(range(i * blocks_per_seq, (i + 1) * blocks_per_seq))))
    return batch
