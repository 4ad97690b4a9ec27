"""The Messages API: Anthropic's messages and events, the loop with tools, errors in its shape."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import BEGINNING, SPEECH
from event_streams import message_of, read_events, without_ids
from pydantic import TypeAdapter
from tool_functions import FUNCTIONS

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.output_parsing.output_format import output_format
from pagedattn_serve.output_parsing.tool_format import ToolUse
from pagedattn_serve.server.http.errors import ApiError, encode_json, last_events
from pagedattn_serve.server.http.logs import RequestContext, current_request
from pagedattn_serve.server.openai.blocks import OutputEnd, Piece
from pagedattn_serve.server.openai.messages.events import MessageWriter
from pagedattn_serve.server.openai.messages.routes import Message

PATH = "/v1/messages"
SPEAK: dict[str, Any] = {"temperature": 0, "max_tokens": 100}
# Any value of these is short.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_near": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "now", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
# Nothing is drawn that could be long: neither a thought, nor a text.
CALL: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "disabled"},
    "max_tokens": 200,
    "seed": 3,
}


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def create(client: Any, stream: bool = False, *messages: Any, **body: Any) -> dict[str, Any]:
    """The message, or what its events add up to."""
    body = {"messages": list(messages), **body}
    if stream:
        posted = client.post(PATH, stream=True, **body)
        assert posted.status_code == 200, posted.text
        return message_of(read_events(posted.text))
    message = client.answer(PATH, **body)
    TypeAdapter(Message).validate_python(message)
    return message


def error(response: Any) -> tuple[int, str, str]:
    """Status, type and message of an error, which has to have Anthropic's shape."""
    body = response.json()
    assert (set(body), body["type"], set(body["error"])) == (
        {"type", "error", "request_id"},
        "error",
        {"type", "message"},
    )
    assert body["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]
    return response.status_code, body["error"]["type"], body["error"]["message"]


def num_tokens(client: Any, text: str) -> int:
    count: int = client.answer("/tokenize", prompt=text, add_special_tokens=False)["count"]
    return count


@pytest.mark.parametrize("stream", [False, True])
def test_a_text(client: Any, stream: bool) -> None:
    message = create(client, stream, said(BEGINNING), metadata={"user_id": "a"}, **SPEAK)
    [content] = message["content"]
    assert content == {"type": "text", "text": SPEECH}  # the AI SDK takes no citations that are null
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens(client, BEGINNING)


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_output_ends(client: Any, stream: bool) -> None:
    message = create(client, stream, said(BEGINNING), **{**SPEAK, "max_tokens": 3})
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 3)
    message = create(client, stream, said(BEGINNING), stop_sequences=["nothing of it", SPEECH[5:8]], **SPEAK)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", SPEECH[5:8])
    assert message["content"][0]["text"] == SPEECH.partition(SPEECH[5:8])[0]


def test_an_output_that_does_not_fit(client: Any, tools: Any) -> None:
    """max_tokens may be more than fits, as agents ask for as much as any model gives."""
    assert create(client, False, said(BEGINNING), **{**SPEAK, "max_tokens": 10**6})["stop_reason"] == "end_turn"
    long = "a" * 2000
    message = create(tools, False, said(long), thinking={"type": "disabled"}, max_tokens=10**6, seed=1)
    assert message["stop_reason"] == "model_context_window_exceeded"
    for times in (500, 10**5):  # the second is refused by its characters
        status, kind, text = error(client.post(PATH, messages=[said(BEGINNING * times)], max_tokens=1))
        assert (status, kind) == (400, "invalid_request_error")
        # As Claude Code wants it.
        assert re.fullmatch(r"prompt is too long: \d+ (tokens|characters) > \d+ maximum", text)


def test_forms_of_messages(client: Any) -> None:
    """All say the same; the last one goes on with the assistant's own words."""
    for system, messages in (
        (None, [said([block(BEGINNING)])]),
        (BEGINNING[:2], [said(BEGINNING[2:])]),
        ([block(BEGINNING[:2])], [said([]), said(BEGINNING[2:])]),
        ([block("x-anthropic-billing-header: v=1.d8a;"), block(BEGINNING[:2])], [said(BEGINNING[2:])]),
        (f"x-anthropic-billing-header: v=1.d8a;\n{BEGINNING[:2]}", [said(BEGINNING[2:]), said("", "system")]),
        (None, [said(BEGINNING[:2]), said([block(BEGINNING[2:])], "assistant")]),
    ):
        assert create(client, False, *messages, system=system, **SPEAK)["content"][0]["text"] == SPEECH
        count = client.answer(f"{PATH}/count_tokens", messages=messages, system=system)
        assert count == {"input_tokens": num_tokens(client, BEGINNING)}


def test_messages_of_the_system(client: Any) -> None:
    """They join what the system says before; the answer goes on with the assistant's message before them."""
    before = {"system": [block("Be short."), block("Be kind.")], "messages": [said("a"), said("b", "assistant")]}
    amid = {"system": "Be short.", "messages": [said("a"), said("b", "assistant"), said([block("Be kind.")], "system")]}
    one, other = (client.answer(PATH, **body, **SPEAK) for body in (before, amid))
    assert one["content"] == other["content"]
    assert other["usage"]["cache_read_input_tokens"] > 0
    no_effect = {"speed": "standard", "mcp_servers": []}
    one, other = (client.answer(f"{PATH}/count_tokens", **body, **no_effect) for body in (before, amid))
    assert one == other


def test_variables_of_the_template(tools: Any) -> None:
    """They count before what `thinking` gives to it."""
    fields = {"messages": [said("Rain?")], "thinking": {"type": "enabled"}}
    variables = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
    more, fewer = (tools.answer(f"{PATH}/count_tokens", **fields, **each) for each in ({}, variables))
    others = tools.answer(f"{PATH}/count_tokens", **fields | {"thinking": {"type": "disabled"}})
    assert fewer == others != more
    status, kind, text = error(tools.post(PATH, **fields, max_tokens=1, chat_template_kwargs={"messages": []}))
    assert (status, kind) == (400, "invalid_request_error") and text.startswith("chat_template_kwargs: ")


def test_a_salt(client: Any) -> None:
    """Only prompts of the same salt share blocks."""
    for salt, shares in (("a", False), ("a", True), ("b", False)):
        message = create(client, False, said("salt " * 20), cache_salt=salt, max_tokens=1)
        assert (message["usage"]["cache_read_input_tokens"] > 0) == shares


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_with_a_tool(tools: Any, stream: bool) -> None:
    message = create(tools, stream, said("Rain?"), **CALL)
    [call] = message["content"]
    assert (call["type"], call["name"], message["stop_reason"]) == ("tool_use", "get_weather", "tool_use")
    assert call["input"]["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [block("sun")], "is_error": False}
    history = [said("Rain?"), said(message["content"], "assistant"), said([result, block("And now?")])]
    again = create(tools, stream, *history, **{**CALL, "tool_choice": {"type": "tool", "name": "get_weather"}})
    assert [each["type"] for each in again["content"]] == ["tool_use"]
    fields = {name: CALL[name] for name in ("tools", "thinking")}
    count = tools.answer(f"{PATH}/count_tokens", messages=history, **fields)["input_tokens"]
    assert count == again["usage"]["input_tokens"] + again["usage"]["cache_read_input_tokens"]
    assert again["usage"]["cache_read_input_tokens"] > 0


def test_a_stream_says_what_the_whole_says(tools: Any) -> None:
    """With thinking, too, which its budget ends."""
    for fields, kinds in (
        ({}, ["tool_use"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 20}}, ["thinking", "tool_use"]),
    ):
        one, other = (create(tools, stream, said("Rain?"), **{**CALL, **fields}) for stream in (False, True))
        assert without_ids(one["content"]) == without_ids(other["content"])
        assert [each["type"] for each in one["content"]] == kinds
    again = create(tools, False, said("Rain?"), said(one["content"], "assistant"), said("So?"), **CALL)
    assert again["stop_reason"] == "tool_use"


def test_a_schema(tools: Any) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        message = create(tools, False, said("Rain?"), **{**CALL, "tools": None, "tool_choice": None, **fields})
        assert "city" in json.loads(message["content"][0]["text"])
    bad = {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}
    for stream in (False, True):
        text = error(tools.post(PATH, messages=[said("a")], max_tokens=1, stream=stream, **bad))[2]
        assert text.startswith("output_config.format: ")


def test_what_a_coding_agent_asks(tools: Any) -> None:
    """A body with all that such an agent sends, after a call, with its ways to save tokens."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no network", "is_error": True}
    message = tools.http.post(
        f"{PATH}?beta=true",
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b-2025-01-01", "x-api-key": "none"},
        json={
            "model": "tiny",
            "max_tokens": 64000,
            "stream": False,
            "system": [block("You are an agent."), block("Be short.")],
            "messages": [
                said([block("<reminder>Today is Friday.</reminder>"), block("Rain?")]),
                said([{"type": "thinking", "thinking": "Hm.", "signature": "x"}, block("I look."), call], "assistant"),
                said([{**result, "cache_control": {"type": "ephemeral"}}]),
            ],
            "tools": [
                {**TOOL, "eager_input_streaming": True, "input_examples": [{"city": "Rome"}]},
                {
                    "name": "stop",
                    "input_schema": {"type": "object"},
                    "defer_loading": False,
                    "allowed_callers": ["direct"],
                },
            ],
            "tool_choice": {"type": "tool", "name": "get_weather"},
            "thinking": {"type": "disabled"},
            "metadata": {"user_id": "user_1_account__session_2"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "temperature": 1,
            "speed": "standard",
            "inference_geo": "us",
            "diagnostics": {"previous_message_id": None},
            "mcp_servers": [],
        },
    ).json()
    assert [each["type"] for each in message["content"]] == ["tool_use"]


def test_keys(speaker_path: str, serve: Callable[..., Any]) -> None:
    with serve(LLMEngine(speaker_path, num_blocks=64), api_keys=("one",)) as client:
        body = {"messages": [said("a")]}
        path = f"{PATH}/count_tokens"
        for headers in ({}, {"x-api-key": "two"}, {"Authorization": "Bearer two", "x-api-key": "one"}):
            status, kind, _ = error(client.http.post(path, json=body, headers=headers))
            assert (status, kind) == (401, "authentication_error")
        for headers in ({"x-api-key": "one", "anthropic-version": "2023-06-01"}, {"Authorization": "Bearer one"}):
            assert client.http.post(path, json=body, headers=headers).status_code != 401


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "messages: expected a value, got none"),
        ({"messages": [said("a")]}, "max_tokens: expected a value, got none"),
        ({"messages": [said("a")], "max_tokens": 1, "more": 5}, "more: expected none"),
        ({"messages": [said("a"), said([{"type": "image"}])], "max_tokens": 1}, "messages[1].content[0].type: "),
        ({"messages": [said("a", "tool")], "max_tokens": 1}, "messages[0].role: "),
        ({"messages": [said([{"type": "image"}], "system")], "max_tokens": 1}, "messages[0].content[0].type: "),
        ({"messages": [said("a")], "max_tokens": 1, "system": "\ud800"}, "system: expected text that UTF-8 can write"),
        (
            {"messages": [said("a")], "max_tokens": 1, "system": [block("b"), block("\ud800")]},
            "system: expected text that UTF-8 can write",
        ),
        (
            {"messages": [said("a"), said("\ud800", "system")], "max_tokens": 1},
            "messages[1].content: expected text that UTF-8 can write",
        ),
        ({"messages": [said("a")], "max_tokens": 1, "mcp_servers": [{}]}, "mcp_servers: "),
        ({"messages": [{**said("a"), "name": "b"}], "max_tokens": 1}, "messages[0].name: "),
        ({"messages": [said(5)], "max_tokens": 1}, "messages[0].content: "),
        ({"messages": [said([{"type": "text"}])], "max_tokens": 1}, "messages[0].content[0].text: "),
        (
            {"messages": [said([{"type": "tool_use", "id": "a", "name": "b"}], "assistant")], "max_tokens": 1},
            "messages[0].content[0].input: ",
        ),
        (
            {
                "messages": [said([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}])],
                "max_tokens": 1,
            },
            "messages[0].content[0].content[0].type: ",
        ),
        ({"messages": [said("a")], "max_tokens": 1, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_2025"),
        ({"messages": [said("a")], "max_tokens": 1, "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"messages": [said("a")], "max_tokens": 1, "tool_choice": {"type": "any"}}, "tool_choice: "),
    ],
    ids=str,
)
def test_what_is_refused(client: Any, body: dict[str, Any], words: str) -> None:
    status, kind, message = error(client.post(PATH, **body))
    assert (status, kind) == (400, "invalid_request_error") and words in message, message


def test_a_thread_is_refused(client: Any) -> None:
    """In the words by which Anthropic's clients go on without one."""
    response = client.post(PATH, messages=[said("a")], max_tokens=1, thread={"type": "create"})
    assert response.status_code == 400
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert response.json()["error"] == {
        "type": "invalid_request_error",
        "message": "thread: expected none, as no conversation is kept",
        "details": details,
    }


def test_a_number_of_a_call_that_no_answer_can_be_written_with() -> None:
    """Catches a status of 500 for what the grammar of JSON allows a model to write."""
    of_calls = output_format("hermes", "none", "")
    turn = of_calls.turn("", ToolUse(FUNCTIONS))
    assert turn is not None
    parser = turn.parser()
    writer = MessageWriter("msg_1", "m", [], 10, of_calls)
    writer.start(1, 0)
    text = '<tool_call>{"name": "get_weather", "arguments": {"far": [1e999, -1e999], "near": 1e300}}</tool_call>'
    writer.write([Piece(parser.feed(text) + parser.finish(), [])])
    writer.finish(OutputEnd("stop", None, 1, 0, 5, 0))
    [call] = json.loads(encode_json(writer.answer()))["content"]
    assert call["input"] == {"far": [None, None], "near": 1e300}


def test_a_stream_that_fails() -> None:
    """Its last event, which has a name by which Anthropic's clients know it; no [DONE] follows."""
    token = current_request.set(RequestContext("abc", PATH))
    try:
        [event] = read_events(last_events(ApiError(503, "no more")).decode())
    finally:
        current_request.reset(token)
    assert event == {"type": "error", "error": {"type": "api_error", "message": "no more"}, "request_id": "abc"}


def test_other_errors(client: Any) -> None:
    body = {"messages": [said("a")], "max_tokens": 1}
    assert error(client.post(PATH, **body, model="other"))[:2] == (404, "not_found_error")
    assert error(client.http.post(PATH, content=b"{"))[:2] == (415, "invalid_request_error")
    assert error(client.http.get(f"{PATH}/nothing"))[:2] == (404, "not_found_error")
