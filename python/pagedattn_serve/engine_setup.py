"""What the options of an engine leave to the model and the memory: the device, the lengths and the cache."""

import logging
from dataclasses import replace

import torch

import pagedattn_ext
from pagedattn_serve.config import UNBOUNDED, CacheConfig, SchedulerConfig, check_int
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.execution.cache_memory import (
    DEFAULT_CPU_MEMORY,
    block_bytes_of,
    choose_num_blocks,
    choose_num_host_blocks,
    cuda_memory,
    num_useful_blocks,
)
from pagedattn_serve.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)


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
    """Fill in num_blocks, unless given, from kv_cache_memory or the device's default; and num_host_blocks. Raises
    ValueError if there is no room for a block, and for an int8 cache on CUDA."""
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
    return replace(cache_config, num_blocks=num_blocks, num_host_blocks=num_host_blocks)


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
