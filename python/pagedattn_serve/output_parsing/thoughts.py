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
    ends_at_calls: whether a call, too, ends a thought, and the output ends with calls then. As in vLLM, so it is where
    models call without an end of the thought before. Elsewhere such a call is a part of the thought.
    """

    name: str
    begin: str
    end: str
    is_implied: bool = False
    ends_at_calls: bool = False

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

    def before(
        self, answer: Format, is_open: bool | None, max_tokens: int | None, calls: tuple[str, Format] | None = None
    ) -> Format:
        """The answer, and the thought that may come before it. max_tokens: of the thought; None for any number. calls:
        those that may end the thought in place of its end and the answer: their opening, and what follows it. The
        thought does not have the opening then, so that all that reads as a call is one."""
        if is_open is False:
            return answer
        begin, text = "" if is_open else self.begin, {"type": "any_text", "max_tokens": max_tokens}
        within = tag(begin, {**text, "excludes": [calls[0]] if calls else []}, self.end)
        thought: Format = {"type": "sequence", "elements": [within, _SPACE]}
        if is_open is None:
            thought = {"type": "or", "elements": [{"type": "const_string", "value": ""}, thought]}
        output: Format = {"type": "sequence", "elements": [thought, answer]}
        if calls is None:
            return output
        opening, after_opening = calls
        cut = tag(begin, {**text, "excludes": [self.end]}, opening)
        return {"type": "or", "elements": [output, {"type": "sequence", "elements": [cut, after_opening]}]}

    def read(self, source: Source, is_open: bool | None, opening: str | None = None) -> Reader[bool]:
        """The events of the thought. opening: of a call, which ends the thought and is not read; None if none does.
        Returns whether a call ended it."""
        if is_open is False:
            return False
        space = yield from source.skip_space()
        if not (yield from source.starts_with(self.begin)):
            if is_open is None:
                yield Content(space)
                return False
            source.put_back(space)  # the thought begins with it
        end = yield from source.read_thought((self.end,) if opening is None else (self.end, opening))
        yield Reasoning("")  # an empty thought, too, stands before the content
        if end is None or end == self.end:
            return False
        source.put_back(end)
        return True

    def without_end(self, events: Reader[None]) -> Reader[None]:
        """The events after a thought that a call ended, without the thought's end, if it comes before any text."""
        held: str | None = ""  # text that may be the end; None after it
        for event in events:
            if held is not None and isinstance(event, Content):
                held += event.text
                text = held.lstrip()
                if len(text) < len(self.end) and self.end.startswith(text):
                    continue
                event, held = Content(text.removeprefix(self.end)), None
            yield event
        if held:
            yield Content(held)


THOUGHT_FORMATS = (
    ThoughtFormat("qwen3", "<think>", "</think>", ends_at_calls=True),
    ThoughtFormat("deepseek_r1", "<think>", "</think>", is_implied=True),
    ThoughtFormat("mistral", "[THINK]", "[/THINK]", ends_at_calls=True),
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
