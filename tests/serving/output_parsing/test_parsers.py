"""Parsers of outputs: what they tell of a text, whatever pieces it comes in."""

import json
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_functions import FUNCTIONS

from pagedattn_serve.output_parsing import source as source_module
from pagedattn_serve.output_parsing.events import Call, ParsedOutput, is_whole
from pagedattn_serve.output_parsing.output_format import output_format
from pagedattn_serve.output_parsing.parser import OutputParser, parse
from pagedattn_serve.output_parsing.source import Source
from pagedattn_serve.output_parsing.tool_format import ToolUse

PARIS = {"city": "Paris"}
ODD = {"city": 'a "b"\n</tool_call>, }]) é🙂 \\', "days": -2, "kind": "rain", "is_near": True}
LONDON = {"city": "London"}
QUOTES = {"city": 'it\'s "here", )'}
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def hermes(call: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(call, ensure_ascii=False)}}}\n</tool_call>'


def qwen3_coder(call: dict[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in call.items()}
    parameters = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())
    return f"<tool_call>\n<function=get_weather>\n{parameters}</function>\n</tool_call>"


def listed(call: dict[str, Any], arguments: str = "arguments") -> str:
    return json.dumps({"name": "get_weather", arguments: call}, ensure_ascii=False)


def pythonic(call: dict[str, Any]) -> str:
    return f"get_weather({', '.join(f'{name}={value!r}' for name, value in call.items())})"


def deepseek(call: dict[str, Any]) -> str:
    return f"{BEGIN}get_weather{SEP}{json.dumps(call)}{END}"


def channel(name: str, text: str, end: str = "<|end|><|start|>assistant") -> str:
    return f"<|channel|>{name}<|message|>{text}{end}"


CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
BLOCK = f"{CALLS_BEGIN}{{}}<｜tool▁calls▁end｜>"
FENCED = f"{BEGIN}function{SEP}get_weather\n```json\n{{}}\n```{END}"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
# By the name of a parser: outputs, with the content and the arguments of the calls.
OUTPUTS: dict[str, list[tuple[str, str, list[dict[str, Any]]]]] = {
    "hermes": [
        (f"I look.\n{hermes(ODD)}\n{hermes(PARIS)}", "I look.", [ODD, PARIS]),
        (f"{hermes(PARIS)}\n and so on ", "and so on ", [PARIS]),
        (f"I look.\n{hermes(PARIS)}\nIt rains.", "I look.\n\nIt rains.", [PARIS]),
        ('<tool_call>{"arguments":{"city":"Paris"} ,"name":"get_weather"}</tool_call>', "", [PARIS]),
        ('<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [PARIS]),
        ('<tool_call>{"id": [1], "name": "get_weather"}</tool_call>', "", [{}]),
        ("<tool_call>no call</tool_call> <tool_", "<tool_call>no call</tool_call> <tool_", []),
        ('<tool_call>[{"name": "a"}]', '<tool_call>[{"name": "a"}]', []),
        (f"a <think>b</think>{hermes(PARIS)}", "a <think>b</think>", [PARIS]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {}}</tool_call>', "", [{"a": 1}]),
    ],
    "qwen3_coder": [
        (f"I look.\n{qwen3_coder(ODD)}\n{qwen3_coder(PARIS)}", "I look.", [ODD, PARIS]),
        ("<tool_call>\n<function=get_weather>\n</function>\n</tool_call>", "", [{}]),
        ("<tool_call><function=get_weather><parameter=city>Paris</parameter></function>", "", [PARIS]),
        ("<tool_call>\n<function=f>\n<parameter=a>\nnull\n</parameter>\n</function>", "", [{"a": None}]),
        ('<tool_call>\n<function=f>\n<parameter=a>\n "x"\n</parameter>\n</function>', "", [{"a": ' "x"'}]),
        ("<tool_call>\n<function=f>\n<parameter=a>\nNaN\n</parameter>\n</function>", "", [{"a": "NaN"}]),
        (
            "<tool_call>\n<function=f>\n<parameter=a>\n[-Infinity]\n</parameter>\n</function>",
            "",
            [{"a": "[-Infinity]"}],
        ),
        ("<tool_call> no", "<tool_call> no", []),
    ],
    "mistral": [
        (f"I look.[TOOL_CALLS]get_weather[ARGS]{json.dumps(ODD)}", "I look.", [ODD]),
        ('[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]get_weather{"city": "Paris"}', "", [{}, PARIS]),
        ('[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"city": "Paris"}', "", [PARIS]),
        (f"[TOOL_CALLS] [{listed(PARIS)}]", "", [PARIS]),
    ],
    "mistral_list": [
        (f"I look. [TOOL_CALLS] [{listed(ODD)}, {listed(PARIS)}]", "I look.", [ODD, PARIS]),
        ("[TOOL_CALLS] [1]", "1]", []),
    ],
    "llama3_json": [
        (listed(ODD, "parameters"), "", [ODD]),
        (f"<|python_tag|>{listed(ODD, 'parameters')}; {listed(PARIS, 'parameters')}", "", [ODD, PARIS]),
        (f"{listed(PARIS, 'parameters')}; and so on", "; and so on", [PARIS]),
        (' {"a": 1} and {"b": 2}', ' {"a": 1} and {"b": 2}', []),
        ("I look. {}", "I look. {}", []),
    ],
    "pythonic": [
        (f"[{pythonic(ODD)}, {pythonic(PARIS)}]", "", [ODD, PARIS]),
        ('[f(), get_weather(city="Paris", x=[None, (1, "a")], )]', "", [{}, {**PARIS, "x": [None, [1, "a"]]}]),
        (f"[{pythonic(QUOTES)}]", "", [QUOTES]),
        ("[f(x=(1, 2), y=3)]", "", [{"x": [1, 2], "y": 3}]),
        ("[1, 2] are (two)", "[1, 2] are (two)", []),
        ("I look [f()]", "I look [f()]", []),
    ],
    "deepseek_v31": [
        (f"I look.{BLOCK.format(deepseek(ODD) + deepseek(PARIS))}", "I look.", [ODD, PARIS]),
    ],
    "deepseek_v3": [
        (BLOCK.format(FENCED.format(json.dumps(ODD)) + "\n" + FENCED.format(json.dumps(PARIS))), "", [ODD, PARIS]),
    ],
    "gpt_oss": [
        (channel("analysis", "hm") + TO_WEATHER + json.dumps(ODD), "", [ODD]),
        (channel("commentary", "I look.") + f"{TO_WEATHER}{json.dumps(PARIS)}<|call|>", "I look.", [PARIS]),
        (f"{TO_WEATHER}{json.dumps(PARIS)}<|call|>" * 2, "", [PARIS, PARIS]),
        (" to=functions.get_weather<|channel|>commentary json<|message|>" + json.dumps(PARIS), "", [PARIS]),
        (channel("final", "It rains.", ""), "It rains.", []),
        ("no message", "no message", []),
    ],
}
CASES = [(name, *output) for name, outputs in OUTPUTS.items() for output in outputs]
# By the name of a parser: a pattern of what only calls begin with. The tags of gpt_oss are tokens, and are not cut.
OPENINGS = {
    **dict.fromkeys(("hermes", "qwen3_coder"), "<tool_call>"),
    **dict.fromkeys(("mistral", "mistral_list"), r"\[TOOL_CALLS\]"),
    **dict.fromkeys(("deepseek_v31", "deepseek_v3"), CALLS_BEGIN),
    **{"llama3_json": r'{"name"|<\|python_tag\|>', "pythonic": r"\[(g|f\()"},
}
CALLS = [case for case in CASES if case[0] in OPENINGS and case[3]]


def new_parser(name: str, is_required: bool = False, reasoning_parser: str = "none") -> OutputParser:
    turn = output_format(name, reasoning_parser, "").turn("", ToolUse(FUNCTIONS, is_required))
    assert turn is not None
    return turn.parser()


def in_pieces(parser: OutputParser, pieces: list[str]) -> ParsedOutput:
    output = ParsedOutput()
    for piece in pieces:
        output.add(parser.feed(piece))
    output.add(parser.finish())
    return output


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_an_output(name: str, text: str, content: str, calls: list[dict[str, Any]]) -> None:
    """At every cut in two, and character by character."""
    whole = parse(new_parser(name), text)
    assert whole.content == content
    assert [json.loads(call.arguments) for call in whole.calls] == calls
    assert all(call.name in ("get_weather", "f") for call in whole.calls)
    for cut in range(len(text) + 1):
        assert in_pieces(new_parser(name), [text[:cut], text[cut:]]) == whole, text[:cut]
    assert in_pieces(new_parser(name), list(text)) == whole


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_an_output_that_is_cut(name: str, text: str, content: str, calls: list[dict[str, Any]]) -> None:
    """What there is of it is a beginning of what there would be, and every call but the last is whole."""
    whole = parse(new_parser(name), text)
    for end in range(len(text)):
        output = parse(new_parser(name), text[:end])
        for call, of_whole in zip(output.calls, whole.calls, strict=False):
            assert call.name == of_whole.name
            assert of_whole.arguments.startswith(call.arguments)
        assert output.calls[:-1] == whole.calls[: max(len(output.calls) - 1, 0)]
        assert all(is_whole(call.arguments) for call in output.calls[:-1])
        assert not output.calls or is_whole(output.calls[-1].arguments) == is_json(output.calls[-1].arguments)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS)
def test_a_call_that_is_cut_is_no_text(name: str, text: str, content: str, calls: list[dict[str, Any]]) -> None:
    """Be it cut before the name, within the arguments, in a tag, or between two calls."""
    for end in range(len(text)):
        cut = text[:end]
        output = parse(new_parser(name), cut)
        if re.search(OPENINGS[name], cut):
            assert content.startswith(output.content.rstrip()), cut
        else:
            assert output == ParsedOutput(cut), "it may be a text"
        assert in_pieces(new_parser(name), list(cut)) == output


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS)
def test_calls_that_are_required(name: str, text: str, content: str, calls: list[dict[str, Any]]) -> None:
    """There is no text, wherever the output is cut, even in the tag of a thought."""
    thought = "<think>\na\n</think>\n\n"
    for reasoning_parser, before in (
        ("none", ""),
        ("qwen3", "\n"),
        ("qwen3", thought),
        ("mistral", "[THINK]a[/THINK]"),
    ):
        whole = before + text
        for end in range(len(whole) + 1):
            output = parse(new_parser(name, True, reasoning_parser), whole[:end])
            assert output.content == "", whole[:end]
            assert in_pieces(new_parser(name, True, reasoning_parser), list(whole[:end])) == output
        assert [json.loads(call.arguments) for call in output.calls] == calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[(name, text) for name in OPENINGS for text in ("a <", "a [", "a {", "<", "a <b>\n", "{", "[", "a[TOOL")],
        *[(name, "a <tool") for name in OPENINGS],
        *[("llama3_json", text) for text in ('{"na', '{"city": "Par', '{"name": 5}', '{"a": {"name": "b"')],
        *[("pythonic", text) for text in ("[1", "[true", "[{")],
        ("mistral", "[TOOL_CALLS] is a token"),
    ],
)
def test_a_text_that_looks_like_a_call(name: str, text: str) -> None:
    """Nothing of it is lost."""
    expected = ParsedOutput(text)
    assert parse(new_parser(name), text) == in_pieces(new_parser(name), list(text)) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "get-weather.v2", "arguments": {}}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=get-weather.v2>\n</function>\n</tool_call>"),
        ("mistral", "[TOOL_CALLS]get-weather.v2[ARGS]{}"),
        ("mistral_list", '[TOOL_CALLS] [{"name": "get-weather.v2", "arguments": {}}]'),
        ("llama3_json", '{"name": "get-weather.v2", "parameters": {}}'),
        ("pythonic", "[get-weather.v2()]"),
        ("deepseek_v31", BLOCK.format(f"{BEGIN}get-weather.v2{SEP}{{}}{END}")),
        ("deepseek_v3", BLOCK.format(FENCED.format("{}").replace("get_weather", "get-weather.v2"))),
        ("gpt_oss", TO_WEATHER.replace("get_weather", "get-weather.v2") + "{}"),
    ],
)
def test_a_name_with_dots_and_dashes(name: str, text: str) -> None:
    """As functions may have them."""
    assert parse(new_parser(name), text) == ParsedOutput("", "", [Call("get-weather.v2", "{}")])


@pytest.mark.parametrize("name", ["mistral", "mistral_list"])
def test_the_length_that_templates_of_mistral_demand_of_ids(name: str) -> None:
    assert len(output_format(name, "none", "").new_call_id()) == 9


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{{"name": {}}}</tool_call>'),
        ("hermes", '<tool_call>{{"arguments": {}, "name": "f"}}</tool_call>'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}"),
        ("llama3_json", '{{"parameters": {}, "name": "f"}}'),
        ("deepseek_v31", BLOCK.format(f"{BEGIN}f{SEP}{{}}{END}")),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("pythonic", "[f(a={})]"),
    ],
)
def test_lists_that_are_nested_too_deeply_end_no_answer(name: str, text: str) -> None:
    """What no grammar holds may be any text. Catches an error of Python's reader that leaves the parser."""
    parse(new_parser(name), text.format("[" * 5000 + "]" * 5000))


def test_a_text_after_a_call_that_looks_like_a_call() -> None:
    for name, call in (("hermes", hermes(PARIS)), ("qwen3_coder", qwen3_coder(PARIS))):
        assert parse(new_parser(name), f"{call}\na <tool").content == "a <tool"
        assert parse(new_parser(name), f"{call}\n<tool").content == "", "a further call"
        assert parse(new_parser(name), f"{call}\n<table>").content == "<table>"


WORDS = [
    *("<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": ', '{"a": ', '"x\\', '"', "}", "{", "[", "]", ","),
    *("<function=f>", "</function>", "\n", " ", "<parameter=city>", "\n</parameter>", "[TOOL_CALLS]", "[ARGS]", "; "),
    *("f(", "a=", "'", ")", "1", "true", CALLS_BEGIN, BEGIN, SEP, "\n```json\n", END, "<|channel|>", "final", "é", ":"),
    *("analysis", "<|message|>", "<|end|>", "<|start|>", " to=functions.f", "<think>", "</think>", "[THINK]"),
    *("[/THINK]", "ab"),
]


@pytest.mark.parametrize("reasoning_parser", ["none", "qwen3", "deepseek_r1", "mistral"])
@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "gpt_oss"])
@given(words=st.lists(st.sampled_from(WORDS), max_size=25), seed=st.integers())
def test_any_text(name: str, reasoning_parser: str, words: list[str], seed: int) -> None:
    """Catches an end without an end, a parser that falls, and events that depend on the pieces."""
    turn = output_format(name, reasoning_parser, "").turn("", ToolUse(FUNCTIONS))
    assert turn is not None
    text = "".join(words)
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=4))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert in_pieces(turn.parser(), pieces) == parse(turn.parser(), text)


@given(words=st.lists(st.sampled_from(WORDS), max_size=25))
def test_any_text_in_channels(words: list[str]) -> None:
    text = "".join(words)
    assert in_pieces(new_parser("gpt_oss"), list(text)) == parse(new_parser("gpt_oss"), text)


# ---- thoughts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\na b\n</think>\n\nc\n", "a b", "c\n"),
        ("qwen3", "", "\n c ", "", "\n c "),
        ("qwen3", "", "c</think>", "", "c</think>"),
        ("qwen3", "", "<think></think>\n\nc", "", "c"),
        ("qwen3", "<think>\n", "a</think>c", "a", "c"),
        ("qwen3", "<think>\n\n</think>\n\n", "<think>c", "", "<think>c"),
        ("qwen3", "<think>\n", "a", "a", ""),
        ("qwen3", "<think>\n", "\n</think>\n\nc", "", "c"),
        ("deepseek_r1", "", "a\n</think>\n\nc", "a", "c"),
        ("deepseek_r1", "", "<think>a</think>c", "a", "c"),
        ("mistral", "", "[THINK]a[/THINK]c", "a", "c"),
        ("gpt_oss", "", channel("analysis", "a ") + channel("analysis", "b") + channel("final", "c", ""), "a \nb", "c"),
    ],
)
def test_a_thought(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    """Whether the prompt, the output or neither opens it."""
    turn = output_format("none", name, "").turn(prompt)
    assert turn is not None and turn.structured_output is None
    expected = ParsedOutput(content, reasoning)
    assert parse(turn.parser(), text) == expected
    for cut in range(len(text) + 1):
        parser = turn.parser()
        assert in_pieces(parser, [text[:cut], text[cut:]]) == expected
        thoughts = [text[begin:end] for begin, end in parser.thoughts]
        assert "\n".join(map(str.strip, thoughts)) == reasoning.replace(" \n", "\n")


def test_a_long_text_before_a_mark_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again at each piece that comes."""
    num_searched = 0

    class Watched:
        def __init__(self, pattern: str) -> None:
            self._search = re.compile(pattern).search

        def search(self, text: str, begin: int = 0) -> re.Match[str] | None:
            nonlocal num_searched
            num_searched += len(text) - begin
            return self._search(text, begin)

    monkeypatch.setattr(source_module, "re", SimpleNamespace(compile=Watched, escape=re.escape))
    source = Source()
    reader = source.text_until("<end>", "|")
    text = "a <en" * 1000
    for piece in (*text, *"<end"):
        assert next(reader) is None
        source.text += piece
    assert next(reader) is None
    source.text += "> b"
    with pytest.raises(StopIteration) as end:
        next(reader)
    assert end.value.value == (text, "<end>") and source.text == " b"
    assert num_searched < 10 * len(text)


def test_thoughts_have_all_between_their_tags() -> None:
    """White space, too, is of the tokens that a thought took."""
    for name, prompt, text, expected in (
        ("qwen3", "", "\n<think>\na\n</think>\nb", ["\na\n"]),
        ("qwen3", "<think>", "\na", ["\na"]),
        ("mistral", "", "[THINK] [/THINK]", [" "]),
        ("gpt_oss", "", channel("analysis", " a ") + channel("analysis", "b") + channel("final", "c"), [" a ", "b"]),
    ):
        turn = output_format("none", name, "").turn(prompt)
        assert turn is not None
        parser = turn.parser()
        parse(parser, text)
        assert [text[begin:end] for begin, end in parser.thoughts] == expected


def test_a_thought_and_a_call() -> None:
    turn = output_format("hermes", "qwen3", "").turn("", ToolUse(FUNCTIONS))
    assert turn is not None
    text = f"<think>\nRain?\n</think>\n\n{hermes(PARIS)}"
    expected = ParsedOutput("", "Rain?", [Call("get_weather", json.dumps(PARIS))])
    assert in_pieces(turn.parser(), list(text)) == expected


@pytest.mark.parametrize(
    ("name", "reasoning_parser", "calls"),
    [
        ("hermes", "qwen3", f"{hermes(LONDON)}\n{hermes(PARIS)}"),
        ("qwen3_coder", "qwen3", f"{qwen3_coder(LONDON)}\n{qwen3_coder(PARIS)}"),
        ("deepseek_v31", "qwen3", BLOCK.format(deepseek(LONDON) + deepseek(PARIS))),
        ("mistral", "mistral", "".join(f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(each)}" for each in (LONDON, PARIS))),
        ("mistral_list", "mistral", f"[TOOL_CALLS] [{listed(LONDON)}, {listed(PARIS)}]"),
    ],
)
def test_a_call_ends_a_thought(name: str, reasoning_parser: str, calls: str) -> None:
    """As in vLLM, where the thought has no end of its own, or one that comes after the call."""
    begin, end = ("[THINK]", "[/THINK]") if reasoning_parser == "mistral" else ("<think>", "</think>")
    expected = ParsedOutput("", "Rain?", [Call("get_weather", json.dumps(each)) for each in (LONDON, PARIS)])
    for prompt, text, content in (
        ("", f"{begin}\nRain?\n{calls}", ""),
        (f"{begin}\n", f"Rain?\n{calls}", ""),
        (f"{begin}\n", f"Rain?\n{calls}\n", ""),
        (begin, f"Rain? {calls}\n{end}", ""),
        (begin, f"Rain? {calls}{end}\n\nI look.", "I look."),
        (begin, f"Rain? {calls}{end[:-1]}", end[:-1]),
        (begin, f"Rain? {calls}I look.{end}", f"I look.{end}"),
    ):
        turn = output_format(name, reasoning_parser, "").turn(prompt, ToolUse(FUNCTIONS))
        assert turn is not None
        expected.content = content
        for cut in range(len(text) + 1):
            parser = turn.parser()
            assert in_pieces(parser, [text[:cut], text[cut:]]) == expected, text[:cut]
            [(first, last)] = parser.thoughts
            assert text[first:last].strip() == "Rain?" and text[last:].startswith(calls)
        assert in_pieces(turn.parser(), list(text)) == expected


@pytest.mark.parametrize(
    ("reasoning_parser", "use"),
    [("deepseek_r1", ToolUse(FUNCTIONS)), ("qwen3", ToolUse(())), ("qwen3", None)],
    ids=["another form of thoughts", "no call may come", "no tools"],
)
def test_a_call_that_is_of_a_thought(reasoning_parser: str, use: ToolUse | None) -> None:
    turn = output_format("hermes", reasoning_parser, "").turn("", use)
    assert turn is not None
    text = f"<think>\nRain? {hermes(LONDON)}\n</think>\n\nYes."
    assert in_pieces(turn.parser(), list(text)) == ParsedOutput("Yes.", f"Rain? {hermes(LONDON)}")


def test_an_answer_that_is_continued() -> None:
    """The prompt has its beginning already."""
    thoughts = output_format("none", "qwen3", "")
    for continued, text, expected in (
        ("<think>a", "b</think>c", ParsedOutput("c", "b")),
        ("<think>a</think>b", "c", ParsedOutput("c")),
        ("b", "<think>", ParsedOutput("<think>")),
    ):
        turn = thoughts.turn(f"prompt {continued}", continued=continued)
        assert turn is not None and parse(turn.parser(), text) == expected
