"""Forms of output: what a user may say, what llguidance makes of it, and how a matcher follows an output."""

import json
import re
import sys
import threading
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pagedattn_serve import DEMO_MODEL, StructuredOutput
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.sampling import grammar
from pagedattn_serve.sampling.grammar import GrammarCompiler, error_of
from pagedattn_serve.structured_output import MAX_CHARACTERS

EOS = frozenset((0, 1))


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer), EOS)


def allowed(matcher: Any) -> set[int]:
    """What llguidance's matcher allows next."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


# ---- what a user may say ---------------------------------------------------------------------------------------------


def test_what_is_kept() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    form = StructuredOutput(json=schema)
    assert (
        form.kind == "json" and isinstance(form.json, str) and list(json.loads(form.json)["properties"]) == ["b", "a"]
    )
    assert form == StructuredOutput(json=json.dumps(schema)) and hash(form) == hash(StructuredOutput(json=schema))
    schema["type"] = "array"
    assert json.loads(form.schema)["type"] == "object"
    assert StructuredOutput(choice=["a", "b"]) == StructuredOutput(choice=("a", "b"))
    assert StructuredOutput(json={}).kind == "json" and StructuredOutput(regex="").kind == "regex"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, ValueError, "structured_output: expected one of json, .*, grammar, structural_tag, got none"),
        ({"json": "{}", "regex": "a"}, ValueError, "structured_output: expected one of .*, got json and regex"),
        ({"json_object": True, "choice": ["a"]}, ValueError, "got json_object and choice"),
        ({"json_object": 1}, TypeError, "json_object: expected a bool"),
        ({"json": ["a"]}, TypeError, "json: expected a JSON schema as a dict, a bool or a string, got list"),
        ({"json": "{"}, ValueError, "json: expected a JSON schema, got what is no JSON"),
        ({"json": "[" * 10**5}, ValueError, "json: expected a JSON schema, got what is no JSON"),
        ({"json": {"const": {1, 2}}}, ValueError, "json: expected a JSON schema, got what is no JSON"),
        ({"json": {"const": float("nan")}}, ValueError, "json: expected a JSON schema, got what is no JSON"),
        ({"json": {"enum": ["a" * MAX_CHARACTERS]}}, ValueError, "json: expected at most 100,000 characters"),
        ({"regex": b"a"}, TypeError, "regex: expected a string, got bytes"),
        ({"regex": "\ud800"}, ValueError, "regex: expected text that UTF-8 can write"),
        ({"grammar": "a" * (MAX_CHARACTERS + 1)}, ValueError, "grammar: expected at most 100,000 characters"),
        ({"choice": "ab"}, TypeError, "choice: expected a list of strings, got str"),
        ({"choice": []}, ValueError, "choice: expected one string at least"),
        ({"choice": ["a", ""]}, ValueError, "choice: expected one string at least, and no empty one"),
        ({"choice": ["a", 1]}, TypeError, "choice: expected a string, got int"),
        ({"choice": ["a" * 60_000, "b" * 60_000]}, ValueError, "choice: expected at most 100,000 characters together"),
        ({"regex": "a", "whitespace_pattern": ""}, ValueError, "whitespace_pattern: expected None beside regex"),
        ({"json": "{}", "whitespace_pattern": 1}, TypeError, "whitespace_pattern: expected a string, got int"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StructuredOutput(**fields)


# ---- what llguidance makes of it -------------------------------------------------------------------------------------

ACCEPTED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "json": ({"json": {"type": "array", "items": {"type": "null"}}}, ["[]", "[null , null]"], ["null", "[1]", "[}"]),
    "json as text": ({"json": '{"enum": ["a", 1]}'}, ['"a"', "1"], ["a", "2"]),
    "no white space": ({"json": {"const": [1, 2]}, "whitespace_pattern": ""}, ["[1,2]"], ["[1, 2]", " [1,2]"]),
    "json object": ({"json_object": True}, ["{}", '{ "a": [1, {}]}'], ["[]", "1", '{"a"}']),
    "compact object": ({"json_object": True, "whitespace_pattern": ""}, ['{"a":1}'], ['{"a": 1}']),
    "regex": ({"regex": "(the|a) c[au]t+"}, ["the cat", "a cutt"], ["the", "xthe cat", "the catx"]),
    "regex, any character": ({"regex": r"\d{2}/é."}, ["12/é🙂"], ["1/éa", "12/é"]),
    "nothing": ({"regex": ""}, [""], ["a"]),
    "choice": ({"choice": ['the "cat"', "a\n\\é🙂", "the"]}, ['the "cat"', "a\n\\é🙂", "the"], ["a", "the cat"]),
    "grammar": ({"grammar": 'start: "a" | "(" start ")"'}, ["a", "((a))"], ["(a", "b"]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_each_kind(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    fields, right, wrong = ACCEPTED[name]
    for text, is_right in [*((text, True) for text in right), *((text, False) for text in wrong)]:
        matcher = compiler.matcher(StructuredOutput(**fields)).advance([])
        token_ids = ids(tokenizer, text)
        follows = matcher.validate_tokens(token_ids) == len(token_ids) and matcher.consume_tokens(token_ids)
        assert (follows and allowed(matcher) >= EOS) == is_right, text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": "[]"}, "schema must be an object"),
        ({"json": "[]", "whitespace_pattern": ""}, "Expecting object schema"),
        ({"json": "false"}, "false, which no value follows"),
        ({"json": {"type": "array", "uniqueItems": True}}, r'Unimplemented keys: \["uniqueItems"\]'),
        ({"json": {"$ref": "https://example.com/schema"}}, r"\$ref: Resource"),
        ({"json_object": True, "whitespace_pattern": "["}, "regex parse error"),
        ({"regex": "(a"}, r'(.|\n)*invalid regex "\(a"'),
        ({"regex": "(?=a)b"}, r"(.|\n)*look-around"),
        ({"grammar": "start: b"}, '(.|\n)*unknown name: "b"'),
        ({"grammar": ""}, "Empty grammar"),
    ],
)
def test_a_form_that_cannot_be_held_to(compiler: GrammarCompiler, fields: dict[str, Any], reason: str) -> None:
    form = StructuredOutput(**fields)
    expected = f"a form ({form.kind}) that an output can be held to"
    message = re.escape(f"structured_output: expected {expected}, got ")
    with pytest.raises(ArgumentError, match=f"^{message}{reason}") as caught:
        compiler.matcher(form)
    assert (caught.value.argument, caught.value.expected) == ("structured_output", expected)


@pytest.mark.parametrize(
    ("ebnf", "right", "wrong"),
    [
        # Rules that never come to themselves are one expression: a lexer that takes the longest would refuse this.
        ('root ::= [a-z]* "end" # or\n', ["end", "endxend"], ["en", "endx"]),
        (
            'root ::= sum\nsum ::= term\n  | sum "+" term\nterm ::= [a-z]+ | "(" sum ")"',
            ["a", "a+(b+cc)"],
            ["a+", "(a"],
        ),
        (r'root ::= "\x41\u00e9\U0001F600\t\"\\/" [\]^\-/][a-][^a] .', ['Aé😀\t"\\/]-\n\n', 'Aé😀\t"\\/^ab '], ["A"]),
        (r'root ::= "\e[0m" [\a\v]', ["\x1b[0m\a", "\x1b[0m\v"], ["e[0ma", "\x1b[0mv"]),
        (
            'root ::= a-b c_D\na-b::="x"\nc_D ::= "y"{2} ("z"{1,} | ) | "v"{1,2} | () "w" |',
            ["xyy", "xyyzz", "xvv", "xw", "x"],
            ["xy", "xvvv"],
        ),
    ],
)
def test_ebnf(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, ebnf: str, right: list[str], wrong: list[str]
) -> None:
    """Also as a part of a structural tag."""
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": ebnf}}
    for form in (StructuredOutput(grammar=ebnf), StructuredOutput(structural_tag=tag)):
        for text, is_right in [*((text, True) for text in right), *((text, False) for text in wrong)]:
            matcher = compiler.matcher(form).advance([]).deep_copy()
            token_ids = ids(tokenizer, text)
            follows = matcher.validate_tokens(token_ids) == len(token_ids) and matcher.consume_tokens(token_ids)
            assert (follows and matcher.is_accepting()) == is_right, text


@pytest.mark.parametrize(
    ("ebnf", "reason"),
    [
        ('root ::= "a"\nb ::= (= "c")', r"line 2 of EBNF: expected a part of a rule, got '= \"c\"\)'"),
        ('a ::= "a"', "expected a rule root, got a"),
        ("root ::= a", "rule root: expected names of rules, got a"),
        ('root ::= "a"\nroot ::= "b"', "rule root: expected one rule of this name, got two"),
        ('"a"\nroot ::= "a"', 'expected a rule of EBNF first, as in root ::= ..., got "a"'),
        ('root ::= "a"\nb ::= "\\UFFFFFFFF"', r"line 2 of EBNF: expected an escape of a character, .* got \\UFFFFFFFF"),
        (r"root ::= [^\d]", r"line 1 of EBNF: expected an escape of a character, .* got \\d"),
        (r'root ::= "\x4"', r"line 1 of EBNF: expected an escape of a character, .* got \\x"),
    ],
)
def test_what_is_no_ebnf(compiler: GrammarCompiler, ebnf: str, reason: str) -> None:
    with pytest.raises(ArgumentError, match=rf"a form \(grammar\) that an output can be held to, got {reason}"):
        compiler.matcher(StructuredOutput(grammar=ebnf))


def test_references_in_a_row_do_not_end_the_process(compiler: GrammarCompiler) -> None:
    """On a thread's usual stack, llguidance overruns it."""
    size, lines = 0, ["start: a0"]
    while size < MAX_CHARACTERS - 100:
        lines.append(f"a{len(lines) - 1}:a{len(lines)}")
        size += len(lines[-1]) + 1
    deep_grammar = "\n".join([*lines, f'a{len(lines) - 1}: "x"'])
    assert len(lines) > 6000
    compiler.matcher(StructuredOutput(grammar=deep_grammar))
    links = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(2200)}
    schema = {"$ref": "#/$defs/0", "$defs": {**links, "2200": {"type": "null"}}}
    compiler.matcher(StructuredOutput(json=json.dumps(schema)))
    assert threading.stack_size() == 0


def test_thousands_of_choices(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    """All begin alike, so that all go on after the first token."""
    matcher = compiler.matcher(StructuredOutput(choice=[f"a{i}" for i in range(5000)])).advance([])
    assert matcher.consume_tokens(ids(tokenizer, "a4321")) and error_of(matcher) is None
    assert allowed(matcher) >= EOS


def test_a_form_is_compiled_once(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(grammar, "_compile", lambda tokens, form: compiled.append(form))
    compiler = GrammarCompiler(tokenizer, len(tokenizer), EOS)
    one, other = StructuredOutput(json={"type": "null"}), StructuredOutput(regex="a")
    for form in (one, other, StructuredOutput(json={"type": "null"}), one, other):
        compiler.matcher(form)
    assert compiled == [one, other]


def test_without_llguidance(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"expected llguidance: in a clone .*: pip .*'\./python\[structured\]'$"):
        GrammarCompiler(tokenizer, len(tokenizer), EOS)


def test_a_model_without_an_end(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"^structured_output: expected a model with an end-of-sequence token"):
        GrammarCompiler(tokenizer, len(tokenizer), frozenset())


def test_a_tokenizer_that_llguidance_cannot_read() -> None:
    class Slow:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    with pytest.raises(ValueError, match=r"^structured_output: expected a tokenizer that llguidance can read"):
        GrammarCompiler(Slow(), 10, EOS)


@pytest.mark.parametrize("vocab_size", [2000, 2048, 2049, 2200])
def test_vocabularies_of_other_sizes(vocab_size: int) -> None:
    """A model may have more tokens than the tokenizer, which never come, or fewer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    compiler = GrammarCompiler(tokenizer, vocab_size, frozenset((0, 7)))
    matcher = compiler.matcher(StructuredOutput(regex=".*"))
    assert matcher.num_mask_words == -(-max(vocab_size, 2048) // 32)
    free = allowed(matcher.advance([]))
    assert {0, 7} < free and max(free) < 2048 and len(free) > 1500


# ---- how a matcher follows an output ---------------------------------------------------------------------------------


def test_a_matcher_follows(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    form = StructuredOutput(regex="ab(cd|ef)")
    a, b, c, d, e = (ids(tokenizer, letter)[0] for letter in "abcde")
    matcher = compiler.matcher(form)
    assert a in allowed(matcher.advance([])) and b not in allowed(matcher.advance([]))
    assert {c, e} <= allowed(matcher.advance([a, b]))
    fork = matcher.fork()
    assert allowed(matcher.advance([a, b, c])) == {d}
    assert {c, e} <= allowed(fork.advance([a, b]))
    assert allowed(matcher.advance([a, b, c, d])) == EOS
    assert a in allowed(compiler.matcher(form).advance([]))
    assert error_of(matcher.advance([a, b, c, d])) is None


def test_an_output_that_does_not_follow(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    matcher = compiler.matcher(StructuredOutput(regex="ab")).advance(ids(tokenizer, "b"))
    error = error_of(matcher)
    assert error is not None and error.argument == "structured_output"
    assert "doesn't satisfy the grammar" in error.got and "\n" not in error.got


def test_an_interrupt_while_it_follows(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    class Interrupting(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise KeyboardInterrupt

    a, b, c = (ids(tokenizer, letter)[0] for letter in "abc")
    matcher = compiler.matcher(StructuredOutput(regex="abc"))
    matcher.advance([a])
    with pytest.raises(KeyboardInterrupt):
        matcher.advance(Interrupting([a, b]))
    assert allowed(matcher.advance([a, b])) == {c}
