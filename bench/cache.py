"""Writing, reading and moving blocks of the paged cache, beside torch's index operations on the same layout.

Usage: python bench/cache.py [--quick] [--dtype float32] [--threads N] [--json FILE] [--plot FILE.png]

GB/s counts every byte that is read and every byte that is written; the share is of tensor.copy_. 32 tokens are a decode
step, each in a block of its own; more tokens are a prompt, in runs of a block. Blocks are drawn at random. Caches and
the probe's memory lie in huge pages where the system grants them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import (
    COLD_BYTES,
    Probe,
    Row,
    copy_probe,
    finish,
    hardware,
    make_inputs,
    parse_args,
    print_rows,
    time_interleaved,
)
from torch import Tensor

from pagedattn_ext import allocate_kv_cache, ops

BLOCK_SIZE, HEAD_SIZE = 16, 128
NUM_PAIRS = 128


class Pool:
    """A cache, and its slots as torch indexes them: views in which a token is [num_kv_heads, head_size / x, x]."""

    def __init__(self, num_kv_heads: int, dtype: torch.dtype) -> None:
        self.num_kv_heads, self.dtype = num_kv_heads, dtype
        self.num_blocks = num_blocks = COLD_BYTES // (BLOCK_SIZE * num_kv_heads * HEAD_SIZE * dtype.itemsize)
        (self.key_cache, self.value_cache), (self.other_key_cache, _) = allocate_kv_cache(
            num_blocks, num_kv_heads, HEAD_SIZE, BLOCK_SIZE, dtype, torch.get_default_device(), num_layers=2
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
        if num_tokens <= 32:
            slots = blocks[:num_tokens] * BLOCK_SIZE + torch.randint(BLOCK_SIZE, (num_tokens,))
        else:
            slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:num_tokens]
        return cls(key, value, slots, (slots // BLOCK_SIZE, slots % BLOCK_SIZE))


Measure = Callable[[str, int, Callable[[], object], dict[str, Callable]], Row]


def bench_tokens(pool: Pool, measure: Measure) -> list[Row]:
    def reshape_and_cache(tokens: Tokens) -> None:
        ops.reshape_and_cache(tokens.key, tokens.value, pool.key_cache, pool.value_cache, tokens.slot_mapping)

    def index_put(tokens: Tokens) -> None:
        pool.key_slots.index_put_(tokens.index, tokens.key.view(-1, *pool.key_slots.shape[2:]))
        pool.value_slots.index_put_(tokens.index, tokens.value)

    def gather_cached_kv(tokens: Tokens) -> tuple[Tensor, Tensor]:
        return ops.gather_cached_kv(pool.key_cache, pool.value_cache, tokens.slot_mapping)

    def index(tokens: Tokens) -> tuple[Tensor, Tensor]:
        return pool.key_slots[tokens.index].flatten(2), pool.value_slots[tokens.index]

    functions = {"reshape_and_cache": {"ours": reshape_and_cache, "torch": index_put}}
    if hasattr(ops, "gather_cached_kv"):
        functions["gather_cached_kv"] = {"ours": gather_cached_kv, "torch": index}
    token_bytes = 4 * pool.num_kv_heads * HEAD_SIZE * pool.dtype.itemsize  # key and value, read and written
    return [
        measure(f"{name}, {n} tokens", n * token_bytes, lambda n=n: Tokens.make(pool, n), both)
        for name, both in functions.items()
        for n in (32, 512)
    ]


def bench_blocks(pool: Pool, measure: Measure) -> list[Row]:
    def make_pairs() -> Tensor:
        return torch.randperm(pool.num_blocks)[: 2 * NUM_PAIRS].view(NUM_PAIRS, 2)

    def copy_blocks(pairs: Tensor) -> None:
        ops.copy_blocks([pool.key_cache], [pool.value_cache], pairs)

    def copy_by_index(pairs: Tensor) -> None:
        for cache in (pool.key_cache, pool.value_cache):
            cache.index_copy_(0, pairs[:, 1], cache.index_select(0, pairs[:, 0]))

    def swap_blocks(pairs: Tensor) -> None:
        ops.swap_blocks(pool.key_cache, pool.other_key_cache, pairs)

    def swap_by_index(pairs: Tensor) -> None:
        pool.other_key_cache.index_copy_(0, pairs[:, 1], pool.key_cache.index_select(0, pairs[:, 0]))

    num_bytes = 2 * NUM_PAIRS * pool.key_cache[0].nbytes
    copy, swap = {"ours": copy_blocks, "torch": copy_by_index}, {"ours": swap_blocks, "torch": swap_by_index}
    return [
        measure(f"copy_blocks, {NUM_PAIRS} pairs", 2 * num_bytes, make_pairs, copy),
        measure(f"swap_blocks, {NUM_PAIRS} pairs", num_bytes, make_pairs, swap),
    ]


def bench(num_kv_heads: int, dtype: torch.dtype, device: str, num_rounds: int, probe: Probe) -> list[Row]:
    def measure(name: str, num_bytes: int, make: Callable[[], object], functions: dict[str, Callable]) -> Row:
        inputs = make_inputs(make, num_bytes, device)
        seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
        return Row("cache", f"{name}, {num_kv_heads}x{HEAD_SIZE}", dtype, num_bytes, probe, seconds)

    with torch.device(device):
        pool = Pool(num_kv_heads, dtype)
    return bench_tokens(pool, measure) + bench_blocks(pool, measure)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    facts = hardware(args.device)
    with torch.device(args.device):
        probe = copy_probe()
    num_rounds = 5 if args.quick else 25
    rows = [row for dtype in args.dtypes for n in (32, 8) for row in bench(n, dtype, args.device, num_rounds, probe)]
    print_rows(rows)
    finish(args, facts, rows)


if __name__ == "__main__":
    main()
