"""From the options of a dataclass to the command line. `EngineArgs` and `ServerConfig` say what the options mean."""

import argparse
import re
from collections.abc import Callable
from typing import get_args

from pagedattn_serve import engine_args as engine_options
from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import BadArgument
from pagedattn_serve.server.http import config as server_config

OPTIONS = engine_options.OPTIONS | server_config.OPTIONS
UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
# Names of values in the help; those of other options are N for numbers, and the option's own name.
METAVARS = {
    "tokenizer": "DIR",
    "kv_cache_memory": "SIZE",
    "swap_space": "GIB",
    "distributed_executor_backend": "BACKEND",
    "gpu_memory_utilization": "SHARE",
    "preemption_mode": "MODE",
    "scheduling_policy": "POLICY",
    "kv_cache_dtype": "DTYPE",
    "kv_scales": "FILE",
    "speculation": "METHOD",
    "quantization": "FORM",
    "allowed_hosts": "HOSTS",
    "api_keys": "KEY",
    "served_model_name": "NAME",
    "chat_template": "FILE",
    "max_body_size": "SIZE",
    "request_timeout": "SECONDS",
    "shutdown_timeout": "SECONDS",
    "log_format": "FORMAT",
    "log_level": "LEVEL",
}
# Flags that do not have the name of their option.
FLAGS = {"model": "MODEL", "out": "OUT", "enable_prefix_caching": "--no-prefix-caching", "api_keys": "--api-key"}
MODEL = ("dtype", "quantization")
PLACE = ("tokenizer", "device", "tensor_parallel_size", "distributed_executor_backend")
SCHEDULING = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "preemption_mode"),
    *("speculation", "num_speculative_tokens", "max_beam_width", "enforce_eager"),
)
CACHE_SIZE = ("kv_cache_memory", "num_blocks")
CACHE = ("block_size", "gpu_memory_utilization", "swap_space", "enable_prefix_caching", "kv_cache_dtype", "kv_scales")
# The options of EngineArgs that `add_model`, `add_place` and `add_engine` add.
ENGINE_OPTIONS = ("model", *MODEL, *PLACE, *SCHEDULING, *CACHE_SIZE, *CACHE)

SERVER = ("host", "port", "allowed_hosts", "api_keys", "prefix_cache_per_key", "served_model_name", "chat_template")
REPLICAS = ("data_parallel_size",)
LIMITS = ("max_waiting", "max_body_size", "request_timeout", "shutdown_timeout")
LOG = ("log_format", "log_level")
# The options of ServerConfig that `add_server` adds.
SERVER_OPTIONS = (*SERVER, *REPLICAS, *LIMITS, *LOG)


def engine_args(args: argparse.Namespace) -> EngineArgs:
    """args: with the options of `add_model`, `add_place` and `add_engine`. Raises ValueError or TypeError."""
    names = [*ENGINE_OPTIONS, *(("seed",) if args.command == "serve" else ())]
    return EngineArgs(**{name: getattr(args, name) for name in names})


def flag_of(name: str) -> str:
    """What the command line calls an option."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def by_flag(error: BadArgument, args: argparse.Namespace) -> BadArgument:
    """The same error, where the command line has a name for the argument. An error with a place names that first."""
    return error.renamed(flag_of(error.argument)) if error.argument in args and not error.place else error


def add_model(parser: argparse.ArgumentParser, options: tuple[str, ...] = MODEL) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="Hugging Face directory, or a repository in its cache (default: the demo model of the package)",
    )
    add_options(parser, options)


def add_place(parser: argparse.ArgumentParser) -> None:
    add_options(parser, PLACE)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The engine's options, in groups of their own; `cli.engine` makes an engine of them."""
    add_options(parser.add_argument_group("engine"), SCHEDULING)
    cache = parser.add_argument_group("cache; a SIZE is in bytes, or 512MiB, 4GiB")
    add_options(cache.add_mutually_exclusive_group(), CACHE_SIZE)
    add_options(cache, CACHE)


def add_server(parser: argparse.ArgumentParser) -> None:
    """The server's options, in groups of their own; `cli.serve` makes a ServerConfig of them."""
    add_options(parser.add_argument_group("server"), SERVER)
    add_options(parser.add_argument_group("replicas"), REPLICAS)
    add_options(parser.add_argument_group("limits"), LIMITS)
    add_options(parser.add_argument_group("log, on standard error; it has no prompts, outputs or keys"), LOG)
    parser.set_defaults(api_keys=None, served_model_name=None)  # the environment and the model say them


def add_options(group: argparse._ActionsContainer, names: tuple[str, ...]) -> None:
    """Options of EngineArgs and ServerConfig, by name."""
    for name in names:
        option = OPTIONS[name]
        flag, help = flag_of(name), option.help.replace("%", "%%")
        if name == "enable_prefix_caching":
            group.add_argument(flag, dest=name, action="store_false", help=f"do not {help}")
        elif option.type is bool:
            group.add_argument(flag, action="store_true", help=help)
        elif name == "api_keys":
            group.add_argument(flag, dest=name, action="append", metavar=METAVARS[name], help=help)
        else:
            kind = next((kind for kind in (int, float) if kind in (option.type, *get_args(option.type))), str)
            says_default = option.default is None or "(default: " in help
            group.add_argument(
                flag,
                type=CONVERTERS.get(name, NUMBERS.get(kind, kind)),
                default=option.default,
                metavar=METAVARS.get(name, "N" if kind is int else None),
                help=help if says_default else f"{help} (default: {option.default})",
            )


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an int, got {text!r}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def numbers(text: str) -> tuple[float, ...]:
    return tuple(map(number, text.split(",")))


def size(text: str) -> int:
    """Bytes of "1000", "512MiB", "1.5 GiB"."""
    match = re.fullmatch(r"(-?\d+|\d+\.\d+(?=\s*[a-z]))\s*([kmgt]ib|)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected bytes, or a number of KiB, MiB, GiB or TiB, got {text!r}")
    digits, unit = match.groups()
    return int(float(digits) * UNITS[unit]) if "." in digits else int(digits) * UNITS[unit]


def parts(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


NUMBERS: dict[type, Callable[[str], float]] = {int: integer, float: number}
CONVERTERS = {"kv_cache_memory": size, "max_body_size": size, "allowed_hosts": parts}
