"""The speeds that this project asks of itself, and what it reaches here.

Usage: python bench/targets.py [--device cuda] [--only SUBSTRING ...] [--json FILE [--go-on]]

This file is about CPUs, and prints; the targets on a GPU are in targets_cuda.py.

One thread where not said otherwise. Decode: 8 sequences of 2048 tokens, block size 16, nothing in the CPU's caches;
paged caches and the probes' memory lie in huge pages where the system grants them. One thread's shares of the read
probe are taken with both in pages of 4 KiB, as torch's own memory has them; behind them stands the share with both in
huge pages. Norms, activations and rotary: with what the calls just before left in the caches; behind them stands what
is reached without (elementwise.py). SDPA's decode gets the query heads of a KV head as rows of one head, its fastest
form (attention/inputs.py). A percentage is our rate over that of a probe, a factor a peer's time over ours, both timed
in the same rounds; rates of different processes (the AVX2 path and the AVX512 path) are compared by their shares of the
probe. The run takes some minutes and is sensitive to noise: near a limit, repeat it. The exit status is 0 whether
targets are met or not, and 1 if one could not be measured. FILE is written anew after each target: a run that is cut
off leaves what it has measured, and --go-on measures the rest. A run ends with status 3 where an error has made the GPU
useless for its process.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import targets_cuda
import torch
from attn import (
    EIGHT,
    FP8_DTYPES,
    GQA8,
    MHA,
    Attention,
    Model,
    bench_decode,
    bench_fp8_decode,
    bench_prefill,
    bench_shared_decode,
)
from cache import bench as bench_cache
from elementwise import CASES
from elementwise import bench as bench_elementwise
from harness import (
    Row,
    Target,
    add_device_option,
    check_device,
    copy_probe,
    dtype_name,
    hardware,
    matmul_probe,
    prepare,
    ratio_target,
    read_probe,
    share_target,
    synchronize,
    use_small_pages,
    write_json,
)

import pagedattn_ext

FP32, BF16 = torch.float32, torch.bfloat16
NUM_ROUNDS, NUM_LONG_ROUNDS = 21, 3  # long ones take a second or more
WIDTH = 72


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
def decode_beside_gather(model: Model, dtype: torch.dtype) -> Row:
    peers = {"gather + SDPA": Attention.gather_sdpa}
    return bench_decode(model, "8 x 2048", EIGHT, dtype, "cpu", NUM_LONG_ROUNDS, get_read_probe(), peers)


@cache
def fp8_decode(model: Model, dtype: torch.dtype) -> Row:
    return bench_fp8_decode(model, "8 x 2048", EIGHT, dtype, "cpu", NUM_ROUNDS, get_read_probe())


@cache
def shared_decode(model: Model, dtype: torch.dtype) -> Row:
    return bench_shared_decode(model, dtype, "cpu", NUM_ROUNDS, get_matmul_probe(FP32))


def use_avx2() -> None:
    """For a process of its own: the choice holds for its life."""
    os.environ["PAGEDATTN_CPU_CAPABILITY"] = "avx2"
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


def avx2_of_avx512(model: Model, dtype: torch.dtype) -> float:
    return decode_share_after(use_avx2, model, dtype) / decode_share(model, dtype)


@cache
def prefill(model: Model, num_tokens: int, prefix: int, dtype: torch.dtype) -> Row:
    return bench_prefill(model, num_tokens, prefix, dtype, "cpu", NUM_LONG_ROUNDS, get_matmul_probe(dtype))


@cache
def elementwise(name: str, num_tokens: int, dtype: torch.dtype, in_cache: bool) -> Row:
    (case,) = [case for case in CASES if case.name == name]
    return bench_elementwise(case, num_tokens, dtype, "cpu", NUM_ROUNDS, get_copy_probe(), in_cache)


@cache
def cache_rows(num_kv_heads: int, dtype: torch.dtype) -> dict[str, Row]:
    rows = bench_cache(num_kv_heads, dtype, "cpu", NUM_ROUNDS, get_copy_probe())
    return {row.label(): row for row in rows}


# ---- targets --------------------------------------------------------------------------------------------------------


def attention_targets() -> Iterator[Target]:
    for model, dtype, of_probe, vs_sdpa in (
        (MHA, FP32, 0.75, 2),
        (MHA, BF16, 0.75, 7),
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
    for model in (MHA, GQA8):
        for dtype in FP8_DTYPES:
            name = f"decode, {model.name}, {dtype_name(dtype)}"
            yield ratio_target(name, "bf16 cache", 1.3, partial(fp8_decode, model, dtype))
    for dtype in (FP32, BF16):
        row = partial(shared_decode, GQA8, dtype)
        yield ratio_target(f"decode, 8 x 2112 sharing 2048, {GQA8.name}, {dtype_name(dtype)}", "unshared", 4, row)
    if pagedattn_ext.cpu_capability().startswith("avx512"):
        for model in (MHA, GQA8):
            for dtype in (FP32, BF16):
                name = f"decode, {model.name}, {dtype_name(dtype)}, AVX2: GB/s of the AVX512 path"
                yield Target(name, 0.7, partial(avx2_of_avx512, model, dtype), "{:.1%}")
    for model, num_tokens, prefix in (
        (MHA, 512, 0),
        (MHA, 2048, 0),
        (MHA, 256, 1024),
        (GQA8, 512, 0),
        (GQA8, 2048, 0),
        (GQA8, 4096, 0),
        (GQA8, 256, 1024),
    ):
        for dtype in (FP32, BF16):
            name = f"prefill, {model.name}, {num_tokens} tokens after {prefix}, {dtype_name(dtype)}"
            yield ratio_target(name, "SDPA", 1, partial(prefill, model, num_tokens, prefix, dtype))


def other_targets() -> Iterator[Target]:
    for op, num_tokens, dtype, required, peer in (
        ("rms_norm", 32, FP32, 3, "F.rms_norm"),
        ("rms_norm", 32, BF16, 3, "F.rms_norm"),
        ("rms_norm", 512, FP32, 2.3, "F.rms_norm"),
        ("rms_norm", 512, BF16, 10, "F.rms_norm"),
        ("silu_and_mul", 32, FP32, 2, "eager"),
        ("silu_and_mul", 32, BF16, 2, "eager"),
        ("silu_and_mul", 512, FP32, 2, "eager"),
        ("silu_and_mul", 512, BF16, 2, "eager"),
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
    for num_kv_heads in (32, 8):
        for dtype in (FP32, BF16):

            def cache_row(label: str, num_kv_heads: int = num_kv_heads, dtype: torch.dtype = dtype) -> Row:
                return cache_rows(num_kv_heads, dtype)[label]

            size = f"{num_kv_heads}x128, {dtype_name(dtype)}"
            name = f"reshape_and_cache, 512 tokens, {size}"
            yield ratio_target(name, "torch", 2, partial(cache_row, name), "index_put")
            for name in (f"copy_blocks, 128 pairs, {size}", f"swap_blocks, 128 pairs, {size}"):
                yield share_target(name, 0.65, partial(cache_row, name))
    # At the end: idle threads disturb what comes after them.
    for dtype in (FP32, BF16):
        name = f"decode, {MHA.name}, {dtype_name(dtype)}, two threads"
        yield share_target(name, 0.75, partial(decode, MHA, dtype, 2))


UNFINISHED = "the process ended meanwhile"
STATUS_OF_LOST_GPU = 3


def measured(target: Target) -> dict[str, object]:
    """Measure and print a target; returns what goes into the JSON file. An error ends this target only."""
    try:
        value = target.measure()
        found = {
            "measured": value,
            "met": target.is_met(value),
            "note": target.note(),
            "row": target.row().as_dict() if target.row else None,
        }
    except Exception as error:  # wrong results, too little memory, a kernel that fails
        print(f"{target.what:{WIDTH}}  failed: {type(error).__name__}: {error}", flush=True)
        found = {"error": f"{type(error).__name__}: {error}"}
    else:
        numbers = "  ".join(target.form.format(number).rjust(8) for number in (target.required, value))
        outcome = f"{'met' if found['met'] else 'not met'} {found['note']}".rstrip()
        print(f"{target.what:{WIDTH}}  {numbers}  {outcome}", flush=True)
    return described(target, found)


def described(target: Target, found: Mapping[str, object]) -> dict[str, object]:
    return {"what": target.what, "required": target.required, "at_most": target.at_most, **found}


def is_gpu_lost() -> bool:
    """After an illegal address and the like, every call of the process fails."""
    try:
        synchronize()
    except Exception:  # RuntimeError, or torch.AcceleratorError
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_device_option(parser)
    only = "the targets whose description contains one of them"
    parser.add_argument("--only", nargs="+", default=[""], metavar="SUBSTRING", help=only)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write hardware, command, targets and raw times")
    parser.add_argument("--go-on", action="store_true", help="keep what FILE has, and measure what it lacks")
    args = parser.parse_args()
    if args.go_on and not args.json:
        parser.error("--go-on: expected --json FILE beside it")
    check_device(parser, args.device)
    prepare(num_threads=1)
    facts = hardware(args.device)
    results: list[dict[str, object]] = []
    if args.go_on and args.json.exists():
        results = json.loads(args.json.read_text())["targets"]

    def save() -> None:
        if args.json:
            write_json(args.json, facts, {"targets": results})

    print(f"\n{'what':{WIDTH}}  required  measured", flush=True)
    known = {result["what"] for result in results}
    for target in targets_cuda.targets() if args.device == "cuda" else (*attention_targets(), *other_targets()):
        if target.what in known or not any(part in target.what for part in args.only):
            continue
        results.append(described(target, {"error": UNFINISHED}))  # one that ends the process is not tried again
        save()
        results[-1] = measured(target)
        save()
        if "error" in results[-1] and is_gpu_lost():
            print("the GPU is lost to this process: the targets after this one are left out", flush=True)
            return STATUS_OF_LOST_GPU
    num_failed = sum("error" in result for result in results)
    failed = f", {num_failed} failed" if num_failed else ""
    print(f"\n{sum(bool(result.get('met')) for result in results)} of {len(results)} met{failed}")
    if args.device == "cuda":
        print(targets_cuda.NOT_MEASURED)
    elif not pagedattn_ext.cpu_capability().startswith("avx512"):
        print("skipped: the AVX2 path beside the AVX512 path, which this process does not use")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
