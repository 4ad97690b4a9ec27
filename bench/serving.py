"""The engine under synthetic requests, beside other ways to generate the same tokens.

Usage: python bench/serving.py [--quick] [--workload alpaca] [--requests N] [--rate R] [--json FILE] [--plot FILE.png]

Lengths are those of ShareGPT or Alpaca (serving_requests.py), prompts are random tokens, decoding is greedy and never
stops early. First the engine serves all requests: throughput, latencies, cache. A step's host time is what it spends
outside of the model and the sampler: scheduling, inputs, outputs. Then engine and peers take turns at the first
requests, all there at once, with the same weights and threads. Peers, all of transformers: `generate` with one request
at a time; with padded batches of 16 in order of arrival, each as long as its longest output; its own continuous
batching over a paged cache; and the same on our ops (use_paged_attention).
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers
from harness import check_plot, hardware, keep_freed_memory, write_files
from serving_peers import System, compare, load_peers, print_comparison, run_in_turns
from serving_requests import SHAPES, WORKLOADS, Request, make_model, make_requests
from serving_run import ModelTimer, plot_run, print_summary, serve, summarize

from pagedattn_serve import LLMEngine


def at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected at least {minimum}, got {value}")
        return value

    return integer


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, positive, count = parser.add_argument, at_least(1), at_least(0)
    add("--model", metavar="DIR", help="a Hugging Face directory (default: a LLaMA with random weights, of --shape)")
    add("--shape", choices=list(SHAPES), default="tiny", help="of the model made (default: %(default)s)")
    add("--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="default: %(default)s")
    add("--workload", choices=list(WORKLOADS), help="whose lengths (default: sharegpt; alpaca with --quick)")
    add("--mean-input", type=positive, metavar="N", help="prompts scaled to a mean of N tokens")
    add("--mean-output", type=positive, metavar="N", help="outputs scaled to a mean of N tokens")
    add("--requests", type=positive, metavar="N", help="default: 64; 16 with --quick")
    add("--rate", type=float, metavar="R", help="requests per second, with Poisson arrivals (default: all at once); "
        "for the engine's own report: peers are offline and are compared with all requests there at once")  # fmt: skip
    add("--peer-requests", type=count, metavar="N", help="requests for the comparison (default: 16; 6 with --quick; "
        "0: no comparison)")  # fmt: skip
    add(
        "--rounds",
        type=positive,
        default=1,
        metavar="N",
        help="of the comparison; medians are shown (default: %(default)s)",
    )
    add("--max-num-seqs", type=positive, default=256, metavar="N", help="default: %(default)s")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--kv-cache-memory", type=positive, metavar="BYTES", help="default: the engine's")
    memory.add_argument("--num-blocks", type=positive, metavar="N", help="the cache's size in blocks of 16 tokens")
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    add("--seed", type=count, default=0, help="of weights, lengths, tokens and arrivals (default: %(default)s)")
    add("--quick", action="store_true", help="fewer and shorter requests, under a minute")
    add("--json", type=Path, metavar="FILE", help="write hardware, command, steps, requests, summary and peers")
    add("--plot", type=Path, metavar="FILE.png", help="draw batch, queue and cache over time (needs matplotlib)")
    args = parser.parse_args()
    if args.rate is not None and not args.rate > 0:
        parser.error(f"argument --rate: expected a number above 0, got {args.rate}")
    check_plot(parser, args.plot)
    args.requests = args.requests or (16 if args.quick else 64)
    if args.peer_requests is None:
        args.peer_requests = 6 if args.quick else 16
    args.workload = args.workload or ("alpaca" if args.quick else "sharegpt")
    return parser, args


def describe(args: argparse.Namespace, requests: list[Request], max_model_len: int) -> str:
    weights = args.model or f"LLaMA of shape {args.shape} with random weights"
    arrivals = f"{args.rate:g} a second" if args.rate else "all at once"
    means = (mean(len(r.prompt_token_ids) for r in requests), mean(r.max_tokens for r in requests))
    scaled = " and scaled" if args.mean_input or args.mean_output else ""
    return (
        f"{weights}, {args.dtype}; {len(requests)} requests, {arrivals}\n"
        f"mean tokens in and out: {means[0]:.0f} and {means[1]:.0f}, drawn as of {args.workload}{scaled}, clipped to "
        f"{max_model_len} together"
    )


def main() -> None:
    parser, args = parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    facts = hardware("cpu")
    with tempfile.TemporaryDirectory() as made:
        model = args.model or made
        if not args.model:
            make_model(args.shape, args.seed, made)
        try:
            engine = LLMEngine(
                model, dtype=args.dtype, device="cpu", max_num_seqs=args.max_num_seqs,
                num_blocks=args.num_blocks, kv_cache_memory=args.kv_cache_memory,
            )  # fmt: skip
        except (FileNotFoundError, ValueError) as error:
            parser.error(str(error))
        requests = make_requests(
            args.workload, args.requests, engine.max_model_len,
            transformers.AutoConfig.from_pretrained(model).vocab_size, args.seed,
            rate=args.rate, mean_input=args.mean_input, mean_output=args.mean_output,
        )  # fmt: skip
        print(describe(args, requests, engine.max_model_len))
        timer = ModelTimer(engine)
        offline = [replace(request, arrival=0.0) for request in requests]
        serve(engine, timer, offline[:1])  # warm-up
        run = serve(engine, timer, requests)
        summary = summarize(run, engine)
        print_summary(summary)
        comparison: dict[str, dict[str, Any]] = {}
        if args.peer_requests:
            systems: dict[str, System] = {"engine": partial(serve, engine, timer), **load_peers(model, args.dtype)}
            comparison = compare(run_in_turns(systems, offline[: args.peer_requests], args.rounds))
            print_comparison(comparison, min(args.peer_requests, args.requests), args.rounds)
    report = {"summary": summary, "peers": comparison, "requests": [*map(asdict, run.requests)]}
    report["steps"] = [*map(asdict, run.steps)]
    write_files(args, facts, partial(plot_run, run=run, num_blocks=summary["num_blocks"]), report)


if __name__ == "__main__":
    main()
