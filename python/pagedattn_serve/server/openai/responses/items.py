"""The items of a conversation: as messages for the chat template, and as they are kept and listed."""

from collections.abc import Iterable, Mapping
from typing import Any

from pagedattn_serve.errors import ArgumentError, ArgumentTypeError
from pagedattn_serve.server.openai.responses.events import new_item_id
from pagedattn_serve.server.openai.responses.tools import FunctionId
from pagedattn_serve.server.openai.translation import content_of

Item = dict[str, Any]
NamedMessage = tuple[str, dict[str, Any]]  # the name of the item that a message begins with; the message
ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def listed_items(given: str | list[Item]) -> list[Item]:
    """The input of a request as items with ids, whose contents are parts. Raises ValueError or TypeError, which name
    the item."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_listed(f"input[{i}]", item) for i, item in enumerate(given)]


def _listed(name: str, item: Item) -> Item:
    kind = "message" if item.get("type") is None else item["type"]
    if kind not in ITEM_TYPES:
        raise ArgumentError(f"{name}.type", f"one of {', '.join(ITEM_TYPES)}", repr(kind))
    item = {"id": new_item_id(kind), **{key: value for key, value in item.items() if value is not None}, "type": kind}
    if kind == "message":
        if isinstance(item.get("content"), str):
            text_type = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": text_type, "text": item["content"]}]
        item.setdefault("status", "completed")
    return item


def chat_messages(items: Iterable[tuple[str, Item]]) -> list[NamedMessage]:
    """Messages for the chat template, each with the name of the item that it begins with. What an assistant thought,
    said and called in one turn is one message.

    items: with their names. Raises ValueError or TypeError, which name the item.
    """
    messages: list[NamedMessage] = []

    def of_assistant(name: str, *before: str) -> dict[str, Any]:
        """The message of the turn that goes on, or a new one. before: fields that do not come before the item."""
        last = messages[-1][1] if messages else {}
        if last.get("role") != "assistant" or not last.keys().isdisjoint(before):
            last = {"role": "assistant"}
            messages.append((name, last))
        return last

    for name, item in items:
        match item["type"]:
            case "message" if item.get("role") == "assistant":
                message = of_assistant(name, "content", "tool_calls")
                message["content"] = _content(f"{name}.content", item.get("content"))
            case "message":
                role = _text(f"{name}.role", item.get("role"))
                message = {"role": role, "content": _content(f"{name}.content", item.get("content"))}
                messages.append((name, message))
            case "reasoning":
                if thought := _thought(name, item):
                    message = of_assistant(name, "content", "tool_calls")
                    message["reasoning_content"] = "\n".join([*_given(message, "reasoning_content"), thought])
            case "function_call":
                texts = {field: _text(f"{name}.{field}", item.get(field)) for field in ("name", "arguments", "call_id")}
                namespace = item.get("namespace")
                if namespace is not None:
                    texts["name"] = FunctionId(_text(f"{name}.namespace", namespace), texts["name"]).in_chat
                function = {"name": texts["name"], "arguments": texts["arguments"]}
                call = {"id": texts["call_id"], "type": "function", "function": function}
                of_assistant(name).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                call_id = _text(f"{name}.call_id", item.get("call_id"))
                output = _content(f"{name}.output", item.get("output"))
                messages.append((name, {"role": "tool", "tool_call_id": call_id, "content": output}))
    for _, message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _given(message: Mapping[str, str], field: str) -> list[str]:
    return [message[field]] if field in message else []


def _thought(name: str, item: Item) -> str:
    """The text of a reasoning item, or of its summary; empty if it has neither."""
    field = "content" if item.get("content") else "summary"
    parts = item.get(field) or []
    if not isinstance(parts, list):
        raise ArgumentTypeError(f"{name}.{field}", "a list of parts", type(parts).__name__)
    return "\n".join(_part_text(f"{name}.{field}[{i}]", part) for i, part in enumerate(parts))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ArgumentTypeError(name, "a string", type(value).__name__)
    return value


def _content(name: str, content: object) -> Any:
    """A content as the chat template takes it."""
    return content if isinstance(content, str) else content_of(_parts(name, content))


def _parts(name: str, content: object) -> list[dict[str, str]]:
    if not isinstance(content, list):
        raise ArgumentTypeError(name, "a string or a list of parts", type(content).__name__)
    return [_part(f"{name}[{i}]", part) for i, part in enumerate(content)]


def _part(name: str, part: object) -> dict[str, str]:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "refusal", "refusal": _text(f"{name}.refusal", part.get("refusal"))}
    return {"type": "text", "text": _part_text(name, part)}


def _part_text(name: str, part: object) -> str:
    if not isinstance(part, dict):
        raise ArgumentTypeError(name, "an object with a type", type(part).__name__)
    kind = part.get("type")
    if kind not in _TEXTS:
        raise ArgumentError(f"{name}.type", "a text, the only kind of content here", repr(kind))
    return _text(f"{name}.text", part.get("text"))
