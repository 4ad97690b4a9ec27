"""Structured output in the engine: it holds whatever else a request asks for, whatever the batch, the cache and the
drafts; other requests do not notice."""

import json
import re
import sys
from collections import Counter
from typing import Any

import jsonschema_rs
import pytest
from checkpoints import Checkpoint
from engine_runs import completions, finish_all, run
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer

from pagedattn_serve import DEMO_MODEL, RequestOutput, SamplingParams, StructuredOutput
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.sampling import json_schema
from pagedattn_serve.sampling.grammar import GrammarCompiler

EOS = (0, 1)  # of ending_model
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["the cat", "the hat", "the mat"]}, "minItems": 3, "maxItems": 6},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WORDS = r"([a-z]{2,5} ){3}end"
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON, "whitespace_pattern": ""},
    "json as text": {"json": json.dumps(PERSON), "whitespace_pattern": " ?"},
    "json object": {"json_object": True, "whitespace_pattern": ""},
    "regex": {"regex": WORDS},
    "choice": {"choice": ["the cat sat", "the cat ran", "a hat"]},
    "grammar": {"grammar": 'start: "a" | "b" | "(" start "," start ")"'},
}
LARGE: dict[str, Any] = dict(num_blocks=300)  # for whatever is asked here at once, and quickly checked
SMALL: dict[str, Any] = dict(num_blocks=30, block_size=8, max_num_seqs=8, max_num_batched_tokens=64)
PROMPTS = ["the cat", "the end of the story", "a", "the hat and the mat"]


def params_of(name: str, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "structured_output": StructuredOutput(**FORMS[name]), **options})


def holds(name: str, text: str) -> bool:
    """Whether a text has one of FORMS."""
    if "json" in FORMS[name]:
        return jsonschema_rs.is_valid(PERSON, json.loads(text))
    if name == "json object":
        return isinstance(json.loads(text), dict)
    if name == "regex":
        return re.fullmatch(WORDS, text) is not None
    if name == "choice":
        return text in FORMS[name]["choice"]
    while "(" in text:  # a pair is what one letter is
        text, before = re.sub(r"\([ab],[ab]\)", "a", text), text
        if text == before:
            return False
    return text in ("a", "b")


def expect_form(name: str, output: RequestOutput) -> int:
    """All outputs that were not cut have the form; returns how many."""
    assert output.error is None
    ended = [each for each in output.outputs if each.finish_reason == "stop"]
    for each in ended:
        assert holds(name, each.text), each.text
        assert each.token_ids[-1] in EOS and each.stop_reason is None
        assert not set(each.token_ids[:-1]) & set(EOS)
    assert all(each.finish_reason in ("stop", "length") for each in output.outputs)
    return len(ended)


@pytest.fixture(scope="module")
def engine(ending_model: str) -> LLMEngine:
    return LLMEngine(ending_model, **LARGE)


# ---- every kind ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", FORMS)
def test_every_kind(engine: LLMEngine, name: str, temperature: float) -> None:
    outputs = run(engine, PROMPTS, params_of(name, temperature=temperature, seed=3))
    num_ended = sum(expect_form(name, output) for output in outputs)
    if name not in ("json object", "grammar"):  # which need not end
        assert num_ended == len(PROMPTS)


@pytest.mark.parametrize("name", ["json", "choice"])
def test_the_demo_model(name: str) -> None:
    engine = LLMEngine(DEMO_MODEL, **LARGE)
    [output] = run(engine, ["The with statement"], params_of(name, temperature=0))
    assert output.outputs[0].finish_reason == "stop" and holds(name, output.outputs[0].text)


def test_a_cut_output_is_length(engine: LLMEngine) -> None:
    [output] = run(engine, ["the cat"], params_of("regex", max_tokens=3))
    assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 3


def test_only_the_end_comes_at_the_end(engine: LLMEngine) -> None:
    """One token more than the text has: an end-of-sequence token, though the model finds others likelier."""
    [output] = run(engine, ["the"], SamplingParams(temperature=0, structured_output=StructuredOutput(regex="")))
    [each] = output.outputs
    assert (each.text, each.finish_reason, len(each.token_ids)) == ("", "stop", 1) and each.token_ids[0] in EOS


# ---- with other parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [dict(n=3), dict(n=2, best_of=4)])
@pytest.mark.parametrize("name", ["json", "regex", "choice"])
def test_several_outputs(engine: LLMEngine, name: str, options: dict[str, Any]) -> None:
    [output] = run(engine, ["the cat"], params_of(name, seed=1, **options))
    assert expect_form(name, output) == options["n"]
    if name != "choice":
        assert len({each.text for each in output.outputs}) == options["n"]


def test_seeds(engine: LLMEngine) -> None:
    one, again, other = run(engine, ["the cat"] * 3, [params_of("json", seed=seed) for seed in (5, 5, 6)])
    assert completions([one]) == completions([again]) != completions([other])


def test_restrictions_of_a_draw(engine: LLMEngine) -> None:
    kinds = [dict(top_k=2), dict(top_p=0.3), dict(min_p=0.5), dict(presence_penalty=2.0), dict(repetition_penalty=3.0)]
    kinds += [dict(frequency_penalty=-2.0, temperature=3.0), dict(logprobs=3)]
    params = [params_of("json", seed=2, **options) for options in kinds]
    assert [expect_form("json", output) for output in run(engine, ["the cat"] * len(kinds), params)] == [1] * len(kinds)


def first_ids(engine: LLMEngine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer(text).input_ids


def raised(logits: Tensor, token_id: int) -> Tensor:
    logits[token_id] = 1e4
    return logits


def test_bias_and_masks(engine: LLMEngine) -> None:
    def choose(choices: list[str], **options: Any) -> str:
        params = SamplingParams(structured_output=StructuredOutput(choice=choices), **options)
        [output] = run(engine, ["the"], params)
        assert output.outputs[0].finish_reason == "stop", output.error
        return output.outputs[0].text

    for word, other in (("x", "z"), ("z", "x")):
        [token_id] = first_ids(engine, word)
        assert choose(["x", "z"], logit_bias={token_id: 100}) == word
        assert choose(["x", "z"], allowed_token_ids=[token_id, *EOS]) == word
        assert choose(["x", "z"], bad_words=[other]) == word
        assert choose(["x", "z"], logits_processors=[lambda _, logits, i=token_id: raised(logits, i)]) == word
        assert choose(["x", "z"], logits_processors=[lambda _, logits: raised(logits, 99)]) in ("x", "z")


def test_min_tokens(engine: LLMEngine) -> None:
    form = StructuredOutput(regex="[a-z]{1,30}")
    for seed in range(4):
        params = SamplingParams(structured_output=form, min_tokens=8, max_tokens=40, seed=seed, logit_bias={0: 50})
        [output] = run(engine, ["the"], params)
        assert output.outputs[0].finish_reason == "stop" and len(output.outputs[0].token_ids) == 9


@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_a_form_that_has_ended_ends_the_output_before_min_tokens(ending_model: str, speculation: str | None) -> None:
    """Nothing but the end can come then."""
    engine = LLMEngine(ending_model, speculation=speculation)
    forms = [StructuredOutput(regex=regex) for regex in ("(abc){3}", "a{1,3}", "[a-z]{1,30}")]
    params = [SamplingParams(structured_output=form, seed=0, min_tokens=20, max_tokens=60) for form in forms]
    outputs = run(engine, ["abcabcabc"] * 3, params)
    assert [(output.error, output.outputs[0].finish_reason) for output in outputs] == [(None, "stop")] * 3
    texts = [output.outputs[0].text for output in outputs]
    assert texts[:2] == ["abcabcabc", "aaa"] and len(texts[2]) == 30  # and not sooner


@pytest.mark.parametrize("stop", ["stop", "stop_token_ids"])
def test_stops_cut_it_short(engine: LLMEngine, stop: str) -> None:
    value = ["bc"] if stop == "stop" else first_ids(engine, "c")
    params = SamplingParams(structured_output=StructuredOutput(regex="abcabc"), **{stop: value})
    [output] = run(engine, ["the"], params)
    [each] = output.outputs
    assert (each.text, each.finish_reason) == ("a" if stop == "stop" else "ab", "stop")
    assert each.stop_reason == value[0]


@pytest.mark.parametrize(
    "options",
    [
        dict(allowed_token_ids=[50, 51]),  # none of which begins a JSON text
        dict(regex="q+", bad_words=["q"]),
    ],
)
def test_nothing_left_to_choose(engine: LLMEngine, options: dict[str, Any]) -> None:
    """The request ends and says why; the others of its batch go on as they are alone."""
    form = StructuredOutput(regex=options.pop("regex")) if "regex" in options else StructuredOutput(json_object=True)
    bad = SamplingParams(structured_output=form, seed=0, **options)
    others = [params_of("json", seed=1), SamplingParams(temperature=0, max_tokens=20)]
    expected = [run(engine, ["the hat"], param)[0] for param in others]
    outputs = run(engine, ["the cat", "the hat", "the hat"], [bad, *others])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].error == "sampling_params: expected a token to choose, got masks that leave none"
    assert completions(outputs[1:]) == completions(expected)


def test_a_form_too_complex_to_go_on(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What llguidance reports in the middle ends the request in an error, though its mask then allows the end."""
    reports = iter([None, None, ArgumentError("structured_output", "a form", "lexer too complex")])
    monkeypatch.setattr("pagedattn_serve.execution.logits_processors.error_of", lambda matcher: next(reports))
    [output] = run(engine, ["the cat"], params_of("json", temperature=0))
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("error", 2)
    assert output.error == "structured_output: expected a form, got lexer too complex"
    assert output.argument_error is not None and output.argument_error.argument == "structured_output"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            dict(use_beam_search=True, n=2, temperature=0),
            ValueError,
            "use_beam_search: expected False beside structured",
        ),
        (dict(ignore_eos=True), ValueError, "ignore_eos: expected False beside structured_output"),
        (dict(structured_output={"regex": "a"}), TypeError, "structured_output: expected StructuredOutput, got dict"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        params_of("regex", **options)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("json", {"type": "x"}), ("regex", "("), ("grammar", "start: b")],
)
def test_a_bad_form_is_refused_when_added(engine: LLMEngine, kind: str, form: Any) -> None:
    engine.add_request("good", "the cat", params_of("choice", temperature=0))
    with pytest.raises(ValueError, match=rf"^structured_output: expected a form \({kind}\) that .*, got "):
        engine.add_request("bad", "the cat", SamplingParams(structured_output=StructuredOutput(**{kind: form})))
    assert finish_all(engine).keys() == {"good"}


PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
ZOD_HOSTNAME = (
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
)
TEXT: dict[str, Any] = {"type": "string"}
# What pydantic and zod write, a value that follows it, and one that does not.
WRITTEN: dict[str, tuple[Any, Any, Any]] = {
    "any": (True, 5, None),
    "decimal": (TEXT | {"pattern": PYDANTIC_DECIMAL + r"\d*\.?\d*$"}, "-12.5", "-."),
    "decimal, places": (TEXT | {"pattern": PYDANTIC_DECIMAL + r"\d*\.?\d{0,2}0*$"}, "12.34", "1.234"),
    "decimal, digits": (
        TEXT | {"pattern": PYDANTIC_DECIMAL + r"(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d*\.\d*0*)$"},
        "123.45",
        "123.456",
    ),
    "decimal, digits behind the point": (
        TEXT | {"pattern": PYDANTIC_DECIMAL + r"(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*)$"},
        "1.23",
        "1.234",
    ),
    "decimal, both": (
        TEXT | {"pattern": PYDANTIC_DECIMAL + r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*)$"},
        "123.45",
        "1234.5",
    ),
    "email": (TEXT | {"format": "email", "pattern": ZOD_EMAIL}, "a.b'c@d-e.fg", "a..b@d.ef"),
    "duration": (TEXT | {"format": "duration", "pattern": ZOD_DURATION}, "P1Y2M3DT4H5M6S", "PT"),
    "hostname": (TEXT | {"format": "hostname", "pattern": ZOD_HOSTNAME}, "a-b.cd", "-a"),
    "a long hostname": (TEXT | {"format": "hostname", "pattern": ZOD_HOSTNAME}, "a." * 126 + "a", "a." * 127 + "a"),
    "local time": (TEXT | {"format": "time", "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d$"}, "23:59", "24:00"),
    "pattern of a format": (TEXT | {"format": "cuid", "pattern": "^c[a-z]{8}$"}, "cabcdefgh", "c"),
    "bytes": (TEXT | {"format": "binary"}, "é", 1),
    "base64": (TEXT | {"format": "base64"}, "YWI=", "YWI"),
    "record": (
        {"type": "object", "propertyNames": TEXT, "additionalProperties": {"type": "number"}},
        {"b": 1},
        {"b": ""},
    ),
    "keys by name": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/E"},
            "additionalProperties": {"type": "integer"},
            "$defs": {"E": {"enum": ["a", "b"], "title": "E", "type": "string"}},
        },
        {"a": 1, "b": 2},
        {"c": 1},
    ),
    "keys by pattern": ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, {"aa": 1}, {"b": 1}),
    "keys by format and pattern": (
        {"type": "object", "propertyNames": TEXT | {"format": "email", "pattern": ZOD_EMAIL}},
        {"a@b.cd": 1},
        {"a": 1},
    ),
    "keys by length": ({"type": "object", "propertyNames": {"minLength": 2}}, {"aé": 1}, {"a": 1}),
    "keys by greatest length": ({"type": "object", "propertyNames": {"maxLength": 2}}, {"": 1}, {"aéb": 1}),
    "keys by format": (
        {"type": "object", "propertyNames": {"format": "uuid"}},
        {"01234567-89ab-cdef-0123-456789abcdef": 1},
        {"a": 1},
    ),
    "a list": ({"type": "array", "items": {"const": 1}, "uniqueItems": False}, [1, 1], [2]),
    "finite": ({"type": "number", "minimum": -1.7976931348623157e308}, -2.5, ""),
    "a property that never is": (
        {"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 1}}, "additionalProperties": {"not": {}}},
        {"b": 1},
        {"a": 1},
    ),
    "no other property": ({"type": "object", "additionalProperties": {"not": {}}}, {}, {"a": 1}),
    "no name of a property": ({"type": "object", "propertyNames": {"not": {}}}, {}, {"a": 1}),
    "a choice that never is": ({"anyOf": [{"not": {}}, TEXT]}, "a", 1),
    "never, by reference": (
        {"anyOf": [{"$ref": "#/$defs/E"}, TEXT], "$defs": {"E": {"not": {}, "description": "never"}}},
        "a",
        1,
    ),
    "a list of nothing": ({"type": "array", "items": {"not": {}}}, [], [1]),
    "a choice without end": (
        {
            "anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}],
            "$defs": {"E": {"type": "object", "properties": {"e": {"$ref": "#/$defs/E"}}, "required": ["e"]}},
        },
        None,
        {"e": None},
    ),
    "a regular expression": (TEXT | {"format": "regex"}, "a+", 1),
    "a tree": (
        {
            "$defs": {
                "Node": {
                    "type": "object",
                    "properties": {
                        "kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
                        "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                    },
                    "required": ["kids", "next"],
                }
            },
            "$ref": "#/$defs/Node",
        },
        {"kids": [{"kids": [], "next": None}], "next": None},
        {"kids": []},
    ),
}


@pytest.fixture(scope="module")
def demo_tokenizer() -> Any:
    """Whose tokens have all bytes."""
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_libraries_write_is_taken(demo_tokenizer: Any, name: str) -> None:
    """Catches a schema of pydantic's or zod's that is refused, and one whose meaning is lost."""
    schema, good, bad = WRITTEN[name]
    compiler = GrammarCompiler(demo_tokenizer, len(demo_tokenizer), frozenset({demo_tokenizer.eos_token_id}))

    def is_held(value: Any) -> bool:
        form = StructuredOutput(json=schema, whitespace_pattern="")
        token_ids = demo_tokenizer(json.dumps(value, ensure_ascii=False, separators=(",", ":"))).input_ids
        matcher = compiler.matcher(form).advance([])
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    assert is_held(good)
    assert bad is None or not is_held(bad)


NODE: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        (False, "false"),
        ({"$ref": "#"}, r"\$ref"),
        ({"allOf": [{"$ref": "#"}]}, r"\$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, r"\$ref"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, r"\$ref"),
        (NODE, r"\$ref"),
        ({"$ref": "#/$defs/a"}, r"\$ref"),
        ({"$ref": "https://example.com/a.json"}, r"\$ref"),
        (TEXT | {"pattern": "^(?=a)b"}, "pattern"),
        (TEXT | {"format": "roman"}, "format"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, "propertyNames"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 2}, "minProperties"),
        ({"if": {"type": "string"}}, "if"),
        ({"not": {}}, "not: {}"),
        ({"not": True, "description": "never"}, "not: {}"),
        ({"anyOf": [{"not": {}}, {"allOf": [{"not": {}}]}]}, "not: {}"),
        ({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}, "not: {}"),
        ({"not": {"type": "string"}}, "not"),
    ],
    ids=str,
)
def test_what_no_output_can_be_held_to_is_refused_by_its_keyword(engine: LLMEngine, schema: Any, keyword: str) -> None:
    """Catches an endless reference that fails in the output, or never ends, and an error without the keyword."""
    params = SamplingParams(structured_output=StructuredOutput(json=schema))
    with pytest.raises(ValueError, match=rf"^structured_output: expected a form \(json\) .* got .*{keyword}"):
        engine.add_request("bad", "the cat", params)
    assert not engine.has_unfinished_requests()


def test_names_of_properties_repeat_no_large_schema() -> None:
    """Catches a schema of 100,000 characters that grows to gigabytes."""
    names = {"enum": [f"a{i}" for i in range(1000)]}
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"description": "a" * 1000}}
    with pytest.raises(ValueError, match="propertyNames with 1,000 names"):
        json_schema.prepare(json.dumps(schema))


def test_a_model_without_a_tokenizer_or_an_end(llama: Checkpoint, text_model: str) -> None:
    params = params_of("regex")
    with pytest.raises(ValueError, match="structured_output: expected none, as the model's directory has no tokenizer"):
        LLMEngine(llama.path).add_request("a", sampling_params=params, prompt_token_ids=[1])
    with pytest.raises(ValueError, match="structured_output: expected a model with an end-of-sequence token"):
        LLMEngine(text_model).add_request("a", "the cat", params)


def test_without_llguidance(ending_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine(ending_model, **LARGE)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"structured_output: expected llguidance: in a clone .*: pip install"):
        engine.add_request("a", "the cat", params_of("regex"))
    [output] = run(engine, ["the cat"], SamplingParams(temperature=0, max_tokens=3))
    assert output.finished


# ---- batches, caches, drafts -----------------------------------------------------------------------------------------


def mixed() -> tuple[list[str], list[SamplingParams]]:
    """Forms of each kind between requests without."""
    params = []
    for i, name in enumerate(FORMS):
        params.append(params_of(name, max_tokens=60, temperature=i % 2, seed=i, n=1 + i % 2 * 2))
        params.append(SamplingParams(max_tokens=30, temperature=i % 2, seed=i))
    return [PROMPTS[i % len(PROMPTS)] for i in range(len(params))], params


def test_a_batch_changes_nothing(engine: LLMEngine) -> None:
    prompts, params = mixed()
    alone = [run(engine, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    assert completions(run(engine, prompts, params)) == completions(alone)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption(engine: LLMEngine, ending_model: str, mode: str) -> None:
    prompts, params = mixed()
    expected = run(engine, prompts, params)
    small = LLMEngine(ending_model, preemption_mode=mode, **SMALL)
    assert completions(run(small, prompts, params)) == completions(expected)
    stats = small.stats()
    assert (stats.num_swaps if mode == "swap" else stats.num_recomputes) > 0


@pytest.mark.parametrize("options", [LARGE, SMALL, SMALL | dict(num_speculative_tokens=12)])
def test_speculation(engine: LLMEngine, ending_model: str, options: dict[str, Any]) -> None:
    """Greedy and seeded; drafts that the form does not allow, drafts beyond its end, and some that are right."""
    prompts, params = mixed()
    prompts += ["the cat the hat the cat the hat"] * 3
    listed = {"type": "array", "items": {"enum": ["the cat", "the hat"]}, "minItems": 4, "maxItems": 9}
    for form in (StructuredOutput(json=listed), StructuredOutput(regex="(the cat ){6}"), StructuredOutput(regex=".*")):
        params.append(SamplingParams(temperature=0, max_tokens=100, structured_output=form))
    expected = run(engine, prompts, params)
    speculating = LLMEngine(ending_model, speculation="ngram", **options)
    assert completions(run(speculating, prompts, params)) == completions(expected)
    stats = speculating.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_proposed_tokens
    assert expected[-2].outputs[0].text == "the cat " * 6


def test_a_batch_without_structure_does_nothing(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("masks for nobody")

    monkeypatch.setattr("pagedattn_serve.execution.logits_processors.TokenMasks.apply", fail)
    kinds = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, min_tokens=2, logit_bias={3: 1.0})]
    assert all(output.error is None for output in run(engine, ["the cat"] * 2, kinds))


# ---- random schemas --------------------------------------------------------------------------------------------------


def texts(max_size: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=max_size)


def strings() -> st.SearchStrategy[dict[str, Any]]:
    limits = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted)
    lengths = limits.map(lambda each: {"type": "string", "minLength": each[0], "maxLength": each[1]})
    patterns = st.sampled_from(["^[a-c]{1,4}$", "^(ab|c)d?$", r"^\d{2}-\d{2}$"])
    return lengths | patterns.map(lambda pattern: {"type": "string", "pattern": pattern})


def integers() -> st.SearchStrategy[dict[str, Any]]:
    limits = st.tuples(st.integers(-1000, 1000), st.integers(-1000, 1000)).map(sorted)
    return limits.map(lambda each: {"type": "integer", "minimum": each[0], "maximum": each[1]})


def numbers() -> st.SearchStrategy[dict[str, Any]]:
    limits = st.tuples(st.integers(-9, 9), st.integers(1, 9))
    return limits.map(lambda each: {"type": "number", "minimum": each[0], "maximum": each[0] + each[1]})


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    constants = st.none() | st.booleans() | st.integers(-99, 99) | texts(5)
    enums = st.lists(constants, min_size=1, max_size=4).map(lambda values: {"enum": values})
    return (
        strings()
        | integers()
        | numbers()
        | enums
        | constants.map(lambda value: {"const": value})
        | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])
    )


def objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def make(properties: dict[str, Any], flags: list[bool]) -> dict[str, Any]:
        required = [name for name, is_required in zip(properties, flags, strict=False) if is_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(make, st.dictionaries(texts(4), values, max_size=3), st.lists(st.booleans(), min_size=3))


def arrays(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def make(items: dict[str, Any], limits: list[int]) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": limits[0], "maxItems": limits[1]}

    return st.builds(make, values, st.tuples(st.integers(0, 3), st.integers(0, 3)).map(sorted))


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    def combine(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        choices = st.lists(values, min_size=1, max_size=3).map(lambda each: {"anyOf": each})
        return objects(values) | arrays(values) | choices

    return st.recursive(leaves(), combine, max_leaves=6)


def test_random_schemas(ending_model: str) -> None:
    """What ends parses and is valid, by another implementation of JSON schemas; most of it ends."""
    engines = [LLMEngine(ending_model, speculation=speculation, **LARGE) for speculation in (None, "ngram")]
    reasons: Counter[str | None] = Counter()

    @given(schemas(), st.sampled_from(["", " ?", "[ \n]{0,2}"]), st.integers(0, 2**32), st.sampled_from([0, 1, 3]))
    def check(schema: dict[str, Any], whitespace: str, seed: int, temperature: float) -> None:
        form = StructuredOutput(json=schema, whitespace_pattern=whitespace)
        options = SamplingParams(structured_output=form, seed=seed, temperature=temperature, max_tokens=300)
        outputs = [run(engine, ["the cat"], options)[0] for engine in engines[: 1 + seed % 2]]
        assert all(completions([output]) == completions(outputs[:1]) for output in outputs)
        assert outputs[0].error is None
        [each] = outputs[0].outputs
        reasons[each.finish_reason] += 1
        if each.finish_reason == "stop":
            jsonschema_rs.validate(schema, json.loads(each.text))

    check()
    assert reasons.keys() <= {"stop", "length"}
    assert reasons["stop"] > 0.8 * reasons.total()
