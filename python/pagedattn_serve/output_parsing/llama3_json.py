"""Calls as Llama 3.1 writes them: the output is an object, or several with "; " between them.

{"name": "get_weather", "parameters": {"city": "Paris"}}
"""

import json
import re

from pagedattn_serve.output_parsing.events import Content, is_whole
from pagedattn_serve.output_parsing.json_calls import read_call
from pagedattn_serve.output_parsing.source import Reader, Source
from pagedattn_serve.output_parsing.tool_format import Format, Function, ToolFormat, ToolUse, arguments, tag

_PYTHON_TAG = "<|python_tag|>"  # which may come first
_BEGINNING = re.compile(r'\s*(<\|python_tag\|>|\{\s*"name")')  # of a call


class Llama3Json(ToolFormat):
    name = "llama3_json"
    marks = (_PYTHON_TAG,)
    separator = "; "

    def is_of(self, template: str) -> bool:
        return _PYTHON_TAG in template or ('"parameters":' in template and "<|start_header_id|>" in template)

    def call(self, function: Function) -> Format:
        return tag(f'{{"name": {json.dumps(function.name)}, "parameters": ', arguments(function), "}")

    def text_or_calls(self, use: ToolUse) -> Format:
        no_object = {"type": "regex", "pattern": r"(?s:\s*([^\s{].*)?)"}
        return {"type": "or", "elements": [no_object, self.calls(use), tag(_PYTHON_TAG, self.calls(use), "")]}

    def read(self, source: Source, use: ToolUse) -> Reader[None]:
        index = 0
        read = yield from source.skip_space()
        if (yield from source.starts_with(_PYTHON_TAG)):
            read += _PYTHON_TAG
        while (no_call := (yield from read_call(source, index))) is None:
            index += 1
            read = yield from source.skip_space()
            if not (yield from source.starts_with(";")):
                break
            read += ";"
        read += no_call or ""
        if source.is_at_end and not is_whole(read) and (index or _BEGINNING.match(read)):
            return  # cut before the name of the function
        yield Content(read)
        yield from source.read_rest(Content)
