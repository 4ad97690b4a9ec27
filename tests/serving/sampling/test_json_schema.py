"""JSON schemas for llguidance: which of them no finite value can follow, and what it takes to find them."""

import json
import sys
from typing import Any

import pytest

from pagedattn_serve.sampling.json_schema import TextKind, prepare, text_kind


def reference(name: object) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def chain(num_links: int) -> dict[str, Any]:
    """Each link leads to the next, and only the last one says without a reference what a value is."""
    links = {str(i): {"allOf": [reference(i + 1), {"type": "object"}]} for i in range(num_links)}
    return {**reference(0), "$defs": links | {str(num_links): {"type": "object"}}}


def chain_backwards(num_links: int) -> dict[str, Any]:
    schema = chain(num_links)
    return {**reference(0), "$defs": dict(reversed(schema["$defs"].items()))}


def object_of(num_properties: int) -> dict[str, Any]:
    """Each property leads to the property before, and all of them must be there."""
    properties = {str(i): {"$ref": f"#/properties/{i - 1}"} for i in range(1, num_properties)}
    required = [str(i) for i in range(num_properties)]
    return {"type": "object", "properties": {"0": {"type": "string"}} | properties, "required": required}


def endless(num_links: int) -> dict[str, Any]:
    """A choice between a chain without an end and null."""
    return {
        "anyOf": [reference(0), {"type": "null"}],
        "$defs": chain(num_links)["$defs"] | {f"{num_links}": reference(0)},
    }


def num_calls(schema: dict[str, Any]) -> int:
    """Of `prepare`, Python's functions and those in C together."""
    text, calls = json.dumps(schema), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        prepare(text)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("schema_of", [chain, chain_backwards, object_of, endless])
def test_a_schema_twice_as_long_takes_twice_the_calls(schema_of: Any) -> None:
    assert num_calls(schema_of(400)) < 2.5 * num_calls(schema_of(200))


def test_a_chain_is_kept_if_it_has_an_end() -> None:
    assert json.loads(prepare(json.dumps(chain(50)))) == chain(50)
    emptied = json.loads(prepare(json.dumps(endless(50))))
    assert emptied["anyOf"] == [{"enum": []}, {"type": "null"}]
    assert emptied["$defs"] == {str(i): {"enum": []} for i in range(51)}


@pytest.mark.parametrize(
    ("schema", "is_possible"),
    [
        ({"anyOf": [{"$ref": "#"}, {"type": "string"}]}, True),
        ({"anyOf": [{"$ref": "#"}, {"not": {}}]}, False),
        ({"anyOf": [{"type": "string"}], "oneOf": [{"$ref": "#"}]}, False),  # one of either
        ({"anyOf": []}, True),
        ({"allOf": [{"type": "string"}, {"$ref": "#"}]}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, True),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a", "a"]}, False),
        ({"type": "object", "required": ["a"]}, True),  # of what no schema speaks
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"$ref": "elsewhere.json"}, True),
    ],
)
def test_what_a_value_must_have(schema: dict[str, Any], is_possible: bool) -> None:
    if is_possible:
        assert json.loads(prepare(json.dumps(schema))) == schema
    else:
        with pytest.raises(ValueError, match=r"no value follows|without end"):
            prepare(json.dumps(schema))


def test_schemas_are_put_into_other_words_wherever_they_are() -> None:
    """Not in values, such as those of enum."""
    inner = {"uniqueItems": False}
    for name in ("items", "additionalProperties", "additionalItems"):
        assert json.loads(prepare(json.dumps({name: inner}))) == {name: {}}
    for name in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
        assert json.loads(prepare(json.dumps({name: [inner, {}]}))) == {name: [{}, {}]}
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        assert json.loads(prepare(json.dumps({name: {"a": inner}}))) == {name: {"a": {}}}
    assert json.loads(prepare(json.dumps({"enum": [inner]}))) == {"enum": [inner]}


@pytest.mark.parametrize(("name", "written"), [("a/b", "a~1b"), ("a~b", "a~0b"), ("a~1b", "a~01b")])
def test_references_to_names_with_signs(name: str, written: str) -> None:
    root = {"$defs": {name: {"type": "string"}}}
    assert text_kind(reference(written), root)[0] is TextKind.ALWAYS


@pytest.mark.parametrize("name", ["anyOf", "oneOf"])
def test_a_choice_of_texts_is_a_text(name: str) -> None:
    texts: list[Any] = [{"type": "string"}, {"enum": ["a", "b"]}]
    assert text_kind({name: texts}, {})[0] is TextKind.ALWAYS
    assert text_kind({name: [*texts, {"type": "null"}]}, {})[0] is TextKind.SOMETIMES
