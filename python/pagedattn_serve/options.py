"""Options, each said once: a dataclass has a field for each, `name: Annotated[type, "what it means"] = default`. A
`Flag` after the meaning puts the option on the command line.

The dataclass's docstring, the command line and the docs are made from what is said there.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, get_args, get_origin

from pagedattn_serve.config import DEMO_MODEL

UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class Flag(NamedTuple):
    """How the command line shows an option.

    group: heading of the help that the flag stands under; None: among the command's first options.
    metavar: name of the value in the help. Default: N for an int, else the option's own name.
    convert: makes the value from a text. Default: what the option's type says.
    name: of the flag. Default: the option's own name, with dashes.
    several: whether the flag takes all texts that follow it, one at least.
    """

    group: str | None = None
    metavar: str | None = None
    convert: Callable[[str], Any] | None = None
    name: str | None = None
    several: bool = False


class Option(NamedTuple):
    type: Any
    default: Any
    help: str
    flag: Flag | None = None


def options_of(args_type: type) -> dict[str, Option]:
    """The options of a dataclass, by name. From here on its docstring has them, too."""
    options = {
        each.name: Option(each.type.__origin__, each.default, *each.type.__metadata__)  # type: ignore[union-attr]
        for each in fields(args_type)
    }
    lines = (f"{name}: {option.help}." for name, option in options.items())
    args_type.__doc__ = "\n\n    ".join([f"{args_type.__doc__}", *lines])
    return options


# ---- the command line -----------------------------------------------------------------------------------------------


def flag_name(name: str, option: Option | None = None) -> str:
    """What the command line calls an argument, which may be an option."""
    return (option and option.flag and option.flag.name) or f"--{name.replace('_', '-')}"


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="Hugging Face directory, GGUF file, or a repository in Hugging Face's cache (default: the package's demo "
        "model)",
    )


def add_options(parser: argparse.ArgumentParser, options: dict[str, Option]) -> None:
    """The options that have flags, in the groups that the flags name."""
    for title in dict.fromkeys(option.flag.group for option in options.values() if option.flag):
        group = parser if title is None else parser.add_argument_group(title)
        for name, option in options.items():
            if option.flag and option.flag.group == title:
                add_option(group, name, option)


def add_option(group: argparse._ActionsContainer, name: str, option: Option) -> None:
    """A bool that is True by default gets a flag that turns it off. A tuple without a converter may be repeated."""
    flag = option.flag or Flag()
    types = (option.type, *get_args(option.type))
    kind: Callable[[str], Any] = integer if int in types else number if float in types else str
    keywords: dict[str, Any] = {"dest": name, "help": option.help.replace("%", "%%")}
    if option.type is bool:
        keywords["action"] = "store_false" if option.default else "store_true"
        keywords["help"] = f"do not {keywords['help']}" if option.default else keywords["help"]
    elif get_origin(option.type) is tuple and flag.convert is None:
        keywords |= {"action": "append", "metavar": flag.metavar}
    else:
        keywords |= {"type": flag.convert or kind, "default": option.default}
        keywords["metavar"] = flag.metavar or ("N" if kind is integer else None)
        if option.default is not None and "(default: " not in option.help:
            keywords["help"] += f" (default: {option.default})"
    if flag.several:
        keywords["nargs"] = "+"
    group.add_argument(flag_name(name, option), **keywords)


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
