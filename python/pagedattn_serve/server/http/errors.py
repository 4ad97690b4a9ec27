"""Errors that clients get as answers. Whichever route an error comes from, it has OpenAI's shape, {"error": {"message",
"type", "param", "code"}}, and the right status."""

import json
from typing import Any

from starlette.responses import Response

from pagedattn_serve.server.http.logs import current_request

MAX_MESSAGE = 1000  # characters: messages quote what they were given


class ApiError(Exception):
    """A request that is answered with an error, or a stream that ends with one.

    param: the field of the request that is to blame, if one is. code: OpenAI's word for what is wrong, if it has one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response. With status 500 the message ends with the id that the log has."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        message = str(self)
        if len(message) > MAX_MESSAGE:
            message = message[: MAX_MESSAGE - 3] + "..."
        context = current_request.get()
        if self.status == 500 and context is not None:
            message += f" (request {context.answer_id or context.request_id})"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """The client has closed its connection: nobody is left to answer."""


class JSONResponse(Response):
    """Any text as valid JSON: a lone surrogate, which UTF-8 cannot write, as its escape."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content).encode("utf-8", "backslashreplace")


encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)
