"""The speeds that this project asks of itself on a CPU: the table of bench/targets.py.

One thread where not said otherwise. Decode: 8 sequences of 2048 tokens, block size 16, nothing in the CPU's caches;
paged caches and the probes' memory lie in huge pages where the system grants them. One thread's shares of the read
probe are taken with both in pages of 4 KiB, as torch's own memory has them; behind them stands the share with both in
huge pages. Norms, activations and rotary: with what the calls just before left in the caches; behind them stands what
is reached without (elementwise.py). SDPA's decode gets the query heads of a KV head as rows of one head, its fastest
form (attention/inputs.py). Rates of different processes (the AVX2 path and the AVX512 path) are compared by their
shares of the probe.

"The best peer" is the fastest of torch's and, with --vllm, those out of vLLM's wheel.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from statistics import median

import linear
import torch
import vllm_kernels
from attn import (
    EIGHT,
    GQA8,
    MHA,
    QUANTIZED_DTYPES,
    SMALL,
    Attention,
    Model,
    bench_decode,
    bench_nhd_decode,
    bench_prefill,
    bench_quantized_decode,
    bench_quantized_prefill,
    bench_shared_decode,
)
from cache import bench as bench_cache
from elementwise import CASES, bench_calls
from elementwise import bench as bench_elementwise
from harness import Row, Target, dtype_name, prepare, ratio_target, share_target, use_small_pages
from probes import copy_probe, matmul_probe, read_probe

import pagedattn_ext

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = FP32, BF16
NUM_ROUNDS, NUM_LONG_ROUNDS = 21, 3  # long ones take a second or more
SIXTY_FOUR = [2048] * 64
HEAD_SIZES = [Model(f"MHA 16x{head_size}", 16, 16, head_size) for head_size in (80, 96, 256)]


# ---- measurements, each made once ------------------------------------------------------------------------------------

# The memory of a probe stays.
get_read_probe, get_copy_probe, get_matmul_probe = cache(read_probe), cache(copy_probe), cache(matmul_probe)


@cache
def decode(model: Model, dtype: torch.dtype, num_threads: int = 1) -> Row:
    torch.set_num_threads(num_threads)
    peers = {"SDPA": Attention.sdpa}
    row = bench_decode(model, "8 x 2048", EIGHT, dtype, "cpu", NUM_ROUNDS, get_read_probe(), peers)
    torch.set_num_threads(1)
    return row


@cache
def many_decode(model: Model, dtype: torch.dtype) -> Row:
    return bench_decode(model, "64 x 2048", SIXTY_FOUR, dtype, "cpu", NUM_ROUNDS, get_read_probe(), {})


@cache
def decode_beside_gather(model: Model, dtype: torch.dtype) -> Row:
    peers = {"gather + SDPA": Attention.gather_sdpa}
    return bench_decode(model, "8 x 2048", EIGHT, dtype, "cpu", NUM_LONG_ROUNDS, get_read_probe(), peers)


@cache
def quantized_decode(model: Model, dtype: torch.dtype) -> Row:
    return bench_quantized_decode(model, "8 x 2048", EIGHT, dtype, "cpu", NUM_ROUNDS, get_read_probe())


@cache
def nhd_decode(model: Model, dtype: torch.dtype) -> Row:
    return bench_nhd_decode(model, "8 x 2048", EIGHT, dtype, "cpu", NUM_ROUNDS, get_read_probe())


@cache
def shared_decode(model: Model, dtype: torch.dtype) -> Row:
    return bench_shared_decode(model, dtype, "cpu", NUM_ROUNDS, get_matmul_probe(FP32))


def use_capability(name: str) -> None:
    """For a process of its own: the choice holds for its life."""
    os.environ["PAGEDATTN_CPU_CAPABILITY"] = name
    prepare(num_threads=1)


def use_small_pages_only() -> None:
    """For a process of its own, too."""
    use_small_pages()
    prepare(num_threads=1)


def decode_share(model: Model, dtype: torch.dtype) -> float:
    return decode(model, dtype).share()


def decode_share_after(initializer: Callable[[], None], model: Model, dtype: torch.dtype) -> float:
    with ProcessPoolExecutor(1, get_context("spawn"), initializer) as pool:
        return pool.submit(decode_share, model, dtype).result()


def other_of_this(capability: str, model: Model, dtype: torch.dtype) -> float:
    return decode_share_after(partial(use_capability, capability), model, dtype) / decode_share(model, dtype)


@cache
def prefill(model: Model, num_tokens: int, prefix: int, dtype: torch.dtype) -> Row:
    return bench_prefill(model, num_tokens, prefix, dtype, "cpu", NUM_LONG_ROUNDS, get_matmul_probe(dtype))


@cache
def quantized_prefill(model: Model, num_tokens: int, dtype: torch.dtype) -> Row:
    return bench_quantized_prefill(model, num_tokens, dtype, "cpu", NUM_LONG_ROUNDS, get_matmul_probe(BF16))


@cache
def linear_row(name: str, layer: tuple[int, int], num_rows: int, dtype: torch.dtype) -> Row:
    num_rounds = NUM_ROUNDS if num_rows <= 64 else NUM_LONG_ROUNDS
    return linear.bench(name, layer, num_rows, dtype, num_rounds, get_read_probe())


@cache
def elementwise(name: str, num_tokens: int, dtype: torch.dtype, in_cache: bool) -> Row:
    (case,) = [case for case in CASES if case.name == name]
    return bench_elementwise(case, num_tokens, dtype, "cpu", NUM_ROUNDS, get_copy_probe(), in_cache)


@cache
def call_seconds() -> dict[str, dict[str, list[float]]]:
    return bench_calls(NUM_ROUNDS, get_copy_probe())


def call_microseconds(op: str) -> float:
    return median(call_seconds()[op]["ours"]) * 1e6


@cache
def cache_rows(num_kv_heads: int, dtype: torch.dtype) -> dict[str, Row]:
    rows = bench_cache(num_kv_heads, dtype, "cpu", NUM_ROUNDS, get_copy_probe())
    return {row.label(): row for row in rows}


# ---- targets --------------------------------------------------------------------------------------------------------


def targets() -> Iterator[Target]:
    yield from decode_targets()
    yield from prefill_targets()
    yield from linear_targets()
    yield from elementwise_targets()
    yield from cache_targets()
    # At the end: idle threads disturb what comes after them.
    for dtype in DTYPES:
        name = f"decode, {MHA.name}, {dtype_name(dtype)}, two threads"
        yield share_target(name, 0.75, partial(decode, MHA, dtype, 2))


def has_avx512() -> bool:
    """No constant: the first question makes the choice of `use_capability`, which comes after the import."""
    return pagedattn_ext.cpu_capability().startswith(("avx512", "amx"))


def not_measured() -> str:
    left_out = [] if has_avx512() else ["the AVX2 path beside the AVX512 path, which this process does not use"]
    if pagedattn_ext.cpu_capability() != "amx":
        left_out.append("the AVX512 path beside the AMX path, which this process does not use")
    if not vllm_kernels.are_loaded():
        left_out.append("the factors over kernels of vLLM's wheel (--vllm)")
    return f"skipped: {'; '.join(left_out)}" if left_out else "nothing skipped"


def best_peer_target(
    what: str, required: float, row: Callable[[], Row], peers: tuple[str, ...], ours: str | None = None
) -> Target:
    """ours: another form of ours in the row, which stands for ours then. The note names the best of several peers."""

    def measure() -> float:
        ratios = row().ratios()
        of_ours = 1 if ours is None else ratios[ours]
        return min(ratios[peer] for peer in peers if peer in ratios) / of_ours

    def best() -> str:
        ratios = row().ratios()
        return f"({min((peer for peer in peers if peer in ratios), key=ratios.__getitem__)})"

    if len(peers) == 1:
        return Target(f"{what}: vs {peers[0]}", required, measure, "{:.2f}x", row=row)
    return Target(f"{what}: vs the best peer", required, measure, "{:.2f}x", note=best, row=row)


def decode_targets() -> Iterator[Target]:
    for model, dtype, of_probe, vs_sdpa in (
        (MHA, FP32, 0.75, 2),
        (MHA, BF16, 0.8, 7),
        (GQA8, FP32, 0.8, 3),
        (GQA8, BF16, 0.65, 3.5),
    ):
        name, row = f"decode, {model.name}, {dtype_name(dtype)}", partial(decode, model, dtype)

        def in_huge_pages(row: Callable[[], Row] = row) -> str:
            return f"(huge pages: {row().share():.1%})"

        share = partial(decode_share_after, use_small_pages_only, model, dtype)
        yield Target(f"{name}: share of the probe, 4 KiB pages", of_probe, share, "{:.1%}", note=in_huge_pages)
        yield ratio_target(name, "SDPA", vs_sdpa, row, "SDPA, contiguous KV")
        yield ratio_target(name, "gather + SDPA", 10, partial(decode_beside_gather, model, dtype))
    if vllm_kernels.are_loaded():
        for model in (MHA, GQA8, SMALL):
            for dtype in DTYPES:
                name = f"decode, {model.name}, {dtype_name(dtype)}"
                yield best_peer_target(name, 1.15, partial(decode, model, dtype), ("vLLM", "SGLang"))
        for dtype in DTYPES:
            name = f"decode, {SMALL.name}, 64 sequences, {dtype_name(dtype)}"
            yield best_peer_target(name, 1.15, partial(many_decode, SMALL, dtype), ("vLLM", "SGLang"))
    for model in (MHA, GQA8):
        for dtype in DTYPES:
            name, row = f"decode, NHD, {model.name}, {dtype_name(dtype)}", partial(nhd_decode, model, dtype)
            for block_size, required, ours in (
                (16, 0.95, None),
                (256, 0.95, "blocks of 256"),
                (1, 0.9, "blocks of 1"),
            ):
                yield best_peer_target(f"{name}, blocks of {block_size}", required, row, ("chunked",), ours)
    for model in (MHA, GQA8):
        for dtype in QUANTIZED_DTYPES:
            name = f"decode, {model.name}, {dtype_name(dtype)}"
            yield ratio_target(name, "bf16 cache", 1.3, partial(quantized_decode, model, dtype))
    for dtype in DTYPES:
        row = partial(shared_decode, GQA8, dtype)
        yield ratio_target(f"decode, 8 x 2112 sharing 2048, {GQA8.name}, {dtype_name(dtype)}", "unshared", 4, row)
    if has_avx512():
        for model in (MHA, GQA8):
            for dtype in DTYPES:
                name = f"decode, {model.name}, {dtype_name(dtype)}, AVX2: GB/s of the AVX512 path"
                yield Target(name, 0.7, partial(other_of_this, "avx2", model, dtype), "{:.1%}")
    if pagedattn_ext.cpu_capability() == "amx":
        for model in (MHA, GQA8, SMALL):
            name = f"decode, {model.name}, bfloat16, AVX512: GB/s of the AMX path"
            yield Target(name, 1, partial(other_of_this, "avx512_bf16", model, BF16), "{:.1%}", at_most=True)


def prefill_targets() -> Iterator[Target]:
    for model, num_tokens, prefix in (
        (MHA, 512, 0),
        (MHA, 2048, 0),
        (MHA, 256, 1024),
        (GQA8, 512, 0),
        (GQA8, 2048, 0),
        (GQA8, 8192, 0),
        (GQA8, 256, 1024),
        (SMALL, 512, 0),
        (SMALL, 2048, 0),
        *((model, 2048, 0) for model in HEAD_SIZES),
    ):
        for dtype in DTYPES:
            name = f"prefill, {model.name}, {num_tokens} tokens after {prefix}, {dtype_name(dtype)}"
            row, required = partial(prefill, model, num_tokens, prefix, dtype), 1.05 if dtype == FP32 else 1.15
            for form, ours in (("chunked cache", None), ("NHD cache", "NHD"), ("dense", "dense")):
                yield best_peer_target(f"{name}, {form}", required, row, ("SDPA", "vLLM", "SGLang"), ours)
    for dtype in QUANTIZED_DTYPES:
        what, row = f"prefill, {GQA8.name}, 2048 tokens", partial(quantized_prefill, GQA8, 2048, dtype)
        yield ratio_target(f"{what}, {dtype_name(dtype)}", "bf16 cache", 1 / 1.15, row)


def linear_targets() -> Iterator[Target]:
    for layer in linear.LAYERS:
        for num_rows in (1, 16, 64, 128, 512, 2048):
            size = f"{layer[0]} x {layer[1]}, {num_rows} row{'s' * (num_rows > 1)}"
            for weights, dtype in (("fp32", FP32), ("bf16", BF16), ("int8", FP32)):
                row = partial(linear_row, weights, layer, num_rows, dtype)
                yield best_peer_target(f"linear, {weights}, {size}", 1.05, row, linear.PEERS)
            int4 = "int4 in groups of 128"
            row = partial(linear_row, int4, layer, num_rows, FP32)
            yield ratio_target(f"linear, {int4}, {size}", "int8", 1, row)
            if vllm_kernels.are_loaded():
                row = partial(linear_row, int4, layer, num_rows, BF16)
                yield best_peer_target(f"linear, {int4}, rows of bf16, {size}", 1.05, row, linear.PEERS)


def elementwise_targets() -> Iterator[Target]:
    for op, num_tokens, dtype, required, peer in (
        ("rms_norm", 32, FP32, 3, "F.rms_norm"),
        ("rms_norm", 32, BF16, 3, "F.rms_norm"),
        ("rms_norm", 512, FP32, 2.3, "F.rms_norm"),
        ("rms_norm", 512, BF16, 10, "F.rms_norm"),
        ("silu_and_mul", 32, FP32, 2, "eager, in place"),
        ("silu_and_mul", 32, BF16, 2, "eager, in place"),
        ("silu_and_mul", 512, FP32, 2, "eager, in place"),
        ("silu_and_mul", 512, BF16, 2, "eager, in place"),
        ("rotary_embedding_neox", 32, FP32, 8, "eager, HF form"),
        ("rotary_embedding_neox", 32, BF16, 8, "eager, HF form"),
        ("rotary_embedding_neox", 512, FP32, 8, "eager, HF form"),
        ("rotary_embedding_neox", 512, BF16, 8, "eager, HF form"),
    ):
        name = f"{op}, {num_tokens} tokens, {dtype_name(dtype)}"
        row = partial(elementwise, op, num_tokens, dtype)

        def when_cold(row: Callable[[bool], Row] = row) -> str:
            cold = row(False)
            return f"(cold: {cold.ratios()['torch']:.2f}x, {cold.share():.0%} of the copy probe)"

        yield ratio_target(name, "torch", required, partial(row, True), peer, when_cold)
    for op in ("rms_norm", "fused_add_rms_norm", "silu_and_mul"):
        name = f"{op}: us of a call with next to nothing to compute"
        yield Target(name, 10, partial(call_microseconds, op), "{:.1f}", at_most=True)


def cache_targets() -> Iterator[Target]:
    for num_kv_heads in (32, 8):
        for dtype in DTYPES:

            def cache_row(label: str, num_kv_heads: int = num_kv_heads, dtype: torch.dtype = dtype) -> Row:
                return cache_rows(num_kv_heads, dtype)[label]

            size = f"{num_kv_heads}x128, {dtype_name(dtype)}"
            for num_tokens in (1, 8, 32, 64):
                for op in ("reshape_and_cache", "reshape_and_cache nhd"):
                    name = f"{op}, {num_tokens} tokens, {size}"
                    yield ratio_target(name, "torch", 1, partial(cache_row, name), "index_put")
            name = f"reshape_and_cache, 512 tokens, {size}"
            yield ratio_target(name, "torch", 2, partial(cache_row, name), "index_put")
            for name in (f"copy_blocks, 128 pairs, {size}", f"swap_blocks, 128 pairs, {size}"):
                yield share_target(name, 0.65, partial(cache_row, name))
