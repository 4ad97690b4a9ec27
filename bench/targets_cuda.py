"""The speeds that this project asks of itself on a Hopper GPU: the table of bench/targets.py --device cuda.

Shapes are those of attn.py, cache.py and elementwise.py, in bf16, block size 16, cold L2; how they are timed:
cuda_timing.py. A percentage is our rate over that of a probe in the same run, a factor a peer's time over ours.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import median

import attn
import torch
from cache import HEAD_SIZE, NUM_HEADS, NUM_PAIRS, bench_swaps
from cache import NUM_TOKENS as NUM_CACHE_TOKENS
from cache import bench as bench_cache
from elementwise import CASES, NUM_TOKENS
from elementwise import bench as bench_elementwise
from harness import (
    Probe,
    Row,
    Target,
    dtype_name,
    ratio_target,
    share_target,
)
from probes import copy_probe, matmul_probe, read_probe

BF16 = torch.bfloat16
NUM_ROUNDS = 25
MANY_SEQS, LONG_TOKENS = 64, 1024  # decode is as fast as SDPA from here on
PROBES: dict[str, Callable[[], Probe]] = {"read": read_probe, "copy": copy_probe, "matmul": partial(matmul_probe, BF16)}


@cache
def probe(name: str, device: str) -> Probe:
    with torch.device(device):
        return PROBES[name]()


def later(bench: Callable[..., Row], *case: object, device: str, probe_name: str) -> Callable[[], Row]:
    return cache(lambda: bench(*case, device, NUM_ROUNDS, probe(probe_name, device)))


@cache
def cache_rows(num_kv_heads: int, device: str) -> dict[str, Row]:
    rows = bench_cache(num_kv_heads, BF16, device, NUM_ROUNDS, probe("copy", device))
    return {row.label(): row for row in rows + bench_swaps(num_kv_heads, BF16, device, NUM_ROUNDS)}


def decode_targets(device: str) -> Iterator[Target]:
    for model, lengths, seq_lens in attn.CUDA_DECODES:
        name = f"decode, {model.name}, {lengths}"
        row = later(attn.bench_decode_on_cuda, model, lengths, seq_lens, BF16, device=device, probe_name="read")
        if len(seq_lens) >= MANY_SEQS and min(seq_lens) >= LONG_TOKENS:
            yield ratio_target(name, "SDPA", 0.9, row, "SDPA, contiguous KV")
        elif seq_lens is attn.ONE:
            yield microseconds_target(name, 15, row)
        elif seq_lens is attn.FROM_64_TO_8192:
            yield share_target(name, 0.8, row)
    for model, lengths, seq_lens, dtype in attn.CUDA_FP8_DECODES:
        name = f"decode, {model.name}, {lengths}, {dtype_name(dtype)}"
        row = later(attn.bench_quantized_decode, model, lengths, seq_lens, dtype, device=device, probe_name="read")
        yield ratio_target(name, "bf16 cache", 1.6, row)


def microseconds_target(what: str, required: float, row: Callable[[], Row]) -> Target:
    def measure() -> float:
        return median(row().seconds["ours"]) * 1e6

    return Target(f"{what}: us", required, measure, "{:.1f}", at_most=True, row=row)


def prefill_targets(device: str) -> Iterator[Target]:
    for model, num_tokens, prefix in attn.CUDA_PREFILLS:
        name = f"prefill, {model.name}, {num_tokens} tokens"
        case = model, num_tokens, prefix, BF16
        row = later(attn.bench_prefill_beside_flash, *case, device=device, probe_name="matmul")
        yield ratio_target(name, "SDPA", 0.6, row, "SDPA, flash")


def copy_targets(device: str) -> Iterator[Target]:
    """Also the ways to the host and back, whose probe is a copy, too."""
    num_tokens = NUM_TOKENS[device][-1]
    for case in CASES:
        row = later(bench_elementwise, case, num_tokens, BF16, device=device, probe_name="copy")
        yield share_target(f"{case.name}, {num_tokens} tokens", 0.7, row)
    for num_kv_heads in NUM_HEADS:
        for required, name in (
            (0.7, f"reshape_and_cache, {NUM_CACHE_TOKENS[device][-1]} tokens"),
            (0.7, f"copy_blocks, {NUM_PAIRS[device]} pairs"),
            (0.9, f"swap_blocks to the host, {NUM_PAIRS[device]} pairs"),
            (0.9, f"swap_blocks to the GPU, {NUM_PAIRS[device]} pairs"),
        ):
            label = f"{name}, {num_kv_heads}x{HEAD_SIZE}, {dtype_name(BF16)}"
            yield share_target(label, required, lambda n=num_kv_heads, label=label: cache_rows(n, device)[label])


def targets(device: str = "cuda") -> list[Target]:
    return [*decode_targets(device), *prefill_targets(device), *copy_targets(device)]


def not_measured() -> str:
    return "not measured: the factors over vLLM's kernels, which are not peers here"
