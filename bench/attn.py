"""Paged attention, decode and prefill, beside what torch offers for it.

Usage: python bench/attn.py [--quick] [--dtype float32] [--threads N] [--json FILE] [--plot FILE.png]

Decode: GB/s counts the bytes of the sequences' keys and values, and the share is of torch.sum. Prefill: GFLOP/s counts
the pairs of tokens that causality leaves, and the share is of a matrix product. Physical blocks are in random order.
Caches, SDPA's keys and values, and what torch.sum reads lie in huge pages where the system grants them.
Peers: SDPA on contiguous keys and values (a call for each sequence where lengths differ); gathering these from
the cache for it; a loop over the sequences in plain torch; for an fp8 cache, the same tokens in a bf16 cache.
Last, the latency of single small calls, on a quiet machine and beside busy processes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from harness import (
    COLD_BYTES,
    Probe,
    Row,
    busy_processes,
    dtype_name,
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

from pagedattn_ext import allocate_kv_cache, ops

T = TypeVar("T")
BLOCK_SIZE = 16
NUM_BUSY = 4


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
FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
FP8_DECODES = [(model, "8 x 2048", EIGHT, dtype) for dtype in FP8_DTYPES for model in (MHA, GQA8)]

PREFILLS = [(model, *tokens) for model in (MHA, GQA8) for tokens in ((512, 0), (2048, 0), (256, 1024))]
QUICK_PREFILLS = [(GQA8, 512, 0), (GQA8, 256, 1024)]


@dataclass(frozen=True)
class Paged:
    """New tokens of some sequences, and a paged cache."""

    query: Tensor  # [num_tokens, num_heads, head_size]
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor

    @classmethod
    def make(cls, query: Tensor, key: Tensor, value: Tensor, seq_lens: list[int], dtype: torch.dtype) -> "Paged":
        """key, value: [num_seqs, num_kv_heads, tokens, head_size], tokens as many as whole blocks hold."""
        num_seqs, num_heads, num_tokens, head_size = key.shape
        blocks = torch.randperm(num_seqs * num_tokens // BLOCK_SIZE)
        ((key_cache, value_cache),) = allocate_kv_cache(
            len(blocks), num_heads, head_size, BLOCK_SIZE, dtype, torch.get_default_device()
        )
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        tokens = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (key, value))
        ops.reshape_and_cache(*tokens, key_cache, value_cache, slots)
        block_tables = blocks.view(num_seqs, -1).int()
        return cls(query, key_cache, value_cache, block_tables, torch.tensor(seq_lens, dtype=torch.int32))

    def decode(self) -> Tensor:
        return ops.paged_attention_v1(self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens)

    def decode_naive(self) -> Tensor:
        """A sequence at a time."""
        out = torch.empty_like(self.query)
        num_kv_heads, head_size, block_size = self.value_cache.shape[1:]
        for seq_idx, seq_len in enumerate(self.seq_lens.tolist()):
            blocks = self.block_tables[seq_idx, : -(-seq_len // block_size)]
            key = self.key_cache[blocks].permute(1, 0, 3, 2, 4).reshape(num_kv_heads, -1, head_size)[:, :seq_len]
            value = self.value_cache[blocks].permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_size)[:, :seq_len]
            query = self.query[seq_idx].view(num_kv_heads, -1, head_size) * head_size**-0.5
            out[seq_idx] = ((query @ key.mT).softmax(-1) @ value).flatten(0, 1)
        return out


def random_kv(model: Model, seq_lens: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As SDPA takes them, for Paged.make; in the memory of a cache."""
    shape = len(seq_lens), model.num_kv_heads, -(-max(seq_lens) // BLOCK_SIZE) * BLOCK_SIZE, model.head_size
    num_blocks = shape[0] * shape[2] // BLOCK_SIZE
    ((key, value),) = allocate_kv_cache(
        num_blocks, model.num_kv_heads, model.head_size, BLOCK_SIZE, dtype, torch.get_default_device()
    )
    return key.view(shape).normal_(), value.view(shape).normal_()


class Attention:
    """The last num_queries tokens of each sequence over all of its tokens, in our layout and in torch's."""

    def __init__(self, model: Model, seq_lens: list[int], num_queries: int, dtype: torch.dtype) -> None:
        num_seqs = len(seq_lens)
        self.num_queries = num_queries
        self.query = torch.randn(num_seqs * num_queries, model.num_heads, model.head_size, dtype=dtype)
        self.query_start_loc = torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries
        self.key, self.value = random_kv(model, seq_lens, dtype)
        self.paged = Paged.make(self.query, self.key, self.value, seq_lens, dtype)

        # What SDPA takes: the whole batch where lengths agree, a sequence at a time where they do not.
        self.parts = [(slice(i, i + 1), seq_len) for i, seq_len in enumerate(seq_lens)]
        if len(set(seq_lens)) == 1:
            self.parts = [(slice(None), seq_lens[0])]
        self.is_causal = num_queries == max(seq_lens)
        is_chunk = 1 < num_queries < max(seq_lens)
        seen = torch.ones(num_queries, max(seq_lens), dtype=torch.bool)
        self.mask = seen.tril(max(seq_lens) - num_queries) if is_chunk else None

    def decode(self) -> Tensor:
        return self.paged.decode()

    def prefill(self) -> Tensor:
        p = self.paged
        return ops.paged_attention(
            p.query, p.key_cache, p.value_cache, p.block_tables, p.seq_lens, query_start_loc=self.query_start_loc
        )[0]

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
        p = self.paged
        key = p.key_cache[p.block_tables].permute(0, 2, 1, 4, 3, 5)  # seq, head, block, token, d / x, x
        value = p.value_cache[p.block_tables].permute(0, 2, 1, 4, 3)
        return self.attend(key.flatten(-2).flatten(2, 3), value.flatten(2, 3))

    def naive(self) -> Tensor:
        return self.paged.decode_naive()


class Fp8Decode:
    """The same tokens in an fp8 cache and in a bf16 cache; random numbers that both hold exactly."""

    def __init__(self, model: Model, seq_lens: list[int], dtype: torch.dtype) -> None:
        query = torch.randn(len(seq_lens), model.num_heads, model.head_size, dtype=torch.bfloat16)
        key, value = (t.to(dtype).bfloat16() for t in random_kv(model, seq_lens, torch.bfloat16))
        self.fp8 = Paged.make(query, key, value, seq_lens, dtype)
        self.bf16 = Paged.make(query, key, value, seq_lens, torch.bfloat16)

    def decode(self) -> Tensor:
        return self.fp8.decode()

    def decode_bf16(self) -> Tensor:
        return self.bf16.decode()


Functions = Mapping[str, Callable[[T], Tensor]]
DECODE_PEERS: Functions[Attention] = {
    "SDPA": Attention.sdpa,
    "gather + SDPA": Attention.gather_sdpa,
    "naive": Attention.naive,
}


def assert_same(functions: Functions[T], inputs: T, tolerance: float) -> None:
    """A faster way to another result would be no news."""
    ours, *peers = (function(inputs) for function in functions.values())
    for peer in peers:
        torch.testing.assert_close(ours, peer, rtol=tolerance, atol=tolerance * peer.abs().max().item())


def tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 2e-2


def bench_decode(
    model: Model,
    name: str,
    seq_lens: list[int],
    dtype: torch.dtype,
    device: str,
    num_rounds: int,
    probe: Probe,
    peers: Functions[Attention],
) -> Row:
    num_bytes = kv_bytes(model, seq_lens, dtype)
    inputs = make_inputs(partial(Attention, model, seq_lens, 1, dtype), num_bytes, device)
    functions = {"ours": Attention.decode, **peers}
    assert_same(functions, inputs[0], tolerance(dtype))
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
    return Row("decode", f"{model.name}, {name}", dtype, num_bytes, probe, seconds)


def bench_fp8_decode(
    model: Model, name: str, seq_lens: list[int], dtype: torch.dtype, device: str, num_rounds: int, probe: Probe
) -> Row:
    num_bytes = kv_bytes(model, seq_lens, dtype)
    inputs = make_inputs(partial(Fp8Decode, model, seq_lens, dtype), num_bytes, device)
    functions: Functions[Fp8Decode] = {"ours": Fp8Decode.decode, "bf16 cache": Fp8Decode.decode_bf16}
    assert_same(functions, inputs[0], tolerance(torch.bfloat16))
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
    return Row("decode, fp8 cache", f"{model.name}, {name}", dtype, num_bytes, probe, seconds)


def bench_prefill(
    model: Model, num_tokens: int, prefix: int, dtype: torch.dtype, device: str, num_rounds: int, probe: Probe
) -> Row:
    num_pairs = num_tokens * prefix + num_tokens * (num_tokens + 1) // 2
    make = partial(Attention, model, [prefix + num_tokens], num_tokens, dtype)
    inputs = make_inputs(make, COLD_BYTES, device)  # one: arithmetic is the limit
    functions: Functions[Attention] = {"ours": Attention.prefill, "SDPA": Attention.sdpa}
    assert_same(functions, inputs[0], tolerance(dtype))
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
    name = f"{model.name}, {num_tokens} tokens" + (f" after {prefix}" if prefix else "")
    return Row("prefill", name, dtype, 4 * model.num_heads * model.head_size * num_pairs, probe, seconds)


def kv_bytes(model: Model, seq_lens: list[int], dtype: torch.dtype) -> int:
    return 2 * sum(seq_lens) * model.num_kv_heads * model.head_size * dtype.itemsize


def bench_latency(dtype: torch.dtype, device: str) -> dict[str, dict[str, float]]:
    """One thread and two: below its grain an op must not wake the second one, which busy processes would delay."""
    (attention,) = make_inputs(partial(Attention, GQA8, [16], 1, dtype), COLD_BYTES, device)
    latencies = {}
    threads_before = torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_busy in (0, NUM_BUSY):
            with busy_processes(num_busy):
                micros = latency(attention.decode)
            name = f"{dtype_name(dtype)}, torch threads: {num_threads}, busy processes: {num_busy}"
            print(name + ": p50 {p50_us:.1f} us, p99 {p99_us:.1f} us, longest {max_us:.0f} us".format(**micros))
            latencies[name] = micros
    torch.set_num_threads(threads_before)
    return latencies


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    facts = hardware(args.device)
    options = args.device, 3 if args.quick else 9
    with torch.device(args.device):
        reading = read_probe()
        matmuls = [matmul_probe(dtype) for dtype in args.dtypes]
    peers = {name: peer for name, peer in DECODE_PEERS.items() if not (args.quick and name == "naive")}
    decodes = QUICK_DECODES if args.quick else DECODES
    rows = [bench_decode(*case, dtype, *options, reading, peers) for dtype in args.dtypes for case in decodes]
    print_rows(rows)
    if torch.bfloat16 in args.dtypes:
        rows += (table := [bench_fp8_decode(*case, *options, reading) for case in FP8_DECODES])
        print_rows(table)
    prefills = QUICK_PREFILLS if args.quick else PREFILLS
    dtypes = zip(args.dtypes, matmuls, strict=True)
    rows += (table := [bench_prefill(*case, dtype, *options, probe) for dtype, probe in dtypes for case in prefills])
    print_rows(table)

    print(f"\none call of many in a row: decode, {GQA8.name}, 1 sequence of 16 tokens")
    latencies = [bench_latency(dtype, args.device) for dtype in args.dtypes]
    finish(args, facts, rows, latency={name: micros for of_dtype in latencies for name, micros in of_dtype.items()})


if __name__ == "__main__":
    main()
