"""What a coding agent asks of /v1/messages, request by request: bodies in Anthropic's public form, with all that such
agents send. The model follows a script (scripted_models.py)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from event_streams import message_of, read_events
from scripted_models import make_scripted_model

from pagedattn_serve.engine import LLMEngine

PATH = "/v1/messages?beta=true"
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "x-api-key": "none",
    "x-stainless-lang": "js",
}
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
DIALECT = "http://json-schema.org/draft-07/schema#"
TOOLS: list[dict[str, Any]] = [
    {
        "name": "Edit",
        "description": "Changes a file.\n\n- All edits are made, or none.",
        "input_schema": {
            "$schema": DIALECT,
            "type": "object",
            "properties": {
                "file_path": {"type": "string", "description": "an absolute path"},
                "edits": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "old": {"type": "string"},
                            "new": {"type": "string"},
                            "all": {"type": "boolean", "default": False},
                        },
                        "required": ["old", "new"],
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["file_path", "edits"],
            "additionalProperties": False,
        },
    },
    {
        "name": "TodoWrite",
        "description": "Keeps a list.",
        "input_schema": {
            "$schema": DIALECT,
            "type": "object",
            "properties": {
                "todos": {
                    "type": "array",
                    "items": {
                        "anyOf": [
                            {"type": "object", "properties": {"text": {"type": "string", "minLength": 1}}},
                            {"type": "object", "properties": {"status": {"enum": ["pending", "completed"]}}},
                            {"type": "null"},
                        ]
                    },
                }
            },
            "required": ["todos"],
        },
    },
    {"name": "mcp__files__list", "input_schema": {"type": "object", "properties": {}}},
    {
        "name": "get_weather",
        "description": "",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "timeout": {"type": "number", "exclusiveMinimum": 0}},
            "required": ["city"],
        },
        "eager_input_streaming": True,
        **EPHEMERAL,
    },
]


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def result(call: dict[str, Any], content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call["id"], "content": content, **more}


SHARED: dict[str, Any] = {
    "model": "tiny",
    "system": [text("You are an agent for code."), text("Be short.\n\n# Tools\nUse them.", **EPHEMERAL)],
    "tools": TOOLS,
    "max_tokens": 32000,
    "temperature": 1,
    "thinking": {"type": "enabled", "budget_tokens": 4000},
    "metadata": {"user_id": "user_0a_account__session_0b"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}
QUESTION = user(text("<reminder>\nToday is Friday.\n</reminder>"), text("Where does it rain?", **EPHEMERAL))


@pytest.fixture(scope="module")
def agent(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("llguidance")
    directory: Path = tmp_path_factory.mktemp("scripted")
    make_scripted_model(directory)
    with serve(LLMEngine(directory, dtype="float32", num_blocks=2048)) as client:
        yield client


def post(client: Any, path: str = PATH, **body: Any) -> Any:
    response = client.http.post(path, headers=HEADERS, json=body)
    assert response.status_code == 200, response.text
    return response


def ask(client: Any, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return message_of(read_events(post(client, **{**SHARED, "messages": list(messages), **fields}).text))


def test_a_session(agent: Any) -> None:
    counted = {name: SHARED[name] for name in ("model", "system", "tools", "thinking")}
    path = "/v1/messages/count_tokens?beta=true"
    count = post(agent, path, messages=[QUESTION], **counted).json()["input_tokens"]
    first = ask(agent, QUESTION)
    assert [block["type"] for block in first["content"]] == ["thinking", "tool_use"]
    assert (first["stop_reason"], first["stop_sequence"]) == ("tool_use", None)
    assert first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"] == count
    call = first["content"][-1]
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})

    # The tool fails. The agent sends the thought with its signature, and says something of its own after the result.
    failed = result(call, "no network", is_error=True)
    said = {"role": "assistant", "content": [*first["content"][:1], text("I look."), call]}
    again = ask(agent, QUESTION, said, user(failed, text("<reminder>Try again.</reminder>")))
    assert again["content"][-1]["input"] == {"city": "Paris"}
    assert again["usage"]["cache_read_input_tokens"] > 0  # the system's blocks and the tools

    # Two results at once, one of them in parts; then the last call, and the answer.
    calls = [call, {**again["content"][-1], "id": "toolu_2"}]
    results = [result(calls[0], [text("rain in Paris")]), result(calls[1], "", **EPHEMERAL)]
    third = ask(agent, QUESTION, {"role": "assistant", "content": calls}, user(*results))
    assert third["content"][-1]["input"] == {"city": "Rome"}
    last = [result(third["content"][-1], [text("rain in Rome", **EPHEMERAL)])]
    history = [QUESTION, {"role": "assistant", "content": calls}, user(*results)]
    end = ask(agent, *history, {"role": "assistant", "content": third["content"]}, user(*last))
    assert (end["content"], end["stop_reason"]) == ([text('{"city": "Rome", "rains": true}')], "end_turn")


def test_what_it_asks_beside_a_session(agent: Any) -> None:
    """A title, with another model's defaults; a check of what it is allowed to, with a stop sequence and one token; a
    typed answer."""
    small = {"model": "tiny", "messages": [{"role": "user", "content": "A title?"}], "max_tokens": 512}
    message = post(agent, **small, system="Be short.", temperature=0, thinking={"type": "disabled"}).json()
    assert message["content"] == [text('{"city": "Rome", "rains": true}')]
    message = post(agent, **small, stop_sequences=["</block>", "rains"], metadata={"user_id": "a"}).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "rains")
    message = post(agent, **{**small, "max_tokens": 1}).json()
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 1)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "rains": {"type": "boolean"}},
        "required": ["city", "rains"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "medium"}
    message = post(agent, **small, output_config=config, thinking={"type": "adaptive"}).json()
    assert message["content"][0]["text"] == '{"city": "Rome", "rains": true}'
