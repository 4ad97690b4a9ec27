"""Options, each said once: a dataclass has a field for each, `name: Annotated[type, "what it means"] = default`.

The dataclass's docstring, the command line and the docs are made from what is said there.
"""

from dataclasses import fields
from typing import Any, NamedTuple


class Option(NamedTuple):
    type: Any
    default: Any
    help: str


def options_of(args_type: type) -> dict[str, Option]:
    """The options of a dataclass, by name. From here on its docstring has them, too."""
    options = {
        each.name: Option(each.type.__origin__, each.default, each.type.__metadata__[0])  # type: ignore[union-attr]
        for each in fields(args_type)
    }
    lines = (f"{name}: {option.help}." for name, option in options.items())
    args_type.__doc__ = "\n\n    ".join([f"{args_type.__doc__}", *lines])
    return options
