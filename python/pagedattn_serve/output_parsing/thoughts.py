"""Thoughts between two tags, before the rest of an output."""

from dataclasses import dataclass

from pagedattn_serve.output_parsing.events import Content, Reasoning
from pagedattn_serve.output_parsing.source import Reader, Source
from pagedattn_serve.output_parsing.tool_format import Format, tag

_SPACE: Format = {"type": "regex", "pattern": r"[ \t\r\n]{0,4}"}  # between a thought and what follows


@dataclass(frozen=True)
class ThoughtFormat:
    """The tags of a model's thoughts.

    is_implied: whether an output is a thought from its beginning, if neither the prompt nor the output has a tag.
    """

    name: str
    begin: str
    end: str
    is_implied: bool = False

    def is_open(self, prompt: str, continued: str) -> bool | None:
        """Whether an output begins within a thought (True), or after it (False). None: the output says it.

        continued: the beginning of the answer, where the prompt has it already.
        """
        if continued and (self.begin in continued or self.end in continued):
            return continued.rfind(self.begin) > continued.rfind(self.end)
        end = prompt.rstrip()
        if continued or end.endswith(self.end):
            return False
        return True if end.endswith(self.begin) or self.is_implied else None

    def before(self, answer: Format, is_open: bool | None, max_tokens: int | None) -> Format:
        """The answer, and the thought that may come before it. max_tokens: of the thought; None for any number."""
        if is_open is False:
            return answer
        within = tag("" if is_open else self.begin, {"type": "any_text", "max_tokens": max_tokens}, self.end)
        thought: Format = {"type": "sequence", "elements": [within, _SPACE]}
        if is_open is None:
            thought = {"type": "or", "elements": [{"type": "const_string", "value": ""}, thought]}
        return {"type": "sequence", "elements": [thought, answer]}

    def read(self, source: Source, is_open: bool | None) -> Reader[None]:
        """The events of the thought."""
        if is_open is False:
            return
        space = yield from source.skip_space()
        if not (yield from source.starts_with(self.begin)):
            if is_open is None:
                yield Content(space)
                return
            source.put_back(space)  # the thought begins with it
        yield from source.read_thought((self.end,))
        yield Reasoning("")  # an empty thought, too, stands before the content


THOUGHT_FORMATS = (
    ThoughtFormat("qwen3", "<think>", "</think>"),
    ThoughtFormat("deepseek_r1", "<think>", "</think>", is_implied=True),
    ThoughtFormat("mistral", "[THINK]", "[/THINK]"),
)


def thoughts_of(template: str) -> ThoughtFormat | None:
    """The form of thoughts that a chat template is written for."""
    qwen3, deepseek_r1, mistral = THOUGHT_FORMATS
    if mistral.begin in template:
        return mistral
    if qwen3.end not in template:
        return None
    names_them = qwen3.begin in template or "thinking" in template  # so the prompt or the output has the tag
    return qwen3 if names_them else deepseek_r1
