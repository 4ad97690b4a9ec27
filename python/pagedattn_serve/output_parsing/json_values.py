"""Arguments that come one by one, each as a text or a literal, told as the pieces of one JSON object."""

import ast
import json
from functools import partial
from typing import Any

from pagedattn_serve.config import parse_json
from pagedattn_serve.output_parsing.events import CallArguments


class ObjectWriter:
    """The events of a call's arguments, member by member."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._is_empty = True

    def key(self, name: str) -> CallArguments:
        before = "{" if self._is_empty else ", "
        self._is_empty = False
        return self.piece(f"{before}{_quoted(name)}: ")

    def piece(self, text: str) -> CallArguments:
        return CallArguments(self._index, text)

    def text(self, text: str) -> CallArguments:
        """A piece of a text, whose quotes are pieces of their own."""
        return self.piece(_quoted(text)[1:-1])

    def end(self) -> CallArguments:
        return self.piece("{}" if self._is_empty else "}")


def literal(text: str, may_be_text: bool) -> str:
    """A literal of JSON or of Python, as JSON. What is neither is a text. may_be_text: what is in quotes is then a
    text, too, quotes included; no white space is cut off texts."""
    stripped = text.strip()
    read_json = partial(parse_json, is_strict=True)
    for read in (read_json, ast.literal_eval):
        try:
            value: Any = read(stripped)
            if isinstance(value, str) and may_be_text:
                break
            return stripped if read is read_json else json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return _quoted(text if may_be_text else stripped)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
