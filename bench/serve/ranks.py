"""One rank of several threads beside as many ranks of one thread each: tensor parallel, and pipeline parallel."""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import draw_bars, print_table, write_files

from pagedattn_serve import LLMEngine
from serve.engines import CACHE_BYTES, make_workload, same_tokens
from serve.peers import System, compare, run_in_turns
from serve.run import Run, engine_options, warm_server
from serve.workloads import SHAPES, Request, make_model


def on_threads(num_threads: int, system: System) -> System:
    """The system, whose process computes with so many threads."""

    def serve(requests: list[Request]) -> Run:
        torch.set_num_threads(num_threads)
        return system(requests)

    return serve


def plot_ranks(path: Path, title: str, rows: dict[str, dict[str, Any]]) -> None:
    """Bars of tokens per second."""
    figure, axes = draw_bars({"tokens/s": {name: row["tokens_per_s"] for name, row in rows.items()}}, "{:.1f}")
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=120)


def compare_ranks(args: argparse.Namespace, facts: dict[str, object]) -> None:
    """The command `ranks`."""
    print(f"LLaMA of shape {args.shape} with random weights, {args.format}")
    requests = make_workload(args.workload, args.quick, SHAPES[args.shape].vocab_size, args.seed)
    # The same requests come several times, and their prompts must not be found in the cache.
    options = dict(kv_cache_memory=CACHE_BYTES, enable_prefix_caching=False, **engine_options(args.format))
    with tempfile.TemporaryDirectory() as model:
        make_model(args.shape, args.seed, model)
        one = warm_server(LLMEngine(model, device="cpu", **options))
        ranks = warm_server(LLMEngine(model, device="cpu", tensor_parallel_size=args.threads, **options))
        stages = warm_server(LLMEngine(model, device="cpu", pipeline_parallel_size=args.threads, **options))
        systems = {"engine": on_threads(args.threads, one), "ranks": on_threads(1, ranks)}
        systems["stages"] = on_threads(1, stages)
        runs = run_in_turns(systems, requests, args.rounds)
    rows = compare(runs)
    names = {
        "engine": f"1 rank of {args.threads} threads",
        "ranks": f"{args.threads} ranks of 1 thread",
        "stages": f"{args.threads} stages of 1 thread",
    }
    table = [[f"{args.workload}, {args.format}; median of {args.rounds}", "tokens/s", "of 1 rank", "same tokens"]]
    for name, row in rows.items():
        shares = [f"{1 / row['ratio']:.2f}x", f"{same_tokens(runs['engine'][0], runs[name][0]):.0%}"]
        table.append([names[name], f"{row['tokens_per_s']:.1f}", *shares])
    print_table(table)
    write_files(args, facts, partial(plot_ranks, rows=rows), {"ranks": rows})
