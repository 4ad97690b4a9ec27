"""What an output may be and what it says, for one model: its form of calls and its form of thoughts together."""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pagedattn_serve.errors import ArgumentError, BadArgument, shown
from pagedattn_serve.output_parsing import gpt_oss
from pagedattn_serve.output_parsing.deepseek import DeepSeekV3, DeepSeekV31
from pagedattn_serve.output_parsing.events import Content
from pagedattn_serve.output_parsing.hermes import Hermes
from pagedattn_serve.output_parsing.llama3_json import Llama3Json
from pagedattn_serve.output_parsing.mistral import Mistral, MistralList
from pagedattn_serve.output_parsing.parser import OutputParser, Read
from pagedattn_serve.output_parsing.pythonic import Pythonic
from pagedattn_serve.output_parsing.qwen3_coder import Qwen3Coder
from pagedattn_serve.output_parsing.source import Reader, Source
from pagedattn_serve.output_parsing.thoughts import THOUGHT_FORMATS, ThoughtFormat, thoughts_of
from pagedattn_serve.output_parsing.tool_format import Format, TaggedFormat, ToolFormat, ToolUse, new_call_id
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.structured_output import BOUNDED_SPACE, StructuredOutput

AUTO, NONE, GPT_OSS = "auto", "none", "gpt_oss"
BUDGET = "thinking_token_budget"  # vLLM's name of the field
# A template is told by the first that knows it.
TOOL_FORMATS: tuple[ToolFormat, ...] = (
    *(Hermes(), Qwen3Coder(), Mistral(), MistralList(), DeepSeekV31(), DeepSeekV3(), Pythonic(), Llama3Json()),
)
TOOL_PARSERS = (AUTO, NONE, *(each.name for each in TOOL_FORMATS), GPT_OSS)
REASONING_PARSERS = (AUTO, NONE, *(each.name for each in THOUGHT_FORMATS), GPT_OSS)


@dataclass(frozen=True)
class Turn:
    """One output, before it begins.

    structured_output: what the output has to be held to, in place of the form that the request asks for.
    read: reads its text. reads_special_tokens: whether the text has to have its special tokens.
    """

    structured_output: StructuredOutput | None
    read: Read
    reads_special_tokens: bool

    def hold(self, params: SamplingParams) -> SamplingParams:
        """The parameters for this output. Raises ValueError if they cannot hold it to a form."""
        skips = params.skip_special_tokens and not self.reads_special_tokens
        return replace(params, structured_output=self.structured_output, skip_special_tokens=skips)

    def parser(self) -> OutputParser:
        """A parser of one output; each of several outputs has its own."""
        return OutputParser(self.read)


class OutputFormat:
    """The forms of a model's outputs. None: the model has no such form, or none that is known.

    special_tokens: the texts of the tokens that outputs leave out unless they are asked for. added_tokens: of all added
    tokens; None if they are not known.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        thoughts: ThoughtFormat | None,
        special_tokens: Collection[str] = (),
        added_tokens: Collection[str] | None = None,
    ) -> None:
        self._tools = tools
        self._thoughts = thoughts
        self._added_tokens = added_tokens
        # Whether the tokens of a thought can be bounded: its end has to be one of the tokenizer's added tokens.
        self.takes_budget = thoughts is not None and self._is_token(thoughts.end)
        self._reads_special_tokens = any(mark in special_tokens for mark in self._marks)

    @property
    def takes_tools(self) -> bool:
        return self._tools is not None

    @property
    def _marks(self) -> tuple[str, ...]:
        """Tokens that the parser has to see."""
        thoughts = () if self._thoughts is None else (self._thoughts.begin, self._thoughts.end)
        return thoughts if self._tools is None else (*thoughts, *self._tools.marks)

    def _is_token(self, text: str) -> bool:
        return self._added_tokens is None or text in self._added_tokens

    def new_call_id(self) -> str:
        return new_call_id() if self._tools is None else self._tools.new_call_id()

    def turn(
        self,
        prompt: str,
        use: ToolUse | None = None,
        form: StructuredOutput | None = None,
        continued: str = "",
        max_thought_tokens: int | None = None,
    ) -> Turn | None:
        """What the output after a prompt is, or None if it is text and nothing else, held to the form if there is one.

        prompt: the text of the prompt. use: the calls that the output may have; None if the request has no tools.
        form: of the answer to the user, after a thought, and in place of calls unless these are required.
        continued: the beginning of the answer, if the prompt has it already. max_thought_tokens: None for any number.

        Raises ValueError if there are tools and no form of calls is known, a bound of thoughts that cannot be held, or
        too long schemas.
        """
        if use is not None and not self.takes_tools:
            raise ArgumentError("tools", "none, as the model's form of calls is not known (see --tool-call-parser)")
        if max_thought_tokens is not None and not self.takes_budget:
            reason = "the model's form of thoughts is not known (see --reasoning-parser)"
            if self._thoughts is not None:
                reason = f"the end of a thought, {self._thoughts.end}, is not one of the tokenizer's added tokens"
            raise ArgumentError(BUDGET, f"none, as {reason}")
        if use is None and self._thoughts is None:
            return None
        is_open = False if self._thoughts is None else self._thoughts.is_open(prompt, continued)
        opening = self._opening_amid_thoughts(use, max_thought_tokens)
        is_bound = form is not None or max_thought_tokens is not None
        if use is not None or (is_bound and is_open is not False):
            answer = None if form is None else format_of(form)
            form = _structural_tag(self._structure(use, answer, is_open, max_thought_tokens, opening))
        return Turn(form, partial(self._read, use, is_open, opening), self._reads_special_tokens)

    def _opening_amid_thoughts(self, use: ToolUse | None, max_thought_tokens: int | None) -> str | None:
        """What a call begins with that ends a thought; None if no call does. Where the tokens of a thought are counted,
        it has to be a token."""
        if use is None or not use.functions or self._thoughts is None or not self._thoughts.ends_at_calls:
            return None
        opening = self._tools.opening if isinstance(self._tools, TaggedFormat) else None
        is_held = opening is not None and (max_thought_tokens is None or self._is_token(opening))
        return opening if is_held else None

    def _structure(
        self,
        use: ToolUse | None,
        answer: Format | None,
        is_open: bool | None,
        max_thought_tokens: int | None,
        opening: str | None,
    ) -> Format:
        calls = None
        if use is not None:
            assert self._tools is not None
            answer = _with_calls(self._tools, use, answer)
            if opening is not None:
                assert isinstance(self._tools, TaggedFormat)
                calls = opening, self._tools.calls_after_opening(use)
        answer = answer or {"type": "any_text"}
        return answer if self._thoughts is None else self._thoughts.before(answer, is_open, max_thought_tokens, calls)

    def _read(self, use: ToolUse | None, is_open: bool | None, opening: str | None, source: Source) -> Reader[None]:
        events = self._read_all(use, is_open, opening, source)
        is_required = use is not None and use.is_required
        for event in events:
            # Where the output is calls and nothing else, what reads as text is the beginning of a tag that is cut.
            if not (is_required and isinstance(event, Content)):
                yield event

    def _read_all(self, use: ToolUse | None, is_open: bool | None, opening: str | None, source: Source) -> Reader[None]:
        is_cut = self._thoughts is not None and (yield from self._thoughts.read(source, is_open, opening))
        if use is None or not use.functions or self._tools is None:
            yield from source.read_rest(Content)
            return
        events = self._tools.read(source, use)
        yield from self._thoughts.without_end(events) if self._thoughts is not None and is_cut else events


class GptOss(OutputFormat):
    """The form of gpt-oss, whose calls and thoughts are both messages in channels."""

    takes_tools = True
    _marks = gpt_oss.MARKS

    def __init__(self, special_tokens: Collection[str] = ()) -> None:
        super().__init__(None, None, special_tokens)

    def turn(
        self,
        prompt: str,
        use: ToolUse | None = None,
        form: StructuredOutput | None = None,
        continued: str = "",
        max_thought_tokens: int | None = None,
    ) -> Turn | None:
        if max_thought_tokens is not None:
            raise ArgumentError(BUDGET, "none, as thoughts of gpt_oss may be several (see reasoning_effort)")
        if continued:
            raise ArgumentError("continue_final_message", "False, as no message of gpt_oss can be continued")
        if use is not None or form is not None:
            form = _structural_tag(gpt_oss.structure(use, None if form is None else format_of(form)))
        return Turn(form, gpt_oss.read, self._reads_special_tokens)


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ValueError for names that are none, and for gpt_oss beside another."""
    for argument, name, names in (
        ("tool_call_parser", tool_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if not isinstance(name, str) or name not in names:
            raise ArgumentError(argument, f"one of {', '.join(names)}", shown(name))
    others = {tool_parser, reasoning_parser} - {GPT_OSS, AUTO, NONE}
    if others and GPT_OSS in (tool_parser, reasoning_parser):
        raise ArgumentError("tool_call_parser", "gpt_oss for calls and thoughts, or for neither", others.pop())


def output_format(
    tool_parser: str,
    reasoning_parser: str,
    template: str,
    special_tokens: Collection[str] = (),
    added_tokens: Collection[str] | None = None,
) -> OutputFormat:
    """The form of a model's outputs by the names of its parsers. template: its chat template, which "auto" looks at.
    special_tokens, added_tokens: as of `OutputFormat`.

    Raises ValueError as `check_parsers`."""
    check_parsers(tool_parser, reasoning_parser)
    names = {tool_parser, reasoning_parser}
    if GPT_OSS in names or (AUTO in names <= {AUTO, NONE} and gpt_oss.is_of(template)):
        return GptOss(special_tokens)
    if tool_parser == AUTO:
        tools = next((each for each in TOOL_FORMATS if each.is_of(template)), None)
    else:
        tools = next((each for each in TOOL_FORMATS if each.name == tool_parser), None)
    if reasoning_parser == AUTO:
        thoughts = thoughts_of(template)
    else:
        thoughts = next((each for each in THOUGHT_FORMATS if each.name == reasoning_parser), None)
    return OutputFormat(tools, thoughts, special_tokens, added_tokens)


def format_of(form: StructuredOutput) -> Format:
    """A form of output as a part of a structural tag."""
    if form.choices:
        return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in form.choices]}
    if form.regex is not None:
        return {"type": "regex", "pattern": form.regex}
    if form.grammar is not None:
        return {"type": "grammar", "grammar": form.grammar}
    if form.structural_tag is not None:
        assert isinstance(form.structural_tag, str)
        tag: Any = json.loads(form.structural_tag)
        return tag["format"] if isinstance(tag, dict) and isinstance(tag.get("format"), dict) else {"type": tag}
    return {"type": "json_schema", "json_schema": json.loads(form.schema)}


def _structural_tag(structure: Format) -> StructuredOutput:
    schemas: dict[str, Format] = {}
    try:
        tag = {"type": "structural_tag", "format": _without_schemas(structure, schemas)}
        tag["definitions"] = list(schemas.values())
        return StructuredOutput(structural_tag=tag, whitespace_pattern=BOUNDED_SPACE)
    except BadArgument as error:  # too long, or no JSON
        raise error.renamed("structured_output") from None
    except RecursionError:
        raise ArgumentError("structured_output", "a form that is nested less deeply") from None


def _without_schemas(structure: Any, schemas: dict[str, Format]) -> Any:
    """The structure with the index of each schema in place of it. schemas: takes them, each once. Schemas are long, and
    a call that may stand in several places has its schema in each."""
    match structure:
        case {"type": "json_schema"}:
            key = repr(structure)  # equal schemas may differ: 1 is True, and properties have an order
            schemas.setdefault(key, structure)
            return {"type": "defined", "index": list(schemas).index(key)}
        case dict():
            return {name: _without_schemas(value, schemas) for name, value in structure.items()}
        case list():
            return [_without_schemas(each, schemas) for each in structure]
    return structure


def _with_calls(tools: ToolFormat, use: ToolUse, answer: Format | None) -> Format:
    if not use.functions:
        return answer or tools.text()
    if use.is_required:
        return tools.calls(use)
    return {"type": "or", "elements": [tools.calls(use), answer]} if answer else tools.text_or_calls(use)
