"""`pagedattn simulate`: what a deployment would do under a load, without its hardware and without weights."""

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from torch import nn

from pagedattn_serve.async_engine.router import Router
from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.errors import ArgumentError, ArgumentOSError
from pagedattn_serve.execution.engine_setup import token_bytes_of
from pagedattn_serve.loading.directory import model_directory
from pagedattn_serve.loading.loader import build_model
from pagedattn_serve.loading.quantized_checkpoint import checkpoint_format
from pagedattn_serve.progress import Progress
from pagedattn_serve.text.tokenizer import load_tokenizer
from pagedattn_simulate.cost_model import Hardware, ModelShape
from pagedattn_simulate.deployment import Deployment, sustainable_rate
from pagedattn_simulate.files import read_pairs
from pagedattn_simulate.metrics import Distribution, Summary
from pagedattn_simulate.plot import draw_runs
from pagedattn_simulate.workload import (
    MAX_REQUESTS,
    WORKLOADS,
    GivenPairs,
    LengthPairs,
    RequestForm,
    SimulatedRequest,
    TraceEntry,
    WorkloadPairs,
    poisson_trace,
)

MIN_REQUESTS = 10  # between which and MAX_REQUESTS the sustainable rate is looked for


def simulate(
    args: argparse.Namespace,
    form: RequestForm,
    hardware: Hardware,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    trace: list[TraceEntry] | None,
) -> int:
    """args: checked as far as no model is needed; the others are made of them. trace: None if a rate is given."""
    deployment = Deployment(
        shape=shape_of(args.model, args.dtype, args.kv_cache_dtype),
        hardware=hardware,
        num_ranks=args.tensor_parallel_size,
        num_replicas=args.data_parallel_size,
        scheduler_config=scheduler_config,
        cache_config=cache_config,
    )
    make_routing = partial(routing_of, deployment, args.seed)
    run = partial(run_with_progress, deployment, make_routing, form)
    gc.collect()
    gc.freeze()  # what was imported is looked at by no collection again
    runs: list[tuple[str, str, Summary]] = []
    if trace is not None:
        runs = [(system, "trace", run(system, trace)) for system in args.system]
    else:
        trace_at = trace_maker(args, deployment)
        for system in args.system:
            if args.max_latency is None:
                runs += [(system, f"{rate:g}", run(system, trace_at(rate))) for rate in args.rate]
                continue

            def run_at(rate: float, system: str = system) -> Summary:
                return run(system, trace_at(rate))

            limits = (MIN_REQUESTS / args.duration, MAX_REQUESTS / args.duration)
            found = sustainable_rate(run_at, args.max_latency, *limits)
            if found is None:
                expected = f"what {system} can hold at {limits[0]:g} requests a second"
                raise ArgumentError("max_latency", expected, f"{args.max_latency:g} s a token")
            runs.append((system, f"{found[0]:.3g}", found[1]))
    facts = describe(args, deployment)
    print("\n".join(f"{name:10}{value}" for name, value in facts.items()) + "\n")
    print_table([service(*each, cost_per_million(args, each[2])) for each in runs])
    print()
    print_table([memory(*each) for each in runs])
    if args.json is not None:
        results = [
            {"system": system, "rate": rate, **summary.as_dict(), "cost_per_million": cost_per_million(args, summary)}
            for system, rate, summary in runs
        ]
        with writing("json", args.json):
            args.json.write_text(json.dumps({**facts, "runs": results}, indent=1) + "\n")
    if args.plot is not None:
        title = f"{facts['model']}\n{facts['hardware']}; {facts['requests']}\nsimulated; {facts['numbers']}"
        with writing("plot", args.plot):
            draw_runs(args.plot, title, runs)
    return 0


@contextmanager
def writing(argument: str, path: Path) -> Iterator[None]:
    """In here the file of an argument is written. Raises ArgumentOSError if the system does not let it."""
    try:
        yield
    except OSError as error:
        raise ArgumentOSError(argument, "a file that can be written", f"{path} ({error.strerror or error})") from None


def run_with_progress(
    deployment: Deployment,
    make_routing: Callable[[], Router],
    form: RequestForm,
    system: str,
    trace: list[TraceEntry],
) -> Summary:
    """A line on standard error says how many requests are over, if the run takes longer than a moment."""
    with Progress(len(trace), f"{system}, requests", delay=2, leave=False) as progress:

        def on_end(request: SimulatedRequest) -> None:
            progress.update()

        return deployment.run(system, trace, make_routing, form, on_end)


def shape_of(path: str, dtype: str, kv_cache_dtype: str) -> ModelShape:
    """Of the model in a directory, of which only config.json is read."""
    directory = model_directory(path)
    model = build_model(directory, dtype)
    if checkpoint_format(directory) is not None:
        raise ArgumentError("model", "weights in 16 or 32 bits: the time of quantized ones is not known", path)
    if model.states:
        raise ArgumentError("model", "layers without states: the time of such layers is not known", path)
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_embedding_parameters = sum(weight.numel() for weight in embeddings)
    vocabulary = max(embeddings, key=lambda weight: weight.numel())
    num_head_parameters = vocabulary.numel()
    # A last layer that is tied to the embeddings is the same parameter, and counted once.
    is_tied = not any(
        isinstance(module, nn.Linear) and module.weight is not vocabulary and module.weight.shape == vocabulary.shape
        for module in model.modules()
    )
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=vocabulary.shape[1],
        num_heads=model.num_heads,
        num_kv_heads=min(shape.num_kv_heads for shape in model.cache_shapes),
        head_size=max(shape.head_size for shape in model.cache_shapes),
        num_parameters=num_parameters,
        num_layer_parameters=num_parameters - num_embedding_parameters - (0 if is_tied else num_head_parameters),
        num_head_parameters=num_head_parameters,
        max_model_len=model.max_model_len,
        parameter_bytes=model.dtype.itemsize,
        token_bytes=token_bytes_of(model, kv_cache_dtype),
    )


def trace_maker(args: argparse.Namespace, deployment: Deployment) -> Callable[[float], list[TraceEntry]]:
    """Traces by their rate."""
    lengths: LengthPairs
    if args.lengths in WORKLOADS:
        lengths = WorkloadPairs(args.lengths)
    else:
        tokenizer = load_tokenizer(model_directory(args.model), args.tokenizer)
        if tokenizer is None:
            expected = f"a directory with a tokenizer that counts the tokens of {args.lengths}"
            raise ArgumentError("tokenizer", expected, "none in the model's")
        lengths = GivenPairs(read_pairs(args.lengths, lambda text: len(tokenizer(text).input_ids)))
    limit = deployment.max_model_len - args.shared_prefix
    if limit < 2:
        expected = f"at most {deployment.max_model_len - 2} tokens (max_model_len {deployment.max_model_len})"
        raise ArgumentError("shared_prefix", expected, args.shared_prefix)

    def trace_at(rate: float) -> list[TraceEntry]:
        trace = poisson_trace(lengths, rate, args.duration, limit, args.seed)
        if not trace:
            raise ArgumentError("duration", f"time for a request at {rate:g} a second", f"{args.duration:g} s")
        return trace

    return trace_at


def routing_of(deployment: Deployment, seed: int) -> Router:
    router = Router(Random(seed))
    for replica in range(deployment.num_replicas):
        router.start(replica, deployment.num_slots)
    return router


def cost_per_million(args: argparse.Namespace, summary: Summary) -> float | None:
    """Of output tokens."""
    if args.price is None or not summary.tokens_per_second:
        return None
    num_gpus = args.tensor_parallel_size * args.data_parallel_size
    return args.price * num_gpus / 3600 / summary.tokens_per_second * 1e6


# ---- what is shown ---------------------------------------------------------------------------------------------------


def describe(args: argparse.Namespace, deployment: Deployment) -> dict[str, str]:
    hardware, shape, config = deployment.hardware, deployment.shape, deployment.cache_config
    count = f"{deployment.num_replicas} x {deployment.num_ranks} " if deployment.num_replicas > 1 else ""
    count = count or (f"{deployment.num_ranks} " if deployment.num_ranks > 1 else "")
    load = (
        f"{args.trace}" if args.trace else f"{args.lengths}, Poisson arrivals for {args.duration:g} s, seed {args.seed}"
    )
    if args.n > 1:
        load += f", {args.n} outputs a request"
    if args.beam_width:
        load += f", {args.beam_width} beams a request"
    if args.shared_prefix:
        load += f", after a shared prefix of {args.shared_prefix} tokens"
    return {
        "model": f"{args.model}: {shape.num_parameters / 1e9:.3g}B parameters, {shape.weight_bytes / 1e9:.3g} GB; "
        f"{shape.token_bytes / 1024:,.0f} KiB of cache a token; up to {deployment.max_model_len:,} tokens",
        "hardware": f"{count}{hardware.name}, {hardware.memory / (1 << 30):.0f} GiB each",
        "numbers": hardware.source,
        "cache": f"{deployment.num_slots:,} slots: {config.num_blocks:,} blocks of {config.block_size}"
        + ", on each replica" * (deployment.num_replicas > 1),
        "requests": load,
    }


def service(system: str, rate: str, summary: Summary, cost: float | None) -> dict[str, str]:
    """A line of the first table: what users see, and what it costs."""

    def seconds(of: Distribution | None, name: str) -> str:
        return "-" if of is None else f"{getattr(of, name):.3g}"

    first, between = summary.time_to_first_token, summary.inter_token_latency
    cells = {
        "system": system,
        "rate": rate,
        "req/s": f"{summary.requests_per_second:.3g}",
        "tok/s": f"{summary.tokens_per_second:.0f}",
        "s/token": seconds(summary.normalized_latency, "mean"),
        "TTFT p50": seconds(first, "p50"),
        "p90": seconds(first, "p90"),
        "p99": seconds(first, "p99"),
        "ITL p50": seconds(between, "p50"),
        "p90 ": seconds(between, "p90"),
        "p99 ": seconds(between, "p99"),
        "batch": f"{summary.batch_size:.1f}",
    }
    if summary.num_failed:
        cells["failed"] = str(summary.num_failed)
    if cost is not None:
        cells["1M tok"] = f"{cost:.3g}"
    return cells


def memory(system: str, rate: str, summary: Summary) -> dict[str, str]:
    """A line of the second table: what the slots of the cache were taken for."""
    shares = {kind: f"{share:.1%}" for kind, share in summary.memory.items()}
    found = {"shared": f"{summary.shared:.1%}", "found": f"{summary.found:.1%}"}
    return {"system": system, "rate": rate, **shares, **found, "preemptions": str(summary.num_preemptions)}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for each in rows for name in each))
    table = [[name.strip() for name in names], *([each.get(name, "") for name in names] for each in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(names))]
    for line in table:
        first, *rest = zip(line, widths, strict=True)
        print("  ".join([f"{first[0]:{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]).rstrip())
