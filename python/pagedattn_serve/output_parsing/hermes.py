"""Calls as Hermes writes them, and Qwen 2.5 and Qwen 3:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

import json

from pagedattn_serve.output_parsing.events import Content
from pagedattn_serve.output_parsing.json_calls import read_call
from pagedattn_serve.output_parsing.source import Reader, Source
from pagedattn_serve.output_parsing.tool_format import Format, Function, TaggedFormat, ToolUse, arguments, tag

_END = "</tool_call>"


class Hermes(TaggedFormat):
    name = "hermes"
    opening = "<tool_call>"
    marks = (opening, _END)

    def is_of(self, template: str) -> bool:
        others = ("<function=", "<arg_key>")  # which other forms have within these tags
        return "<tool_call>" in template and not any(other in template for other in others)

    def call(self, function: Function) -> Format:
        begin = f'<tool_call>\n{{"name": {json.dumps(function.name)}, "arguments": '
        return tag(begin, arguments(function), f"}}\n{_END}")

    def read(self, source: Source, use: ToolUse) -> Reader[None]:
        index = 0
        while (yield from self.next_call(source, index)):
            no_call = yield from read_call(source, index)
            if no_call is not None:
                if source.is_at_end:  # cut before the name of the function
                    return
                yield Content(self.opening + no_call)
                continue
            index += 1
            yield from source.skip_space()
            yield from source.ends_within(_END)  # cut
            yield from source.starts_with(_END)
