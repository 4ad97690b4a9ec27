"""Fields that ask for a form of the output: response_format, structured_outputs, and the four guided ones."""

import json
from typing import Any

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "A class"},
    CHAT: {"messages": [{"role": "user", "content": "A class"}]},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["list", "dict"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
pytest.importorskip("llguidance")


def texts(demo: Any, path: str, **fields: Any) -> list[str]:
    choices = demo.answer(path, **PROMPTS[path], max_tokens=300, seed=1, **fields)["choices"]
    assert all(choice["finish_reason"] == "stop" for choice in choices)
    return [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in choices]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_schema(demo: Any, path: str) -> None:
    """Met by every output, as white space is limited."""
    response_format = {"type": "json_schema", "json_schema": {"name": "type", "strict": True, "schema": SCHEMA}}
    newest = {"structured_outputs": {"json": SCHEMA}}
    for fields in ({"response_format": response_format}, {"guided_json": SCHEMA}, newest):
        for text in texts(demo, path, n=8, **fields):
            value = json.loads(text)
            assert value["name"] in ("list", "dict")
            assert value["ok"] in (True, False)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_other_forms(demo: Any, path: str) -> None:
    assert all(text in ("yes", "no") for text in texts(demo, path, n=4, guided_choice=["yes", "no"]))
    [text] = texts(demo, path, guided_regex="[0-9]{3}")
    assert len(text) == 3
    assert text.isdigit()
    assert texts(demo, path, guided_json=json.dumps({"const": 5})) == ["5"]
    for grammar in ('start: "a" "b"', 'root ::= "a" end\nend ::= [b]'):
        assert texts(demo, path, guided_grammar=grammar, guided_decoding_backend="xgrammar") == ["ab"]
    assert texts(demo, path, guided_json={"const": [5, 6]}, guided_whitespace_pattern="") == ["[5,6]"]
    assert texts(demo, path, response_format={"type": "text"}, guided_choice=["yes"]) == ["yes"]
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}
    assert texts(demo, path, response_format=tag) == ["ab"]
    structure = {"begin": "<a>", "schema": {"const": 5}, "end": "</a>"}
    older_tag = {"type": "structural_tag", "structures": [structure], "triggers": ["<a"]}
    for fields in ({"response_format": older_tag}, {"structured_outputs": {"structural_tag": older_tag}}):
        demo.answer(path, **PROMPTS[path], max_tokens=1, **fields)
    others_are_none = {"json_object": False, "disable_fallback": False, "disable_additional_properties": False}
    for form, text in (
        ({"regex": "c{3}", "disable_any_whitespace": False, **others_are_none}, "ccc"),
        ({"json": {"const": [5, 6]}, "disable_any_whitespace": True}, "[5,6]"),
        ({"regex": "c{3}"}, "ccc"),
        ({"choice": ["yes"]}, "yes"),
        ({"grammar": 'start: "a" "b"'}, "ab"),
        ({"json": {"const": 5}, "whitespace_pattern": ""}, "5"),
        ({"structural_tag": tag}, "ab"),
        ({"structural_tag": json.dumps(tag)}, "ab"),
    ):
        assert texts(demo, path, structured_outputs=form) == [text]
    grammar = 'start: "a" "b"'
    assert texts(demo, path, guided_grammar=grammar, structured_outputs={"grammar": grammar}) == ["ab"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("kind", "name"), [("json_object", "value"), ("json", "value"), ("json_object", "schema")])
def test_a_schema_beside_another_type(demo: Any, path: str, kind: str, name: str) -> None:
    """As TGI has it, now and before; as llama.cpp and Together have it. Catches a schema that is not looked at."""
    assert texts(demo, path, response_format={"type": kind, name: {"const": 5}}) == ["5"]


def test_any_object(demo: Any) -> None:
    choices = demo.answer(COMPLETIONS, prompt="A class", response_format={"type": "json_object"}, n=8, seed=2)[
        "choices"
    ]
    for choice in choices:
        assert choice["text"].lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "nothing"}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}}, "response_format"),
        ({"response_format": {"type": "json_object", "triggers": ["<"]}}, "response_format"),
        ({"response_format": {"type": "json_object", "format": {"type": "any_text"}}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "text", "value": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"response_format": {"type": "json_object", "value": {"type": 5}}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "json_schema"}}}, "response_format"),
        ({"guided_choice": ["a"], "use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"guided_regex": "a", "guided_whitespace_pattern": ""}, "guided_whitespace_pattern"),
        ({"guided_whitespace_pattern": "["}, "guided_whitespace_pattern"),
    ],
    ids=str,
)
def test_forms_that_are_none(demo: Any, path: str, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        status, blamed, message = demo.error(path, **PROMPTS[path], **fields, stream=stream)
        assert (status, blamed) == (400, param) and message.startswith(f"{param}: "), message


def test_a_form_that_nothing_has(demo: Any) -> None:
    """It shows when the output is made, and is no failure of the server, which clients would ask again."""
    fields = {"guided_regex": "[ab]", "allowed_token_ids": [5]}
    status, blamed, message = demo.error(COMPLETIONS, prompt="A class", **fields)
    assert (status, blamed) == (400, None) and message.startswith("sampling_params: expected "), message


@pytest.mark.parametrize(
    ("schema", "keyword"), [({"$ref": "#"}, "$ref"), ({"not": {}}, "not"), (False, "false")], ids=str
)
def test_a_schema_that_nothing_can_be_held_to(demo: Any, schema: Any, keyword: str) -> None:
    """Catches a keyword that is not named, and a stream that begins before its error."""
    forms = {"guided_json": schema, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    for name, value in forms.items():
        for stream in (False, True):
            status, blamed, message = demo.error(COMPLETIONS, prompt="A class", **{name: value}, stream=stream)
            assert (status, blamed) == (400, name) and keyword in message, message


def test_any_json(demo: Any) -> None:
    """Catches a schema true that is refused, or taken for any object."""
    for form in ({"guided_json": True}, {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}):
        choices = demo.answer(COMPLETIONS, prompt="A class", **form, n=8, seed=2, max_tokens=40)["choices"]
        values = [json.loads(choice["text"]) for choice in choices if choice["finish_reason"] == "stop"]
        assert any(not isinstance(value, dict) for value in values)
