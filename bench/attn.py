"""Paged attention, decode and prefill, beside what torch offers for it.

Usage: python bench/attn.py [--device cuda] [--quick] [--dtype float32] [--threads N] [--vllm PYTHON] [--json FILE]
       [--plot FILE.png]

Decode: GB/s counts the bytes of the sequences' keys and values, and the share is of the fastest read (probes.py).
Prefill: GFLOP/s counts the pairs of tokens that causality leaves, and the share is of a matrix product.
Physical blocks are in random order. Caches, SDPA's keys and values, and the memory of the read lie in huge pages where
the system grants them.
Peers: SDPA on contiguous keys and values, with the query heads of a KV head as rows of one head (a call for each
sequence where lengths differ); varlen_attention on the same keys and values (dense); gathering these from the cache for
SDPA; a loop over the sequences in plain torch; for a cache of 8 bits, the same tokens in a bf16 cache; for decode over
caches in the layout NHD, blocks of other sizes and the chunked layout; with --vllm (vllm_kernels.py), vLLM's attention
on its own pages, without what it plans once for all layers, and in 16 bits SGLang's on tokens in random order. Prompts
over an NHD cache stand beside those that are ours.
Shared: sequences with a common prefix, beside equally long sequences without one. GFLOP/s counts every row's pairs, and
the share is of a matrix product in float32. Then the time to find out what is shared, beside the least time that the
call could take. Last, the latency of single small calls, on a quiet machine and beside busy processes.

On a GPU (cuda_timing.py says how it is timed) there are two peers. One is SDPA: for decode its fastest backend for the
shape, named beside the row; for prefill its flash backend. The other is FlashInfer, where it is installed, with the
same block tables in its own layout. Mixed: a prompt and rows of decode in one call, or two calls of SDPA. Last, what a
call costs the host.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import TypeVar

import cuda_timing
import torch
from attention.inputs import Attention, Mixed, Model, NhdDecode, Quantized, SharedDecode
from attention.peers import attention_in_wheel, fastest_sdpa, flash, flashinfer_decode
from attention.plan import Planner, decode_tables
from harness import (
    Probe,
    Row,
    busy_processes,
    check_and_time,
    cold_bytes,
    dtype_name,
    finish,
    hardware,
    latency,
    make_inputs,
    parse_args,
    print_rows,
    time_interleaved,
    tolerance,
)
from probes import copy_probe, matmul_probe, print_probes, read_probe
from torch import Tensor

T = TypeVar("T")
NUM_BUSY = 4

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
QUANTIZED_DTYPES = [*FP8_DTYPES, torch.int8]
QUANTIZED_DECODES = [(model, "8 x 2048", EIGHT, dtype) for dtype in QUANTIZED_DTYPES for model in (MHA, GQA8)]
QUANTIZED_PREFILLS = [(GQA8, 512, dtype) for dtype in QUANTIZED_DTYPES]

SHARED, NUM_SHARED = [2112] * 8, 2048
PLANNED, NUM_PLANNED_SHARED = [4096] * 256, (0, 4032)

PREFILLS = [(model, *tokens) for model in (MHA, GQA8) for tokens in ((512, 0), (2048, 0), (256, 1024))]
QUICK_PREFILLS = [(GQA8, 512, 0), (GQA8, 256, 1024)]

# On a GPU.
GQA64 = Model("GQA 64/8x128", 64, 8, 128)
MQA = Model("MQA 32/1x128", 32, 1, 128)
FROM_64_TO_8192 = [64 + 8128 * i // 63 for i in range(64)]
CUDA_DECODES = [
    (MHA, "64 x 4096", [4096] * 64),
    (MHA, "64 x 1024", [1024] * 64),
    (GQA8, "64 x 4096", [4096] * 64),
    (GQA64, "64 x 4096", [4096] * 64),
    (MQA, "64 x 4096", [4096] * 64),
    (SMALL, "64 x 1024", [1024] * 64),
    (GQA8, "4 x 32768", [32768] * 4),
    (MHA, "1 x 1024", ONE),
    (GQA8, "1 x 1024", ONE),
    (GQA8, "1 x 8192", [8192]),
    (MHA, "64 of 64 to 8192", FROM_64_TO_8192),
    (GQA8, "64 of 64 to 8192", FROM_64_TO_8192),
    (GQA8, "1 x 8192, 63 x 64", [8192] + [64] * 63),
]
CUDA_FP8_DECODES = [(model, "64 x 4096", [4096] * 64, dtype) for dtype in FP8_DTYPES for model in (MHA, GQA8)]
CUDA_PREFILLS = [(model, 2048, 0) for model in (MHA, GQA8)] + [(GQA8, 8192, 0)]
CUDA_MIXED = [(model, 2048, [4096] * 63) for model in (MHA, GQA8)]


Functions = Mapping[str, Callable[[T], Tensor]]
DECODE_PEERS: Functions[Attention] = {
    "SDPA": Attention.sdpa,
    "gather + SDPA": Attention.gather_sdpa,
    "naive": Attention.naive,
}


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
    functions = {"ours": Attention.decode, **peers, **attention_in_wheel(inputs)}
    seconds = check_and_time(functions, inputs, tolerance(dtype), num_rounds, probe)
    return Row("decode", f"{model.name}, {name}", dtype, num_bytes, probe, seconds)


def bench_decode_on_cuda(
    model: Model, name: str, seq_lens: list[int], dtype: torch.dtype, device: str, num_rounds: int, probe: Probe
) -> Row:
    num_bytes = kv_bytes(model, seq_lens, dtype)
    inputs = make_inputs(partial(Attention, model, seq_lens, 1, dtype), num_bytes, device)
    backend, sdpa = fastest_sdpa(inputs, dtype)
    functions = {"ours": Attention.decode, "SDPA": sdpa, **flashinfer_decode(model, inputs, dtype)}
    seconds = check_and_time(functions, inputs, tolerance(dtype), num_rounds, probe)
    return Row("decode", f"{model.name}, {name}", dtype, num_bytes, probe, seconds, f"SDPA: {backend}")


def bench_quantized_decode(
    model: Model, name: str, seq_lens: list[int], dtype: torch.dtype, device: str, num_rounds: int, probe: Probe
) -> Row:
    num_bytes = kv_bytes(model, seq_lens, dtype)
    inputs = make_inputs(partial(Quantized, model, seq_lens, 1, dtype), num_bytes, device)
    functions: Functions[Quantized] = {"ours": Quantized.decode, "bf16 cache": Quantized.decode_bf16}
    seconds = check_and_time(functions, inputs, tolerance(torch.bfloat16), num_rounds, probe)
    return Row("decode, 8-bit cache", f"{model.name}, {name}", dtype, num_bytes, probe, seconds)


def bench_quantized_prefill(
    model: Model, num_tokens: int, dtype: torch.dtype, device: str, num_rounds: int, probe: Probe
) -> Row:
    inputs = make_inputs(partial(Quantized, model, [num_tokens], num_tokens, dtype), cold_bytes(device), device)
    functions: Functions[Quantized] = {"ours": Quantized.prefill, "bf16 cache": Quantized.prefill_bf16}
    seconds = check_and_time(functions, inputs, tolerance(torch.bfloat16), num_rounds, probe)
    name = f"{model.name}, {num_tokens} tokens"
    return Row("prefill, 8-bit cache", name, dtype, num_operations(model, num_tokens), probe, seconds)


def bench_nhd_decode(
    model: Model, name: str, seq_lens: list[int], dtype: torch.dtype, device: str, num_rounds: int, probe: Probe
) -> Row:
    num_bytes = kv_bytes(model, seq_lens, dtype)
    inputs = make_inputs(partial(NhdDecode, model, seq_lens, dtype), num_bytes, device)
    functions: Functions[NhdDecode] = {
        "ours": lambda inputs: inputs.decode(16),
        "blocks of 256": lambda inputs: inputs.decode(256),
        "blocks of 1": lambda inputs: inputs.decode(1),
        "chunked": NhdDecode.decode_chunked,
    }
    seconds = check_and_time(functions, inputs, tolerance(dtype), num_rounds, probe)
    return Row("decode, NHD", f"{model.name}, {name}", dtype, num_bytes, probe, seconds)


def bench_shared_decode(
    model: Model, dtype: torch.dtype, device: str, num_rounds: int, probe: Probe, seq_lens: list[int] = SHARED
) -> Row:
    num_bytes = kv_bytes(model, seq_lens, dtype)
    inputs = make_inputs(partial(SharedDecode, model, seq_lens, NUM_SHARED, dtype), num_bytes, device)
    functions: Functions[SharedDecode] = {"ours": SharedDecode.decode, "unshared": SharedDecode.decode_unshared}
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
    work = sum(num_operations(model, 1, seq_len - 1) for seq_len in seq_lens)
    name = f"{model.name}, {len(seq_lens)} x {seq_lens[0]} sharing {NUM_SHARED}"
    return Row("decode, shared", name, dtype, work, probe, seconds)


def bench_planning(planner: Planner, num_shared: int, num_rounds: int, read: Probe, matmul: Probe) -> dict[str, float]:
    """Beside the plan, the least time of the call: to read each block once, or to multiply, at the probes' speed."""
    model, num_seqs, seq_len = GQA8, len(PLANNED), PLANNED[0]
    lens, tables = decode_tables(num_seqs, seq_len, num_shared)

    def plan(_: None) -> int:
        return planner.count(lens, tables, model.num_heads, model.num_kv_heads)

    functions: Mapping[str, Callable[[None], object]] = {"plan": plan, "read": read.run, "matmul": matmul.run}
    seconds = {name: median(times) for name, times in time_interleaved(functions, [None], num_rounds).items()}
    num_bytes = kv_bytes(model, [num_shared, num_seqs * (seq_len - num_shared)], torch.bfloat16)
    work = num_seqs * num_operations(model, 1, seq_len - 1)
    least = max(num_bytes / read.work * seconds["read"], work / matmul.work * seconds["matmul"])
    name = f"{model.name}, {num_seqs} x {seq_len} sharing {num_shared}, bfloat16"
    print(f"plan: {name}: {seconds['plan'] * 1e3:.2f} ms of {least * 1e3:.0f} at least, {seconds['plan'] / least:.2%}")
    return {"num_shared": num_shared, "seconds": seconds["plan"], "least_seconds_of_call": least}


def bench_prefill(
    model: Model,
    num_tokens: int,
    prefix: int,
    dtype: torch.dtype,
    device: str,
    num_rounds: int,
    probe: Probe,
    sdpa: Callable[[Attention], Tensor] = Attention.sdpa,
) -> Row:
    make = partial(Attention, model, [prefix + num_tokens], num_tokens, dtype)
    inputs = make_inputs(make, cold_bytes(device), device)  # one: arithmetic is the limit
    functions = {"ours": Attention.prefill, "dense": Attention.dense, "SDPA": sdpa, **attention_in_wheel(inputs)}
    if device == "cpu":
        functions["NHD"] = Attention.prefill_nhd
    seconds = check_and_time(functions, inputs, tolerance(dtype), num_rounds, probe)
    name = f"{model.name}, {num_tokens} tokens" + (f" after {prefix}" if prefix else "")
    return Row("prefill", name, dtype, num_operations(model, num_tokens, prefix), probe, seconds)


bench_prefill_beside_flash = partial(bench_prefill, sdpa=flash(Attention.sdpa))


def bench_mixed(
    model: Model,
    num_prompt_tokens: int,
    decode_lens: list[int],
    dtype: torch.dtype,
    device: str,
    num_rounds: int,
    probe: Probe,
) -> Row:
    make = partial(Mixed, model, num_prompt_tokens, decode_lens, dtype)
    inputs = make_inputs(make, cold_bytes(device), device)
    functions: Functions[Mixed] = {"ours": Mixed.attend, "SDPA": flash(Mixed.sdpa)}
    seconds = check_and_time(functions, inputs, tolerance(dtype), num_rounds, probe)
    work = num_operations(model, num_prompt_tokens) + sum(num_operations(model, 1, n - 1) for n in decode_lens)
    name = f"{model.name}, {num_prompt_tokens} tokens and {len(decode_lens)} x {decode_lens[0]}"
    return Row("mixed", name, dtype, work, probe, seconds)


def num_operations(model: Model, num_tokens: int, prefix: int = 0) -> int:
    """Operations for all pairs of a new token and a token that it sees."""
    num_pairs = num_tokens * prefix + num_tokens * (num_tokens + 1) // 2
    return 4 * model.num_heads * model.head_size * num_pairs


def kv_bytes(model: Model, seq_lens: list[int], dtype: torch.dtype) -> int:
    return 2 * sum(seq_lens) * model.num_kv_heads * model.head_size * dtype.itemsize


def bench_latency(dtype: torch.dtype, device: str) -> dict[str, dict[str, float]]:
    """With one thread and with two. Below its grain an op must not wake the second thread: busy processes delay it."""
    (attention,) = make_inputs(partial(Attention, GQA8, [16], 1, dtype), cold_bytes(device), device)
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


def host_overhead(dtype: torch.dtype, device: str) -> dict[str, float]:
    """What a call costs the host, which prepares the next one while the GPU works."""
    (attention,) = make_inputs(partial(Attention, GQA8, [16], 1, dtype), cold_bytes(device), device)
    functions = {"ours": attention.decode, "SDPA": attention.sdpa}
    micros = {name: cuda_timing.host_microseconds(function) for name, function in functions.items()}
    described = ", ".join(f"{name} {p50:.1f} us" for name, p50 in micros.items())
    print(f"\nhost's time of a call, decode, {GQA8.name}, 1 sequence of 16 tokens, {dtype_name(dtype)}: {described}")
    return micros


def tables_on_cpu(args: argparse.Namespace) -> tuple[list[Row], dict[str, object]]:
    options = args.device, 3 if args.quick else 9
    reading = read_probe()
    matmuls = [matmul_probe(dtype) for dtype in args.dtypes]
    peers = {name: peer for name, peer in DECODE_PEERS.items() if not (args.quick and name == "naive")}
    decodes = QUICK_DECODES if args.quick else DECODES
    rows = [bench_decode(*case, dtype, *options, reading, peers) for dtype in args.dtypes for case in decodes]
    print_rows(rows)
    if torch.bfloat16 in args.dtypes:
        rows += (table := [bench_quantized_decode(*case, *options, reading) for case in QUANTIZED_DECODES])
        print_rows(table)
    nhd = [(model, "8 x 2048", EIGHT, dtype) for dtype in args.dtypes for model in (MHA, GQA8)]
    rows += (table := [bench_nhd_decode(*case, *options, reading) for case in nhd])
    print_rows(table)
    dtypes_shared = args.dtypes + ([FP8_DTYPES[0]] if torch.bfloat16 in args.dtypes else [])
    matmul = matmul_probe(torch.float32)
    shared = [(model, dtype) for dtype in dtypes_shared for model in (MHA, GQA8)]
    rows += (table := [bench_shared_decode(*case, *options, matmul) for case in shared])
    print_rows(table)
    planner = Planner.compile()
    planning = [bench_planning(planner, n, options[1], reading, matmul) for n in NUM_PLANNED_SHARED]
    prefills = QUICK_PREFILLS if args.quick else PREFILLS
    dtypes = zip(args.dtypes, matmuls, strict=True)
    rows += (table := [bench_prefill(*case, dtype, *options, probe) for dtype, probe in dtypes for case in prefills])
    print_rows(table)
    if torch.bfloat16 in args.dtypes:
        probe = matmuls[args.dtypes.index(torch.bfloat16)]
        rows += (table := [bench_quantized_prefill(*case, *options, probe) for case in QUANTIZED_PREFILLS])
        print_rows(table)

    print(f"\none call of many in a row: decode, {GQA8.name}, 1 sequence of 16 tokens")
    latencies = [bench_latency(dtype, args.device) for dtype in args.dtypes]
    latency_of = {name: micros for of_dtype in latencies for name, micros in of_dtype.items()}
    return rows, {"planning": planning, "latency": latency_of}


def tables_on_cuda(args: argparse.Namespace) -> tuple[list[Row], dict[str, object]]:
    options = args.device, 5 if args.quick else 25
    with torch.device(args.device):
        reading, copying = read_probe(), copy_probe()
        matmuls = {dtype: matmul_probe(dtype) for dtype in args.dtypes}
    print_probes(reading, copying, *matmuls.values())
    rows = [bench_decode_on_cuda(*case, dtype, *options, reading) for dtype in args.dtypes for case in CUDA_DECODES]
    print_rows(rows)
    if torch.bfloat16 in args.dtypes:
        rows += (table := [bench_quantized_decode(*case, *options, reading) for case in CUDA_FP8_DECODES])
        print_rows(table)
    # SDPA's flash backend has no float32.
    halves = {dtype: probe for dtype, probe in matmuls.items() if dtype != torch.float32}
    for bench, cases in (bench_prefill_beside_flash, CUDA_PREFILLS), (bench_mixed, CUDA_MIXED):
        table = [bench(*case, dtype, *options, probe) for dtype, probe in halves.items() for case in cases]
        if table:
            print_rows(table)
            rows += table
    overhead = {dtype_name(dtype): host_overhead(dtype, args.device) for dtype in args.dtypes}
    return rows, {"host_microseconds": overhead}


def main() -> None:
    args = parse_args(__doc__.splitlines()[0], has_peers_of_vllm=True)
    facts = hardware(args.device)
    rows, extra = tables_on_cuda(args) if args.device == "cuda" else tables_on_cpu(args)
    finish(args, facts, rows, **extra)


if __name__ == "__main__":
    main()
