"""The arguments of the `pagedattn` command."""

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from pagedattn_serve.cli.options import (
    add_engine,
    add_model,
    add_options,
    add_place,
    add_server,
    integer,
    number,
)
from pagedattn_serve.config import QUANTIZATIONS
from pagedattn_simulate.cli import add_simulate


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
    parser = Parser(prog=prog, description="Serve language models on a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"pagedattn-ext {version('pagedattn-ext')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate_help = "complete prompts; the text appears as it is generated"
    add_generate(commands.add_parser("generate", help=generate_help, description=capital(generate_help)))
    serve_help = "serve OpenAI's API over HTTP"
    add_serve(commands.add_parser("serve", help=serve_help, description=capital(serve_help)))
    quantize_help = "write a copy of a model with its weights in 4 or 8 bits, for the CPU"
    add_quantize(commands.add_parser("quantize", help=quantize_help, description=capital(quantize_help)))
    simulate_help = (
        "what a deployment would do under a load: the real scheduler on a simulated clock; no weights are read"
    )
    add_simulate(commands.add_parser("simulate", help=simulate_help, description=capital(simulate_help)))
    info_help = "shapes of a model, and what fits in the cache; no weights are read"
    add_info(commands.add_parser("info", help=info_help, description=capital(info_help)))
    return parser


def capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def add_generate(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_place(parser)

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

    add_engine(parser)


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_place(parser)
    add_server(parser)
    add_engine(parser)
    add_options(parser, ("seed",))  # of the engine; `generate --seed` is that of its prompts


def add_info(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_options(parser, ("block_size", "kv_cache_memory", "kv_cache_dtype"))


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
