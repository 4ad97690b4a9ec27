"""Outputs of gpt-oss, which are messages in channels: thoughts in `analysis`, calls and words before them in
`commentary`, and the answer in `final`.

<|channel|>analysis<|message|>Does it rain?<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather
<|constrain|>json<|message|>{"city": "Paris"}<|call|>

Source: https://cookbook.openai.com/articles/openai-harmony
"""

import re

from pagedattn_serve.output_parsing.events import CallBegin, Content, Reasoning
from pagedattn_serve.output_parsing.json_calls import read_arguments
from pagedattn_serve.output_parsing.source import Reader, Source
from pagedattn_serve.output_parsing.tool_format import Format, Function, ToolUse, arguments, tag

MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_NEXT = "<|end|><|start|>assistant"
_ANY_TEXT: Format = {"type": "any_text"}
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")


def is_of(template: str) -> bool:
    """Whether a chat template is written for these channels."""
    return "<|channel|>" in template


def structure(use: ToolUse | None, answer: Format | None) -> Format:
    """A whole output. answer: the form of the answer to the user; None for any. Words in `commentary` are told as a
    part of the answer, so none may come before one that has a form."""
    channels = ("analysis", "commentary") if answer is None else ("analysis",)
    before: Format = {
        "type": "tags_with_separator",
        "tags": [tag(f"<|channel|>{channel}<|message|>", _ANY_TEXT, _NEXT) for channel in channels],
        "separator": "",
    }
    ends = [_call(function) for function in use.functions] if use else []
    if use is None or not use.is_required:
        ends.append(tag("<|channel|>final<|message|>", answer or _ANY_TEXT, ""))
    return {"type": "sequence", "elements": [before, {"type": "or", "elements": ends}]}


def read(source: Source) -> Reader[None]:
    """The events of an output."""
    index = 0
    end: str | None = ""
    while end is not None:
        header, mark = yield from source.text_until("<|message|>")
        if mark is None:
            if "<|" not in header:  # no message
                yield Content(header)
            return
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient:
            yield CallBegin(index, recipient[1])
            yield from read_arguments(source, index)
            _, end = yield from source.text_until(*_ENDS)
            index += 1
        elif channel and channel[1] == "analysis":
            yield Reasoning("\n")  # between two thoughts
            end = yield from source.read_thought(_ENDS)
        else:
            end = yield from source.read_until(_ENDS, Content)


def _call(function: Function) -> Format:
    # Only one call: its end, <|call|>, ends the output.
    begin = f"<|channel|>commentary to=functions.{function.name} <|constrain|>json<|message|>"
    return tag(begin, arguments(function), "")
