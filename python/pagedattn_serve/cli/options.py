"""Options that commands share: which model, and how its engine is set up. `EngineArgs` says what they mean."""

import argparse
import re
from typing import get_args

from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.engine_args import OPTIONS

UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
# Names of values in the help; those of other options are N for numbers, and the option's own name.
METAVARS = {
    "tokenizer": "DIR",
    "kv_cache_memory": "SIZE",
    "swap_space": "GIB",
    "gpu_memory_utilization": "SHARE",
    "preemption_mode": "MODE",
    "scheduling_policy": "POLICY",
    "kv_cache_dtype": "DTYPE",
    "kv_scales": "FILE",
    "speculation": "METHOD",
    "quantization": "FORM",
}
MODEL = ("dtype", "quantization")
PLACE = ("tokenizer", "device")
SCHEDULING = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "preemption_mode"),
    *("speculation", "max_beam_width"),
)
CACHE_SIZE = ("kv_cache_memory", "num_blocks")
CACHE = ("block_size", "gpu_memory_utilization", "swap_space", "enable_prefix_caching", "kv_cache_dtype", "kv_scales")
# The options of EngineArgs that `add_model`, `add_place` and `add_engine` add.
ENGINE_OPTIONS = ("model", *MODEL, *PLACE, *SCHEDULING, *CACHE_SIZE, *CACHE)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="Hugging Face directory, or a repository in its cache (default: the demo model of the package)",
    )
    add_options(parser, MODEL)


def add_place(parser: argparse.ArgumentParser) -> None:
    add_options(parser, PLACE)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The engine's options, in groups of their own; `cli.engine` makes an engine of them."""
    add_options(parser.add_argument_group("engine"), SCHEDULING)
    cache = parser.add_argument_group("cache; a SIZE is in bytes, or 512MiB, 4GiB")
    add_options(cache.add_mutually_exclusive_group(), CACHE_SIZE)
    add_options(cache, CACHE)


def add_options(group: argparse._ActionsContainer, names: tuple[str, ...]) -> None:
    """Options of EngineArgs, by name."""
    for name in names:
        option = OPTIONS[name]
        help = option.help.replace("%", "%%")
        if name == "enable_prefix_caching":
            group.add_argument("--no-prefix-caching", dest=name, action="store_false", help=f"do not {help}")
            continue
        kind = next((kind for kind in (int, float) if kind in (option.type, *get_args(option.type))), str)
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=size if name == "kv_cache_memory" else kind,
            default=option.default,
            metavar=METAVARS.get(name, "N" if kind is int else None),
            help=help if option.default is None else f"{help} (default: {option.default})",
        )


def size(text: str) -> int:
    """Bytes of "1000", "512MiB", "1.5 GiB"."""
    match = re.fullmatch(r"(-?\d+|\d+\.\d+(?=\s*[a-z]))\s*([kmgt]ib|)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected bytes, or a number of KiB, MiB, GiB or TiB, got {text!r}")
    number, unit = match.groups()
    return int(float(number) * UNITS[unit]) if "." in number else int(number) * UNITS[unit]
