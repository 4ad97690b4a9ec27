"""Errors that clients get as answers, with the right status. Wherever an error comes from, it has OpenAI's shape,
{"error": {"message", "type", "param", "code"}}, or under `/v1/messages` Anthropic's, {"type": "error", "error":
{"type", "message"}}."""

import json
from typing import Any

from starlette.responses import Response

from pagedattn_serve.server.http.logs import current_request

MAX_MESSAGE = 1000  # characters: messages quote what they were given
DONE = b"data: [DONE]\n\n"
ANTHROPIC_PATH = "/v1/messages"
# Anthropic's types of errors; all others are invalid_request_error, and from status 500 on api_error.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that is answered with an error, or a stream that ends with one.

    param: the field of the request that is to blame, if one is. code: OpenAI's word for what is wrong, if it has one.
    details: what Anthropic's clients read of an error beside its message.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.details = details
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response. With status 500 the message ends with the id that the log has."""
        message = str(self)
        if len(message) > MAX_MESSAGE:
            message = message[: MAX_MESSAGE - 3] + "..."
        context = current_request.get()
        if self.status == 500 and context is not None:
            message += f" (request {context.answer_id or context.request_id})"
        if context is not None and is_anthropic(context.path):
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            of_error: dict[str, Any] = {"type": kind, "message": message}
            if self.details is not None:
                of_error["details"] = self.details
            return {"type": "error", "error": of_error, "request_id": context.request_id}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """The client has closed its connection: nobody is left to answer."""


class JSONResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_utf8(encode_json(content))


encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def to_utf8(text: str) -> bytes:
    """The UTF-8 of JSON, or of events of JSON. A lone surrogate, which UTF-8 cannot write, becomes its escape."""
    return text.encode("utf-8", "backslashreplace")


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


def is_anthropic(path: str) -> bool:
    """Whether a path is of Anthropic's API."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def last_events(error: ApiError) -> bytes:
    """The end of a stream that fails."""
    body = error.body
    data = to_utf8(f"data: {encode_json(body)}\n\n")
    return b"event: error\n" + data if "type" in body else data + DONE
