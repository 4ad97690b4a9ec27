"""The Responses API: its objects and events as OpenAI's client knows them, the loop with tools, what is kept."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import BEGINNING, SPEECH
from event_streams import read_events, response_of, without_ids
from openai.types.responses import Response
from pydantic import TypeAdapter

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.server.openai.blocks import OutputReader
from pagedattn_serve.server.openai.responses.objects import ResponseObject
from pagedattn_serve.server.openai.responses.store import ResponseStore

PATH = "/v1/responses"
SPEAK: dict[str, Any] = {"temperature": 0, "max_output_tokens": 100}
SHORT: dict[str, Any] = {**SPEAK, "max_output_tokens": 5}
# Any value of these is short.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_near": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "get_weather", "description": "now", "parameters": SCHEMA, "strict": True}
B = {"type": "function", "name": "b"}
# Nothing is drawn that could be long: neither a thought, nor a text.
CALL: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "max_output_tokens": 200,
    "seed": 3,
}


def respond(client: Any, stream: bool = False, **body: Any) -> dict[str, Any]:
    """The response, or what its events add up to, which has to be the response that the last of them has."""
    if not stream:
        response = client.answer(PATH, **body)
        TypeAdapter(ResponseObject).validate_python(response)
        Response.model_validate(response)
        return response
    posted = client.post(PATH, stream=True, **body)
    assert posted.status_code == 200 and posted.text.endswith("\n\ndata: [DONE]\n\n"), posted.text
    return response_of(read_events(posted.text.removesuffix("data: [DONE]\n\n")))


def text_of(response: dict[str, Any]) -> str:
    [item] = response["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    text: str = item["content"][0]["text"]
    return text


def num_tokens(client: Any, text: str) -> int:
    count: int = client.answer("/tokenize", prompt=text, add_special_tokens=False)["count"]
    return count


@pytest.mark.parametrize("stream", [False, True])
def test_a_text(client: Any, stream: bool) -> None:
    response = respond(client, stream, input=BEGINNING, metadata={"a": "b"}, **SPEAK)
    assert (text_of(response), response["status"]) == (SPEECH, "completed")
    assert response["metadata"] == {"a": "b"} and response["completed_at"] >= response["created_at"]
    usage = response["usage"]
    assert usage["input_tokens"] == num_tokens(client, BEGINNING)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(demo: Any, stream: bool) -> None:
    """Those of the tokens that make the text, which are the tokens of the same chat."""
    body: dict[str, Any] = {"temperature": 0, "stop": "s t"}
    messages = [{"role": "user", "content": "A class"}]
    chat = demo.answer("/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=2, max_tokens=60, **body)
    expected = chat["choices"][0]["logprobs"]["content"]
    response = respond(demo, stream, input="A class", top_logprobs=2, max_output_tokens=60, **body)
    [item] = response["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    told = item["content"][0]["logprobs"]
    assert told == expected[: len(told)] and len(told) > 3
    text = "".join(token["token"] for token in told)
    assert text.startswith(item["content"][0]["text"]) and len(text) < len(item["content"][0]["text"]) + len("s t")
    assert response["top_logprobs"] == 2
    again = respond(demo, stream, input=[{"role": "user", "content": "a"}, item], max_output_tokens=1)
    assert again["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_text_behind_a_thought(tools: Any, stream: bool) -> None:
    """Catches those of the thought, and of the mark at its end, beside the text."""
    form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    body = {**CALL, "tools": None, "tool_choice": None, "chat_template_kwargs": None, "text": form}
    response = respond(tools, stream, input="Rain?", include=["message.output_text.logprobs"], **body)
    [thought, item] = response["output"]
    [part] = item["content"]
    assert thought["type"] == "reasoning" and "logprobs" not in thought["content"][0]
    assert "".join(token["token"] for token in part["logprobs"]) == part["text"] != ""
    assert bytes(byte for token in part["logprobs"] for byte in token["bytes"]).decode() == part["text"]
    assert all(token["top_logprobs"] == [] for token in part["logprobs"])


@pytest.mark.parametrize(
    "more",
    [
        *({"repetition_penalty": 1.7}, {"min_p": 0.9}, {"logit_bias": {"5": 50}}, {"stop": ["e"]}),
        *({"stop": "e", "include_stop_str_in_output": True}, {"stop_token_ids": [*range(60, 120)]}),
    ],
    ids=str,
)
def test_sampling_is_that_of_chats(demo: Any, more: dict[str, Any]) -> None:
    fields = {"temperature": 0.8, "seed": 4, "top_k": 20, "top_p": 0.9}
    messages = [{"role": "user", "content": "A class"}]

    def say(**others: Any) -> str:
        chat = demo.answer("/v1/chat/completions", messages=messages, max_tokens=300, **fields, **others)
        text = text_of(respond(demo, input="A class", max_output_tokens=300, **fields, **others))
        assert text == chat["choices"][0]["message"]["content"]
        return text

    assert say(**more) != say()


def test_an_end_that_is_ignored(client: Any) -> None:
    response = respond(client, input=BEGINNING, ignore_eos=True, **SPEAK)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens"] == SPEAK["max_output_tokens"]


def test_the_tokens_of_an_input(tools: Any) -> None:
    """As many as the request itself is told of, which has the same body."""
    first = respond(tools, input="Rain?", **CALL)
    for body in ({"input": "Rain?", "instructions": "Be short."}, {"input": "b", "previous_response_id": first["id"]}):
        count = tools.answer(f"{PATH}/input_tokens", **body, **CALL)
        expected = respond(tools, **body, **CALL)["usage"]["input_tokens"]
        assert count == {"object": "response.input_tokens", "input_tokens": expected}
    assert tools.error(f"{PATH}/input_tokens", input=[{"type": "computer_call"}])[:2] == (400, "input")


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_is_cut(client: Any, stream: bool) -> None:
    response = respond(client, stream, input=BEGINNING, **SHORT)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete" and SPEECH.startswith(text_of(response))


def test_forms_of_input(client: Any) -> None:
    """All say the same."""
    parts = [{"type": "input_text", "text": BEGINNING}]
    for given in (
        [{"role": "user", "content": BEGINNING}],
        [{"type": "message", "role": "developer", "content": parts}],
        [{"role": "assistant", "content": [{"type": "output_text", "text": BEGINNING}]}],
        [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": parts}],
    ):
        assert text_of(respond(client, input=given, **SPEAK)) == SPEECH
    assert text_of(respond(client, input=BEGINNING[2:], instructions=BEGINNING[:2], **SPEAK)) == SPEECH


@pytest.mark.parametrize("stream", [False, True])
def test_going_on(client: Any, stream: bool) -> None:
    """The conversation goes on even when the response before has been deleted; its instructions are not kept."""
    first = respond(client, input=BEGINNING[2:], instructions=BEGINNING[:2], **SPEAK)
    second = respond(client, stream, input="And", previous_response_id=first["id"], **SHORT)
    assert second["previous_response_id"] == first["id"]
    assert client.http.delete(f"{PATH}/{first['id']}").json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    assert client.error(PATH, input="And", previous_response_id=first["id"])[:2] == (404, "previous_response_id")
    third = respond(client, input="so", previous_response_id=second["id"], instructions="Talk.", **SHORT)
    texts = "Talk.", BEGINNING[2:], SPEECH, "And", *(each["content"][0]["text"] for each in second["output"]), "so"
    assert third["usage"]["input_tokens"] == num_tokens(client, "".join(texts))


def test_what_is_kept(client: Any) -> None:
    items = [{"role": "user", "content": each} for each in (BEGINNING, "b", "c")]
    response = respond(client, input=items, **SHORT)
    path = f"{PATH}/{response['id']}"
    assert client.http.get(path).json() == response
    assert client.error_of(client.http.get(f"{path}?stream=true"))[:2] == (400, "stream")
    assert client.error_of(client.http.post(f"{path}/cancel"))[:2] == (400, "response_id")
    assert client.error_of(client.http.post(f"{PATH}/other/cancel"))[:2] == (404, "response_id")
    first = client.http.get(f"{path}/input_items?limit=2&order=asc").json()
    assert [item["content"][0]["text"] for item in first["data"]] == [BEGINNING, "b"]
    assert first["has_more"] and first["last_id"] == first["data"][-1]["id"]
    rest = client.http.get(f"{path}/input_items?order=asc&after={first['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["c"] and not rest["has_more"]
    assert client.http.get(f"{path}/input_items").json()["data"] == [*rest["data"], *reversed(first["data"])]
    assert client.error_of(client.http.get(f"{path}/input_items?after=x"))[:2] == (400, "after")
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    again = respond(client, input=[*items, reference], **SHORT)
    text = "".join((BEGINNING, "b", "c", text_of(response)))
    assert again["usage"]["input_tokens"] == num_tokens(client, text)


def test_methods(client: Any) -> None:
    """Catches a path that names the methods of one of its routes alone."""
    response = client.http.put(f"{PATH}/x")
    assert (response.status_code, response.headers["allow"]) == (405, "DELETE, GET")


def test_text_that_utf8_cannot_write(client: Any) -> None:
    """Catches bytes that are no UTF-8 where a response is given again."""
    response = respond(client, input=BEGINNING, user="\ud800", **SHORT)
    assert response["user"] == "\ud800"
    path = f"{PATH}/{response['id']}"
    assert json.loads(client.http.get(path).content.decode()) == response


def test_a_stream_that_takes_too_long(
    speaker_path: str, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the response as far as it has come. The time is over once all tokens have come."""
    limits: dict[float, asyncio.Timeout] = {}
    timeout = asyncio.timeout

    def watched_timeout(seconds: float) -> asyncio.Timeout:
        limits[seconds] = timeout(seconds)
        return limits[seconds]

    async def end(*_: Any) -> None:
        limits[77.0].reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(30)

    monkeypatch.setattr(asyncio, "timeout", watched_timeout)
    monkeypatch.setattr(OutputReader, "end", end)
    with serve(LLMEngine(speaker_path), chat_template="{{ messages[0].content }}", request_timeout=77.0) as client:
        response = respond(client, True, input=BEGINNING, **SPEAK)
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["error"]["message"] == "request: expected its answer to end within 77 seconds"
    assert text_of(response) == SPEECH


def test_what_is_not_kept(client: Any) -> None:
    response = respond(client, input=BEGINNING, store=False, **SHORT)
    assert response["store"] is False
    for name in ("", "/input_items"):
        assert client.error_of(client.http.get(f"{PATH}/{response['id']}{name}"))[0] == 404
    assert client.error_of(client.http.delete(f"{PATH}/{response['id']}"))[0] == 404
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    assert client.error(PATH, input=[reference])[:2] == (404, "input")


def test_another_key_finds_nothing(speaker_path: str, serve: Callable[..., Any]) -> None:
    engine = LLMEngine(speaker_path, num_blocks=64)
    with serve(engine, api_keys=("one", "two"), chat_template="{{ messages }}") as client:
        one, two = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
        body = {"input": BEGINNING, "max_output_tokens": 1}
        response = client.http.post(PATH, json=body, headers=one).json()
        path = f"{PATH}/{response['id']}"
        next_body = {**body, "previous_response_id": response["id"]}
        assert client.http.get(path, headers=two).status_code == 404
        assert client.http.delete(path, headers=two).status_code == 404
        assert client.http.post(PATH, json=next_body, headers=two).status_code == 404
        assert client.http.get(path, headers=one).json() == response
        assert client.http.post(PATH, json=next_body, headers=one).status_code == 200


def test_the_store_is_bounded() -> None:
    """By bytes and by time; what goes takes the ids of its items along."""
    time = 0.0
    store = ResponseStore(1000, 10, lambda: time)

    def add(name: str, size: int) -> None:
        output = [{"id": f"item of {name}", "text": "x" * size}]
        store.add("", {"id": name, "output": output}, [], [{"id": "input"}])

    add("a", 100)
    add("b", 100)
    assert store.output_item("", "item of a") is not None and store.get("", "b") is not None
    add("c", 200)
    assert store.get("", "a") is None and store.output_item("", "item of a") is None
    assert store.get("", "b") is not None and 0 < store.num_bytes <= 1000
    add("d", 2000)
    assert store.get("", "d") is None and store.get("", "c") is not None
    time = 10.0
    assert store.get("", "c") is None and store.num_bytes == 0
    nothing = ResponseStore(0, 10)
    nothing.add("", {"id": "a", "output": []}, [], [])
    assert nothing.get("", "a") is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_with_a_tool(tools: Any, stream: bool) -> None:
    """A call, its result, and another call: by the conversation that is kept, and by the whole input."""
    first = respond(tools, stream, input="Rain?", **CALL)
    [call] = first["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Paris", "Rome")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    second = respond(tools, stream, input=[result], previous_response_id=first["id"], **CALL)
    whole_input = [{"role": "user", "content": "Rain?"}, call, result]
    other = respond(tools, stream, input=whole_input, **CALL)
    assert second["usage"]["input_tokens"] == other["usage"]["input_tokens"]
    assert other["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert without_ids(second["output"]) == without_ids(other["output"])
    assert [item["type"] for item in second["output"]] == ["function_call"]


def test_what_a_coding_agent_asks(tools: Any) -> None:
    """A body with all that such an agent sends, after a call."""
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "rain"}]}
    response = respond(
        tools,
        stream=True,
        instructions="You are an agent.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
            {"type": None, "role": "user", "content": "Rain?"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None},
            {**call, "arguments": '{"city": "Rome"}', "status": "completed"},
            output,
        ],
        reasoning={"effort": "medium", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="a",
        text={"verbosity": "low"},
        **CALL,
    )
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert (response["reasoning"]["effort"], response["text"]["verbosity"]) == ("medium", "low")


@pytest.mark.parametrize("stream", [False, True])
def test_functions_in_a_namespace(tools: Any, stream: bool) -> None:
    """A call comes with the name and the namespace of its function, and may come back so. Codex asks in this way."""
    search = {"type": "web_search", "external_web_access": True}
    space = {"type": "namespace", "name": "weather", "description": "of cities", "tools": [TOOL]}
    body = {**CALL, "tools": [space, search], "client_metadata": {"session_id": "x"}}
    response = respond(tools, stream, input="Rain?", **body)
    [call] = response["output"]
    assert (call["namespace"], call["name"], response["tools"]) == ("weather", "get_weather", [space])
    history = [{"role": "user", "content": "Rain?"}, call]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    again = respond(tools, stream, input=[*history, result], **body)
    as_the_model_sees_it = {**call, "name": "weather__get_weather", "namespace": None}
    flat = {**CALL, "tools": [{**TOOL, "name": "weather__get_weather"}]}
    other = respond(tools, stream, input=[history[0], as_the_model_sees_it, result], **flat)
    assert again["usage"]["input_tokens"] == other["usage"]["input_tokens"]
    assert [item["name"] for item in again["output"] + other["output"]] == ["get_weather", "weather__get_weather"]
    assert "namespace" not in other["output"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut(tools: Any, stream: bool) -> None:
    response = respond(tools, stream, input="Rain?", **{**CALL, "max_output_tokens": 45})
    [call] = response["output"]
    assert (call["type"], call["status"], response["status"]) == ("function_call", "incomplete", "incomplete")
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["arguments"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts(tools: Any, stream: bool) -> None:
    """It is not to be run, unless the stop string comes after the arguments."""
    response = respond(tools, stream, input="Rain?", stop=['"city"'], **CALL)
    [call] = response["output"]
    assert (call["type"], call["status"], response["status"]) == ("function_call", "incomplete", "incomplete")
    assert (response["incomplete_details"], response["completed_at"]) == ({}, None)
    response = respond(tools, stream, input="Rain?", stop=["</tool_call>"], **CALL)
    [call] = response["output"]
    assert (call["status"], response["status"], response["incomplete_details"]) == ("completed", "completed", None)
    assert json.loads(call["arguments"])["city"] in ("Paris", "Rome")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a", "description": "b", "schema": SCHEMA}}}, "city"),
        (
            {"tool_choice": {"type": "function", "name": "get_weather"}, "tools": [{**TOOL, "description": None}]},
            "city",
        ),
    ],
    ids=["text.format", "tool_choice"],
)
def test_forms(tools: Any, fields: dict[str, Any], expected: str) -> None:
    body = {**CALL, "tools": None, "tool_choice": None, **fields}
    response = respond(tools, input="Rain?", **body)
    assert response["tools"] == (fields.get("tools") or [])  # with all that a tool may have
    assert response["text"]["format"] == fields.get("text", {}).get("format", {"type": "text"})
    [item] = response["output"]
    text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    assert expected in json.loads(text)


def test_a_thought(tools: Any) -> None:
    """It is an item of its own, with tokens that are counted, and may come back as one."""
    response = respond(tools, True, input="Rain?", **{**CALL, "chat_template_kwargs": None})
    [thought, *rest] = response["output"]
    assert thought["type"] == "reasoning" and thought["content"][0]["type"] == "reasoning_text"
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] <= response["usage"]["output_tokens"]
    again = [{"role": "user", "content": "Rain?"}, thought, *rest, {"role": "user", "content": "So?"}]
    assert respond(tools, input=again, **CALL)["output"]


@pytest.mark.parametrize(("num_turns", "drops"), [(2, False), (8, True), (13, True)])
def test_the_oldest_turns_give_way(client: Any, num_turns: int, drops: bool) -> None:
    """As few as must be. A system message amid the first turn stays."""
    rules = {"role": "developer", "content": "rules "}
    texts = [f"{i} " + "word " * 5 for i in range(num_turns)]
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes "}] for text in texts]
    turns[0].insert(1, rules)

    def asked(num_dropped: int) -> dict[str, Any]:
        kept = [item for turn in turns[num_dropped:] for item in turn]
        return {"input": [rules, *kept] if num_dropped > 0 else kept, **SHORT}

    num_dropped = 0
    while client.post(PATH, **asked(num_dropped)).status_code == 400:
        num_dropped += 1
    assert (num_dropped > 0) == drops
    response, expected = respond(client, **asked(0), truncation="auto"), respond(client, **asked(num_dropped))
    assert response["usage"]["input_tokens"] == expected["usage"]["input_tokens"]
    assert text_of(response) == text_of(expected)


THOUGHT = {"type": "reasoning_text", "text": "b"}
REFUSAL = {"type": "refusal", "refusal": "c"}


def nested(**item: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}, item]}


def form_of(**fields: Any) -> dict[str, Any]:
    return {"input": "a", "text": {"format": fields}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "input: expected a string or a list of items, one at least"),
        (
            {"input": "a", "instructions": "\ud800"},
            "instructions",
            "instructions: expected text that UTF-8 can write",
        ),
        ({"input": "a", "background": True}, "background", "background: "),
        ({"input": "a", "background": 0}, "background", "background: "),
        ({"input": "a", "top_logprobs": False}, "top_logprobs", "top_logprobs: "),
        ({"input": "a", "truncation": "last"}, "truncation", "truncation: "),
        ({"input": "a", "include": ["message.input_image.image_url"]}, "include", "message.output_text.logprobs"),
        ({"input": "a", "conversation": "conv_1"}, "conversation", "conversation: "),
        ({"input": "a", "stream_options": {}}, "stream_options", "stream_options: "),
        (
            {"input": "a", "tools": [{"type": "file_search"}]},
            "tools",
            "tools: expected objects of the types 'function', 'namespace', 'web_search', got {'type': 'file_search'}",
        ),
        ({"input": "a", "tools": [{"name": "f"}]}, "tools", "tools: expected objects with a type, got {'name': 'f'}"),
        ({"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "tool_choice: "),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "tool_choice: "),
        (
            {"input": "a", "tools": [{**TOOL, "name": "a__b"}, {"type": "namespace", "name": "a", "tools": [B]}]},
            "tools",
            "expected a name of its own, got 'a__b' again",
        ),
        (nested(type="function_call", name="f", arguments="{}", call_id="c", namespace=5), "input", "input[1].namespa"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "tool_choice: "),
        (
            {"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "messages[99]"}},
            "tool_choice",
            "messages[99]",
        ),
        ({"input": "a", "max_output_tokens": 10**6}, "input", "maximum context length"),
        ({"input": "a", "max_output_tokens": 10**6, "truncation": "auto"}, "input", "maximum context length"),
        (nested(type={}, role="user", content="a"), "input", "input[1].type: "),
        (nested(type="computer_call"), "input", "input[1].type: "),
        (nested(role="user", content=[{"type": "input_image"}]), "input", "input[1].content[0].type: "),
        (nested(role="user", content=[{"type": "input_file"}]), "input", "input[1].content[0].type: "),
        (nested(role="user", content=5), "input", "input[1].content: "),
        (nested(type="reasoning", summary="a"), "input", "input[1].summary: expected a list of parts, got str"),
        (nested(type="reasoning", content="a"), "input", "input[1].content: expected a list of parts, got str"),
        (nested(type="reasoning", summary=[THOUGHT, 5]), "input", "input[1].summary[1]: "),
        (nested(type="reasoning", content=[THOUGHT, REFUSAL]), "input", "input[1].content[1].type: expected a text, "),
        (nested(role=5, content="a"), "input", "input[1].role: "),
        (nested(content="a"), "input", "input[1].role: "),
        (nested(type="function_call", arguments="{}", call_id="c"), "input", "input[1].name: "),
        (nested(type="function_call", name="f", arguments="{", call_id="c"), "input", "input[1]: "),
        (nested(type="function_call", name="f", arguments="{}"), "input", "input[1].call_id: "),
        (nested(type="function_call_output", call_id="c", output=None), "input", "input[1].output: "),
        (nested(role="user", content="a", more=float("nan")), "input", "input: expected JSON that "),
        (form_of(type="json_schema", name="a", schema={"const": float("inf")}), "text", "text: expected JSON that "),
        (form_of(type="json_schema", name="a"), "text.format", "text.format: expected a schema with the type json"),
        (form_of(type="text", schema={}), "text.format", "and with no other, got one with text"),
        (form_of(type="json_object", schema=True), "text.format", "and with no other, got one with json_object"),
    ],
    ids=str,
)
def test_what_is_refused(client: Any, fields: dict[str, Any], param: str, words: str) -> None:
    status, blamed, message = client.error(PATH, **fields)
    assert (status, blamed) == (400, param) and words in message, message


def test_items_that_are_nested_too_deeply(client: Any) -> None:
    """Catches a failure of the server where the parser takes what the writer does not."""
    for depth in range(700, 1000, 10):
        item = f'{{"role": "user", "content": "a", "x": {"[" * depth}{"]" * depth}}}'
        content = f'{{"input": [{item}], "max_output_tokens": 1}}'
        response = client.http.post(PATH, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400), depth


def test_a_schema_that_nothing_can_be_held_to(tools: Any) -> None:
    """It shows when the engine takes the request, in a stream as well."""
    form = {"type": "json_schema", "name": "a", "schema": {"type": 5}}
    tool = {**TOOL, "parameters": {"type": 5}}
    for stream in (False, True):
        assert tools.error(PATH, input="a", text={"format": form}, stream=stream)[:2] == (400, "text.format")
        assert tools.error(PATH, input="a", tools=[tool], stream=stream)[:2] == (400, "tools")
