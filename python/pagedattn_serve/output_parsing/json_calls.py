"""Calls that are objects of JSON: {"name": ..., "arguments": {...}}."""

from functools import partial

from pagedattn_serve.config import parse_json
from pagedattn_serve.output_parsing.events import CallArguments, CallBegin
from pagedattn_serve.output_parsing.source import Reader, Source

_ARGUMENTS = ("arguments", "parameters")


def read_call(source: Source, index: int) -> Reader[str | None]:
    """Read an object that is a call. Returns None if it is one, even if the text ends within, and else what was read,
    which is no call. The members may come in any order."""
    read = yield from source.skip_space()
    if not (yield from source.starts_with("{")):
        return read
    read += "{"
    name = ""
    arguments: str | None = None  # which came before the name
    has_arguments = False
    while True:
        read += yield from source.skip_space()
        if (yield from source.starts_with("}")):
            read += "}"
            break
        if (yield from source.starts_with(",")):
            read += ","
            continue
        key = yield from source.json_text()
        space = yield from source.skip_space()
        if not key.startswith('"') or not (yield from source.starts_with(":")):
            return None if name else read + key + space
        read += f"{key}{space}:"
        read += yield from source.skip_space()
        if key == '"name"' and not name:
            value = yield from source.json_text()
            name = _text(value)
            read += value
            if name:
                yield CallBegin(index, name)
            if name and arguments is not None:
                yield CallArguments(index, arguments)
        elif key[1:-1] in _ARGUMENTS and not has_arguments:
            has_arguments = True
            if name:
                yield from read_arguments(source, index)
            else:
                value = yield from source.json_text()
                arguments = _object(value)
                read += value
        else:
            read += yield from source.json_text()
    if not name:
        return read
    if not has_arguments:
        yield CallArguments(index, "{}")
    return None


def read_arguments(source: Source, index: int) -> Reader[None]:
    """Read the arguments of a call: an object, or another value, which is told as an object."""
    yield from source.skip_space()
    if source.text.startswith("{"):
        yield from source.json_value(partial(CallArguments, index))
        return
    value = yield from source.json_text()
    if not source.is_at_end:
        yield CallArguments(index, _object(value))


def _text(value: str) -> str:
    """The text that a value of JSON is; "" if it is none."""
    try:
        text = parse_json(value)
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""


def _object(value: str) -> str:
    """Arguments that came as an object, as its text, or not at all."""
    if value.startswith("{"):
        return value
    return _text(value) or "{}"
