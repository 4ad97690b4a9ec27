"""Looks for cliffs in decode: sizes at which the kernel is suddenly slow, beside those next to them.

Usage: python bench/sweep.py [--quick] [--dtype float32] [--threads N] [--json FILE] [--plot FILE.png]

From a base point, with 1 and with 4 query heads per KV head (the group), one thing varies at a time; head size and
block size vary together. GB/s counts the bytes of the sequences' keys and values, and the share is of torch's fastest
read (harness.py); both are in huge pages where the system grants them. All caches lie in one pool beyond the last-level
cache, blocks in random order; a batch that is larger than the pool passes through it several times. Results are checked
against plain torch.

A cliff is a point below 60% of a neighbour on its axis, both in bytes a second and in operations a second. Both count,
because a larger group has fewer GB/s once arithmetic is the limit. Calls shorter than 0.2 ms are not compared, because
the cost of a call is their limit, not bandwidth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median

import torch
from attention.inputs import Paged
from harness import (
    Probe,
    Row,
    assert_same,
    cold_bytes,
    finish,
    hardware,
    parse_args,
    print_rows,
    time_interleaved,
    tolerance,
)
from probes import read_probe

from pagedattn_ext import allocate_kv_cache

NUM_KV_HEADS = 8
POOL_BYTES = 256 << 20
CLIFF = 0.6
SHORT_SECONDS = 2e-4

GROUPS = (1, 2, 4, 5, 7, 8, 16, 32)
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
BATCHES = (1, 8, 64)
CONTEXTS = (16, 128, 512, 2048, 8192)
LENGTHS = {
    "8 x 2048": [2048] * 8,
    "8 x 2047": [2047] * 8,
    "1 to 8192": [1, 17, 64, 300, 1024, 2048, 4096, 8192],
    "16384 and 7 x 16": [16384, *[16] * 7],
    "512 of 1 to 63": [*range(1, 64, 2)] * 16,
}


@dataclass(frozen=True)
class Case:
    name: str
    place: tuple[int, ...]  # on the axes; neighbours differ by 1 in one number
    seq_lens: list[int]
    group: int
    head_size: int = 128
    block_size: int = 16


def make_axes() -> dict[str, list[Case]]:
    axes = {"group": [Case(str(group), (i,), [2048] * 8, group) for i, group in enumerate(GROUPS)]}
    for group in (1, 4):
        base = Case("", (), [2048] * 8, group)
        axes[f"group {group}: head size, block size"] = [
            replace(base, name=f"{head_size}, {block_size}", place=(i, j), head_size=head_size, block_size=block_size)
            for i, head_size in enumerate(HEAD_SIZES)
            for j, block_size in enumerate(BLOCK_SIZES)
        ]
        lengths = {
            "batch": {f"{batch} x 2048": [2048] * batch for batch in BATCHES},
            "context": {f"8 x {context}": [context] * 8 for context in CONTEXTS},
            "lengths": LENGTHS,
        }
        for axis, batches in lengths.items():
            axes[f"group {group}: {axis}"] = [
                replace(base, name=name, place=(i,), seq_lens=seq_lens)
                for i, (name, seq_lens) in enumerate(batches.items())
            ]
    return axes


class Pool:
    """Random numbers that are the cache of every case."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        head_size, block_size = 256, 64
        num_blocks = POOL_BYTES // (2 * head_size * block_size * dtype.itemsize)
        ((key, value),) = allocate_kv_cache(num_blocks, 1, head_size, block_size, dtype, device)
        self.key, self.value = key.flatten().normal_(), value.flatten().normal_()

    def make_inputs(self, case: Case) -> list[Paged]:
        """Each has the next blocks of one random order: they keep one another out of the caches."""
        dtype, device = self.key.dtype, self.key.device
        head_size, block_size, x = case.head_size, case.block_size, 16 // dtype.itemsize
        block_elements = NUM_KV_HEADS * head_size * block_size
        num_blocks = self.key.numel() // block_elements
        key_cache, value_cache = (t[: num_blocks * block_elements] for t in (self.key, self.value))
        key_cache = key_cache.view(num_blocks, NUM_KV_HEADS, head_size // x, block_size, x)
        value_cache = value_cache.view(num_blocks, NUM_KV_HEADS, head_size, block_size)

        blocks, num_used = torch.randperm(num_blocks, dtype=torch.int32), 0
        inputs = []
        for _ in range(ceil(cold_bytes(device.type) / kv_bytes(case, dtype))):
            tables = torch.zeros(len(case.seq_lens), ceil(max(case.seq_lens) / block_size), dtype=torch.int32)
            for table, seq_len in zip(tables, case.seq_lens, strict=True):
                n = ceil(seq_len / block_size)
                table[:n] = blocks[torch.arange(num_used, num_used + n) % num_blocks]
                num_used += n
            query = torch.randn(len(case.seq_lens), NUM_KV_HEADS * case.group, head_size, dtype=dtype, device=device)
            seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
            inputs.append(Paged(query, key_cache, value_cache, tables.to(device), seq_lens))
        return inputs


def kv_bytes(case: Case, dtype: torch.dtype) -> int:
    return 2 * sum(case.seq_lens) * NUM_KV_HEADS * case.head_size * dtype.itemsize


def bench(axis: str, case: Case, pool: Pool, num_rounds: int, probe: Probe) -> Row:
    dtype = pool.key.dtype
    inputs = pool.make_inputs(case)
    assert_same({"ours": Paged.decode, "naive": Paged.decode_naive}, inputs[0], tolerance(dtype))
    seconds = time_interleaved({"ours": Paged.decode, "probe": probe.run}, inputs, num_rounds)
    return Row(axis, case.name, dtype, kv_bytes(case, dtype), probe, seconds)


def find_cliffs(cases: Sequence[Case], rows: Sequence[Row]) -> list[str]:
    """A note for each case of an axis."""
    is_short = [median(row.seconds["ours"]) < SHORT_SECONDS for row in rows]
    notes = []
    for i, case in enumerate(cases):
        neighbours = [
            (rows[i].share() / rows[j].share() * max(1, case.group / other.group), other.name)
            for j, other in enumerate(cases)
            if sum(abs(a - b) for a, b in zip(case.place, other.place, strict=True)) == 1 and not is_short[j]
        ]
        ratio, name = min(neighbours, default=(1, ""))
        cliff = f"CLIFF: {ratio:.0%} of {name}" if ratio < CLIFF else ""
        notes.append("bound by the cost of a call" if is_short[i] else cliff)
    return notes


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    facts = hardware(args.device)
    print(f"base: {NUM_KV_HEADS} KV heads, head size 128, block size 16, 8 sequences of 2048 tokens")
    with torch.device(args.device):
        probe = read_probe()
    rows, num_cliffs = [], 0
    for dtype in args.dtypes:
        pool = Pool(dtype, args.device)
        for axis, cases in make_axes().items():
            table = [bench(axis, case, pool, 3 if args.quick else 15, probe) for case in cases]
            print_rows(table, notes := find_cliffs(cases, table))
            rows += table
            num_cliffs += sum(note.startswith("CLIFF") for note in notes)
    print(f"\ncliffs: {num_cliffs}")
    finish(args, facts, rows)


if __name__ == "__main__":
    main()
