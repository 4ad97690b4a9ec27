"""The engine under synthetic requests, beside other ways to generate the same tokens; and experiments with it.

Usage: python bench/serving.py [report] [--quick] [--workload alpaca] [--requests N] [--rate R] [--json F] [--plot F]
       python bench/serving.py sharing|samples|prefix|preemption|block-size|long-prompt [--quick] [--json F] [--plot F]
       python bench/serving.py baselines|transformers [--quick] [--json F] [--plot F]
       python bench/serving.py server [--concurrency N ...] [--output-tokens N] [--quick] [--json F] [--plot F]
       python bench/serving.py engines [--workload many batch-16 ...] [--shape small|1B] [--format int8] [--json F]
       python bench/serving.py ranks [--workload many|one|...] [--shape small|1B] [--threads N] [--json F]
       python bench/serving.py sanitizer [--sequences N ...] [--quick] [--json F] [--plot F]
       python bench/serving.py host [--sequences N ...] [--quick] [--json F] [--plot F]
       python bench/serving.py profile [--sequences N ...] [--context N] [--quick] [--json F] [--plot F]
       python bench/serving.py cost-model [--shape small|1B] [--format bfloat16] [--hardware F] [--quick] [--json F]

Lengths are those of ShareGPT or Alpaca (serve/workloads.py), prompts are random tokens, and outputs never stop early.

report, greedy: first the engine serves all requests: throughput, latencies, cache. A step's host time is the
CPU's, outside of the model and the sampler: scheduling, inputs, outputs. Then engine and peers take turns at the first
requests, all there at once, with the same weights and threads. Peers, all of transformers: `generate` with one request
at a time; with padded batches of 16 in order of arrival, each as long as its longest output; its own continuous
batching over a paged cache; and the same on our ops (use_paged_attention).

Experiments (serve/experiments.py): blocks saved by samples or beams of one prompt; their throughput beside that of
separate requests; a prefix shared by all prompts; preemption by recomputing or swapping; the size of blocks; the time
between tokens beside a prompt of 30,000, and how soon a newcomer begins. Where memory binds: baselines, that is, Orca
and FasterTransformer, on the same kernels; and transformers' `generate`, padded and one by one.

server (serve/http_server.py): `pagedattn serve` with N streams at once beside `LLM.generate` with the same requests.

engines (serve/engines.py): OpenVINO GenAI, llama.cpp and vLLM beside the engine, as far as they are installed.

ranks (serve/ranks.py): one rank of N threads beside N ranks of one thread, and N stages of one thread.

sanitizer (serve/sanitizer.py): a step of the demo model with PAGEDATTN_SANITIZE=1, and without.

host (serve/host.py): a step's host time, by how many sequences run, with prefix caching and without.

profile (serve/profile.py): the shares of a step that linear layers, attention, sampler and the rest have.

cost-model (serve/cost_model.py): the step times of `pagedattn simulate`, fitted to this CPU and checked on other steps.
"""

import argparse
import sys
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
from serve import engines
from serve.cost_model import LONGEST, limits_of_cost_model, run_cost_model
from serve.experiments import EXPERIMENTS, MAX_LEN, Setting, plot_rows, print_rows
from serve.host import measure_host
from serve.http_server import compare_server
from serve.peers import System, compare, load_peers, print_comparison, run_in_turns
from serve.profile import limits_of_profile, longest_of_profile, run_profile
from serve.ranks import compare_ranks
from serve.run import FORMATS, engine_options, plot_run, print_summary, summarize, warm_server
from serve.sanitizer import measure_sanitizer
from serve.workloads import SHAPES, WORKLOADS, Request, make_model, make_requests

from pagedattn_serve import DEMO_MODEL, LLMEngine
from pagedattn_simulate.command import shape_of


def at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected at least {minimum}, got {value}")
        return value

    return integer


def positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def add_options(
    parser: argparse.ArgumentParser, shape: str, num_requests: int, num_quick_requests: int, num_rounds: int, plot: str
) -> None:
    """What the report and the experiments have in common, with their defaults."""
    add, positive = parser.add_argument, at_least(1)
    add("--model", metavar="DIR", help="a Hugging Face directory (default: a LLaMA with random weights, of --shape)")
    add("--shape", choices=list(SHAPES), default=shape, help="of the model made (default: %(default)s)")
    add("--requests", type=positive, metavar="N", help=f"default: {num_requests}; {num_quick_requests} with --quick")
    parser.set_defaults(default_requests=(num_requests, num_quick_requests))
    add_run_options(parser, num_rounds, plot)


def add_run_options(
    parser: argparse.ArgumentParser,
    num_rounds: int,
    plot: str,
    num_quick_rounds: int = 1,
    rounds: str = "in which what is compared takes turns",
) -> None:
    """What every command has."""
    add, positive, count = parser.add_argument, at_least(1), at_least(0)
    add("--format", choices=FORMATS, default="float32", help="of the weights; for int8 and int4, transformers has "
        "bfloat16 where the CPU has instructions for it, else float32 (default: %(default)s)")  # fmt: skip
    add("--rounds", type=positive, metavar="N", help=f"{rounds} (default: {num_rounds}; {num_quick_rounds} with "
        "--quick); medians are shown")  # fmt: skip
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    add("--seed", type=count, default=0, help="of weights, lengths, tokens and arrivals (default: %(default)s)")
    add("--quick", action="store_true", help="fewer requests and rounds, under a minute")
    add("--json", type=Path, metavar="FILE", help="write hardware, command and all numbers")
    add("--plot", type=Path, metavar="FILE.png", help=f"draw {plot} (needs matplotlib)")
    parser.set_defaults(parser=parser, default_rounds=(num_rounds, num_quick_rounds))


def add_report_options(parser: argparse.ArgumentParser) -> None:
    add, positive, count = parser.add_argument, at_least(1), at_least(0)
    add("--workload", choices=list(WORKLOADS), help="whose lengths (default: sharegpt; alpaca with --quick)")
    add("--mean-input", type=positive, metavar="N", help="prompts scaled to a mean of N tokens")
    add("--mean-output", type=positive, metavar="N", help="outputs scaled to a mean of N tokens")
    add("--rate", type=positive_float, metavar="R", help="requests per second, with Poisson arrivals (default: all at "
        "once); for the engine's own report: peers are compared with all requests there at once")  # fmt: skip
    add("--peer-requests", type=count, metavar="N", help="requests for the comparison (default: 16; 6 with --quick; "
        "0: no comparison)")  # fmt: skip
    add("--max-num-seqs", type=positive, default=256, metavar="N", help="default: %(default)s")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--kv-cache-memory", type=positive, metavar="BYTES", help="default: the engine's")
    memory.add_argument("--num-blocks", type=positive, metavar="N", help="the cache's size in blocks of 16 tokens")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    add, positive = parser.add_argument, at_least(1)
    add("--model", default=str(DEMO_MODEL), metavar="DIR", help="with a tokenizer (default: the package's demo model)")
    add("--concurrency", type=positive, nargs="+", metavar="N", help="requests at once, a row of the table for each "
        "number (default: 64; 8 with --quick)")  # fmt: skip
    add("--output-tokens", type=at_least(2), default=128, metavar="N", help="of each request (default: %(default)s)")
    add_run_options(parser, 7, "bars of tokens/s")


def add_engines_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workload", choices=engines.WORKLOAD_NAMES, nargs="+", default=["many"], metavar="NAME", help="a table for "
        f"each, in tokens of prompt and output. {engines.describe_workloads()}. Default: many")  # fmt: skip
    add("--shape", choices=list(SHAPES), default="small", help="of the LLaMA made (default: %(default)s)")
    add("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    add_run_options(parser, 1, "bars of tokens per CPU-second")


def add_ranks_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--workload",
        choices=engines.WORKLOAD_NAMES,
        default="many",
        metavar="NAME",
        help="as of engines (default: many)",
    )
    add("--shape", choices=list(SHAPES), default="small", help="of the LLaMA made (default: %(default)s)")
    add_run_options(parser, 3, "bars of tokens/s")
    parser.set_defaults(threads=2)


def add_sanitizer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=at_least(1), nargs="+", default=[1, 16], metavar="N", help="running at "
        "once, a table for each number (default: 1 16)")  # fmt: skip
    add_run_options(parser, 9, "bars of the CPU time of a step", num_quick_rounds=3)
    parser.set_defaults(format="bfloat16")


def add_host_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=at_least(1), nargs="+", metavar="N", help="running at once, a row of the "
        "table for each number (default: 1 64 256 1024; 1 64 with --quick)")  # fmt: skip
    add_run_options(parser, 3, "bars of the microseconds a sequence")


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    add, positive = parser.add_argument, at_least(1)
    add("--model", metavar="DIR", help="a Hugging Face directory (default: a LLaMA with random weights, of --shape)")
    add("--shape", choices=list(SHAPES), default="small", help="of the model made (default: %(default)s)")
    add("--sequences", type=positive, nargs="+", default=[1, 8, 32, 256], metavar="N", help="running at once, columns "
        "of the table for each number (default: 1 8 32 256)")  # fmt: skip
    add("--context", type=positive, default=128, metavar="N", help="tokens of each in the cache (default: %(default)s)")
    add_run_options(parser, 20, "bars of the shares", num_quick_rounds=5, rounds="steps to measure")


def add_cost_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR", help="a Hugging Face directory (default: a LLaMA with random weights, of --shape)")
    add("--shape", choices=list(SHAPES), default="small", help="of the model made (default: %(default)s)")
    add("--hardware", type=Path, metavar="FILE", help="write the numbers for `pagedattn simulate --hardware FILE`")
    add_run_options(parser, 12, "bars of predicted over measured", num_quick_rounds=4, rounds="steps to measure")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Without a command: report.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    of_report = commands.add_parser("report", help="throughput, latencies and cache, beside other systems")
    add_options(of_report, "tiny", 64, 16, 1, "batch, queue and cache over time")
    add_report_options(of_report)
    for name, experiment in EXPERIMENTS.items():
        command = commands.add_parser(name, help=f"experiment: {experiment.title}")
        plot = f"bars of {next(iter(experiment.columns))}"
        add_options(command, experiment.shape, *experiment.num_requests, experiment.num_rounds, plot)
    add_server_options(commands.add_parser("server", help="`pagedattn serve` beside LLM.generate"))
    add_engines_options(commands.add_parser("engines", help="other inference engines beside this one"))
    add_ranks_options(commands.add_parser("ranks", help="N ranks, or stages, of a thread beside a rank of N threads"))
    add_sanitizer_options(commands.add_parser("sanitizer", help="what PAGEDATTN_SANITIZE=1 costs"))
    add_host_options(commands.add_parser("host", help="the CPU time of a step outside of the model and the sampler"))
    add_profile_options(commands.add_parser("profile", help="what a step spends its time on"))
    add_cost_model_options(commands.add_parser("cost-model", help="the step times that `pagedattn simulate` computes"))
    arguments = sys.argv[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["report", *arguments]
    args = parser.parse_args(arguments)
    check_plot(args.parser, args.plot)
    args.rounds = args.rounds or args.default_rounds[args.quick]
    if args.command == "server":
        args.concurrency = args.concurrency or [8 if args.quick else 64]
    if args.command == "host":
        args.sequences = args.sequences or ([1, 64] if args.quick else [1, 64, 256, 1024])
    if args.command in ("server", "engines", "ranks", "sanitizer", "host", "profile", "cost-model"):
        return args
    args.requests = args.requests or args.default_requests[args.quick]
    if args.command == "report":
        args.workload = args.workload or ("alpaca" if args.quick else "sharegpt")
        if args.peer_requests is None:
            args.peer_requests = 6 if args.quick else 16
    return args


def describe(args: argparse.Namespace, requests: list[Request], max_model_len: int) -> str:
    arrivals = f"{args.rate:g} a second" if args.rate else "all at once"
    means = (mean(len(r.prompt_token_ids) for r in requests), mean(r.max_tokens for r in requests))
    scaled = " and scaled" if args.mean_input or args.mean_output else ""
    return (
        f"{len(requests)} requests, {arrivals}; mean tokens in and out: {means[0]:.0f} and {means[1]:.0f}, drawn as of "
        f"{args.workload}{scaled}, clipped to {max_model_len} together"
    )


def report(
    args: argparse.Namespace, facts: dict[str, object], start: Callable[..., LLMEngine], engine: LLMEngine
) -> None:
    requests = make_requests(
        args.workload, args.requests, engine.max_model_len, args.vocab_size, args.seed,
        rate=args.rate, mean_input=args.mean_input, mean_output=args.mean_output,
    )  # fmt: skip
    print(describe(args, requests, engine.max_model_len))
    run = warm_server(engine)(requests)
    summary = summarize(run)
    print_summary(summary)
    comparison: dict[str, dict[str, Any]] = {}
    if args.peer_requests:
        # The same requests come several times: no system is to find them in its cache.
        ours = warm_server(start(enable_prefix_caching=False))
        systems: dict[str, System] = {"engine": ours, **load_peers(args.model, engine_options(args.format)["dtype"])}
        offline = [replace(request, arrival=0.0) for request in requests[: args.peer_requests]]
        comparison = compare(run_in_turns(systems, offline, args.rounds))
        print_comparison(comparison, len(offline), args.rounds)
    raw = {"requests": [*map(asdict, run.requests)], "steps": [*map(asdict, run.steps)]}
    write_files(args, facts, partial(plot_run, run=run), {"summary": summary, "peers": comparison, **raw})


def run_experiment(
    args: argparse.Namespace, facts: dict[str, object], start: Callable[..., LLMEngine], engine: LLMEngine
) -> None:
    experiment = EXPERIMENTS[args.command]
    max_model_len = min(engine.max_model_len, experiment.max_len)
    print(f"{args.requests} requests at once; rounds: {args.rounds}")
    dtype = engine_options(args.format)["dtype"]
    setting = Setting(args.model, dtype, start, max_model_len, args.vocab_size, args.requests, args.rounds, args.seed)
    rows = [*experiment.measure(setting)]
    print_rows(experiment, rows)
    raw = {"experiment": args.command, "rows": [row.as_dict() for row in rows]}
    write_files(args, facts, partial(plot_rows, experiment=experiment, rows=rows), raw)


def max_len_of(args: argparse.Namespace) -> int:
    """Positions of the model that a command makes."""
    if args.command == "cost-model":
        return LONGEST
    if args.command == "profile":
        return max(MAX_LEN, longest_of_profile(args))
    return EXPERIMENTS[args.command].max_len if args.command in EXPERIMENTS else MAX_LEN


def main() -> None:
    args = parse_args()
    if args.command == "server":
        return compare_server(args)
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    facts = hardware("cpu")
    if args.command == "engines":
        return engines.compare_engines(args, facts)
    if args.command == "ranks":
        return compare_ranks(args, facts)
    if args.command == "sanitizer":
        return measure_sanitizer(args, facts)
    if args.command == "host":
        return measure_host(args, facts)
    print(f"{args.model or f'LLaMA of shape {args.shape} with random weights'}, {args.format}")
    with tempfile.TemporaryDirectory() as made:
        if not args.model:
            args.model = made
            make_model(args.shape, args.seed, made, max_len_of(args))
        start = partial(LLMEngine, args.model, device="cpu", **engine_options(args.format))
        run = run_experiment
        if args.command == "report":
            run = report
            start = partial(
                start, max_num_seqs=args.max_num_seqs, num_blocks=args.num_blocks, kv_cache_memory=args.kv_cache_memory
            )
        elif args.command == "profile":
            start = partial(start, **limits_of_profile(args))
        elif args.command == "cost-model":
            start = partial(start, **limits_of_cost_model(args))
        try:
            engine = start()
        except (FileNotFoundError, ValueError) as error:
            args.parser.error(str(error))
        if args.command == "profile":
            return run_profile(args, facts, engine)
        if args.command == "cost-model":
            return run_cost_model(args, facts, engine, shape_of(args.model, args.format, "auto"))
        args.vocab_size = transformers.AutoConfig.from_pretrained(args.model).vocab_size
        run(args, facts, start, engine)


if __name__ == "__main__":
    main()
