"""What an output is held to, by what it may be: whatever a model writes, its calls can be read."""

import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from checkpoints import EOS
from tool_functions import FUNCTIONS, TIME
from tool_models import PIECES, make_tool_tokenizer
from transformers import PreTrainedTokenizerFast

from pagedattn_serve import SamplingParams, StructuredOutput
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.output_parsing.events import ParsedOutput
from pagedattn_serve.output_parsing.output_format import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    GptOss,
    OutputFormat,
    output_format,
)
from pagedattn_serve.output_parsing.parser import parse
from pagedattn_serve.output_parsing.tool_format import Function, ToolUse, arguments, functions_of, tool_use
from pagedattn_serve.sampling.grammar import GrammarCompiler

pytest.importorskip("llguidance")
NAMES = [name for name in TOOL_PARSERS if name not in ("auto", "none")]


@dataclass
class RandomWriter:
    """Writes outputs of random tokens that a matcher allows."""

    tokenizer: PreTrainedTokenizerFast
    draw: random.Random

    def write(self, matcher: Any, max_tokens: int, beginning: str = "") -> tuple[str, bool]:
        """The text, and whether it has come to its end."""
        token_ids: list[int] = self.tokenizer(beginning).input_ids
        assert matcher.consume_tokens(token_ids)
        last_plain = 256 + len(PIECES)
        while len(token_ids) < max_tokens:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.nonzero(bits)[0].tolist()
            assert allowed, matcher.get_error()
            added = [token_id for token_id in allowed if token_id > last_plain]
            token_id = self.draw.choice(added if added and self.draw.random() < 0.3 else allowed)
            if token_id == self.tokenizer.eos_token_id:
                return self.tokenizer.decode(token_ids), True
            token_ids.append(token_id)
            matcher.consume_tokens([token_id])
        return self.tokenizer.decode(token_ids), False


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tool_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerFast) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer), frozenset([tokenizer.convert_tokens_to_ids(EOS)]))


@pytest.fixture
def write(tokenizer: PreTrainedTokenizerFast, compiler: GrammarCompiler) -> Any:
    """write(format, use, ...) is a random output that the format's turn allows, what it says, and whether it ended.
    beginning: of the output."""
    writer = RandomWriter(tokenizer, random.Random(1))

    def write(
        output: OutputFormat, use: ToolUse | None, form: Any = None, max_tokens: int = 200, beginning: str = ""
    ) -> tuple[str, ParsedOutput, bool]:
        turn = output.turn("", use, form)
        assert turn is not None and turn.structured_output is not None
        matcher = compiler.matcher(turn.structured_output).advance([]).deep_copy()
        text, has_end = writer.write(matcher, max_tokens, beginning)
        return text, parse(turn.parser(), text), has_end

    return write


def check_calls(output: ParsedOutput) -> None:
    """Each call is one of a function there is, with the arguments that the function takes."""
    types = {"city": str, "days": int, "kind": str, "is_near": bool}
    for call in output.calls:
        arguments = json.loads(call.arguments)
        assert call.name in ("get_weather", "get_time")
        assert ("city" in arguments) if call.name == "get_weather" else arguments == {}
        assert all(type(value) is types[name] for name, value in arguments.items()), arguments
        assert arguments.get("kind", "rain") in ("rain", "wind")


@pytest.mark.parametrize("reasoning", ["none", "qwen3"])
@pytest.mark.parametrize("name", NAMES)
def test_calls_that_are_required(write: Any, name: str, reasoning: str) -> None:
    output = output_format(name, "none" if name == "gpt_oss" else reasoning, "")
    num_ended = 0
    for _ in range(12):
        _, parsed, has_end = write(output, ToolUse(FUNCTIONS, is_required=True), max_tokens=600)
        if has_end:
            num_ended += 1
            assert parsed.calls and (not parsed.content or name == "gpt_oss")
            check_calls(parsed)
    assert num_ended


# What begins calls and hardly ever comes by chance, as it is no token of the tokenizer.
OPENINGS = {
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "pythonic": "[",
}


@pytest.mark.parametrize("name", NAMES)
def test_text_or_calls(write: Any, name: str) -> None:
    output = output_format(name, "none", "")
    num_calls = 0
    for i in range(12):
        beginning = OPENINGS.get(name, "") if i % 2 else ""
        _, parsed, has_end = write(output, ToolUse(FUNCTIONS, is_parallel=False), max_tokens=600, beginning=beginning)
        assert len(parsed.calls) <= 1
        num_calls += len(parsed.calls)
        if has_end:
            check_calls(parsed)
    assert num_calls


@pytest.mark.parametrize("name", ["hermes", "mistral", "gpt_oss"])
def test_calls_that_are_forbidden(write: Any, name: str) -> None:
    output = output_format(name, "none", "")
    opening = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "gpt_oss": "to=functions"}[name]
    for _ in range(6):
        text, parsed, _ = write(output, ToolUse(()))
        assert opening not in text and not parsed.calls


@pytest.mark.parametrize("name", ["hermes", "gpt_oss"])
def test_one_function(write: Any, name: str) -> None:
    for _ in range(6):
        _, parsed, _ = write(output_format(name, "none", ""), ToolUse((TIME,), is_required=True, is_parallel=False))
        assert [call.name for call in parsed.calls] in ([], ["get_time"])


# By the name of a parser: a call, and what stands between two calls; None if they stand in a list.
CALLS_OF_TIME = {
    "hermes": ('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', "\n"),
    "qwen3_coder": ("<tool_call>\n<function=get_time>\n</function>\n</tool_call>", "\n"),
    "mistral": ("[TOOL_CALLS]get_time[ARGS]{}", ""),
    "mistral_list": ('[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]', None),
}


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("max_thought_tokens", [None, 20])
@pytest.mark.parametrize("name", CALLS_OF_TIME)
def test_an_output_ends_after_a_call_within_a_thought(
    tokenizer: PreTrainedTokenizerFast,
    compiler: GrammarCompiler,
    name: str,
    max_thought_tokens: int | None,
    is_required: bool,
) -> None:
    """Whether its tags come as tokens or as letters, which are tokens beyond any bound."""
    call, separator = CALLS_OF_TIME[name]
    for prompt in ("", "<think>"):
        turn = output_format(name, "qwen3", "").turn(
            prompt, ToolUse(FUNCTIONS, is_required), max_thought_tokens=max_thought_tokens
        )
        assert turn is not None and turn.structured_output is not None
        for text, is_right in (
            (f"The time? {call}", True),
            (f"The time? {call}{separator}{call}", separator is not None),
            (f"The time?</think>{call}", True),
            ("The time?</think>It is.", not is_required),
            ("The time?", False),
            (f"{call.partition('get_time')[0]}no call</think>It is.", False),
        ):
            whole = text if prompt else f"<think>{text}"
            forms = [tokenizer(whole).input_ids]
            if max_thought_tokens is None:
                forms.append(tokenizer("<think>" if not prompt else "").input_ids + in_letters(tokenizer, text))
            for token_ids in forms:
                matcher = compiler.matcher(turn.structured_output).advance([]).deep_copy()
                follows = matcher.validate_tokens(token_ids) == len(token_ids) and matcher.consume_tokens(token_ids)
                # Where the output opens the thought, text without an end may be an answer, too.
                if is_right or prompt or is_required:
                    assert (follows and matcher.is_accepting()) == is_right, (text, token_ids)


def in_letters(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return [token_id for letter in text for token_id in tokenizer(letter).input_ids]


@pytest.mark.parametrize("name", CALLS_OF_TIME)
def test_calls_within_thoughts_can_be_read(
    tokenizer: PreTrainedTokenizerFast, compiler: GrammarCompiler, name: str
) -> None:
    writer, num_cut = RandomWriter(tokenizer, random.Random(2)), 0
    turn = output_format(name, "qwen3", "").turn("<think>", ToolUse(FUNCTIONS))
    assert turn is not None and turn.structured_output is not None
    for _ in range(12):
        text, has_end = writer.write(compiler.matcher(turn.structured_output).advance([]).deep_copy(), 200)
        parsed = parse(turn.parser(), text)
        if has_end and "</think>" not in text:
            num_cut += 1
            assert parsed.calls and not parsed.content
        if has_end:
            check_calls(parsed)
    assert num_cut


def test_a_bound_of_thoughts_and_a_tag_that_is_no_token() -> None:
    """A call does not end a thought then: nothing could keep the letters of the tag from coming amid the thought."""
    output = output_format("hermes", "qwen3", "", added_tokens={"<think>", "</think>"})
    text = "a<tool_call>b</think>c"
    for max_thought_tokens, reasoning in ((None, "a"), (9, "a<tool_call>b")):
        turn = output.turn("<think>", ToolUse(FUNCTIONS), max_thought_tokens=max_thought_tokens)
        assert turn is not None and parse(turn.parser(), text).reasoning == reasoning


def test_schemas_of_tools_count_once() -> None:
    """Although a call may stand before the end of a thought, and after it. Equal schemas are not always one."""
    functions = tuple(Function(f"f{i}", {"properties": {"a": {"const": value}}}) for i, value in enumerate((1, True)))
    long = Function("f", {"enum": ["a" * 60_000]})
    turn = output_format("hermes", "qwen3", "").turn("", ToolUse((*functions, long)))
    assert turn is not None and turn.structured_output is not None
    tag = json.loads(str(turn.structured_output.structural_tag))
    schemas = [each["json_schema"]["properties"]["a"]["const"] for each in tag["definitions"][:2]]
    assert [*map(repr, schemas)] == ["1", "True"] and len(tag["definitions"]) == 3


@pytest.mark.parametrize(("name", "form", "is_right"), [
    ("qwen3", {"choice": ["yes", "no"]}, {"yes", "no"}.__contains__),
    ("deepseek_r1", {"json": {"type": "boolean"}}, {"true", "false"}.__contains__),
    ("qwen3", {"regex": "[ab]{3}"}, lambda text: len(text) == 3),
    ("mistral", {"grammar": 'start: "a" start | "b"'}, lambda text: text.strip("a") == "b"),
    ("gpt_oss", {"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
])  # fmt: skip
def test_a_form_after_a_thought(write: Any, name: str, form: dict[str, Any], is_right: Any) -> None:
    num_thoughts = num_ended = 0
    for _ in range(8):
        _, parsed, has_end = write(output_format("none", name, ""), None, StructuredOutput(**form), max_tokens=600)
        num_thoughts += bool(parsed.reasoning)
        num_ended += has_end
        assert not has_end or is_right(parsed.content.strip()), parsed
    assert num_thoughts and num_ended


def test_a_form_or_calls(write: Any) -> None:
    form = StructuredOutput(choice=["yes", "no"])
    outputs = [write(output_format("hermes", "none", ""), ToolUse(FUNCTIONS), form) for _ in range(12)]
    assert {parsed.content for _, parsed, has_end in outputs if has_end} <= {"", "yes", "no"}
    assert any(parsed.calls for _, parsed, _ in outputs) and any(parsed.content for _, parsed, _ in outputs)


def test_what_needs_no_turn() -> None:
    """A request without tools on a model without thoughts is not looked at."""
    assert output_format("hermes", "none", "").turn("", None, StructuredOutput(regex="a")) is None
    turn = output_format("none", "qwen3", "").turn("<think>\n\n</think>\n", None, StructuredOutput(regex="a"))
    assert turn is not None and turn.structured_output == StructuredOutput(regex="a")


@pytest.mark.parametrize(("template", "tools", "thoughts"), [
    ("{% if tools %}<tool_call> {name} {% endif %}{% if enable_thinking %}<think></think>", "Hermes", "qwen3"),
    ("<tool_call>\n<function=example>", "Qwen3Coder", None),
    ("<tool_call>{{ name }}\n<arg_key>", "NoneType", None),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", "MistralList", None),
    ("[TOOL_CALLS]{{ name }}[ARGS] [THINK]", "Mistral", "mistral"),
    ("<｜Assistant｜><｜tool▁calls▁begin｜>```json {{ content.split('</think>')[-1] }}", "DeepSeekV3", "deepseek_r1"),
    ("<｜tool▁calls▁begin｜> {% if thinking %}<think>{% else %}</think>{% endif %}", "DeepSeekV31", "qwen3"),
    ('<|start_header_id|> {"name": function name, "parameters": ...} <|python_tag|>', "Llama3Json", None),
    ("[func_name1(params_name1=params_value1)] <|start_header_id|>", "Pythonic", None),
    ("{{ message.content }}", "NoneType", None),
])  # fmt: skip
def test_forms_told_from_a_template(template: str, tools: str, thoughts: str | None) -> None:
    output = output_format("auto", "auto", template)
    assert type(output._tools).__name__ == tools
    assert getattr(output._thoughts, "name", None) == thoughts
    assert type(output_format("none", "none", template)) is OutputFormat
    assert not output_format("none", "none", template).takes_tools


def test_channels_are_told_from_a_template() -> None:
    assert isinstance(output_format("auto", "auto", "<|start|>assistant<|channel|>final"), GptOss)
    assert isinstance(output_format("gpt_oss", "none", ""), GptOss)


def test_names_that_are_none() -> None:
    with pytest.raises(ArgumentError, match=r"^tool_call_parser: expected one of auto, none, hermes, .* got 'hermit'"):
        output_format("hermit", "auto", "")
    with pytest.raises(ArgumentError, match=r"^reasoning_parser: expected one of auto, none, qwen3, "):
        output_format("auto", "hermes", "")
    with pytest.raises(ArgumentError, match=r"^tool_call_parser: expected gpt_oss for calls and thoughts"):
        output_format("hermes", "gpt_oss", "")
    assert {"hermes", "gpt_oss"} < set(TOOL_PARSERS) and "gpt_oss" in REASONING_PARSERS


def test_tools_without_a_form_of_calls() -> None:
    with pytest.raises(ArgumentError, match=r"^tools: expected none, as the model's form of calls is not known"):
        output_format("none", "qwen3", "").turn("", ToolUse(FUNCTIONS))


def test_what_a_tool_choice_asks_for() -> None:
    tools = [{"type": "function", "function": {"name": each.name}} for each in FUNCTIONS]
    functions = functions_of(tools)
    one: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
    allowed: dict[str, Any] = {"type": "allowed_tools"}
    for choice, expected in (
        ("auto", ToolUse(functions)),
        ("required", ToolUse(functions, is_required=True)),
        ("none", ToolUse(())),
        (one, ToolUse(functions[1:], is_required=True, is_parallel=False)),
        (allowed | {"allowed_tools": {"mode": "auto", "tools": [one]}}, ToolUse(functions[1:])),
        (allowed | {"allowed_tools": {"mode": "required", "tools": [one]}}, ToolUse(functions[1:], is_required=True)),
    ):
        assert tool_use(tools, choice) == expected


@pytest.mark.parametrize("is_strict", [False, True])
def test_what_cannot_be_held_to_is_refused_of_strict_tools_alone(is_strict: bool) -> None:
    [function] = functions_of([{"type": "function", "function": {"name": "f", "strict": is_strict}}])
    assert arguments(function)["lenient"] is not is_strict


def test_nothing_follows_a_list_of_calls(tokenizer: PreTrainedTokenizerFast, compiler: GrammarCompiler) -> None:
    turn = output_format("mistral_list", "none", "").turn("", ToolUse(FUNCTIONS))
    assert turn is not None and turn.structured_output is not None
    matcher = compiler.matcher(turn.structured_output).advance([]).deep_copy()
    token_ids = tokenizer(CALLS_OF_TIME["mistral_list"][0]).input_ids
    assert matcher.validate_tokens([*token_ids, *token_ids]) == len(token_ids)


def test_space_within_arguments_is_bounded(tokenizer: PreTrainedTokenizerFast, compiler: GrammarCompiler) -> None:
    """A weak model might write nothing else."""
    turn = output_format("mistral", "none", "").turn("", ToolUse(FUNCTIONS))
    assert turn is not None and turn.structured_output is not None
    for num_spaces, is_right in ((20, True), (21, False)):
        token_ids = tokenizer(f'[TOOL_CALLS]get_weather[ARGS]{{{" " * num_spaces}"city"').input_ids
        matcher = compiler.matcher(turn.structured_output).advance([]).deep_copy()
        assert (matcher.validate_tokens(token_ids) == len(token_ids)) == is_right


@pytest.mark.parametrize("special_tokens", [(), ("[TOOL_CALLS]",)])
def test_marks_that_are_special_tokens_are_in_the_text(special_tokens: tuple[str, ...]) -> None:
    """Which leaves out special tokens by default: the parser could not see that a call begins."""
    turn = output_format("mistral", "none", "", special_tokens).turn("", ToolUse(FUNCTIONS))
    assert turn is not None and turn.hold(SamplingParams()).skip_special_tokens == (not special_tokens)


def test_schemas_that_are_too_long() -> None:
    long = Function("f", {"enum": ["a" * 100_000]})
    with pytest.raises(ArgumentError, match=r"^structured_output: expected at most 100,000 characters, got 100,"):
        output_format("hermes", "none", "").turn("", ToolUse((long,)))


def test_a_schema_that_nothing_can_be_held_to(compiler: GrammarCompiler) -> None:
    """The error says which function has it."""
    bad = Function("paint", {"type": "object", "properties": {"a": {"type": "colour"}}})
    turn = output_format("hermes", "none", "").turn("", ToolUse((TIME, bad)))
    assert turn is not None and turn.structured_output is not None
    with pytest.raises(ArgumentError, match=r'got format.tags\[1\].content \(after .*"paint".*: Invalid type: colour$'):
        compiler.matcher(turn.structured_output)
