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
from pagedattn_serve.config import read_file, read_text
from pagedattn_serve.distributed.torchrun import serve_as_rank
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import ArgumentError, BadArgument
from pagedattn_serve.loading.directory import directory_to_write, model_directory
from pagedattn_serve.loading.kv_scales import given_scales
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.sockets import bind
from pagedattn_serve.text.tokenizer import tokenizer_directory
from pagedattn_simulate.cli import prepare_simulate

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
