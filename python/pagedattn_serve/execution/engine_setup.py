"""What the options of an engine leave to the model and the memory: the device, the lengths, the size of the cache."""

import logging
import math
from dataclasses import replace

import torch

import pagedattn_ext
from pagedattn_serve.config import DEFAULT_WATERMARK, UNBOUNDED, CacheConfig, SchedulerConfig, check_int
from pagedattn_serve.errors import ArgumentError, reason_of
from pagedattn_serve.execution.cache_engine import choose_cache_dtype
from pagedattn_serve.execution.free_memory import free_memory
from pagedattn_serve.execution.model_runner import ModelRunner
from pagedattn_serve.execution.state_cache import bytes_per_slot
from pagedattn_serve.models.cache_shape import bytes_per_block
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.held_blocks import max_held_blocks, max_num_tokens
from pagedattn_serve.scheduling.sequence import ScheduledBatch, ScheduledSequence, Sequence, TableArray

logger = logging.getLogger(__name__)

DEFAULT_CPU_MEMORY = 1 << 30  # bytes; a share of the memory would take it from other programs


def num_useful_blocks(config: SchedulerConfig, cache_config: CacheConfig) -> int:
    """Blocks that sequences may hold at once, and the watermark beside them."""
    return math.ceil(num_held_blocks(config, cache_config) / (1 - DEFAULT_WATERMARK))


def num_held_blocks(config: SchedulerConfig, cache_config: CacheConfig) -> int:
    """Blocks that sequences hold at most when as many run as may, and each is at its longest."""
    return config.max_num_seqs * max_held_blocks(config.max_model_len, cache_config, config.max_num_batched_tokens)


def token_bytes_of(model: CausalLM, kv_cache_dtype: str = "auto") -> int:
    """Bytes that a token takes over all caches of the model."""
    return bytes_per_block(model.cache_shapes, 1, choose_cache_dtype(kv_cache_dtype, model.dtype))


def block_bytes_of(model: CausalLM, block_size: int, kv_cache_dtype: str = "auto") -> int:
    """Bytes that one block takes: as many as the caches of a group need."""
    dtype = choose_cache_dtype(kv_cache_dtype, model.dtype)
    return bytes_per_block(model.cache_groups().shapes, block_size, dtype)


def state_bytes_of(model: CausalLM) -> int:
    """Bytes that the states of one sequence take, over all layers; 0 if the model keeps none."""
    return bytes_per_slot(model.states)


def num_useful_state_slots(config: SchedulerConfig, prefix_caching: bool) -> int:
    """A slot for each sequence that may run; and with prefix caching as many for checkpoints."""
    return config.max_num_seqs * (2 if prefix_caching else 1)


def choose_num_state_slots(model: CausalLM, memory: int, block_bytes: int, at_most: int) -> int:
    """Slots for states that are to have room in `memory` bytes beside the blocks, not more than `at_most`.

    States get half of the memory at most, but that of one sequence always; and all of it if there are no other caches.
    Raises ValueError if there is no room for the states of one sequence and a block.
    """
    state_bytes = state_bytes_of(model)
    if not state_bytes:
        return 0
    if memory < (least := state_bytes + block_bytes):
        raise ArgumentError("kv_cache_memory", f"at least a block and the states of a sequence, {least} bytes", memory)
    share = memory // 2 if block_bytes else memory
    return min(max(share // state_bytes, 1), at_most)


def choose_num_blocks(model: CausalLM, memory: int, block_size: int, at_most: int, kv_cache_dtype: str = "auto") -> int:
    """Blocks that fit in `memory` bytes, but not more than `at_most`. ValueError if there is room for none."""
    block_bytes = block_bytes_of(model, block_size, kv_cache_dtype)
    if memory < block_bytes:
        raise ArgumentError("kv_cache_memory", f"at least one block, {block_bytes} bytes", memory)
    return min(memory // block_bytes, at_most) if block_bytes else at_most


def choose_num_host_blocks(model: CausalLM, config: SchedulerConfig, cache_config: CacheConfig, num_blocks: int) -> int:
    """Blocks that fit in `swap_space` GiB beside the states there (num_host_state_slots), but not more than the cache
    has (num_blocks), nor than sequences may hold.

    The bound is that of the PagedAttention paper (section 4.5): no request is let in that comes after a swapped-out
    request, so what is swapped out was in the cache before. But it may be more than the cache held at one time: the
    requests that stay grow into the room and are swapped out in their turn, or better priorities keep coming. Then the
    pool is full, and the next request is computed again.
    """
    block_bytes = block_bytes_of(model, cache_config.block_size, cache_config.kv_cache_dtype)
    at_most = min(num_blocks, num_held_blocks(config, cache_config))
    memory = cache_config.swap_bytes - cache_config.num_host_state_slots * state_bytes_of(model)
    return min(memory // block_bytes, at_most) if block_bytes else at_most


def cpu_memory(share: float | None) -> int:
    """Bytes that the cache may take on the CPU: the share of what is free now; None: DEFAULT_CPU_MEMORY."""
    if share is None:
        return DEFAULT_CPU_MEMORY
    free = free_memory()
    memory = int(free * share)
    logger.info("cpu_memory_utilization: the cache may take %s of %s free bytes", f"{memory:,}", f"{free:,}")
    return memory


def cache_memory(model: CausalLM, config: SchedulerConfig, cache_config: CacheConfig, device: str) -> tuple[int, str]:
    """Bytes that the cache may take, and the option that says how many."""
    if cache_config.kv_cache_memory is not None:
        return cache_config.kv_cache_memory, "kv_cache_memory"
    if device != "cpu":
        return cuda_memory(model, config, cache_config, device), "gpu_memory_utilization"
    share = cache_config.cpu_memory_utilization
    return cpu_memory(share), "kv_cache_memory" if share is None else "cpu_memory_utilization"


def cuda_memory(model: CausalLM, config: SchedulerConfig, cache_config: CacheConfig, device: str) -> int:
    """Bytes that the cache may take: the share of the device, less all that the largest step takes beside the cache.

    The largest step is run, on a cache of its own that is gone afterwards. Raises ValueError if nothing is left.
    """
    torch.cuda.reset_peak_memory_stats(device)
    batch = largest_batch(config, cache_config, generates=bool(model.head))
    num_blocks = max(blocks[-1] for *_, blocks in batch.table_writes) + 1
    tables = TableArray(config, cache_config)
    for write in batch.table_writes:
        tables.write(*write)
    num_slots = len(batch.state_slots) if model.states else 0
    trial_config = replace(cache_config, num_blocks=num_blocks, num_state_slots=num_slots)
    runner = ModelRunner(model, trial_config, tables, device, seed=0)
    runner.execute(batch)
    own_cache = num_blocks * block_bytes_of(model, cache_config.block_size, cache_config.kv_cache_dtype)
    own_cache += num_slots * state_bytes_of(model)
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


def largest_batch(config: SchedulerConfig, cache_config: CacheConfig, generates: bool = True) -> ScheduledBatch:
    """Prompts that fill a step to its limits: the most sequences, the most tokens, the most tokens drawn. generates:
    whether any are drawn."""
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // num_seqs, config.max_model_len - 1)
    blocks_per_seq = -(-length // cache_config.block_size)
    num_drafts = 0 if config.speculation is None or not generates else min(config.num_speculative_tokens, length - 1)
    batch = ScheduledBatch()
    for i in range(num_seqs):
        sequence = Sequence(f"profile-{i}", [0] * (length - num_drafts))
        tokens = sequence.prompt_token_ids, sequence.output_token_ids
        sequence.sampling = SamplingState(SamplingParams(top_p=0.9), *tokens)
        batch.sequences.append(ScheduledSequence(sequence, length - num_drafts, int(generates), (0,) * num_drafts))
        for group in range(len(cache_config.windows)):
            begin = (group * num_seqs + i) * blocks_per_seq
            batch.table_writes.append((group, i, 0, list(range(begin, begin + blocks_per_seq))))
        batch.state_slots.append(i)
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


def leave_out_for_states(
    cache_config: CacheConfig, config: SchedulerConfig, model: CausalLM
) -> tuple[CacheConfig, SchedulerConfig]:
    """For a model whose layers keep states: without speculation, and without prefix caching if the model cannot begin
    where a prefix ends. The log says so."""
    if not model.states:
        return cache_config, config
    if cache_config.enable_prefix_caching and model.forgets_states:
        reason = "would compute token by token what follows a prefix"
        logger.info("enable_prefix_caching: off, as %s keeps states and %s", model.architecture, reason)
        cache_config = replace(cache_config, enable_prefix_caching=False)
    if config.speculation is not None:
        reason = "keeps states, which cannot be taken back to the token before a wrong guess"
        logger.warning("speculation: off, as %s %s", model.architecture, reason)
    return cache_config, replace(config, speculation=None)


def limit_to_memory(
    cache_config: CacheConfig, model: CausalLM, scheduler_config: SchedulerConfig, device: str
) -> CacheConfig:
    """Fill in num_blocks from kv_cache_memory or the device's default; how many blocks there are on the host, and
    states here and there; and the windows of the model's groups of layers. A num_blocks that is given counts blocks of
    all layers: the cache has as many of each group. Raises ValueError if there is no room for a block, and for an int8
    cache on CUDA."""
    cache_config = replace(cache_config, windows=model.cache_groups().windows)
    block_size, kv_cache_dtype = cache_config.block_size, cache_config.kv_cache_dtype
    if kv_cache_dtype == "int8" and device != "cpu":
        raise ArgumentError("kv_cache_dtype", "another than int8, which is for the CPU", f"int8 on {device}")
    num_blocks, num_state_slots = cache_config.num_blocks, 0
    if model.states:
        num_state_slots = num_useful_state_slots(scheduler_config, cache_config.enable_prefix_caching)
    if num_blocks == UNBOUNDED:
        memory, option = cache_memory(model, scheduler_config, cache_config, device)
        block_bytes = block_bytes_of(model, block_size, kv_cache_dtype)
        try:
            num_state_slots = choose_num_state_slots(model, memory, block_bytes, num_state_slots)
            memory -= num_state_slots * state_bytes_of(model)
            num_seqs = min(num_state_slots or scheduler_config.max_num_seqs, scheduler_config.max_num_seqs)
            at_most = num_useful_blocks(replace(scheduler_config, max_num_seqs=num_seqs), cache_config)
            num_blocks = choose_num_blocks(model, memory, block_size, at_most, kv_cache_dtype)
        except ArgumentError as error:
            raise error.renamed(option) from None
    else:
        num_blocks *= len(cache_config.windows)
    num_host_state_slots = 0
    if model.states:  # half of the pool at most, too
        num_host_state_slots = min(cache_config.swap_bytes // 2 // state_bytes_of(model), num_state_slots)
    with_states = replace(cache_config, num_state_slots=num_state_slots, num_host_state_slots=num_host_state_slots)
    num_host_blocks = choose_num_host_blocks(model, scheduler_config, with_states, num_blocks)
    return replace(with_states, num_blocks=num_blocks, num_host_blocks=num_host_blocks)


def limit_to_cache(config: SchedulerConfig, cache_config: CacheConfig) -> SchedulerConfig:
    """Cut max_model_len to what the whole cache holds: a longer sequence could never end. Cut max_num_seqs to the
    sequences whose states have room."""
    num_states = cache_config.num_state_slots
    if 0 < num_states < config.max_num_seqs:
        logger.warning("max_num_seqs: cut from %d to %d, whose states have room", config.max_num_seqs, num_states)
        config = replace(config, max_num_seqs=num_states)
    num_tokens = max_num_tokens(cache_config, config.max_num_batched_tokens)
    if config.max_model_len <= num_tokens:
        return config
    logger.warning(
        "max_model_len: cut from %d to %d tokens, all that the cache holds", config.max_model_len, num_tokens
    )
    return replace(config, max_model_len=num_tokens)


def describe_memory(model: CausalLM, memory: int, block_size: int, kv_cache_dtype: str) -> dict[str, str]:
    """What a sequence and a token take, and how many fit in `memory` bytes, in words."""
    block_bytes, state_bytes = block_bytes_of(model, block_size, kv_cache_dtype), state_bytes_of(model)
    most = num_useful_state_slots(SchedulerConfig(max_model_len=UNBOUNDED), prefix_caching=True)
    num_states = choose_num_state_slots(model, memory, block_bytes, most)
    words, fit = {}, []
    if state_bytes:
        words["states"] = f"{state_bytes:,} bytes per sequence"
        fit.append(f"{num_states:,} state slots")
    if block_bytes:
        left = memory - num_states * state_bytes
        num_blocks = choose_num_blocks(model, left, block_size, UNBOUNDED, kv_cache_dtype)
        token_bytes, groups = token_bytes_of(model, kv_cache_dtype), model.cache_groups()
        words["cache"] = f"{token_bytes:,} bytes per token, {block_bytes:,} per block of {block_size}"
        num_tokens = num_blocks // len(groups.windows) * block_size
        if groups.windows == (None,):
            fit.append(f"{num_blocks:,} blocks ({num_tokens:,} tokens)")
        else:
            words["cache"] += ", which is of one group of layers" if len(groups.windows) > 1 else ""
            words["layer groups"] = groups.describe()
            words["full length"] = describe_full_length(model, block_size, block_bytes)
            fit.append(f"{num_blocks:,} blocks ({num_tokens:,} tokens within the windows)")
    return {**words, "that fit": f"{' and '.join(fit)} in {memory:,} bytes"}


def describe_full_length(model: CausalLM, block_size: int, block_bytes: int) -> str:
    """What a sequence of max_model_len holds, in words: while its prompt runs, and while its output comes."""
    length, windows = model.max_model_len, model.cache_groups().windows
    config = CacheConfig(num_blocks=1, block_size=block_size, windows=windows)
    num_step_tokens = SchedulerConfig(max_model_len=length).max_num_batched_tokens
    at_most, at_end = (max_held_blocks(length, config, num_tokens) for num_tokens in (num_step_tokens, 1))
    return (
        f"{at_end:,} blocks, {at_end * block_bytes:,} bytes a sequence; "
        f"while its prompt runs, at most {at_most:,} blocks, {at_most * block_bytes:,} bytes"
    )


def too_large(model: CausalLM, cache_config: CacheConfig, error: Exception) -> MemoryError:
    """The error for a cache that could not be allocated."""
    num_blocks, block_size = cache_config.num_blocks, cache_config.block_size
    num_bytes = num_blocks * block_bytes_of(model, block_size, cache_config.kv_cache_dtype)
    num_bytes += cache_config.num_state_slots * state_bytes_of(model)
    return MemoryError(
        "num_blocks: expected a cache that fits in memory, got "
        f"{num_blocks // len(cache_config.windows):,} blocks of {block_size} tokens, "
        f"{num_bytes:,} bytes ({reason_of(error)})"
    )
