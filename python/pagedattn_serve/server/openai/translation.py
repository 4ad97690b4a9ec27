"""Requests of other APIs as chats: so all of them share how a prompt is made, and how an output is held and read."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from pagedattn_serve.server.http.errors import ApiError, encode_json
from pagedattn_serve.server.openai.errors import NOT_JSON, validation_error
from pagedattn_serve.server.openai.fields import ChatCompletionRequest

T = TypeVar("T")

ROOM = 100  # levels of nesting: where answers are written, the stack is deeper than where requests are read
_MESSAGE = re.compile(r"messages\[(\d+)\][^ :]*")


def checked_json(value: T) -> T:
    """The same value. Raises an error of pydantic for what JSON cannot say, such as NaN, and for what is nested too
    deeply."""
    nested: Any = value
    for _ in range(ROOM):
        nested = [nested]
    try:
        encode_json(nested)
    except (RecursionError, ValueError):
        raise PydanticCustomError(NOT_JSON, "JSON that is not nested too deeply and has no NaN or Infinity") from None
    return value


def chat_request(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """A request of these fields. Raises ApiError."""
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise validation_error(RequestValidationError(errors)) from None


@contextmanager
def renamed_errors(names: Mapping[str, str], messages: list[str]) -> Iterator[None]:
    """ApiErrors that are raised within name the fields as another API does.

    names: the names there of fields of a chat. messages: what each message of the chat is called there.
    """
    try:
        yield
    except ApiError as error:
        text = str(error)
        if match := _MESSAGE.match(text):  # what follows may be the client's own words
            text = messages[int(match[1])] + text[match.end() :]
        param = error.param and names.get(error.param, error.param)
        if error.param and param and text.startswith(f"{error.param}:"):
            text = param + text.removeprefix(error.param)
        raise ApiError(error.status, text, param=param, code=error.code, headers=error.headers) from None


def content_of(parts: list[dict[str, str]]) -> str | list[dict[str, str]]:
    """Parts as the content of a message: the text of the only one, which every chat template takes, or all of them."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
