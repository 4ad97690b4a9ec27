"""Calls as Qwen 3 Coder writes them:

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from pagedattn_serve.output_parsing.events import CallBegin, Content
from pagedattn_serve.output_parsing.json_values import ObjectWriter, literal
from pagedattn_serve.output_parsing.source import Reader, Source
from pagedattn_serve.output_parsing.tool_format import Format, Function, TaggedFormat, ToolUse, arguments, tag
from pagedattn_serve.sampling.json_schema import TextKind, text_kind


class Qwen3Coder(TaggedFormat):
    name = "qwen3_coder"
    opening = "<tool_call>"
    marks = (opening, "</tool_call>")

    def is_of(self, template: str) -> bool:
        return "<tool_call>" in template and "<function=" in template

    def call(self, function: Function) -> Format:
        begin = f"<tool_call>\n<function={function.name}>"
        return tag(begin, arguments(function, "qwen_xml"), "\n</function>\n</tool_call>")

    def read(self, source: Source, use: ToolUse) -> Reader[None]:
        index = 0
        while (yield from self.next_call(source, index)):
            space = yield from source.skip_space()
            if (yield from source.ends_within("<function=")):
                return  # cut
            if not (yield from source.starts_with("<function=")):
                yield Content(f"{self.opening}{space}")
                continue
            name, has_end = yield from source.text_until(">")
            if has_end:
                yield CallBegin(index, name)
                yield from _read_arguments(source, index, use.parameters(name))
                index += 1


def _read_arguments(source: Source, index: int, schema: dict[str, object]) -> Reader[None]:
    properties = schema.get("properties")
    writer = ObjectWriter(index)
    yield from source.skip_space()
    while (yield from source.starts_with("<parameter=")):
        name, has_end = yield from source.text_until(">")
        if not has_end:
            return
        yield writer.key(name)
        # A value in its lines ends with a line; so it may have the tag in a line.
        end = "\n</parameter>" if (yield from source.starts_with("\n")) else "</parameter>"
        kind, _ = text_kind(properties.get(name, True) if isinstance(properties, dict) else True, schema)
        if kind is TextKind.ALWAYS:
            yield writer.piece('"')
            if not (yield from source.read_until((end,), writer.text, drops_beginning=True)):
                return
            yield writer.piece('"')
        else:
            value, has_end = yield from source.text_until(end)
            if not has_end:
                return
            yield writer.piece(literal(value, kind is TextKind.SOMETIMES))
        yield from source.skip_space()
    if (yield from source.ends_within("<parameter=", "</function>")):
        return  # cut
    yield from source.starts_with("</function>")
    yield writer.end()
    yield from source.skip_space()
    yield from source.ends_within("</tool_call>")  # cut
    yield from source.starts_with("</tool_call>")
