"""The arguments of the `pagedattn` command, and what they say, judged before torch, transformers or anything else that
takes long is imported. So a wrong argument is told at once, as a BadArgument.

A command has two functions: `add_...` puts its arguments on a parser, and `prepare_...` returns the command, ready to
run. What a command does is in a module of its name.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from pagedattn_serve import engine_args as engine_options
from pagedattn_serve.config import DEMO_MODEL, QUANTIZATIONS, read_file, read_text
from pagedattn_serve.distributed.torchrun import serve_as_rank
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import ArgumentError, BadArgument
from pagedattn_serve.loading.directory import directory_to_write, model_directory, prefix_cache_directory
from pagedattn_serve.loading.kv_scales import given_scales
from pagedattn_serve.options import add_model, add_options, flag_name, integer, number
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.server.http import config as server_options
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.sockets import bind, bind_unix
from pagedattn_serve.text.chat_template import check_template
from pagedattn_serve.text.tokenizer import tokenizer_directory
from pagedattn_simulate.cli import add_simulate, prepare_simulate

Command = Callable[[], int]  # returns the exit status

# The options that have flags.
ENGINE_FLAGS = {name: option for name, option in engine_options.OPTIONS.items() if option.flag}
SERVER_FLAGS = {name: option for name, option in server_options.OPTIONS.items() if option.flag}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and the name of the command that has a help for it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message.removeprefix('argument ')} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As a subcommand's parser is called: it knows its arguments, and its help is the one to see."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def make_parser(prog: str = "pagedattn") -> argparse.ArgumentParser:
    """Its `parse_args` returns, beside the arguments, `prepare`: the function that judges them. `prepare` raises
    BadArgument for a wrong one; ImportError where an argument needs a package that is not installed."""
    parser = Parser(prog=prog, description="Serve language models on a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"pagedattn-serve {version('pagedattn-ext')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add_arguments, prepare, help in (
        ("generate", add_generate, prepare_generate, "complete prompts; the text appears as it is generated"),
        ("serve", add_serve, prepare_serve, "serve OpenAI's API over HTTP"),
        (
            "quantize",
            add_quantize,
            prepare_quantize,
            "write a copy of a model with its weights in 4 or 8 bits, for the CPU",
        ),
        (
            "simulate",
            add_simulate,
            prepare_simulate,
            "what a deployment would do under a load: the real scheduler on a simulated clock; no weights are read",
        ),
        (
            "verify",
            add_verify,
            prepare_verify,
            "whether a model, or a server, gives a request the same tokens and logprobs whatever else runs",
        ),
        ("info", add_info, prepare_info, "shapes of a model, and what fits in the cache; no weights are read"),
    ):
        command = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        add_arguments(command)
        command.set_defaults(prepare=prepare)
    return parser


def by_flag(error: BadArgument, args: argparse.Namespace) -> BadArgument:
    """The same error, where the command line has a name for the argument. An error with a place names that first."""
    name = error.argument
    if name not in args or error.place:
        return error
    if name in ("model", "out"):
        return error.renamed(name.upper())
    return error.renamed(flag_name(name, (ENGINE_FLAGS | SERVER_FLAGS).get(name)))


def engine_args(args: argparse.Namespace, names: Iterable[str]) -> EngineArgs:
    """names: of the options that the command takes. Raises ValueError or TypeError."""
    return EngineArgs(args.model, **{name: getattr(args, name) for name in names})


def check_files(args: EngineArgs) -> None:
    """The files that the options name: whether they are there, and what is in them as far as no model is needed."""
    model_directory(args.model, args.allow_download)
    if args.tokenizer is not None:
        tokenizer_directory(args.model, args.tokenizer, args.allow_download)
    if args.kv_scales is not None:
        given_scales(args.kv_scales, None)
    if args.prefix_cache_dir is not None:
        prefix_cache_directory(args.prefix_cache_dir)


# ---- generate -------------------------------------------------------------------------------------------------------

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "ignore_eos")
# Without the engine's seed: `generate --seed` is that of its prompts.
GENERATE_FLAGS = {name: option for name, option in ENGINE_FLAGS.items() if name not in SAMPLING}


def add_generate(parser: argparse.ArgumentParser) -> None:
    add_model(parser)

    prompts = parser.add_argument_group("prompts, and what becomes of them")
    source = prompts.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="text to complete; may be repeated")
    source.add_argument(
        "--prompts-file", metavar="FILE", help="a prompt a line, empty lines left out; - is standard input"
    )
    prompts.add_argument(
        "--json",
        action="store_true",
        help="a line of JSON a prompt, in their order: prompt, text, token_ids, finish_reason, error if there is one",
    )

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=integer, default=128, metavar="N", help="of output, at most (default: %(default)s)"
    )
    sampling.add_argument("--temperature", type=number, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    sampling.add_argument(
        "--top-k", type=integer, default=-1, metavar="K", help="the K likeliest tokens (default: all)"
    )
    sampling.add_argument(
        "--top-p", type=number, default=1.0, metavar="P", help="the likeliest tokens that sum to P (default: 1, all)"
    )
    sampling.add_argument(
        "--min-p",
        type=number,
        default=0.0,
        metavar="P",
        help="tokens of P times the best one's chance (default: 0, all)",
    )
    sampling.add_argument("--seed", type=integer, help="of the random numbers (default: other ones for each prompt)")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="ends the output; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")

    add_options(parser, GENERATE_FLAGS)


def prepare_generate(args: argparse.Namespace) -> Command:
    options = engine_args(args, GENERATE_FLAGS)
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
    if file == "-" and sys.stdin is None:  # closed
        raise ArgumentError("prompts_file", "an open standard input for -", "a closed one")
    lines = (sys.stdin.buffer.read() if file == "-" else read_file("prompts_file", file)).splitlines()
    prompts: list[str] = []
    errors: dict[int, str] = {}
    for line_number, line in enumerate(lines, 1):
        text = line.decode(errors="replace")
        if not text.strip():
            continue
        try:
            line.decode()
        except UnicodeDecodeError as error:
            place = f"byte {error.start + 1} of line {line_number}"
            errors[len(prompts)] = f"prompts-file: expected UTF-8 in {file}, got {line[error.start]:#04x} as {place}"
        prompts.append(text)
    if not prompts:
        raise ArgumentError("prompts_file", f"a prompt a line in {file}", "none")
    return prompts, errors


# ---- serve ----------------------------------------------------------------------------------------------------------

KEY_VARIABLE = "PAGEDATTN_API_KEY"


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_options(parser, SERVER_FLAGS | ENGINE_FLAGS)
    # None as model: the demo model, unless --served-model-name has taken MODEL as a name. None as name: the model's.
    parser.set_defaults(model=None, served_model_name=None)


def prepare_serve(args: argparse.Namespace) -> Command:
    if args.model is None:
        if len(names := args.served_model_name or ()) > 1:
            expected = "MODEL before it, or -- before MODEL, as the option takes all texts that follow"
            raise ArgumentError("served_model_name", expected, f"{' '.join(names)} and no MODEL")
        args.model = DEMO_MODEL
    options = engine_args(args, ENGINE_FLAGS)
    serve_as_rank(options.num_ranks)  # and not come back, in ranks that torchrun has started
    config = server_config(args)
    check_files(options)
    sockets = bind(config.host, config.port) if config.uds is None else bind_unix(config.uds)

    def run() -> int:
        from pagedattn_serve.cli.serve import serve

        return serve(options, config, sockets)

    return run


def server_config(args: argparse.Namespace) -> ServerConfig:
    options = {name: getattr(args, name) for name in SERVER_FLAGS}
    options["api_keys"] = tuple(keys_in_environment() if args.api_keys is None else args.api_keys)
    if args.served_model_name is not None:
        options["served_model_name"] = tuple(args.served_model_name)
    try:
        return config_for(args.model, options)
    except BadArgument as error:
        of_environment = error.argument == "api_keys" and args.api_keys is None
        raise (error.renamed(KEY_VARIABLE) if of_environment else error) from None


def config_for(model: str | os.PathLike[str], options: Mapping[str, Any]) -> ServerConfig:
    """The config of a model's server. options: those of ServerConfig, but the chat template as the path of its file.
    Without a name the model has the last part of its own. Raises ValueError, TypeError or OSError."""
    values = dict(options)
    if values.get("served_model_name") is None:
        values["served_model_name"] = Path(model).name
    if values.get("chat_template") is not None:
        values["chat_template"] = read_text("chat_template", values["chat_template"])
        check_template(values["chat_template"])
    return ServerConfig(**values)


def keys_in_environment() -> list[str]:
    """The keys in KEY_VARIABLE. If the variable is set to nothing, that is an error, not a server without keys."""
    given = os.environ.get(KEY_VARIABLE)
    return [] if given is None else given.split(",")


# ---- quantize -------------------------------------------------------------------------------------------------------


def add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Hugging Face directory, or a repository in its cache")
    parser.add_argument("out", metavar="OUT", help="the directory to write: it does not exist, or is empty")
    parser.add_argument(
        "--format",
        required=True,
        choices=QUANTIZATIONS,
        help="int4: groups of 32 weights with a scale and a zero each; int8: a scale for each output feature; both as "
        "compressed-tensors has them, the last layer as it is",
    )


def prepare_quantize(args: argparse.Namespace) -> Command:
    model_directory(args.model)
    directory_to_write(args.out)

    def run() -> int:
        from pagedattn_serve.cli.quantize import quantize

        return quantize(args)

    return run


# ---- verify ---------------------------------------------------------------------------------------------------------


def add_verify(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--url",
        metavar="URL",
        help="of a server with OpenAI's API, instead of an engine here. MODEL is what the server calls its model "
        "(default: the first that it lists), and OPENAI_API_KEY may hold a key",
    )
    add_options(parser, ENGINE_FLAGS)


def prepare_verify(args: argparse.Namespace) -> Command:
    if args.url is not None:
        return prepare_verify_server(args)
    options = engine_args(args, ENGINE_FLAGS)
    check_files(options)

    def run() -> int:
        from pagedattn_serve.cli.verify import verify_model

        return verify_model(options)

    return run


def prepare_verify_server(args: argparse.Namespace) -> Command:
    check_url(args.url)
    for name, option in ENGINE_FLAGS.items():
        if getattr(args, name) != option.default:
            raise ArgumentError(name, "none with --url, as the server has its own options", getattr(args, name))

    def run() -> int:
        from pagedattn_serve.cli.verify import verify_url

        return verify_url(args.url, None if args.model == DEMO_MODEL else args.model)

    return run


def check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of an address or a port
        is_right = False
    if not is_right or not url.isprintable() or " " in url:
        raise ArgumentError("url", "one such as http://localhost:8000", url or "an empty text")


# ---- info -----------------------------------------------------------------------------------------------------------

INFO_NAMES = ("allow_download", "dtype", "quantization", "block_size", "kv_cache_memory", "kv_cache_dtype")


def add_info(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_options(parser, {name: ENGINE_FLAGS[name] for name in INFO_NAMES})


def prepare_info(args: argparse.Namespace) -> Command:
    check_files(engine_args(args, INFO_NAMES))

    def run() -> int:
        from pagedattn_serve.cli.info import info

        return info(args)

    return run
