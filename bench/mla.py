"""Latent attention (MLA) with absorbed weights, beside torch, and beside our attention over expanded keys and values.

Usage: python bench/mla.py [--dtype DTYPE] [--device cuda] [--quick] [--threads N] [--json FILE] [--plot FILE.png]

Latents of 512 numbers and rotary parts of 64, in blocks of 64 tokens in random order. "decode" is a row of each of 32
sequences, "prompt" all rows of one sequence. torch gathers the latents of the batch, and multiplies: no op of torch has
values that are part of the keys. "expanded" is `ops.paged_attention` over keys of 192 numbers for each head, and values
of 128 that are padded to them; it is there where these keys and values take less than 1 GiB. The projections around
attention are in neither time. Rates count the products of queries with keys and of weights with values; the share is of
torch's product of two large matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import (
    Probe,
    Row,
    assert_same,
    finish,
    hardware,
    make_inputs,
    parse_args,
    print_rows,
    time_interleaved,
    tolerance,
)
from probes import matmul_probe, print_probes
from torch import Tensor

from pagedattn_ext import allocate_kv_cache, ops

LATENT, ROPE, BLOCK_SIZE = 512, 64, 64
EXPANDED = 192
SCALE = EXPANDED**-0.5
MOST_EXPANDED_BYTES = 1 << 30


@dataclass(frozen=True)
class Case:
    name: str
    num_seqs: int
    num_rows: int  # of each sequence, the last of its tokens
    seq_len: int
    num_heads: int

    @property
    def num_pairs(self) -> int:
        """Rows and tokens that they see."""
        return self.num_seqs * (self.num_rows * self.seq_len - self.num_rows * (self.num_rows - 1) // 2)

    def expanded_bytes(self, dtype: torch.dtype) -> int:
        return self.num_seqs * self.seq_len * self.num_heads * 2 * EXPANDED * dtype.itemsize


CASES = [
    Case("decode", 32, 1, 1024, 16),
    Case("decode", 32, 1, 4096, 16),
    Case("decode", 32, 1, 1024, 128),
    Case("decode", 32, 1, 4096, 128),
    Case("prompt", 1, 1024, 1024, 16),
    Case("prompt", 1, 1024, 1024, 128),
]


@dataclass(frozen=True)
class Inputs:
    query: Tensor  # [num_tokens, num_heads, LATENT + ROPE]
    cache: Tensor  # [num_blocks, BLOCK_SIZE, LATENT + ROPE]
    tables: Tensor
    lens: Tensor
    starts: Tensor


def make(case: Case, dtype: torch.dtype) -> Inputs:
    blocks_per_seq = case.seq_len // BLOCK_SIZE
    num_blocks = case.num_seqs * blocks_per_seq
    cache = torch.randn(num_blocks, BLOCK_SIZE, LATENT + ROPE).to(dtype)
    tables = torch.randperm(num_blocks).int().view(case.num_seqs, blocks_per_seq)
    query = torch.randn(case.num_seqs * case.num_rows, case.num_heads, LATENT + ROPE).to(dtype)
    lens = torch.full((case.num_seqs,), case.seq_len, dtype=torch.int32)
    starts = torch.arange(case.num_seqs + 1, dtype=torch.int32) * case.num_rows
    return Inputs(query, cache, tables, lens, starts)


def ours(inputs: Inputs) -> Tensor:
    query, cache = inputs.query, inputs.cache
    out, _ = ops.mla_attention(
        query[..., :LATENT], query[..., LATENT:], cache[..., :LATENT], cache[..., LATENT:], inputs.tables, inputs.lens,
        query_start_loc=inputs.starts, scale=SCALE,
    )  # fmt: skip
    return out


def of_torch(inputs: Inputs) -> Tensor:
    num_seqs, num_heads = len(inputs.lens), inputs.query.shape[1]
    keys = inputs.cache[inputs.tables.flatten()].view(num_seqs, -1, LATENT + ROPE)
    rows = inputs.query.view(num_seqs, -1, num_heads, LATENT + ROPE)
    logits = (rows.flatten(1, 2) @ keys.mT).mul_(SCALE).view(num_seqs, rows.shape[1], num_heads, -1)
    if rows.shape[1] > 1:
        logits += torch.full((rows.shape[1], keys.shape[1]), -torch.inf).triu(1).to(logits)[:, None]
    return (logits.softmax(-1).flatten(1, 2) @ keys[..., :LATENT]).view(-1, num_heads, LATENT)


@dataclass(frozen=True)
class Expanded:
    query: Tensor
    keys: Tensor
    values: Tensor

    def __call__(self, inputs: Inputs) -> Tensor:
        options = {"query_start_loc": inputs.starts, "scale": SCALE}
        return ops.paged_attention(self.query, self.keys, self.values, inputs.tables, inputs.lens, **options)[0]


def expanded(case: Case, dtype: torch.dtype) -> Expanded:
    num_blocks = case.num_seqs * case.seq_len // BLOCK_SIZE
    ((keys, values),) = allocate_kv_cache(num_blocks, case.num_heads, EXPANDED, BLOCK_SIZE, dtype)
    query = torch.randn(case.num_seqs * case.num_rows, case.num_heads, EXPANDED).to(dtype)
    return Expanded(query, keys.normal_(), values.normal_())


def bench(case: Case, dtype: torch.dtype, device: str, num_rounds: int, probe: Probe) -> Row:
    num_bytes = case.num_seqs * case.seq_len * (LATENT + ROPE) * dtype.itemsize
    inputs = make_inputs(lambda: make(case, dtype), num_bytes, device)
    functions: dict[str, Callable[[Inputs], Tensor]] = {"ours": ours, "torch": of_torch}
    assert_same(functions, inputs[0], tolerance(dtype))
    if case.expanded_bytes(dtype) < MOST_EXPANDED_BYTES:
        with torch.device(device):
            functions["expanded"] = expanded(case, dtype)
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
    work = 2 * case.num_pairs * case.num_heads * (2 * LATENT + ROPE)
    name = f"{case.name} {case.num_seqs} x {case.seq_len}, {case.num_heads} heads"
    return Row("latent attention", name, dtype, work, probe, seconds)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    facts = hardware(args.device)
    cases = CASES[::2] if args.quick else CASES
    rows = []
    for dtype in args.dtypes:
        with torch.device(args.device):
            probe = matmul_probe(dtype)
            print_probes(probe)
        rows += [bench(case, dtype, args.device, 3 if args.quick else 5, probe) for case in cases]
    print_rows(rows)
    finish(args, facts, rows)


if __name__ == "__main__":
    main()
