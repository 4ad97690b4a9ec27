"""What an engine is built from: its options, checked, and the device, lengths and cache that follow from them."""

import logging
import re
from dataclasses import replace

import torch

import pagedattn_ext
from pagedattn_serve.config import CacheConfig, SchedulerConfig, check_bool, check_float, check_int
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.execution.cache_engine import choose_cache_dtype
from pagedattn_serve.execution.cache_memory import (
    DEFAULT_CPU_MEMORY,
    block_bytes_of,
    choose_num_blocks,
    choose_num_host_blocks,
    cuda_memory,
    num_useful_blocks,
)
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.models.linear import check_quantization

logger = logging.getLogger(__name__)


def check_options(
    *,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    seed: int,
    swap_space: float,
    gpu_memory_utilization: float,
    num_blocks: int | None,
    kv_cache_memory: int | None,
    trust_remote_code: bool,
    enforce_eager: bool,
    tensor_parallel_size: int,
    kv_cache_dtype: str,
    quantization: str | None,
    max_beam_width: int,
) -> None:
    """Raises ValueError or TypeError for what is wrong whatever the model, before anything of it is read."""
    check_int("block_size", block_size, 8, 256)
    check_int("max_num_seqs", max_num_seqs, 1)
    check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
    check_int("seed", seed, 0, 2**64 - 1)
    check_float("swap_space", swap_space)
    if swap_space < 0:
        raise ArgumentError("swap_space", "a number >= 0", swap_space)
    check_float("gpu_memory_utilization", gpu_memory_utilization)
    if not 0 < gpu_memory_utilization <= 1:
        raise ArgumentError("gpu_memory_utilization", "a share in (0, 1]", gpu_memory_utilization)
    if num_blocks is not None:
        check_int("num_blocks", num_blocks, 1)
    if num_blocks is not None and kv_cache_memory is not None:
        raise ArgumentError("kv_cache_memory", "None beside num_blocks, which says the same")
    if check_bool("trust_remote_code", trust_remote_code):
        raise ArgumentError("trust_remote_code", "False, as running a checkpoint's own code is not supported")
    check_bool("enforce_eager", enforce_eager)
    check_int("tensor_parallel_size", tensor_parallel_size, 1)
    if tensor_parallel_size != 1:
        raise ArgumentError("tensor_parallel_size", "1, as more are not supported", tensor_parallel_size)
    choose_cache_dtype(kv_cache_dtype, torch.float32)
    check_quantization(quantization)
    check_int("max_beam_width", max_beam_width, 1)


def choose_device(name: str) -> str:
    """ "cpu", "cuda" or "cuda:N" for a name that may be "auto", too. ValueError if there is no such device."""
    has_cuda = bool(pagedattn_ext.build_info()["cuda_arches"]) and torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ArgumentError("device", "auto, cpu, cuda or cuda:N", repr(name))
    if name != "cpu" and not has_cuda:
        reason = "torch finds no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
        if not pagedattn_ext.build_info()["cuda_arches"]:
            reason = "this build of pagedattn_ext has no CUDA kernels"
        raise ArgumentError("device", f"cpu ({reason})", name)
    return name


def choose_max_model_len(requested: int | None, of_model: int) -> int:
    """Most tokens of a sequence: what is asked for, up to the model's own."""
    if requested is None:
        return of_model
    check_int("max_model_len", requested, 2, of_model)
    return requested


def choose_cache_config(
    model: CausalLM,
    config: SchedulerConfig,
    device: str,
    *,
    block_size: int,
    num_blocks: int | None,
    kv_cache_memory: int | None,
    swap_space: float,
    gpu_memory_utilization: float,
    enable_prefix_caching: bool,
    kv_cache_dtype: str,
    kv_scales: tuple[tuple[float, float], ...] | None,
) -> CacheConfig:
    """The cache of `num_blocks`, or of kv_cache_memory bytes, or else of the device's default.

    Raises ValueError if there is no room for a block.
    """
    if num_blocks is None:
        memory = kv_cache_memory
        if memory is None and device == "cpu":
            memory = DEFAULT_CPU_MEMORY
        elif memory is None:
            memory = cuda_memory(model, config, block_size, device, gpu_memory_utilization, kv_cache_dtype)
        at_most = num_useful_blocks(config, block_size)
        num_blocks = choose_num_blocks(model, memory, block_size, at_most, kv_cache_dtype)
    return CacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks=choose_num_host_blocks(model, swap_space, block_size, num_blocks, config, kv_cache_dtype),
        enable_prefix_caching=enable_prefix_caching,
        kv_cache_dtype=kv_cache_dtype,
        kv_scales=kv_scales,
    )


def limit_to_cache(config: SchedulerConfig, cache_config: CacheConfig) -> SchedulerConfig:
    """max_model_len cut to what the whole cache holds: a longer sequence could never end."""
    num_slots = cache_config.num_blocks * cache_config.block_size
    if config.max_model_len <= num_slots:
        return config
    logger.warning("max_model_len: cut from %d to %d tokens, all that the cache holds", config.max_model_len, num_slots)
    return replace(config, max_model_len=num_slots)


def too_large(model: CausalLM, cache_config: CacheConfig, error: Exception) -> MemoryError:
    """What to raise where the cache could not be allocated."""
    num_blocks, block_size = cache_config.num_blocks, cache_config.block_size
    num_bytes = num_blocks * block_bytes_of(model, block_size, cache_config.kv_cache_dtype)
    return MemoryError(
        f"num_blocks: expected a cache that fits in memory, got {num_blocks:,} blocks of {block_size} tokens, "
        f"{num_bytes:,} bytes ({str(error).partition(chr(10))[0] or 'out of memory'})"
    )
