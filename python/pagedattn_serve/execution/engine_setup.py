"""What the options of an engine leave to the model and the memory: the device, the lengths, the size of the cache."""

import logging
import math
from dataclasses import replace

import torch

import pagedattn_ext
from pagedattn_serve.config import DEFAULT_WATERMARK, UNBOUNDED, CacheConfig, SchedulerConfig, check_int
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.execution.cache_engine import choose_cache_dtype
from pagedattn_serve.execution.model_runner import ModelRunner
from pagedattn_serve.models.cache_shape import bytes_per_block
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.sequence import ScheduledBatch, ScheduledSequence, Sequence, TableArray

logger = logging.getLogger(__name__)

DEFAULT_CPU_MEMORY = 1 << 30  # bytes; a share of the memory would take it from other programs


def num_useful_blocks(config: SchedulerConfig, block_size: int) -> int:
    """Blocks that sequences may hold at once, and the watermark beside them."""
    return math.ceil(num_held_blocks(config, block_size) / (1 - DEFAULT_WATERMARK))


def num_held_blocks(config: SchedulerConfig, block_size: int) -> int:
    """Blocks that sequences hold when as many run as may, and each is at its longest."""
    return config.max_num_seqs * -(-config.max_model_len // block_size)


def block_bytes_of(model: CausalLM, block_size: int, kv_cache_dtype: str = "auto") -> int:
    """Bytes that one block takes over all caches of the model."""
    dtype = choose_cache_dtype(kv_cache_dtype, model.dtype)
    return bytes_per_block(model.cache_shapes, block_size, dtype)


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


def choose_device(name: str) -> str:
    """The device, "cpu", "cuda" or "cuda:N", for a name of `ModelConfig`. Raises ValueError if there is none."""
    has_cuda = bool(pagedattn_ext.build_info()["cuda_arches"]) and torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    if name != "cpu" and not has_cuda:
        reason = "torch finds no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
        if not pagedattn_ext.build_info()["cuda_arches"]:
            reason = "this build of pagedattn_ext has no CUDA kernels"
        raise ArgumentError("device", f"cpu ({reason})", name)
    return name


def device_of_rank(device: str, rank_on_host: int, ranks_per_host: int) -> str:
    """The device of a rank, where `choose_device` gave this device: on CUDA each rank of a host has another one. Raises
    ArgumentError if the host has too few."""
    if device == "cpu":
        return device
    if device != "cuda":
        raise ArgumentError("device", "cpu, or cuda without a number, for several ranks", device)
    number = torch.cuda.device_count()
    if ranks_per_host > number:
        expected = f"at most {number} on a machine with {number} CUDA devices, as each rank takes one"
        raise ArgumentError("tensor_parallel_size", expected, ranks_per_host)
    return f"cuda:{rank_on_host}"


def limit_to_model(config: SchedulerConfig, model: CausalLM) -> SchedulerConfig:
    """Check a max_model_len that is given: the model has a largest one. Fill in the model's if none is given."""
    if config.max_model_len == UNBOUNDED:
        return replace(config, max_model_len=model.max_model_len)
    check_int("max_model_len", config.max_model_len, 2, model.max_model_len)
    return config


def limit_to_memory(
    cache_config: CacheConfig, model: CausalLM, scheduler_config: SchedulerConfig, device: str
) -> CacheConfig:
    """Fill in num_blocks, unless given, from kv_cache_memory or the device's default; num_host_blocks; and the model's
    window. Raises ValueError if there is no room for a block, and for an int8 cache on CUDA."""
    block_size, kv_cache_dtype = cache_config.block_size, cache_config.kv_cache_dtype
    if kv_cache_dtype == "int8" and device != "cpu":
        raise ArgumentError("kv_cache_dtype", "another than int8, which is for the CPU", f"int8 on {device}")
    num_blocks = cache_config.num_blocks
    if num_blocks == UNBOUNDED:
        memory = cache_config.kv_cache_memory
        if memory is None and device == "cpu":
            memory = DEFAULT_CPU_MEMORY
        elif memory is None:
            memory = cuda_memory(model, scheduler_config, cache_config, device)
        at_most = num_useful_blocks(scheduler_config, block_size)
        num_blocks = choose_num_blocks(model, memory, block_size, at_most, kv_cache_dtype)
    num_host_blocks = choose_num_host_blocks(model, scheduler_config, cache_config, num_blocks)
    return replace(cache_config, num_blocks=num_blocks, num_host_blocks=num_host_blocks, window=model.window())


def limit_to_cache(config: SchedulerConfig, cache_config: CacheConfig) -> SchedulerConfig:
    """Cut max_model_len to what the whole cache holds: a longer sequence could never end."""
    num_slots = cache_config.num_blocks * cache_config.block_size
    if config.max_model_len <= num_slots:
        return config
    logger.warning("max_model_len: cut from %d to %d tokens, all that the cache holds", config.max_model_len, num_slots)
    return replace(config, max_model_len=num_slots)


def too_large(model: CausalLM, cache_config: CacheConfig, error: Exception) -> MemoryError:
    """The error for a cache that could not be allocated."""
    num_blocks, block_size = cache_config.num_blocks, cache_config.block_size
    num_bytes = num_blocks * block_bytes_of(model, block_size, cache_config.kv_cache_dtype)
    return MemoryError(
        f"num_blocks: expected a cache that fits in memory, got {num_blocks:,} blocks of {block_size} tokens, "
        f"{num_bytes:,} bytes ({str(error).partition(chr(10))[0] or 'out of memory'})"
    )
