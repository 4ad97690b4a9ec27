"""What a parser tells of an output as it comes, and the sum of it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # of JSON, or its beginning


class Content(NamedTuple):
    """A piece of the text for the user."""

    text: str


class Reasoning(NamedTuple):
    """A piece of a thought."""

    text: str


class CallBegin(NamedTuple):
    """A call of a function begins. call_index: 0 for the first call of the output."""

    call_index: int
    name: str


class CallArguments(NamedTuple):
    """A piece of the arguments of the call that began last. All pieces together are an object as JSON, or its beginning
    if the output is cut."""

    call_index: int
    text: str


def is_whole(arguments: str) -> bool:
    """Whether an object as JSON, or its beginning, is the whole object."""
    brackets = _TEXT.sub("", arguments)
    return 0 < brackets.count("{") + brackets.count("[") == brackets.count("}") + brackets.count("]")


Event = Content | Reasoning | CallBegin | CallArguments


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedOutput:
    """The sum of the events of an output. arguments of calls: JSON."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegin(_, name):
                    self.calls.append(Call(name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
