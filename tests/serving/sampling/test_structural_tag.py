"""Structural tags: what outputs each type of format allows."""

import json
from typing import Any

import pytest
from checkpoints import EOS
from tool_models import make_tool_tokenizer
from transformers import PreTrainedTokenizerFast

from pagedattn_serve import StructuredOutput
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.sampling.grammar import GrammarCompiler

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"enum": ["x", "y"]},
        "d": {"type": "boolean"},
        "e": {"type": ["string", "null"]},
    },
    "required": ["a"],
    "additionalProperties": False,
}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def tag(begin: str, end: str, content: Any = INTEGER) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TAGS = {"tags": [tag("<tool_call>a=", "</tool_call>"), tag("<tool_call>b=", ".")]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<tool_call>"], **TAGS}
SEPARATED = {"type": "tags_with_separator", "separator": ", ", **TAGS}
A, B = "<tool_call>a=1</tool_call>", "<tool_call>b=-22."
XML = "\n<parameter={}>\n{}\n</parameter>"

# By a name: the format, what it allows, and what it does not.
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "text": ({"type": "any_text"}, ["", "a\n🙂 <tool_call>"], ["a[TOOL_CALLS]"]),
    "text without": ({"type": "any_text", "excludes": ["<tool_call>", "a/b"]}, ["a/<tool_cal"], [A, "xa/bx"]),
    "constant": ({"type": "const_string", "value": 'a"<think>\n'}, ['a"<think>\n'], ["", "a", 'a"<think>\nb']),
    "sequence": (
        {"type": "sequence", "elements": [{"type": "const_string", "value": "n="}, INTEGER]},
        ["n=5"],
        ["5", "n="],
    ),
    "lenient": (
        {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}, "lenient": True},
        ["[1, 1]"],
        ["{}"],
    ),
    "or": ({"type": "or", "elements": [INTEGER, {"type": "regex", "pattern": "/a+"}]}, ["5", "/aa"], ["5/a"]),
    "grammar": (tag("<", "!", {"type": "grammar", "grammar": 'start: "a" start | "b"'}), ["<aab!"], ["aab", "<!"]),
    "text in a tag": (tag("<think>", "</think>.", {"type": "any_text"}), ["<think>a<think></think>."], ["<think>a"]),
    "text in a tag, without": (
        tag("<think>", "</think>", {"type": "any_text", "excludes": ["<tool_call>", "a/b"]}),
        ["<think>a/<tool_cal<think></think>"],
        ["<think><tool_call></think>", "<think>xa/bx</think>", "<think></think>a/b"],
    ),
    "text in a tag without a token": (tag("(", "end.", {"type": "any_text"}), ["(a en end."], ["(a end.b"]),
    "triggered": (TRIGGERED, ["", "a", f"a{A}b{B}{A}c"], ["a<tool_call>", "a<tool_call>c=1", "[TOOL_CALLS]"]),
    "one at least": ({**TRIGGERED, "at_least_one": True}, [f"a{A}", f"{A}{B}a"], ["", "a"]),
    "the first alone": ({**TRIGGERED, "stop_after_first": True}, ["", "a", f"a{A}"], [f"{A}a", f"{A}{B}"]),
    "one": ({**TRIGGERED, "stop_after_first": True, "at_least_one": True}, [f"a{B}"], ["a", f"{A}{B}"]),
    "a trigger of text": (
        {"type": "triggered_tags", "triggers": ["f("], "tags": [tag("f(", ")")]},
        ["f", "of(5)g(x", "f(5)f(6)"],
        ["f(x", "f(5"],
    ),
    "separated": (SEPARATED, ["", A, f"{A}, {B}"], [f"{A}{B}", f"{A}, ", "a"]),
    "separated, one at least": ({**SEPARATED, "at_least_one": True}, [A], [""]),
    "separated, the first alone": ({**SEPARATED, "stop_after_first": True}, ["", A], [f"{A}, {B}"]),
    "qwen_xml": (
        {"type": "json_schema", "json_schema": SCHEMA, "style": "qwen_xml"},
        [
            XML.format("a", 'b "c"\nd'),
            XML.format("a", "") + XML.format("b", "-3") + XML.format("c", "y"),
            XML.format("a", "b") + XML.format("d", "true") + XML.format("e", "null"),
        ],
        ["", XML.format("b", "1"), XML.format("a", "b") + XML.format("c", "z"), XML.format("a", "b") + "c"],
    ),
    "python": (
        {"type": "json_schema", "json_schema": SCHEMA, "style": "python"},
        ['a="b"', 'a="", b=3, c="x", d=True, e=null'],
        ["", "b=3", 'a="b", ', 'a="b", d=true', 'a="b" b=3'],
    ),
    "any arguments": (
        {"type": "json_schema", "json_schema": {"type": "object"}, "style": "python"},
        ["", "a=1", 'a=1, b=["c"]'],
        ["1", "a=1,b"],
    ),
    "arguments with definitions": (
        {
            "type": "json_schema",
            "json_schema": {
                "properties": {"a": {"$ref": "#/definitions/n"}},
                "required": ["a"],
                "definitions": {"n": {"type": "integer"}},
            },
            "style": "python",
        },
        ["a=1"],
        ["", 'a="1"'],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tool_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerFast) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer), frozenset([tokenizer.convert_tokens_to_ids(EOS)]))


def structural_tag(form: Any, **fields: Any) -> StructuredOutput:
    return StructuredOutput(structural_tag={"type": "structural_tag", "format": form}, **fields)


@pytest.mark.parametrize("name", FORMATS)
def test_each_type(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """With the tokens of a tag, and with its text in other tokens."""
    form, right, wrong = FORMATS[name]
    for text, is_right in [*((text, True) for text in right), *((text, False) for text in wrong)]:
        in_bytes = [token_id for letter in text for token_id in tokenizer(letter).input_ids]
        forms = [tokenizer(text).input_ids]
        if "[TOOL_CALLS]" not in text:  # of which a text may have the letters
            forms.append(in_bytes)
        for token_ids in forms:
            matcher = compiler.matcher(structural_tag(form)).advance([]).deep_copy()
            follows = matcher.validate_tokens(token_ids) == len(token_ids) and matcher.consume_tokens(token_ids)
            assert (follows and matcher.is_accepting()) == is_right, (text, token_ids)


def test_a_bound_of_tokens(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast) -> None:
    """Of which any may come but the end, and what ends an output."""
    form = tag("<think>", "</think>", {"type": "any_text", "max_tokens": 3})
    for text, is_right in (("", True), ("abc", True), ("a<tool_call>}}", True), ("abcd", False), ("a</s>", False)):
        token_ids = tokenizer(f"<think>{text}</think>").input_ids
        matcher = compiler.matcher(structural_tag(form)).advance([])
        assert (matcher.validate_tokens(token_ids) == len(token_ids)) == is_right, text


def test_a_bound_of_no_tokens(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast) -> None:
    matcher = compiler.matcher(structural_tag(tag("<think>", "</think>", {"type": "any_text", "max_tokens": 0})))
    for text, is_right in (("", True), ("a", False)):
        token_ids = tokenizer(f"<think>{text}</think>").input_ids
        assert (matcher.advance([]).validate_tokens(token_ids) == len(token_ids)) == is_right


def test_a_bound_of_tokens_without_some(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast) -> None:
    form = tag("<think>", "</think>", {"type": "any_text", "max_tokens": 3, "excludes": ["<tool_call>"]})
    for text, is_right in (("abc", True), ("a</tool_call>b", True), ("a<tool_call>", False), ("abcd", False)):
        token_ids = tokenizer(f"<think>{text}</think>").input_ids
        matcher = compiler.matcher(structural_tag(form)).advance([])
        assert (matcher.validate_tokens(token_ids) == len(token_ids)) == is_right, text


def test_definitions(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast) -> None:
    """A format may stand in several places, and in another definition."""
    one, two = {"type": "defined", "index": 0}, {"type": "defined", "index": 1}
    form = {"type": "sequence", "elements": [tag("<", ">", one), two]}
    whole = {"type": "structural_tag", "format": form, "definitions": [INTEGER, tag("(", ")", one)]}
    for text, is_right in (("<5>(6)", True), ("<5>6", False), ("<a>(6)", False)):
        token_ids = tokenizer(text).input_ids
        matcher = compiler.matcher(StructuredOutput(structural_tag=whole)).advance([])
        assert (matcher.validate_tokens(token_ids) == len(token_ids)) == is_right, text
    for definitions, message in (
        ({"a": INTEGER}, "definitions: expected a list of formats, got dict"),
        ([INTEGER], r"format.elements\[1\].index: expected that of a definition, got 1"),
        ([{"type": "no"}], r"format.elements\[0\].content .after '<'.\.type: expected one of"),
        ([one], r"format.elements\[0\].content .after '<'.\.index: expected that of a definition without itself in it"),
        ([two, one], "expected that of a definition without itself in it, got 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            compiler.matcher(StructuredOutput(structural_tag={**whole, "definitions": definitions}))


def test_white_space_of_json(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast) -> None:
    form = tag("<think>", ".", {"type": "json_schema", "json_schema": {"const": [1, 2]}})
    for pattern, text, is_right in ((None, "[1,  2]", True), ("", "[1,2]", True), ("", "[1, 2]", False)):
        token_ids = tokenizer(f"<think>{text}.").input_ids
        matcher = compiler.matcher(structural_tag(form, whitespace_pattern=pattern)).advance([])
        assert (matcher.validate_tokens(token_ids) == len(token_ids)) == is_right


def test_the_older_words(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast) -> None:
    """Text, but from a trigger on one of the structures that begin with it."""
    structures = [{"begin": f"<{name}>", "schema": {"const": i}, "end": f"</{name}>"} for i, name in enumerate("ab")]
    form = {"type": "structural_tag", "structures": structures, "triggers": ["<"]}
    for text, is_right in (("x<a>0</a><b>1</b>y", True), ("x", True), ("<a>1", False), ("<c>", False)):
        token_ids = tokenizer(text).input_ids
        matcher = compiler.matcher(StructuredOutput(structural_tag=form)).advance([])
        assert (matcher.validate_tokens(token_ids) == len(token_ids)) == is_right, text
    for wrong, message in (
        ({**form, "structures": {}}, "structures: expected a list, got dict"),
        ({**form, "structures": [{"begin": "<"}]}, r'structures\[0\]: expected {"begin": ..., "schema": ...,'),
        ({**form, "structures": [{"schema": {}, "begin": "<"}]}, r"format.tags\[0\].end: expected a string, got None"),
        ({**form, "triggers": None}, "format.triggers: expected a list of one at least, got None"),
    ):
        with pytest.raises(ArgumentError, match=message):
            compiler.matcher(StructuredOutput(structural_tag=wrong))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (None, "format.type: expected one of const_string, .*, got None"),
        ({"type": "text"}, "format.type: expected one of .*, got 'text'"),
        ({"type": "sequence", "elements": []}, "format.elements: expected a list of one at least"),
        (
            {"type": "sequence", "elements": [INTEGER, {"type": "tag"}]},
            r"format.elements\[1\].begin: expected a string",
        ),
        ({"type": "or", "elements": [1]}, r"format.elements\[0\].type: expected one of"),
        ({**TRIGGERED, "triggers": ["x"]}, "format.triggers: expected the beginnings of tags, got 'x'"),
        ({**TRIGGERED, "triggers": [""]}, r"format.triggers: expected a list of texts, none of them empty, got \[''\]"),
        ({"type": "any_text", "excludes": [5]}, "format.excludes: expected a list of texts"),
        ({"type": "any_text", "excludes": 5}, "format.excludes: expected a list of texts"),
        ({"type": "any_text", "excludes": "ab"}, "format.excludes: expected a list of texts"),
        ({"type": []}, r"format.type: expected one of .*, got \[\]"),
        ({"type": "json_schema"}, "format.json_schema: expected a value, got None"),
        ({**INTEGER, "style": []}, "format.style: expected one of json, qwen_xml, python"),
        ({**TRIGGERED, "tags": [INTEGER]}, r"format.tags\[0\].type: expected tag, got 'json_schema'"),
        (
            tag("", "</think>", {"type": "any_text", "max_tokens": -1}),
            "content.max_tokens: expected an int >= 0, got -1",
        ),
        (tag("", "end", {"type": "any_text", "max_tokens": 1}), "content.max_tokens: expected none, as 'end' is not"),
        (
            tag("", "</think>", {"type": "any_text", "max_tokens": 1, "excludes": ["a"]}),
            "content.max_tokens: expected none, as 'a' is not",
        ),
        (tag("", "</think>", {"type": "any_text", "excludes": "ab"}), "content .*.excludes: expected a list of texts"),
        ({**INTEGER, "style": "yaml"}, "format.style: expected one of json, qwen_xml, python"),
        (tag("a", "b", {"type": "json_schema", "json_schema": {"type": "no"}}), "format.content .after 'a'.: Invalid"),
        (tag("a", "b", {"type": "json_schema", "json_schema": False}), "format.content .*: false, which no value"),
        ({"type": "json_schema", "json_schema": {"uniqueItems": True}}, r"format: Unimplemented keys: ..uniqueItems"),
        ({"type": "regex", "pattern": "(a"}, "format: at .* invalid regex"),
    ],
)
def test_what_is_refused(compiler: GrammarCompiler, form: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"a form \(structural_tag\) that .*, got (.|\n)*{message}"):
        compiler.matcher(structural_tag(form))


def test_what_is_no_tag(compiler: GrammarCompiler) -> None:
    with pytest.raises(ArgumentError, match=r'got expected {"type": "structural_tag"'):
        compiler.matcher(StructuredOutput(structural_tag=json.dumps({"format": INTEGER})))
    with pytest.raises(TypeError, match=r"^structural_tag: expected a dict, or its JSON, got list"):
        StructuredOutput(structural_tag=[])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^structural_tag: expected a dict, or its JSON, got what is no JSON"):
        StructuredOutput(structural_tag="{")
