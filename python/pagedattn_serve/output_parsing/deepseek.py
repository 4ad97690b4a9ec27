"""Calls as DeepSeek V3 and R1 write them, and DeepSeek V3.1. Each call has tags of its own within a block:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"in": "UTC"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from typing import ClassVar

from pagedattn_serve.output_parsing.events import CallBegin
from pagedattn_serve.output_parsing.json_calls import read_arguments
from pagedattn_serve.output_parsing.source import Reader, Source
from pagedattn_serve.output_parsing.tool_format import Format, Function, TaggedFormat, ToolUse, arguments, tag

_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIND, _FENCE = f"function{_SEPARATOR}", "\n```json\n"  # around the name, before V3.1


class DeepSeekV31(TaggedFormat):
    name = "deepseek_v31"
    opening = "<｜tool▁calls▁begin｜>"
    block: ClassVar[tuple[str, str]] = (opening, "<｜tool▁calls▁end｜>")
    separator = ""
    marks = (*block, _BEGIN, _SEPARATOR, _END)

    def is_of(self, template: str) -> bool:
        return self.opening in template and "```json" not in template

    def call(self, function: Function) -> Format:
        return tag(f"{_BEGIN}{function.name}{_SEPARATOR}", arguments(function), _END)

    def read(self, source: Source, use: ToolUse) -> Reader[None]:
        index = 0
        while (yield from self.next_call(source, index)):
            yield from source.skip_space()
            while (yield from source.starts_with(_BEGIN)):
                if not (yield from self._read_name(source, index)):
                    return
                yield from read_arguments(source, index)
                yield from source.text_until(_END)
                yield from source.skip_space()
                index += 1
            yield from source.ends_within(_BEGIN, self.block[1])  # cut
            yield from source.starts_with(self.block[1])

    def _read_name(self, source: Source, index: int) -> Reader[bool]:
        """Returns False if the text ends before the arguments."""
        name, mark = yield from source.text_until(_SEPARATOR)
        if mark:
            yield CallBegin(index, name.strip())
        return mark is not None


class DeepSeekV3(DeepSeekV31):
    name = "deepseek_v3"
    separator = "\n"

    def is_of(self, template: str) -> bool:
        return self.opening in template and "```json" in template

    def call(self, function: Function) -> Format:
        return tag(f"{_BEGIN}{_KIND}{function.name}{_FENCE}", arguments(function), f"\n```{_END}")

    def _read_name(self, source: Source, index: int) -> Reader[bool]:
        yield from source.text_until(_SEPARATOR)
        name, mark = yield from source.text_until(_FENCE)
        if mark:
            yield CallBegin(index, name.strip())
        return mark is not None
