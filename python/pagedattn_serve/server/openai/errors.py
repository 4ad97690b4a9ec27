"""What the engine, pydantic and Starlette raise, as errors in OpenAI's shape."""

import reprlib
import sys
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.async_engine import EngineBusyError, EngineDeadError
from pagedattn_serve.config import UTF8_TEXT
from pagedattn_serve.errors import BadArgument
from pagedattn_serve.server.http.errors import ApiError, ClientGoneError, error_response

CLIENT_GONE = 499  # what proxies log of a client that left
# Arguments of the engine, and the names that a client has for them.
_PARAM_OF = {"prompt_token_ids": "prompt", "sampling_params": None}  # None: several
_TOO_LONG = {"too_long": "items", "string_too_long": "characters in each"}  # pydantic's types of errors
NOT_JSON = "not_json"  # a type of our own
# Fields with several forms, of which pydantic would name one alone; where these differ, with the name of the route.
_FORMS = {
    **dict.fromkeys(
        ("prompt", "create_embeddings.input"),
        "a string, a list of strings, a list of token ids or a list of lists of token ids",
    ),
    "tokenize.prompt": "a string",
    "rerank.documents": "a list of strings or of objects with a text",
    **dict.fromkeys(
        ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"), "a string or a list of strings"
    ),
    "stop": "a string or a list of strings",
    "input": "a string or a list of items, one at least",
    "messages": "a list of objects with a role and a content",
}


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    error: ErrorBody


def engine_error(
    error: EngineBusyError | EngineDeadError | BadArgument | TypeError | ValueError,
    form_field: str | None = None,
    retry_after: int = 1,
) -> ApiError:
    """What the client is told of an error of the engine, or of what is made for it (SamplingParams).

    form_field: the request's name for structured_output. retry_after: seconds to stay away from a busy engine.
    """
    text = str(error)
    if isinstance(error, EngineBusyError):
        return ApiError(429, text, code="rate_limit_exceeded", headers={"Retry-After": str(retry_after)})
    if isinstance(error, EngineDeadError):
        return ApiError(503, text, code="engine_dead")
    if not isinstance(error, BadArgument):
        return ApiError(400, text)
    if form_field is not None and error.argument == "structured_output":
        return ApiError(400, str(error.renamed(form_field)), param=form_field)
    param = _PARAM_OF.get(error.argument, error.argument)
    return ApiError(400, text if param is None else str(error.renamed(param)), param=param)


def validation_error(error: RequestValidationError, route: str = "") -> ApiError:
    """The first thing that is wrong with a body, as `name: expected X, got Y`. route: the name of the request's."""
    errors = error.errors()
    telling = (each for each in errors if each["type"] in (*_TOO_LONG, NOT_JSON))
    first = next(telling, errors[0])  # else, of a field with two forms
    location = [str(part) for part in first["loc"][1:]]
    given = first.get("input")
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: expected JSON, got what is not: {first['ctx']['error']} at {location[0]}")
    if isinstance(given, bytes):
        return ApiError(415, "Content-Type: expected application/json")
    if not location:
        expected = f"field names of {UTF8_TEXT}" if first["type"] == "string_unicode" else "a JSON object"
        return ApiError(400, f"body: expected {expected}, got {_short(given)}")
    name = location[0]
    if first["type"] == "extra_forbidden":
        where = "" if len(location) == 1 else f" in {name}"
        return ApiError(400, f"{location[-1]}: expected none, as it is not supported{where}", param=".".join(location))
    if first["type"] == "missing":
        return ApiError(400, f"{location[-1]}: expected a value, got none", param=".".join(location))
    if first["type"] in _TOO_LONG:
        what = _TOO_LONG[first["type"]]
        expected = f"at most {first['ctx']['max_length']:,} {what}"
        return ApiError(400, f"{name}: expected {expected}, got {len(given or ()):,}", param=name)
    if first["type"] == "value_error":
        return ApiError(400, str(first["ctx"]["error"]), param=name)
    return ApiError(400, f"{name}: expected {_expected(name, first, route)}, got {_short(given)}", param=name)


def add_error_handlers(app: FastAPI) -> None:
    """Every error of an app in OpenAI's shape, those of its routing too."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error, request.scope["route"].name))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        encoding = request.headers.get("content-encoding")
        if error.status_code == 400 and encoding is not None:
            return error_response(ApiError(415, f"Content-Encoding: expected none, got {_short(encoding)}"))
        if error.status_code == 400:  # what json.loads raises other than JSONDecodeError
            num_digits = sys.get_int_max_str_digits()
            message = (
                "body: expected JSON in UTF-8 that is not nested too deeply and has no integer of more than "
                f"{num_digits:,} digits"
            )
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path}"
        headers = None if error.headers is None else dict(error.headers)
        if error.status_code == 405:
            headers = {"Allow": _methods(request)}
        return error_response(ApiError(error.status_code, message, headers=headers))

    async def on_client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(ClientGoneError, on_client_gone)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


def _methods(request: Request) -> str:
    """The methods of a request's path. Its route knows one of them alone, and the description of the app all."""
    route = request.scope["route"]
    described = request.app.openapi()["paths"].get(route.path, {})
    return ", ".join(sorted(route.methods | {method.upper() for method in described}))


def _expected(name: str, error: dict[str, Any], route: str) -> str:
    """What a field wants, in words."""
    forms = _FORMS.get(f"{route}.{name}") or _FORMS.get(name)
    if forms is not None and error["type"].endswith("_type"):
        return forms
    context = error.get("ctx", {})
    if error["type"] == "string_unicode":
        return UTF8_TEXT
    if error["type"] == "union_tag_invalid":
        return f"objects of the types {context['expected_tags']}"
    if error["type"] == "union_tag_not_found":
        return "objects with a type"
    for bound, sign in (("ge", ">="), ("gt", ">"), ("le", "<=")):
        if bound in context:
            return f"a number {sign} {context[bound]:g}"
    if "pattern" in context:
        return f"a string of the form {context['pattern']}"
    if "min_length" in context:
        return f"a length of {context['min_length']} at least"
    text: str = error["msg"].removeprefix("Input should be ")
    return text


class _Repr(reprlib.Repr):
    """The beginning of a value, for which the rest of it is not looked at."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)  # which sorts them all


_REPR = _Repr()
_REPR.maxlist = _REPR.maxdict = 10
_REPR.maxstring = _REPR.maxlong = 100


def _short(value: object) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
