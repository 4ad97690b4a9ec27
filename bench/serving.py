"""The engine under synthetic requests, beside other ways to generate the same tokens.

Usage: python bench/serving.py [--quick] [--workload alpaca] [--requests N] [--rate R] [--json FILE] [--plot FILE.png]

Lengths are lognormal around the means of ShareGPT or Alpaca as Kwon et al. (SOSP 2023) give them, prompts are random
tokens, decoding is greedy and never stops early. First the engine serves all requests: throughput, latencies, cache.
A step's host time is what it spends outside of the model and the sampler: scheduling, inputs, outputs.
Then engine and peers take turns at the first requests, all there at once, with the same weights and threads. Peers, all
of transformers: `generate` with one request at a time; with padded batches of 16 in order of arrival, each as long as
its longest output; its own continuous batching over a paged cache; and the same on our ops (use_paged_attention).
"""

import argparse
import importlib.util
import json
import shlex
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy
import torch
import transformers
from harness import hardware, keep_freed_memory
from serving_peers import Request, Run, System, load_peers

from pagedattn_serve import LLMEngine, RequestOutput, SamplingParams

MEANS = {"sharegpt": (161, 338), "alpaca": (19, 58)}  # tokens of prompt and output
SIGMA = 1.0  # of the logarithms: the median is 0.6 of the mean, one length in a hundred is six times the mean
SHAPES = {"tiny": (256, 4, 4, 2, 2048), "small": (768, 12, 12, 4, 32000)}  # hidden, layers, heads, KV heads, vocabulary
FULL = 0.9  # a step with this share of the largest batch counts as full


@dataclass(frozen=True)
class Step:
    end: float  # seconds after the start
    seconds: float
    host_seconds: float
    batch_size: int
    num_waiting: int
    num_used_blocks: int
    num_used_slots: int


@dataclass(frozen=True)
class RequestTimes:
    """Seconds after the start of the run."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrival: float
    first_token: float
    finished: float


@dataclass(frozen=True)
class ServedRun(Run):
    steps: list[Step]
    requests: list[RequestTimes]


# ---- requests -------------------------------------------------------------------------------------------------------


def make_model(shape: str, seed: int, directory: str) -> None:
    torch.manual_seed(seed)
    hidden, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=2048,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def make_requests(args: argparse.Namespace, max_model_len: int, vocab_size: int) -> list[Request]:
    """Clipped so that prompt and output fit; outputs have at least 2 tokens, so that each has a time between them."""
    rng = numpy.random.default_rng(args.seed)

    def lengths(mean_length: float) -> numpy.ndarray:
        return rng.lognormal(numpy.log(mean_length) - SIGMA**2 / 2, SIGMA, args.requests).round().astype(int)

    prompts = lengths(args.mean_input).clip(1, max_model_len - 2)
    outputs = lengths(args.mean_output).clip(2, max_model_len - prompts)
    arrivals = rng.exponential(1 / args.rate, args.requests).cumsum() if args.rate else numpy.zeros(args.requests)
    return [
        Request(rng.integers(vocab_size, size=prompt).tolist(), int(output), float(arrival))
        for prompt, output, arrival in zip(prompts, outputs, arrivals, strict=True)
    ]


def describe(args: argparse.Namespace, requests: list[Request], max_model_len: int) -> str:
    weights = args.model or f"LLaMA of shape {args.shape} with random weights"
    arrivals = f"{args.rate:g} a second" if args.rate else "all at once"
    means = (mean(len(r.prompt_token_ids) for r in requests), mean(r.max_tokens for r in requests))
    return (
        f"{weights}, {args.dtype}; {len(requests)} requests, {arrivals}\n"
        f"mean tokens in and out: {means[0]:.0f} and {means[1]:.0f}, drawn around {args.mean_input} and "
        f"{args.mean_output} and clipped to {max_model_len} together"
    )


# ---- ours -----------------------------------------------------------------------------------------------------------


class ModelTimer:
    """Adds up the seconds that an engine spends in the model and the sampler."""

    def __init__(self, engine: LLMEngine) -> None:
        self.seconds = 0.0
        runner = engine.model_runner
        for owner, name in ((runner.model, "forward"), (runner.sampler, "sample")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            result = function(*args, **kwargs)
            self.seconds += time.monotonic() - started
            return result

        return timed


def serve(engine: LLMEngine, timer: ModelTimer, requests: list[Request]) -> ServedRun:
    outputs: dict[int, RequestOutput] = {}
    steps = []
    arriving = deque(enumerate(requests))
    cpu_started, started = time.process_time(), time.monotonic()
    while arriving or engine.has_unfinished_requests():
        now = time.monotonic() - started
        while arriving and arriving[0][1].arrival <= now:
            i, request = arriving.popleft()
            params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
            engine.add_request(str(i), None, params, request.prompt_token_ids, started + request.arrival)
        if not engine.has_unfinished_requests():
            time.sleep(arriving[0][1].arrival - now)
            continue
        step_started, timer.seconds = time.monotonic(), 0.0
        finished = [output for output in engine.step() if output.finished]
        ended = time.monotonic()
        outputs |= {int(output.request_id): output for output in finished}
        stats = engine.stats()
        steps.append(
            Step(
                end=ended - started,
                seconds=ended - step_started,
                host_seconds=ended - step_started - timer.seconds,
                batch_size=stats.num_running + len(finished),
                num_waiting=stats.num_waiting,
                num_used_blocks=stats.num_used_blocks,
                num_used_slots=stats.num_used_slots,
            )
        )
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started

    times = []
    for i in range(len(requests)):
        metrics = outputs[i].metrics
        moments = (metrics.arrival_time, metrics.first_token_time, metrics.finished_time)
        lengths = (len(outputs[i].prompt_token_ids), len(outputs[i].outputs[0].token_ids))
        times.append(RequestTimes(*lengths, *(moment - started for moment in moments)))
    return ServedRun(
        seconds, cpu_seconds, [outputs[i].outputs[0].token_ids for i in range(len(requests))], steps, times
    )


def percentiles(values: list[float], *ranks: int) -> dict[str, float]:
    return {f"p{rank}": float(value) for rank, value in zip(ranks, numpy.percentile(values, ranks), strict=True)}


def host_time(steps: list[Step]) -> dict[str, Any]:
    micros = [step.host_seconds * 1e6 for step in steps]
    per_sequence = [us / step.batch_size for us, step in zip(micros, steps, strict=True)]
    return {
        "num_steps": len(steps),
        "mean_batch_size": mean(step.batch_size for step in steps),
        "us": percentiles(micros, 50, 99),
        "us_per_sequence": percentiles(per_sequence, 50, 99),
    }


def summarize(run: ServedRun, engine: LLMEngine) -> dict[str, Any]:
    num_tokens = sum(times.num_output_tokens for times in run.requests)
    normalized = [(times.finished - times.arrival) / times.num_output_tokens for times in run.requests]
    to_first = [times.first_token - times.arrival for times in run.requests]
    between = [(times.finished - times.first_token) / (times.num_output_tokens - 1) for times in run.requests]
    full = [step for step in run.steps if step.batch_size >= FULL * max(step.batch_size for step in run.steps)]
    num_slots = sum(step.num_used_blocks for step in run.steps) * engine.scheduler.block_manager.block_size
    return {
        "num_requests": len(run.requests),
        "num_output_tokens": num_tokens,
        "seconds": run.seconds,
        "tokens_per_s": num_tokens / run.seconds,
        "requests_per_s": len(run.requests) / run.seconds,
        "tokens_per_cpu_s": num_tokens / run.cpu_seconds,
        "normalized_latency_s": {"mean": mean(normalized), **percentiles(normalized, 50, 99)},
        "ttft_s": percentiles(to_first, 50, 90, 99),
        "tpot_s": percentiles(between, 50, 90, 99),
        "host": {"all steps": host_time(run.steps), "full steps": host_time(full)},
        "peak_used_blocks": max(step.num_used_blocks for step in run.steps),
        "num_blocks": engine.stats().num_blocks,
        "wasted_slots": 1 - sum(step.num_used_slots for step in run.steps) / num_slots,
        "num_preemptions": engine.stats().num_preemptions,
    }


def print_summary(summary: dict[str, Any]) -> None:
    def show(values: dict[str, float], scale: int, digits: int) -> str:
        return ", ".join(f"{name} {value * scale:.{digits}f}" for name, value in values.items())

    lines = {
        "throughput": f"{summary['tokens_per_s']:.0f} tokens/s, {summary['requests_per_s']:.2f} requests/s, "
        f"{summary['tokens_per_cpu_s']:.0f} tokens per CPU-second; {summary['seconds']:.1f} s",
        "normalized latency": f"{show(summary['normalized_latency_s'], 1, 4)} s per output token",
        "first token": f"{show(summary['ttft_s'], 1000, 0)} ms",
        "each later token": f"{show(summary['tpot_s'], 1000, 2)} ms",
    }
    for name, host in summary["host"].items():
        lines[f"host, {name}"] = (
            f"{show(host['us'], 1, 0)} us a step; {show(host['us_per_sequence'], 1, 1)} us a sequence; "
            f"{host['num_steps']} steps, mean batch {host['mean_batch_size']:.1f}"
        )
    lines["cache"] = (
        f"peak {summary['peak_used_blocks']} of {summary['num_blocks']} blocks; of the slots in used blocks "
        f"{summary['wasted_slots']:.1%} wasted; {summary['num_preemptions']} preemptions"
    )
    print()
    for name, text in lines.items():
        print(f"{name:20}{text}")


# ---- comparison -----------------------------------------------------------------------------------------------------


def run_in_turns(systems: dict[str, System], requests: list[Request], num_rounds: int) -> dict[str, list[Run]]:
    """Each system's peer_runs; a peer that does not run is left out, with a line that says why."""
    warm_up = [Request(request.prompt_token_ids, 2) for request in requests[:2]]
    num_tokens = [request.max_tokens for request in requests]
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    for _ in range(num_rounds):
        for name in list(runs):
            try:
                systems[name](warm_up)
                run = systems[name](requests)
                if [*map(len, run.token_ids)] != num_tokens:
                    raise RuntimeError(f"{sum(map(len, run.token_ids))} tokens instead of {sum(num_tokens)}")
                runs[name].append(run)
            except Exception as error:  # whatever another library raises on this machine
                if name == "engine":
                    raise
                print(f"{name}: left out, {type(error).__name__}: {str(error).partition(chr(10))[0]}")
                del runs[name]
    return runs


def compare(runs: dict[str, list[Run]]) -> dict[str, dict[str, Any]]:
    ours = runs["engine"]
    num_tokens = sum(map(len, ours[0].token_ids))
    comparison: dict[str, dict[str, Any]] = {}
    for name, peer_runs in runs.items():
        pairs = zip(ours[0].token_ids, peer_runs[0].token_ids, strict=True)
        seconds = [run.seconds for run in peer_runs]
        cpu_seconds = [run.cpu_seconds for run in peer_runs]
        comparison[name] = {
            "tokens_per_s": num_tokens / median(seconds),
            "tokens_per_cpu_s": num_tokens / median(cpu_seconds),
            "ratio": median(seconds) / median(run.seconds for run in ours),
            "cpu_ratio": median(cpu_seconds) / median(run.cpu_seconds for run in ours),
            "identical": mean(mine == theirs for mine, theirs in pairs),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
        }
    return comparison


def print_comparison(comparison: dict[str, dict[str, Any]], num_requests: int, num_rounds: int) -> None:
    rounds = f"median of {num_rounds} rounds" if num_rounds > 1 else "one round"
    title = f"first {num_requests} requests, at once; {rounds}"
    width = max(map(len, [title, *comparison]))
    print(f"\n{title:{width}}  tokens/s  ours is  tokens/CPU-s  ours is  same output")
    for name, row in comparison.items():
        print(
            f"{name:{width}}  {row['tokens_per_s']:8.0f}  {row['ratio']:6.2f}x  {row['tokens_per_cpu_s']:12.0f}  "
            f"{row['cpu_ratio']:6.2f}x  {row['identical']:11.0%}"
        )


# ---- results --------------------------------------------------------------------------------------------------------


def plot(path: Path, title: str, run: ServedRun, num_blocks: int) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = {
        "sequences in the step": [step.batch_size for step in run.steps],
        "requests waiting": [step.num_waiting for step in run.steps],
        "blocks in use, %": [100 * step.num_used_blocks / num_blocks for step in run.steps],
    }
    figure, rows = pyplot.subplots(len(panels), sharex=True, figsize=(9, 7), layout="constrained")
    for axes, (label, values) in zip(rows, panels.items(), strict=True):
        axes.plot([step.end for step in run.steps], values)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    rows[0].set_title(title, fontsize=8)
    rows[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=120)


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
    add("--workload", choices=list(MEANS), help="which mean lengths (default: sharegpt; alpaca with --quick)")
    add("--mean-input", type=positive, metavar="N", help="mean tokens of a prompt, instead of the workload's")
    add("--mean-output", type=positive, metavar="N", help="mean tokens of an output, instead of the workload's")
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
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    args.requests = args.requests or (16 if args.quick else 64)
    if args.peer_requests is None:
        args.peer_requests = 6 if args.quick else 16
    args.workload = args.workload or ("alpaca" if args.quick else "sharegpt")
    args.mean_input = args.mean_input or MEANS[args.workload][0]
    args.mean_output = args.mean_output or MEANS[args.workload][1]
    return parser, args


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
        vocab_size = transformers.AutoConfig.from_pretrained(model).vocab_size
        requests = make_requests(args, engine.max_model_len, vocab_size)
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

    command = shlex.join(["python", *sys.argv])
    if args.json:
        report: dict[str, object] = {"command": command, "hardware": facts, "summary": summary, "peers": comparison}
        report |= {"requests": [*map(asdict, run.requests)], "steps": [*map(asdict, run.steps)]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(args.plot, f"{command}\n{facts['cpu']}, threads: {args.threads}", run, summary["num_blocks"])


if __name__ == "__main__":
    main()
