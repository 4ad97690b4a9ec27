"""What the events of /v1/responses and /v1/messages add up to."""

import json
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def read_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which has its type as its name."""
    events = []
    for lines in text.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that events tell. Asserts that they are valid, and that the last event has the same response."""
    for event in events:
        assert _RESPONSE_EVENT.validate_python(event).type == event["type"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    for event in events[2:-1]:
        assert event["output_index"] == len(items) - (event["type"] != "response.output_item.added")
        match event["type"].removeprefix("response."):
            case "output_item.added":
                items.append(event["item"])
                assert event["item"]["status"] == "in_progress"
            case "content_part.added":
                items[-1]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                items[-1]["content"][0]["text"] += event["delta"]
                items[-1]["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[-1]["content"][0]["text"]
                assert event.get("logprobs") == items[-1]["content"][0].get("logprobs")
            case "function_call_arguments.done":
                assert (event["name"], event["arguments"]) == (items[-1]["name"], items[-1]["arguments"])
            case "content_part.done":
                assert event["part"] == items[-1]["content"][0]
            case "output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert event["item"] == items[-1]
        assert event["type"].startswith("response.output_item") or event["item_id"] == items[-1]["id"]
    response: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == items
    return response


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events tell."""
    assert events[0]["type"] == "message_start"
    assert (events[1], events[-1]) == ({"type": "ping"}, {"type": "message_stop"})
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    arguments = ""
    is_open = False
    for event in events[2:-1]:
        assert event["type"] == "message_delta" or event["index"] == len(message["content"]) - is_open
        match event["type"]:
            case "content_block_start":
                assert not is_open
                is_open, arguments = True, ""
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta, block = event["delta"], message["content"][-1]
                kind = delta["type"]
                assert (block["type"], kind) in (
                    ("text", "text_delta"),
                    ("thinking", "thinking_delta"),
                    ("thinking", "signature_delta"),
                    ("tool_use", "input_json_delta"),
                )
                if kind == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    field = kind.removesuffix("_delta")
                    block[field] += delta[field]
            case "content_block_stop":
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(arguments or "{}")
                is_open = False
            case "message_delta":
                assert not is_open and event is events[-2]
                message |= {**event["delta"], "usage": event["usage"]}
    assert message["stop_reason"] is not None
    return message


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]
