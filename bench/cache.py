"""Writing, reading and moving blocks of the paged cache, beside torch's index operations on the same layout.

Usage: python bench/cache.py [--device cuda] [--quick] [--dtype float32] [--threads N] [--json FILE] [--plot FILE.png]

GB/s counts every byte that is read and every byte that is written; the share is of the fastest copy (probes.py). Up to
64 tokens are a decode step, each in a block of its own; more tokens are a prompt, in runs of a block. Blocks are drawn
at random. Caches and the probe's memory lie in huge pages where the system grants them.

On a GPU (cuda_timing.py says how it is timed) blocks are also swapped with pinned memory. There GB/s counts a byte
once, the share is of one copy of as many bytes, and each call is launched by itself, without a CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from harness import (
    Probe,
    Row,
    assert_same,
    assert_same_effect,
    cold_bytes,
    finish,
    hardware,
    make_inputs,
    parse_args,
    print_rows,
    time_interleaved,
)
from probes import copy_probe, print_probes, read_probe
from torch import Tensor

from pagedattn_ext import allocate_kv_cache, ops

BLOCK_SIZE, HEAD_SIZE = 16, 128
NUM_HEADS = (32, 8)
NUM_TOKENS = {"cpu": (1, 8, 32, 64, 512), "cuda": (32, 8192)}
MAX_DECODED = 64
NUM_PAIRS = {"cpu": 128, "cuda": 1024}


class Pool:
    """A cache, and its slots as torch indexes them: views in which a token is [num_kv_heads, head_size / x, x]."""

    def __init__(self, num_kv_heads: int, dtype: torch.dtype, device: str) -> None:
        self.num_kv_heads, self.dtype, self.device = num_kv_heads, dtype, device
        block_bytes = BLOCK_SIZE * num_kv_heads * HEAD_SIZE * dtype.itemsize
        self.num_blocks = num_blocks = max(2 * NUM_PAIRS[device], cold_bytes(device) // block_bytes)
        (self.key_cache, self.value_cache), (self.other_key_cache, _) = allocate_kv_cache(
            num_blocks, num_kv_heads, HEAD_SIZE, BLOCK_SIZE, dtype, device, num_layers=2
        )
        for cache in (self.key_cache, self.value_cache, self.other_key_cache):
            cache.normal_()
        self.key_slots = self.key_cache.permute(0, 3, 1, 2, 4)
        self.value_slots = self.value_cache.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Tokens:
    key: Tensor  # [num_tokens, num_kv_heads, head_size]
    value: Tensor
    slot_mapping: Tensor
    index: tuple[Tensor, Tensor]  # block and offset

    @classmethod
    def make(cls, pool: Pool, num_tokens: int) -> "Tokens":
        key, value = torch.randn(2, num_tokens, pool.num_kv_heads, HEAD_SIZE, dtype=pool.dtype)
        blocks = torch.randperm(pool.num_blocks)
        if num_tokens <= min(MAX_DECODED, pool.num_blocks):
            slots = blocks[:num_tokens] * BLOCK_SIZE + torch.randint(BLOCK_SIZE, (num_tokens,))
        else:
            slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:num_tokens]
        return cls(key, value, slots, (slots // BLOCK_SIZE, slots % BLOCK_SIZE))


Functions = dict[str, Callable]
Measure = Callable[[str, int, Callable[[], object], Functions, list[Tensor]], Row]


def bench_tokens(pool: Pool, measure: Measure) -> list[Row]:
    def reshape_and_cache(tokens: Tokens) -> None:
        ops.reshape_and_cache(tokens.key, tokens.value, pool.key_cache, pool.value_cache, tokens.slot_mapping)

    def index_put(tokens: Tokens) -> None:
        pool.key_slots.index_put_(tokens.index, tokens.key.view(-1, *pool.key_slots.shape[2:]))
        pool.value_slots.index_put_(tokens.index, tokens.value)

    nhd = [cache.view(-1, BLOCK_SIZE, pool.num_kv_heads, HEAD_SIZE) for cache in (pool.key_cache, pool.value_cache)]

    def write_nhd(tokens: Tokens) -> None:
        ops.reshape_and_cache(tokens.key, tokens.value, *nhd, tokens.slot_mapping)

    def index_put_nhd(tokens: Tokens) -> None:
        for cache, rows in zip(nhd, (tokens.key, tokens.value), strict=True):
            cache.index_put_(tokens.index, rows)

    def gather_cached_kv(tokens: Tokens) -> tuple[Tensor, Tensor]:
        return ops.gather_cached_kv(pool.key_cache, pool.value_cache, tokens.slot_mapping)

    def index(tokens: Tokens) -> tuple[Tensor, Tensor]:
        return pool.key_slots[tokens.index].flatten(2), pool.value_slots[tokens.index]

    token_bytes = 4 * pool.num_kv_heads * HEAD_SIZE * pool.dtype.itemsize  # key and value, read and written
    writing, reading = {"ours": reshape_and_cache, "torch": index_put}, {"ours": gather_cached_kv, "torch": index}
    writing_nhd = {"ours": write_nhd, "torch": index_put_nhd}
    return [
        measure(f"{name}, {n} tokens", n * token_bytes, lambda n=n: Tokens.make(pool, n), functions, written)
        for name, functions, written in (
            ("reshape_and_cache", writing, [pool.key_cache, pool.value_cache]),
            ("reshape_and_cache nhd", writing_nhd, nhd),
            ("gather_cached_kv", reading, []),
        )
        for n in NUM_TOKENS[pool.device]
    ]


def bench_blocks(pool: Pool, measure: Measure) -> list[Row]:
    num_pairs = NUM_PAIRS[pool.device]

    def copy_blocks(pairs: Tensor) -> None:
        ops.copy_blocks([pool.key_cache], [pool.value_cache], pairs)

    def copy_by_index(pairs: Tensor) -> None:
        for cache in (pool.key_cache, pool.value_cache):
            cache.index_copy_(0, pairs[:, 1], cache.index_select(0, pairs[:, 0]))

    def swap_blocks(pairs: Tensor) -> None:
        ops.swap_blocks(pool.key_cache, pool.other_key_cache, pairs)

    def swap_by_index(pairs: Tensor) -> None:
        pool.other_key_cache.index_copy_(0, pairs[:, 1], pool.key_cache.index_select(0, pairs[:, 0]))

    num_bytes = 2 * num_pairs * pool.key_cache[0].nbytes
    make = partial(make_pairs, pool.num_blocks, num_pairs)
    copy, swap = {"ours": copy_blocks, "torch": copy_by_index}, {"ours": swap_blocks, "torch": swap_by_index}
    return [
        measure(f"copy_blocks, {num_pairs} pairs", 2 * num_bytes, make, copy, [pool.key_cache, pool.value_cache]),
        measure(f"swap_blocks, {num_pairs} pairs", num_bytes, make, swap, [pool.other_key_cache]),
    ]


def make_pairs(num_blocks: int, num_pairs: int) -> Tensor:
    return torch.randperm(num_blocks)[: 2 * num_pairs].view(num_pairs, 2)


def bench(num_kv_heads: int, dtype: torch.dtype, device: str, num_rounds: int, probe: Probe) -> list[Row]:
    def measure(
        name: str, num_bytes: int, make: Callable[[], object], functions: Functions, written: list[Tensor]
    ) -> Row:
        inputs = make_inputs(make, num_bytes, device)
        if written:
            assert_same_effect(functions, inputs[0], written)
        else:
            assert_same(functions, inputs[0], tolerance=0)
        seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
        return Row("cache", f"{name}, {num_kv_heads}x{HEAD_SIZE}", dtype, num_bytes, probe, seconds)

    with torch.device(device):
        pool = Pool(num_kv_heads, dtype, device)
    return bench_tokens(pool, measure) + bench_blocks(pool, measure)


def bench_swaps(num_kv_heads: int, dtype: torch.dtype, device: str, num_rounds: int) -> list[Row]:
    """Blocks between the memory of a GPU and pinned memory, both ways; the mapping is on the GPU, which reads it."""
    num_pairs = NUM_PAIRS[device]
    sizes = 2 * num_pairs, num_kv_heads, HEAD_SIZE, BLOCK_SIZE, dtype
    ((on_gpu, _),) = allocate_kv_cache(*sizes, device)
    ((on_host, _),) = allocate_kv_cache(*sizes, pin_memory=device == "cuda")
    on_host.copy_(on_gpu.normal_())
    num_bytes = num_pairs * on_gpu[0].nbytes
    with torch.device(device):
        pairs = make_pairs(len(on_gpu), num_pairs)
    rows = []
    for name, src, dst in ("to the host", on_gpu, on_host), ("to the GPU", on_host, on_gpu):
        taken, filled = pairs[:, 0].to(src.device), pairs[:, 1].to(dst.device)

        def swap(pairs: Tensor, src: Tensor = src, dst: Tensor = dst) -> None:
            ops.swap_blocks(src, dst, pairs)

        def swap_by_index(
            _: Tensor, src: Tensor = src, dst: Tensor = dst, taken: Tensor = taken, filled: Tensor = filled
        ) -> None:
            dst.index_copy_(0, filled, src.index_select(0, taken).to(dst.device))

        def copy_at_once(_: Tensor, src: Tensor = src, dst: Tensor = dst) -> None:
            dst[:num_pairs].copy_(src[:num_pairs], non_blocking=True)

        functions = {"ours": swap, "torch": swap_by_index}
        assert_same_effect(functions, pairs, [dst])
        probe = Probe("pinned copy", "GB/s", num_bytes, copy_at_once)
        seconds = time_interleaved({**functions, "probe": copy_at_once}, [pairs], num_rounds, use_graphs=False)
        case = f"swap_blocks {name}, {num_pairs} pairs, {num_kv_heads}x{HEAD_SIZE}"
        rows.append(Row("cache, pinned memory", case, dtype, num_bytes, probe, seconds))
    return rows


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    facts = hardware(args.device)
    with torch.device(args.device):
        probe = copy_probe()
        if args.device == "cuda":
            print_probes(read_probe(), probe)
    num_rounds = 5 if args.quick else 25
    options = args.device, num_rounds
    rows = [row for dtype in args.dtypes for n in NUM_HEADS for row in bench(n, dtype, *options, probe)]
    print_rows(rows)
    if args.device == "cuda":
        rows += (table := [row for dtype in args.dtypes for n in NUM_HEADS for row in bench_swaps(n, dtype, *options)])
        print_rows(table)
    finish(args, facts, rows)


if __name__ == "__main__":
    main()
