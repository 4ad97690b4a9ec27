"""Calls as Llama 4 and others write them, as a list of calls in Python: [get_weather(city="Paris"), get_time()]"""

import re

from pagedattn_serve.output_parsing.events import CallBegin, Content
from pagedattn_serve.output_parsing.json_values import ObjectWriter, literal
from pagedattn_serve.output_parsing.source import Reader, Source
from pagedattn_serve.output_parsing.tool_format import Format, Function, ToolFormat, ToolUse, arguments, tag

_NAME = re.compile(r"[\w.-]+")


class Pythonic(ToolFormat):
    name = "pythonic"
    block = ("[", "]")
    separator = ", "

    def is_of(self, template: str) -> bool:
        return "[func_name1(" in template

    def call(self, function: Function) -> Format:
        return tag(f"{function.name}(", arguments(function, "python"), ")")

    def text_or_calls(self, use: ToolUse) -> Format:
        no_list = {"type": "regex", "pattern": r"(?s:\s*([^\s\[].*)?)"}
        return {"type": "or", "elements": [no_list, self.calls(use)]}

    def read(self, source: Source, use: ToolUse) -> Reader[None]:
        read = yield from source.skip_space()
        if not (yield from source.starts_with("[")):
            yield Content(read)
            yield from source.read_rest(Content)
            return
        read += "["
        index = 0
        while True:
            space = yield from source.skip_space()
            name, mark = yield from source.text_until("(")
            if not mark or not _NAME.fullmatch(name):
                is_cut = mark is None and name and any(each.name.startswith(name) for each in use.functions)
                if index == 0 and not is_cut:
                    yield Content(f"{read}{space}{name}{mark or ''}")
                break
            yield CallBegin(index, name)
            if not (yield from _read_arguments(source, index)):
                return
            index += 1
            yield from source.skip_space()
            if not (yield from source.starts_with(",")):
                yield from source.starts_with("]")
                break
        yield from source.read_rest(Content)


def _read_arguments(source: Source, index: int) -> Reader[bool]:
    """Returns whether they have an end."""
    writer = ObjectWriter(index)
    while True:
        yield from source.skip_space()
        if (yield from source.starts_with(")")):
            yield writer.end()
            return True
        name, mark = yield from source.text_until("=", ")")
        if mark != "=":
            return False
        value = yield from _read_value(source)
        if source.is_at_end:
            return False
        yield writer.key(name.strip())
        yield writer.piece(literal(value, may_be_text=False))
        yield from source.starts_with(",")


def _read_value(source: Source) -> Reader[str]:
    """A literal, up to the comma or the bracket after it."""
    depth, quote, at = 0, "", 0
    while True:
        while at < len(source.text):
            character = source.text[at]
            if quote:
                at += character == "\\"  # and the character after it
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif depth == 0 and character in ",)":
                return source.take(at)
            else:
                depth += (character in "([{") - (character in ")]}")
            at += 1
        if not (yield from source.more()):
            return source.take(len(source.text))
