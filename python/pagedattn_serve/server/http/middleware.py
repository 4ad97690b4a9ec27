"""What every request passes before the app, and every answer after it. It is plain ASGI, so streams go through
unbuffered, and the app sees its client go away.

The order, from the outside: `RootPath`, `RequestLog` (id, log line, unexpected errors), `Cors`, `TimeLimit`,
`HostCheck`, `KeyCheck`, `BodyLimit`, `HeadAsGet`. If a request is refused here, the answer has OpenAI's shape. Behind
`Cors`, the connection is closed too, so that nobody reads a body to its end for nothing.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
import traceback
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedattn_serve.server.http.config import ANY_HOST, ServerConfig
from pagedattn_serve.server.http.errors import (
    ApiError,
    encode_json,
    error_response,
    is_anthropic,
    last_events,
    to_utf8,
)
from pagedattn_serve.server.http.logs import RequestContext, current_request

logger = logging.getLogger(__name__)

# Paths that are served without a key. Every other path, known or not, asks for a key.
OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics"})
OPEN_FOLDER = "/page/"
# A header Host, with or without a port. An address of version 6 stands in brackets.
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@?#\s]+)(:[0-9]*)?", re.IGNORECASE)
# These paths are asked all the time. Requests for them are logged on the level "debug", unless they fail.
POLLED_PATHS = frozenset({"/health", "/metrics", "/state"})

# How often a body may have each of these characters, in its texts too: each of them may stand for a value, a field, an
# object or a list. The parser makes ten million numbers a second, but only one million fields or lists.
MOST_OF = ((b",", 2**20), (b":", 2**17), (b"{", 2**17), (b"[", 2**17))

# A refused client has this time to stop sending. If the connection were closed earlier, the answer could get lost.
LINGER_SECONDS = 2.0


def add_middleware(app: Starlette, config: ServerConfig) -> None:
    """Add all of it, in its order. The app finds what it says of a request in `current_request`."""
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_size, seconds=config.read_timeout)
    app.add_middleware(KeyCheck, keys=config.api_keys)
    if config.allowed_hosts is not None and ANY_HOST not in config.allowed_hosts:
        app.add_middleware(HostCheck, names=(config.host, *config.allowed_hosts))
    app.add_middleware(TimeLimit, seconds=config.request_timeout)
    if config.allowed_origins:  # around the checks: a browser asks without a key whether it may ask
        app.add_middleware(
            Cors,
            allow_origins=config.allowed_origins,
            allow_methods=("DELETE", "GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "request-id", "retry-after"),
        )
    app.add_middleware(RequestLog)
    app.add_middleware(RootPath, root_path=config.root_path)


class RootPath:
    """Gives all others a scope as ASGI wants it: `path` begins with `root_path`, the path under which a proxy serves
    the server, even if the proxy has cut it off. `own_path` is the rest.

    root_path: "" where the scope says it, as that of Ray Serve does.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root_path = (self.root_path or scope.get("root_path", "")).rstrip("/")
            path = scope["path"]
            if not f"{path}/".startswith(f"{root_path}/"):
                path = root_path + path
            if path == root_path:
                path = f"{root_path}/"
            scope = {**scope, "path": path, "root_path": root_path}
        await self.app(scope, receive, send)


def own_path(scope: Scope) -> str:
    """The path of a request by the server's own names, such as /v1/models."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


class RequestLog:
    """Gives each request an id and, when it is over, a line in the log: no prompt, no key, no query string.

    An error that no handler of the app has taken ends here, as status 500 if nothing was sent before. Its text may be
    that of a prompt, so the log has only the error's type and place.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        context = RequestContext(secrets.token_hex(16), own_path(scope))
        current_request.set(context)  # each request has a task of its own
        request_id_headers = [(b"x-request-id", context.request_id.encode())]
        if is_anthropic(context.path):  # whose clients read it by another name
            request_id_headers.append((b"request-id", context.request_id.encode()))
        started = time.monotonic()
        status = 499  # as proxies say of a client that left before there was an answer
        is_gone = is_whole = False

        async def watched_receive() -> Message:
            nonlocal is_gone
            message = await receive()
            is_gone = is_gone or message["type"] == "http.disconnect"
            context.is_read = not message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_whole
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *request_id_headers]
            await send(message)

        try:
            await self.app(scope, watched_receive, send_with_id)
        except Exception as error:
            level = logging.DEBUG if is_gone else logging.ERROR  # an error matters to nobody once the client is gone
            trace = "".join(traceback.format_tb(error.__traceback__)).rstrip()
            logger.log(level, "%s\n%s", type(error).__name__, trace)
            if status == 499 and not is_gone:
                await refuse(receive, send_with_id, 500, "the server failed; its log says where", "internal_error")
        finally:
            log_request(scope, context, status, time.monotonic() - started, is_gone and not is_whole)


def log_request(scope: Scope, context: RequestContext, status: int, seconds: float, has_left: bool) -> None:
    """has_left: whether the client went away before the end of its answer."""
    is_poll = context.path in POLLED_PATHS and status < 400
    fields: dict[str, Any] = {"method": scope["method"], "path": context.path[:200], "status": status}
    if context.answer_id:
        fields["id"] = context.answer_id
    if context.num_prompt_tokens:
        fields |= {"prompt_tokens": context.num_prompt_tokens, "output_tokens": context.num_output_tokens}
    fields["seconds"] = round(seconds, 3)
    if context.key_number is not None:
        fields["key"] = context.key_number
    if has_left:
        fields["client_left"] = True
    logger.log(logging.DEBUG if is_poll else logging.INFO, "request", extra={"fields": fields})


class Cors(CORSMiddleware):
    """Starlette's, but where a page may not ask, the answer has the shape of all refusals."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return error_response(ApiError(response.status_code, bytes(response.body).decode(), headers=headers))


class TimeLimit:
    """Ends a request after so many seconds: 504 if nothing was sent, else an error as the last event of a stream."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self.app = app
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start: Message | None = None

        async def watched_send(message: Message) -> None:
            nonlocal start
            start = start or message
            await send(message)

        try:
            async with asyncio.timeout(self.seconds) as limit:
                await self.app(scope, receive, watched_send)
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"request: expected its answer to end within {self.seconds:g} seconds"
            if start is None:
                # Without this header, openai's clients would ask again, twice.
                await refuse(receive, send, 504, text, "timeout", headers={"x-should-retry": "false"})
            elif "text/event-stream" in Headers(raw=start["headers"]).get("content-type", ""):
                context = current_request.get()
                fail = (context and context.fail) or last_events
                body = fail(ApiError(504, text, code="timeout"))
                with suppress(TimeoutError):  # if the client does not read
                    async with asyncio.timeout(LINGER_SECONDS):
                        await send({"type": "http.response.body", "body": body, "more_body": False})


class HostCheck:
    """Answers only requests that call the server by one of its names; all other requests get status 421.

    A web page can have its own name lead to an address of the server. A browser then takes the server for a part of the
    page, and lets the page ask and read everything. But the browser tells the page's name in the header Host. Nobody
    can have the names of loopback addresses lead elsewhere, so these are always names of the server.

    names: further names of the server, without ports. The address that a connection came to is also a name.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self.app = app
        self.names = frozenset(map(bare_name, names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            # Every browser sends one Host. HTTP/1.0 needs none: health checks of load balancers come without.
            is_right = (
                self._is_own(hosts[0], scope) if len(hosts) == 1 else not hosts and scope["http_version"] == "1.0"
            )
            if not is_right:
                got = ", ".join(hosts)[:100] or "none"
                text = f"Host: expected localhost, 127.0.0.1 or a name that --allowed-hosts adds, got {got}"
                return await refuse(receive, send, 421, text, "host_not_allowed")
        await self.app(scope, receive, send)

    def _is_own(self, host: str, scope: Scope) -> bool:
        match = HOST.fullmatch(host)
        if match is None:
            return False
        name = bare_name(match[1])
        return name in self.names or is_loopback(name) or name == scope["server"][0]


def bare_name(host: str) -> str:
    """A name or an address in the form for comparing: without brackets, capitals and the dot at a full name's end."""
    return host.strip("[]").lower().removesuffix(".")


def is_loopback(name: str) -> bool:
    """Whether a name or an address means the machine itself. For every browser, names that end in .localhost do."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


class KeyCheck:
    """Asks for one of the keys, as `Authorization: Bearer KEY`; 401 without it. Its time reveals nothing of a key."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and self._digests:
            path = own_path(scope)
            digest = presented_digest(scope)
            number = self._number_of(digest)
            if number is not None:
                if context := current_request.get():
                    context.key_number, context.key_id = number, digest.hex()
            elif path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
                headers = {"www-authenticate": "Bearer"}
                text = "Incorrect API key provided: expected one of this server's as Authorization: Bearer KEY"
                return await refuse(receive, send, 401, text, "invalid_api_key", headers)
        await self.app(scope, receive, send)

    def _number_of(self, digest: bytes) -> int | None:
        """The place of a key, from 1. Every key is looked at, so the time does not reveal the place."""
        number = None
        for i, each in enumerate(self._digests):
            if hmac.compare_digest(each, digest):
                number = i + 1
        return number


def presented_digest(scope: Scope) -> bytes:
    """SHA-256 of the key that a request brings. Without a key it is that of b"", which is no key. Anthropic's clients
    send it as `x-api-key: KEY`, to any path; Authorization counts first."""
    key = b""
    for name, value in scope["headers"]:
        if name == b"x-api-key" and not key:
            key = value.strip()
        if name == b"authorization":
            scheme, _, rest = value.partition(b" ")
            key = rest.strip() if scheme.lower() == b"bearer" else key
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Reads each body before the app is called. Beyond max_bytes, or with too many values, the answer is 413; beyond
    `seconds` it is 408. No more than max_bytes of a body are held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        length = headers.get("content-length")
        if length is None and "transfer-encoding" not in headers:
            return await self.app(scope, receive, send)
        too_long = f"body: expected at most {self.max_bytes} bytes"
        if length is not None and int(length) > self.max_bytes:
            return await refuse(receive, send, 413, f"{too_long}, got {int(length)}", "request_too_large")
        try:
            async with asyncio.timeout(self.seconds):
                body = await read_body(receive, self.max_bytes)
        except TimeoutError:
            text = f"body: expected all of it within {self.seconds:g} seconds"
            return await refuse(receive, send, 408, text, "timeout")
        except OverflowError:
            return await refuse(receive, send, 413, f"{too_long}, got more", "request_too_large")
        if body is None:
            return
        if (reason := too_intricate(body)) is not None:
            return await refuse(receive, send, 413, reason, "request_too_large")
        message: Message | None = {"type": "http.request", "body": body, "more_body": False}
        del body  # once the app has it, it is the app's alone

        async def receive_body() -> Message:
            nonlocal message
            first, message = message, None
            return await receive() if first is None else first

        await self.app(scope, receive_body, send)


class HeadAsGet:
    """A HEAD is answered as the GET of its path; the server sends no body for it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


async def read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """A request's body; None if its client went away. Raises OverflowError beyond max_bytes."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise OverflowError
        if not message.get("more_body", False):
            return bytes(body)


def too_intricate(body: bytes) -> str | None:
    """Why the parser would take long for a body, or None. Counting takes a millisecond a MiB.

    A parser in another thread would hold up the event loop as long: it keeps Python's lock from beginning to end.
    """
    for character, most in MOST_OF:
        if (number := body.count(character)) > most:
            return f"body: expected at most {most:,} of {character.decode()!r}, got {number:,}"
    return None


async def refuse(
    receive: Receive, send: Send, status: int, message: str, code: str, headers: MutableMapping[str, str] | None = None
) -> None:
    """Answer with an error. Close the connection when the client sends no more, or at least had the time to stop."""
    body = to_utf8(encode_json(ApiError(status, message, code=code).body))
    all_headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **(headers or {}),
    }
    raw_headers = [(name.encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw_headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    context = current_request.get()
    if context is None or not context.is_read:
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
