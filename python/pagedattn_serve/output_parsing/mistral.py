"""Calls as Mistral's models write them, in the form of today or in the earlier form:

[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]
"""

import json
import re
import secrets
from typing import ClassVar

from pagedattn_serve.output_parsing.events import CallBegin, Content, is_whole
from pagedattn_serve.output_parsing.json_calls import read_arguments, read_call
from pagedattn_serve.output_parsing.source import Reader, Source
from pagedattn_serve.output_parsing.tool_format import Format, Function, TaggedFormat, ToolUse, arguments, tag

_BEGINNING = re.compile(r"[\w.-]*(\[\w*)?")  # of a name and of the mark after it


class _Mistral(TaggedFormat):
    opening = "[TOOL_CALLS]"
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def new_call_id(self) -> str:
        return secrets.token_hex(5)[:9]  # the length that the templates demand

    def read(self, source: Source, use: ToolUse) -> Reader[None]:
        index = 0
        while (yield from self.next_call(source, index)):
            space = yield from source.skip_space()
            if (yield from source.starts_with("[")):
                index = yield from self._read_list(source, index)
                continue
            name, mark = yield from source.text_until("[ARGS]", "[CALL_ID]", "{")
            if mark is None:
                if not _BEGINNING.fullmatch(name):  # else cut
                    yield Content(f"{self.opening}{space}{name}")
                return
            yield CallBegin(index, name.strip())
            if mark == "[CALL_ID]":
                yield from source.text_until("[ARGS]")
            elif mark == "{":
                source.put_back(mark)
            yield from read_arguments(source, index)
            index += 1

    def _read_list(self, source: Source, index: int) -> Reader[int]:
        """Returns the index of the next call."""
        while True:
            no_call = yield from read_call(source, index)
            if no_call is None:
                index += 1
            elif not source.is_at_end or is_whole(no_call):  # else cut
                yield Content(no_call)
            yield from source.skip_space()
            if not (yield from source.starts_with(",")):
                yield from source.starts_with("]")
                return index


class Mistral(_Mistral):
    name = "mistral"
    separator = ""

    def is_of(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and "[ARGS]" in template

    def call(self, function: Function) -> Format:
        return tag(f"[TOOL_CALLS]{function.name}[ARGS]", arguments(function), "")


class MistralList(_Mistral):
    name = "mistral_list"
    block: ClassVar[tuple[str, str]] = ("[TOOL_CALLS] [", "]")
    separator = ", "

    def is_of(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and "[ARGS]" not in template

    def call(self, function: Function) -> Format:
        return tag(f'{{"name": {json.dumps(function.name)}, "arguments": ', arguments(function), "}")
