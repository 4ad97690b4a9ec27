"""The options of `pagedattn simulate`, and what they say, judged before numpy or torch is imported."""

import argparse
from collections.abc import Callable
from pathlib import Path

from pagedattn_serve.config import UNBOUNDED, CacheConfig, SchedulerConfig, check_dtype, check_float, check_int
from pagedattn_serve.engine_args import OPTIONS
from pagedattn_serve.errors import ArgumentError, BadArgument
from pagedattn_serve.loading.directory import model_directory
from pagedattn_serve.options import add_model, add_option, integer, number, numbers, parts
from pagedattn_serve.text.tokenizer import tokenizer_directory


def add_simulate(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_option(parser, "dtype", OPTIONS["dtype"])
    add_deployment(parser.add_argument_group("deployment"))
    add_load(parser.add_argument_group("load"))
    scheduler = parser.add_argument_group("scheduler")
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "preemption_mode"):
        add_option(scheduler, name, OPTIONS[name])
    cache = parser.add_argument_group("cache")
    for name in (
        *("num_blocks", "block_size", "gpu_memory_utilization", "swap_space", "enable_prefix_caching"),
        "kv_cache_dtype",
    ):
        add_option(cache, name, OPTIONS[name])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw latencies, throughput and memory (needs matplotlib)"
    )


def add_deployment(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hardware",
        required=True,
        metavar="NAME",
        help="A100-40, A100-80, H100, H200, cpu, or a JSON file (docs/simulate.md)",
    )
    group.add_argument(
        "--tensor-parallel-size", type=integer, default=1, metavar="N", help="GPUs that share the model (default: 1)"
    )
    group.add_argument("--data-parallel-size", type=integer, default=1, metavar="N", help="replicas of it (default: 1)")
    group.add_argument(
        "--system",
        type=parts,
        default=("paged",),
        metavar="NAME,...",
        help="any of paged (this engine), orca-oracle, orca-pow2, orca-max, fastertransformer (default: paged)",
    )
    group.add_argument(
        "--price", type=number, metavar="P", help="of a GPU for an hour; shows what a million output tokens cost"
    )


def add_load(group: argparse._ArgumentGroup) -> None:
    when = group.add_mutually_exclusive_group(required=True)
    when.add_argument(
        "--rate", type=numbers, metavar="R,...", help="requests a second, with Poisson arrivals; a run for each rate"
    )
    when.add_argument(
        "--max-latency",
        type=number,
        metavar="SECONDS",
        help="look for the highest rate at which the normalised latency (from arrival to end, over output tokens; the "
        "mean of all requests) is no higher",
    )
    when.add_argument(
        "--trace",
        metavar="FILE",
        help="CSV with the columns arrival (in seconds), prompt and output (in tokens), and priority if wanted, with "
        "--scheduling-policy priority",
    )
    group.add_argument(
        "--duration",
        type=number,
        default=600.0,
        metavar="SECONDS",
        help="in which requests arrive; then the last ones are served (default: 600)",
    )
    group.add_argument(
        "--lengths",
        default="sharegpt",
        metavar="NAME",
        help="of prompts and outputs: sharegpt, alpaca, or a JSON file in the form of either (default: sharegpt)",
    )
    add_option(group, "tokenizer", OPTIONS["tokenizer"])
    group.add_argument(
        "--shared-prefix", type=integer, default=0, metavar="N", help="tokens that all prompts begin with (default: 0)"
    )
    group.add_argument(
        "--n", type=integer, default=1, metavar="N", help="outputs of a request, one as long as the other (default: 1)"
    )
    group.add_argument(
        "--beam-width",
        type=integer,
        default=0,
        metavar="N",
        help="beams of a request; its output counts once (default: none)",
    )
    group.add_argument("--seed", type=integer, default=0, metavar="N", help="of arrivals and lengths (default: 0)")


# ---- what the options say --------------------------------------------------------------------------------------------


def prepare_simulate(args: argparse.Namespace) -> Callable[[], int]:
    """Returns the command, ready to run. Raises BadArgument for a wrong option; ImportError for --plot without
    matplotlib."""
    from pagedattn_simulate.cost_model import find_hardware
    from pagedattn_simulate.deployment import MAX_GPUS
    from pagedattn_simulate.files import read_trace
    from pagedattn_simulate.workload import RequestForm

    check_dtype(args.dtype)
    for name in ("tensor_parallel_size", "data_parallel_size"):
        check_int(name, getattr(args, name), 1, MAX_GPUS)
    check_load(args)
    check_results(args)
    form = RequestForm(args.n, args.beam_width, args.shared_prefix, args.seed)
    try:
        hardware = find_hardware(args.hardware)
    except BadArgument as error:
        raise (error if error.argument == "hardware" else error.at(f"--hardware {args.hardware}")) from None
    scheduler_config = SchedulerConfig(
        max_model_len=UNBOUNDED if args.max_model_len is None else args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        policy=args.scheduling_policy,
        preemption_mode=args.preemption_mode,
    )
    cache_config = CacheConfig(
        num_blocks=UNBOUNDED if args.num_blocks is None else args.num_blocks,
        block_size=args.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        swap_space=args.swap_space,
        enable_prefix_caching=args.enable_prefix_caching,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    model_directory(args.model)
    trace = None if args.trace is None else read_trace(args.trace, args.scheduling_policy == "priority")

    def run() -> int:
        from pagedattn_simulate.command import simulate

        return simulate(args, form, hardware, scheduler_config, cache_config, trace)

    return run


def check_load(args: argparse.Namespace) -> None:
    from pagedattn_simulate.deployment import SYSTEMS
    from pagedattn_simulate.workload import MAX_REQUESTS, WORKLOADS

    for system in args.system:
        if system not in SYSTEMS:
            raise ArgumentError("system", f"any of {', '.join(SYSTEMS)}", repr(system))
    check_float("duration", args.duration, 0, but=0)
    for rate in args.rate or ():
        check_float("rate", rate, 0, but=0)
        if (num_requests := rate * args.duration) > MAX_REQUESTS:
            expected = f"at most {MAX_REQUESTS} requests in {args.duration:g} seconds"
            raise ArgumentError("rate", expected, f"{rate:g} a second, {num_requests:.9g} requests")
    if args.max_latency is not None:
        check_float("max_latency", args.max_latency, 0, but=0)
    if args.price is not None:
        check_float("price", args.price, 0)
    if args.lengths not in WORKLOADS and not Path(args.lengths).is_file():
        raise ArgumentError("lengths", f"{', '.join(WORKLOADS)}, or a JSON file", args.lengths or "an empty text")
    if args.tokenizer is not None:
        tokenizer_directory(args.model, args.tokenizer)


def check_results(args: argparse.Namespace) -> None:
    from pagedattn_simulate.plot import check_plot

    if args.plot is not None:
        check_plot(args.plot)
        if args.trace is not None:
            raise ArgumentError("plot", "--rate or --max-latency, to draw over the rate", "--trace")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise ArgumentError("json", "a file in a directory that exists", args.json)
