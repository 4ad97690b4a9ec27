"""What a subcommand's options say, judged before torch, transformers or anything else that takes long is imported. So a
wrong option is told at once, as a BadArgument.

Each function returns its subcommand, ready to run.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pagedattn_serve.cli.options import SERVER_OPTIONS, engine_args
from pagedattn_serve.config import (
    UNBOUNDED,
    CacheConfig,
    SchedulerConfig,
    check_dtype,
    check_float,
    check_int,
    read_file,
    read_text,
)
from pagedattn_serve.distributed.torchrun import serve_as_rank
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import ArgumentError, BadArgument
from pagedattn_serve.loading.directory import directory_to_write, model_directory
from pagedattn_serve.loading.kv_scales import given_scales
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.sockets import bind
from pagedattn_serve.text.tokenizer import tokenizer_directory

Command = Callable[[], int]  # returns the exit status

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "ignore_eos")
KEY_VARIABLE = "PAGEDATTN_API_KEY"


def prepare(args: argparse.Namespace) -> Command:
    """Raises BadArgument for a wrong option; ImportError where an option needs a package that is not installed."""
    prepare_command: Callable[[argparse.Namespace], Command] = {
        "generate": prepare_generate,
        "serve": prepare_serve,
        "quantize": prepare_quantize,
        "simulate": prepare_simulate,
        "info": prepare_info,
    }[args.command]
    return prepare_command(args)


def check_files(args: EngineArgs) -> None:
    """The files that the options name: whether they are there, and what is in them as far as no model is needed."""
    model_directory(args.model)
    if args.tokenizer is not None:
        tokenizer_directory(args.model, args.tokenizer)
    if args.kv_scales is not None:
        given_scales(args.kv_scales, None)


# ---- generate -------------------------------------------------------------------------------------------------------


def prepare_generate(args: argparse.Namespace) -> Command:
    options = engine_args(args)
    params = SamplingParams(
        **{name: getattr(args, name) for name in SAMPLING},
        output_kind=RequestOutputKind.FINAL_ONLY if args.json else RequestOutputKind.DELTA,
    )
    check_files(options)
    prompts, errors = (args.prompt, {}) if args.prompt else read_prompts(args.prompts_file)

    def run() -> int:
        from pagedattn_serve.cli.generate import generate

        return generate(options, params, prompts, errors, args.json)

    return run


def read_prompts(file: str) -> tuple[list[str], dict[int, str]]:
    """The lines of a file, or of standard input for "-", without empty lines; and the errors of lines, by prompt.

    A line that is not UTF-8 is a prompt with an error, which is shown and not run. Raises BadArgument if there are no
    lines.
    """
    lines = (sys.stdin.buffer.read() if file == "-" else read_file("prompts_file", file)).splitlines()
    prompts: list[str] = []
    errors: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.decode(errors="replace")
        if not text.strip():
            continue
        try:
            line.decode()
        except UnicodeDecodeError as error:
            place = f"byte {error.start + 1} of line {number}"
            errors[len(prompts)] = f"prompts-file: expected UTF-8 in {file}, got {line[error.start]:#04x} as {place}"
        prompts.append(text)
    if not prompts:
        raise ArgumentError("prompts_file", f"a prompt a line in {file}", "none")
    return prompts, errors


# ---- serve ----------------------------------------------------------------------------------------------------------


def prepare_serve(args: argparse.Namespace) -> Command:
    options = engine_args(args)
    serve_as_rank(options.tensor_parallel_size)  # and not come back, in ranks that torchrun has started
    config = server_config(args)
    check_files(options)
    sockets = bind(config.host, config.port)

    def run() -> int:
        from pagedattn_serve.cli.serve import serve

        return serve(options, config, sockets)

    return run


def server_config(args: argparse.Namespace) -> ServerConfig:
    options = {name: getattr(args, name) for name in SERVER_OPTIONS}
    options["api_keys"] = tuple(keys_in_environment() if args.api_keys is None else args.api_keys)
    if args.served_model_name is None:
        options["served_model_name"] = Path(args.model).name
    if args.chat_template is not None:
        options["chat_template"] = read_text("chat_template", args.chat_template)
    try:
        return ServerConfig(**options)
    except BadArgument as error:
        of_environment = error.argument == "api_keys" and args.api_keys is None
        raise (error.renamed(KEY_VARIABLE) if of_environment else error) from None


def keys_in_environment() -> list[str]:
    """The keys in KEY_VARIABLE. If the variable is set to nothing, that is an error, not a server without keys."""
    given = os.environ.get(KEY_VARIABLE)
    return [] if given is None else given.split(",")


# ---- quantize and info ----------------------------------------------------------------------------------------------


def prepare_quantize(args: argparse.Namespace) -> Command:
    model_directory(args.model)
    directory_to_write(args.out)

    def run() -> int:
        from pagedattn_serve.cli.quantize import quantize

        return quantize(args)

    return run


def prepare_info(args: argparse.Namespace) -> Command:
    names = ("dtype", "quantization", "block_size", "kv_cache_memory", "kv_cache_dtype")
    check_files(EngineArgs(args.model, **{name: getattr(args, name) for name in names}))

    def run() -> int:
        from pagedattn_serve.cli.info import info

        return info(args)

    return run


# ---- simulate -------------------------------------------------------------------------------------------------------


def prepare_simulate(args: argparse.Namespace) -> Command:
    from pagedattn_serve.simulation.deployment import MAX_GPUS
    from pagedattn_serve.simulation.files import read_trace
    from pagedattn_serve.simulation.hardware import find_hardware
    from pagedattn_serve.simulation.workload import RequestForm

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
    trace = None if args.trace is None else read_trace(args.trace)

    def run() -> int:
        from pagedattn_serve.cli.simulate import simulate

        return simulate(args, form, hardware, scheduler_config, cache_config, trace)

    return run


def check_load(args: argparse.Namespace) -> None:
    from pagedattn_serve.simulation.deployment import SYSTEMS
    from pagedattn_serve.simulation.lengths import WORKLOADS
    from pagedattn_serve.simulation.workload import MAX_REQUESTS

    for system in args.system:
        if system not in SYSTEMS:
            raise ArgumentError("system", f"any of {', '.join(SYSTEMS)}", repr(system))
    check_float("duration", args.duration, 0, but=0)
    for rate in args.rate or ():
        check_float("rate", rate, 0, but=0)
        if (num_requests := rate * args.duration) > MAX_REQUESTS:
            expected = f"at most {MAX_REQUESTS} requests in {args.duration:g} seconds"
            raise ArgumentError("rate", expected, f"{rate:g} a second, {num_requests:.0f} requests")
    if args.max_latency is not None:
        check_float("max_latency", args.max_latency, 0, but=0)
    if args.price is not None:
        check_float("price", args.price, 0)
    if args.lengths not in WORKLOADS and not Path(args.lengths).is_file():
        raise ArgumentError("lengths", f"{', '.join(WORKLOADS)}, or a JSON file", args.lengths or "an empty text")
    if args.tokenizer is not None:
        tokenizer_directory(args.model, args.tokenizer)


def check_results(args: argparse.Namespace) -> None:
    from pagedattn_serve.simulation.plot import check_plot

    if args.plot is not None:
        check_plot(args.plot)
        if args.trace is not None:
            raise ArgumentError("plot", "--rate or --max-latency, to draw over the rate", "--trace")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise ArgumentError("json", "a file in a directory that exists", args.json)
