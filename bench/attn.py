"""Paged attention, decode and prefill, beside what torch offers for it.

Usage: python bench/attn.py [--quick] [--dtype float32] [--threads N] [--json FILE] [--plot FILE.png]

Decode: GB/s counts the bytes of the sequences' keys and values, and the share is of torch.sum. Prefill: GFLOP/s counts
the pairs of tokens that causality leaves, and the share is of a matrix product. Physical blocks are in random order.
Peers: SDPA on contiguous keys and values (a call for each sequence where lengths differ); gathering these from
the cache for it; a loop over the sequences in plain torch.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from harness import (
    COLD_BYTES,
    Probe,
    Row,
    finish,
    hardware,
    latency,
    make_inputs,
    matmul_probe,
    parse_args,
    print_rows,
    read_probe,
    time_interleaved,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedattn_ext import ops

BLOCK_SIZE = 16
NAIVE_QUICK_BYTES = 64 << 20  # the loop is left out beyond this with --quick


@dataclass(frozen=True)
class Model:
    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int


MHA = Model("MHA 32x128", 32, 32, 128)
GQA8 = Model("GQA 32/8x128", 32, 8, 128)
GQA4 = Model("GQA 32/4x128", 32, 4, 128)
SMALL = Model("MHA 12x64", 12, 12, 64)

ONE, EIGHT, MANY = [1024], [2048] * 8, [512] * 64
RAGGED = [64, 512, 2048, 4096]
BATCH_NAMES = ["1 x 1024", "8 x 2048", "64 x 512", "4 ragged"]
# MHA with the batch of 64 would take 2 GiB with its peers.
DECODES = [
    (model, name, seq_lens)
    for model in (MHA, GQA8, GQA4, SMALL)
    for name, seq_lens in zip(BATCH_NAMES, (ONE, EIGHT, MANY, RAGGED), strict=True)
    if not (model is MHA and seq_lens is MANY)
]
QUICK_DECODES = [(model, "8 x 2048", EIGHT) for model in (MHA, GQA8, GQA4, SMALL)]
QUICK_DECODES += [(GQA8, "1 x 1024", ONE), (GQA8, "4 ragged", RAGGED)]

PREFILLS = [(model, *tokens) for model in (MHA, GQA8) for tokens in ((512, 0), (2048, 0), (256, 1024))]
QUICK_PREFILLS = [(GQA8, 512, 0), (GQA8, 256, 1024)]


class Attention:
    """The last num_queries tokens of each sequence over all of its tokens, in our layout and in torch's."""

    def __init__(self, model: Model, seq_lens: list[int], num_queries: int, dtype: torch.dtype) -> None:
        num_seqs, blocks_per_seq = len(seq_lens), -(-max(seq_lens) // BLOCK_SIZE)
        num_heads, head_size, x = model.num_kv_heads, model.head_size, 16 // dtype.itemsize
        self.model, self.num_queries = model, num_queries
        self.query = torch.randn(num_seqs * num_queries, model.num_heads, head_size, dtype=dtype)
        self.key = torch.randn(num_seqs, num_heads, blocks_per_seq * BLOCK_SIZE, head_size, dtype=dtype)
        self.value = torch.randn_like(self.key)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.query_start_loc = torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries

        blocks = torch.randperm(num_seqs * blocks_per_seq)
        self.block_tables = blocks.view(num_seqs, blocks_per_seq).int()
        self.key_cache = torch.empty(len(blocks), num_heads, head_size // x, BLOCK_SIZE, x, dtype=dtype)
        self.value_cache = torch.empty(len(blocks), num_heads, head_size, BLOCK_SIZE, dtype=dtype)
        paged = self.key.view(num_seqs, num_heads, blocks_per_seq, BLOCK_SIZE, head_size // x, x)
        self.key_cache[blocks] = paged.permute(0, 2, 1, 4, 3, 5).flatten(0, 1)
        paged = self.value.view(num_seqs, num_heads, blocks_per_seq, BLOCK_SIZE, head_size)
        self.value_cache[blocks] = paged.permute(0, 2, 1, 4, 3).flatten(0, 1)

        # What SDPA takes: the whole batch where lengths agree, a sequence at a time where they do not.
        self.parts = [(slice(i, i + 1), seq_len) for i, seq_len in enumerate(seq_lens)]
        if len(set(seq_lens)) == 1:
            self.parts = [(slice(None), seq_lens[0])]
        self.is_causal = num_queries == max(seq_lens)
        is_chunk = 1 < num_queries < max(seq_lens)
        seen = torch.ones(num_queries, max(seq_lens), dtype=torch.bool)
        self.mask = seen.tril(max(seq_lens) - num_queries) if is_chunk else None

    def decode(self) -> Tensor:
        return ops.paged_attention_v1(self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens)

    def prefill(self) -> Tensor:
        return ops.paged_attention(
            self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens,
            query_start_loc=self.query_start_loc,
        )[0]  # fmt: skip

    def attend(self, key: Tensor, value: Tensor) -> Tensor:
        query = self.query.unflatten(0, (-1, self.num_queries)).transpose(1, 2)
        outs = [
            scaled_dot_product_attention(
                query[part], key[part, :, :seq_len], value[part, :, :seq_len],
                attn_mask=self.mask, is_causal=self.is_causal, enable_gqa=True,
            ).transpose(1, 2).flatten(0, 1)
            for part, seq_len in self.parts
        ]  # fmt: skip
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def sdpa(self) -> Tensor:
        return self.attend(self.key, self.value)

    def gather_sdpa(self) -> Tensor:
        key = self.key_cache[self.block_tables].permute(0, 2, 1, 4, 3, 5)  # seq, head, block, token, d / x, x
        value = self.value_cache[self.block_tables].permute(0, 2, 1, 4, 3)
        return self.attend(key.flatten(-2).flatten(2, 3), value.flatten(2, 3))

    def naive(self) -> Tensor:
        """Decode, a sequence at a time."""
        out = torch.empty_like(self.query)
        num_kv_heads, head_size = self.model.num_kv_heads, self.model.head_size
        for seq_idx, seq_len in enumerate(self.seq_lens.tolist()):
            blocks = self.block_tables[seq_idx, : -(-seq_len // BLOCK_SIZE)]
            key = self.key_cache[blocks].permute(1, 0, 3, 2, 4).reshape(num_kv_heads, -1, head_size)[:, :seq_len]
            value = self.value_cache[blocks].permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_size)[:, :seq_len]
            query = self.query[seq_idx].view(num_kv_heads, -1, head_size) * head_size**-0.5
            out[seq_idx] = ((query @ key.mT).softmax(-1) @ value).flatten(0, 1)
        return out


def assert_same(functions: dict[str, Callable[[Attention], Tensor]], attention: Attention) -> None:
    """A faster way to another result would be no news."""
    tolerance = 1e-4 if attention.query.dtype == torch.float32 else 2e-2
    ours, *peers = (function(attention) for function in functions.values())
    for peer in peers:
        torch.testing.assert_close(ours, peer, rtol=tolerance, atol=tolerance)


def bench_decode(
    model: Model, name: str, seq_lens: list[int], dtype: torch.dtype, args: Namespace, probe: Probe
) -> Row:
    num_bytes = 2 * sum(seq_lens) * model.num_kv_heads * model.head_size * dtype.itemsize
    inputs = make_inputs(partial(Attention, model, seq_lens, 1, dtype), num_bytes, args.device)
    functions = {"ours": Attention.decode, "SDPA": Attention.sdpa, "gather + SDPA": Attention.gather_sdpa}
    if not args.quick or num_bytes <= NAIVE_QUICK_BYTES:
        functions["naive"] = Attention.naive
    assert_same(functions, inputs[0])
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, 3 if args.quick else 9)
    return Row("decode", f"{model.name}, {name}", dtype, num_bytes, probe, seconds)


def bench_prefill(model: Model, num_tokens: int, prefix: int, dtype: torch.dtype, args: Namespace, probe: Probe) -> Row:
    num_pairs = num_tokens * prefix + num_tokens * (num_tokens + 1) // 2
    make = partial(Attention, model, [prefix + num_tokens], num_tokens, dtype)
    inputs = make_inputs(make, COLD_BYTES, args.device)  # one: arithmetic is the limit
    functions = {"ours": Attention.prefill, "SDPA": Attention.sdpa}
    assert_same(functions, inputs[0])
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, 3 if args.quick else 9)
    name = f"{model.name}, {num_tokens} tokens" + (f" after {prefix}" if prefix else "")
    return Row("prefill", name, dtype, 4 * model.num_heads * model.head_size * num_pairs, probe, seconds)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    facts = hardware(args.device)
    rows = []
    with torch.device(args.device):
        reading = read_probe()
        matmuls = [matmul_probe(dtype) for dtype in args.dtypes]
    for bench, cases, probes in (
        (bench_decode, QUICK_DECODES if args.quick else DECODES, [reading] * len(args.dtypes)),
        (bench_prefill, QUICK_PREFILLS if args.quick else PREFILLS, matmuls),
    ):
        dtypes = zip(args.dtypes, probes, strict=True)
        rows += (table := [bench(*case, dtype, args, probe) for dtype, probe in dtypes for case in cases])
        print_rows(table)

    print()
    latencies = {}
    for dtype in args.dtypes:
        name = f"decode, {GQA8.name}, 1 sequence of 16 tokens, {str(dtype).removeprefix('torch.')}"
        (attention,) = make_inputs(partial(Attention, GQA8, [16], 1, dtype), COLD_BYTES, args.device)
        latencies[name] = micros = latency(attention.decode)
        print(f"one call: {name}: p50 {micros['p50_us']:.1f} us, p99 {micros['p99_us']:.1f} us")
    finish(args, facts, rows, latency=latencies)


if __name__ == "__main__":
    main()
