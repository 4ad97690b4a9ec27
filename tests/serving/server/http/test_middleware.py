"""What requests pass on their way to the app, on apps of a few lines."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.logs import current_request
from pagedattn_serve.server.http.middleware import add_middleware

KEYS = ("first-key", "second-key")


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def who(request: Request) -> Response:
    context = current_request.get()
    assert context is not None
    return PlainTextResponse(f"{context.key_id} {context.request_id}")


async def fail(request: Request) -> Response:
    raise RuntimeError(f"the prompt is: {request.query_params['prompt']}")


async def slow(request: Request) -> Response:
    await asyncio.sleep(30)
    raise AssertionError("not reached")


async def slow_stream(request: Request) -> Response:
    async def events() -> AsyncIterator[str]:
        yield "data: 1\n\n"
        loop = asyncio.get_running_loop()
        clock = loop.time
        loop.time = lambda: clock() + 60  # type: ignore[method-assign]
        await asyncio.sleep(30)

    return StreamingResponse(events(), media_type="text/event-stream")


async def count(request: Request) -> Response:
    context = current_request.get()
    assert context is not None
    context.num_prompt_tokens, context.num_output_tokens = 5, 7
    return PlainTextResponse("counted")


def make_app(**config: Any) -> Starlette:
    handlers = {"/v1/echo": echo, "/v1/who": who, "/v1/fail": fail, "/v1/slow": slow, "/v1/slow_stream": slow_stream}
    handlers |= {"/v1/count": count, "/v1/messages": echo, "/health": echo, "/metrics": echo}
    app = Starlette(routes=[Route(path, handler, methods=["GET", "POST"]) for path, handler in handlers.items()])
    add_middleware(app, ServerConfig(**config))
    return app


def app_of(handler: Any) -> Starlette:
    """The middleware around a handler that has all paths."""
    app = Starlette()
    app.router = handler
    add_middleware(app, ServerConfig())
    return app


async def gone() -> Message:
    """The `receive` of a client that has left."""
    return {"type": "http.disconnect"}


def request(app: Starlette, path: str, method: str = "GET", root_path: str = "", **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=True, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def assert_error(response: httpx.Response, status: int, code: str) -> str:
    """In OpenAI's shape, and the connection ends; returns the message."""
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json" and response.headers["connection"] == "close"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code
    return error["message"]


# --- ids ---


def test_each_request_has_an_id_of_its_own_that_is_the_servers() -> None:
    app = make_app()
    responses = [request(app, "/v1/who", headers={"X-Request-Id": "mine"}) for _ in range(20)]
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == 20 and "mine" not in ids and all(len(bytes.fromhex(each)) == 16 for each in ids)
    assert [response.text.split()[-1] for response in responses] == ids  # the app knows it too


def test_refused_and_failed_requests_have_an_id() -> None:
    assert request(make_app(api_keys=KEYS), "/v1/who").headers["x-request-id"]
    assert request(make_app(), "/v1/fail?prompt=x").headers["x-request-id"]
    assert request(make_app(), "/v1/nothing").headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/nothing", "/v1/who"])
def test_anthropics_clients_find_the_id_by_another_name(path: str) -> None:
    """Of errors, too, wherever they come from; other clients do not get the second name."""
    for options in ({}, {"api_keys": KEYS}):
        headers = request(make_app(**options), path).headers
        expected = headers["x-request-id"] if path.startswith("/v1/messages") else None
        assert headers.get("request-id") == expected


# --- names ---

NAMES = ("Box.example", "FD00::1", "[fd00::2]")
OWN_NAMES = """
localhost LOCALHOST:8000 localhost. a.localhost:1 127.0.0.1 127.9.8.7:80 [::1] [::1]:8000 [0:0:0:0:0:0:0:1]
own.example:8000 box.example BOX.example.:1 [fd00::1]:80 [fd00::2] server:8000
"""  # the last is the connection's address here
OTHER_NAMES = """
evil.example evil.example:8000 box.example.evil.example localhost.evil.example evillocalhost 127.0.0.1.evil.example
localhost:80:80 localhost:x localhost/ localhost@evil.example 10.0.0.1 2130706433 [::2] [::1].evil.example [::1 ::1 *
"""


@pytest.mark.parametrize("host", OWN_NAMES.split())
def test_a_name_of_the_server(host: str) -> None:
    app = make_app(host="own.example", allowed_hosts=NAMES)
    assert request(app, "/v1/who", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", [*OTHER_NAMES.split(), "", "localhost evil.example"])
def test_another_name(host: str) -> None:
    """As of a page whose own name leads here: neither with a key nor without does it learn anything."""
    app = make_app(host="own.example", allowed_hosts=NAMES, api_keys=KEYS)
    for headers in ({}, {"Authorization": f"Bearer {KEYS[0]}"}):
        response = request(app, "/health", headers={"Host": host, **headers})
        message = assert_error(response, 421, "host_not_allowed")
        assert message.endswith(f"a name that --allowed-hosts adds, got {host or 'none'}")


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.0", [], 200), ("1.1", [], 421), ("1.1", [b"localhost"], 200), ("1.0", [b"localhost", b"localhost"], 421)],
)
def test_one_host_or_in_http_1_0_none(version: str, hosts: list[bytes], status: int) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"http_version": version, "headers": [(b"host", host) for host in hosts], "server": ("127.0.0.1", 80)}
    sent, _ = asgi_call(make_app(allowed_hosts=()), "/v1/who", receive, **scope)
    assert sent[0]["status"] == status


@pytest.mark.parametrize("allowed_hosts", [None, ("box.example", "*")])
def test_any_name(allowed_hosts: tuple[str, ...] | None) -> None:
    app = make_app(allowed_hosts=allowed_hosts)
    assert request(app, "/v1/who", headers={"Host": "evil.example"}).status_code == 200


# --- keys ---


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_any_of_the_keys_is_right(key: str, scheme: str) -> None:
    response = request(make_app(api_keys=KEYS), "/v1/who", headers={"Authorization": f"{scheme} {key}"})
    assert response.status_code == 200


def test_a_key_has_a_name_that_does_not_tell_it() -> None:
    app = make_app(api_keys=KEYS)
    names = [request(app, "/v1/who", headers={"Authorization": f"Bearer {key}"}).text.split(" ")[0] for key in KEYS]
    assert len(set(names)) == 2 and not any(key in name for key in KEYS for name in names)
    assert request(make_app(), "/v1/who").text.startswith(" ")  # none


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "first-key"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic first-key"},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-key2"},
        {"Authorization": "Bearer first-key second-key"},
        {"Authorization": "Bearer fIrst-key"},
        {"Authorization": b"Bearer first-k\xe9y"},
        {"X-Api-Key": "first-ke"},
        {"X-Api-Key": "first-key", "Authorization": "Bearer first-ke"},
    ],
)
def test_without_a_right_key(headers: dict[str, Any]) -> None:
    response = request(make_app(api_keys=KEYS), "/v1/who", headers=headers)
    message = assert_error(response, 401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert not any(key in message for key in (*KEYS, "first-ke"))


@pytest.mark.parametrize(
    "path", ["/v1/who", "/v1/nothing", "/tokenize", "/state", "/docs", "/openapi.json", "/health/"]
)
def test_whatever_is_not_open_asks_for_a_key(path: str) -> None:
    assert_error(request(make_app(api_keys=KEYS), path), 401, "invalid_api_key")


@pytest.mark.parametrize("path", ["/health", "/metrics", "/", "/version"])
def test_what_is_open(path: str) -> None:
    assert request(make_app(api_keys=KEYS), path).status_code in (200, 404)  # of this app here


# --- bodies ---


async def chunks_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("body", [b"", b"x" * 1000, lambda: chunks_of(b"x" * 500, b"", b"x" * 500)])
def test_a_body_up_to_the_limit_arrives(body: bytes | Callable[[], AsyncIterator[bytes]]) -> None:
    content = body if isinstance(body, bytes) else body()
    response = request(make_app(max_body_size=1000), "/v1/echo", "POST", content=content)
    assert response.status_code == 200 and response.content == (b"x" * 1000 if body else b"")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_beyond_the_limit(is_chunked: bool) -> None:
    content = chunks_of(b"x" * 500, b"x" * 501) if is_chunked else b"x" * 1001
    response = request(make_app(max_body_size=1000), "/v1/echo", "POST", content=content)
    message = assert_error(response, 413, "request_too_large")
    assert message == "body: expected at most 1000 bytes, got " + ("more" if is_chunked else "1001")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[" + b"5," * 2**20 + b"5,5]", "at most 1,048,576 of ',', got 1,048,577"),
        (b"{" + b'"5":5,' * 2**17 + b'"5":5}', "at most 131,072 of ':', got 131,073"),
        (b"[" + b"{}" * 2**18, "at most 131,072 of '{', got 262,144"),
        (b"[" * (2**17 + 1), "at most 131,072 of '[', got 131,073"),
    ],
    ids=["values", "fields", "objects", "lists"],
)
def test_a_body_that_would_take_the_parser_long(content: bytes, expected: str) -> None:
    """Of 16 MiB it took two seconds, in which nobody else was served."""
    response = request(make_app(), "/v1/echo", "POST", content=content)
    assert assert_error(response, 413, "request_too_large") == f"body: expected {expected}"


def test_a_body_without_a_right_key_is_not_kept() -> None:
    """It is refused before a byte of it is asked for."""
    received: list[str] = []

    async def run() -> None:
        async def receive() -> Message:
            received.append("body" if sent else "early")
            return {"type": "http.request", "body": b"x" * 100, "more_body": len(received) < 5}

        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"content-length", b"500")]
        scope = {"type": "http", "method": "POST", "path": "/v1/echo", "headers": headers, "query_string": b""}
        await make_app(api_keys=KEYS)(scope, receive, send)
        assert sent[0]["status"] == 401

    asyncio.run(run())
    assert received == ["body"] * 5  # after the answer was sent


def asgi_call(
    app: Starlette, path: str, receive: Callable[[], Coroutine[Any, Any, Message]], **scope: Any
) -> tuple[list[Message], float]:
    """What was sent, and the seconds that it took, to a client that sends as `receive` does."""

    async def run() -> tuple[list[Message], float]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        full = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", **scope}
        loop = asyncio.get_running_loop()
        started = loop.time()
        await app(full, receive, send)
        return sent, loop.time() - started

    return asyncio.run(run())


def test_a_body_that_does_not_end_in_time() -> None:
    """However many bytes come in between."""

    async def receive() -> Message:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    app = make_app(read_timeout=0.2)
    sent, seconds = asgi_call(app, "/v1/echo", receive, headers=[(b"transfer-encoding", b"chunked")])
    assert sent[0]["status"] == 408 and sent[-1]["more_body"] is False
    assert json.loads(sent[1]["body"])["error"]["message"] == "body: expected all of it within 0.2 seconds"
    assert seconds < 25


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/slow", b"x", 504), ("/v1/fail", b"x", 500), ("/v1/echo", b"," * (2**20 + 1), 413)],
)
def test_who_has_sent_all_is_not_waited_for(path: str, body: bytes, status: int) -> None:
    """What comes behind a body is the client's end alone: each refusal waited two seconds for it."""
    received: list[Message] = []

    async def receive() -> Message:
        received.append({"type": "http.request", "body": body, "more_body": False})
        return received[-1]

    scope = {"headers": [(b"content-length", b"%d" % len(body))], "query_string": b"prompt=x"}
    sent, _ = asgi_call(make_app(request_timeout=0.1), path, receive, **scope)
    assert sent[0]["status"] == status and sent[-1]["more_body"] is False
    assert len(received) == 1


def test_a_client_that_leaves_while_it_sends(caplog: pytest.LogCaptureFixture) -> None:
    messages = iter([{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Message:
        return next(messages)

    with caplog.at_level(logging.INFO):
        sent, _ = asgi_call(make_app(), "/v1/echo", receive, headers=[(b"content-length", b"100")])
    assert sent == []
    assert access_lines(caplog) == [{"method": "POST", "path": "/v1/echo", "status": 499, "client_left": True}]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_client_that_leaves_a_stream(caplog: pytest.LogCaptureFixture, is_whole: bool) -> None:
    """It has the status, so only a word in the log tells its answer from a whole one, after which clients leave too."""

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": not is_whole})
        await receive()

    with caplog.at_level(logging.INFO):
        asgi_call(app_of(stream), "/v1/echo", gone)
    [line] = access_lines(caplog)
    assert (line["status"], line.get("client_left", False)) == (200, not is_whole)


def test_an_app_that_raises_as_its_client_is_gone_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def leave(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raise RuntimeError("nobody to answer")

    with caplog.at_level(logging.INFO):
        sent, _ = asgi_call(app_of(leave), "/", gone)
    assert sent == [] and [record.levelname for record in caplog.records] == ["INFO"]
    assert access_lines(caplog)[0]["status"] == 499


def test_the_app_sees_its_client_go_away() -> None:
    """After the body, what the client does comes through."""
    seen: list[str] = []

    async def watch(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([(await receive())["type"], (await receive())["type"]])

    messages = iter([{"type": "http.request", "body": b"x", "more_body": False}, {"type": "http.disconnect"}])

    async def receive() -> Message:
        return next(messages)

    asgi_call(app_of(watch), "/", receive, headers=[(b"content-length", b"1")])
    assert seen == ["http.request", "http.disconnect"]


# --- time ---


def test_a_request_that_takes_too_long() -> None:
    response = request(make_app(request_timeout=0.1), "/v1/slow")
    message = assert_error(response, 504, "timeout")
    assert message == "request: expected its answer to end within 0.1 seconds"
    assert response.headers["x-should-retry"] == "false"


def test_a_stream_that_takes_too_long() -> None:
    response = request(make_app(request_timeout=60), "/v1/slow_stream")
    first, error, done, rest = response.text.split("\n\n")
    assert response.status_code == 200 and (first, done, rest) == ("data: 1", "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"


# --- the log ---


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the line of each request, without its seconds."""
    fields = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert all(0 <= each["seconds"] < 30 for each in fields)
    return [{name: value for name, value in each.items() if name != "seconds"} for each in fields]


def server_log(caplog: pytest.LogCaptureFixture) -> str:
    """All that the server logged; httpx logs as well."""
    own = [record for record in caplog.records if record.name.startswith("pagedattn")]
    return "\n".join(f"{record.getMessage()} {vars(record)}" for record in own)


def test_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(api_keys=KEYS)
    headers = {"Authorization": f"Bearer {KEYS[1]}"}
    with caplog.at_level(logging.INFO):
        request(app, "/v1/count?prompt=secret", headers=headers)
        request(app, "/v1/echo", "POST", content=b"secret", headers=headers)
        request(app, "/v1/who")
        request(app, "/v1/" + "x" * 10_000, headers=headers)
    counted, echoed, refused, unknown = access_lines(caplog)
    tokens = {"prompt_tokens": 5, "output_tokens": 7}
    assert counted == {"method": "GET", "path": "/v1/count", "status": 200, **tokens, "key": 2}
    assert echoed == {"method": "POST", "path": "/v1/echo", "status": 200, "key": 2}
    assert refused == {"method": "GET", "path": "/v1/who", "status": 401}
    assert unknown["status"] == 404 and len(unknown["path"]) == 200
    assert not any(word in server_log(caplog) for word in ("secret", *KEYS))


def test_what_is_polled_is_not_logged_unless_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        request(make_app(), "/health")
        request(make_app(), "/metrics")
        assert access_lines(caplog) == []
        request(make_app(max_body_size=1), "/health", "POST", content=b"long")
    assert [line["status"] for line in access_lines(caplog)] == [413]


def test_an_error_of_the_app_is_a_500_and_its_text_stays_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        response = request(make_app(), "/v1/fail?prompt=my+secret")
    assert_error(response, 500, "internal_error")
    log = server_log(caplog)
    assert "RuntimeError" in log and "in fail" in log
    assert "secret" not in log and "secret" not in response.text
    assert access_lines(caplog)[0]["status"] == 500


# --- web pages, and proxies ---

PAGE = {"Origin": "https://chat.example"}


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
def test_pages_of_allowed_origins_may_ask(method: str) -> None:
    """Before they ask, without a key, and when they are refused. Other pages read nothing."""
    app = make_app(api_keys=KEYS, allowed_origins=("https://chat.example",))
    asking = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization,content-type"}
    before = request(app, "/v1/echo", "OPTIONS", headers=PAGE | asking)
    assert before.status_code == 200
    assert before.headers["access-control-allow-headers"] == asking["Access-Control-Request-Headers"]
    key = {"Authorization": f"Bearer {KEYS[0]}"}
    for headers, status in ((PAGE | key, 200), (PAGE, 401)):
        response = request(app, "/v1/echo", headers=headers)
        assert response.status_code == status and response.headers["access-control-allow-origin"] == PAGE["Origin"]
        assert "x-request-id, request-id" in response.headers["access-control-expose-headers"]
    other = {"Origin": "https://other.example"}
    refused = request(app, "/v1/echo", "OPTIONS", headers=other | asking)
    expected = {"message": "Disallowed CORS origin", "type": "invalid_request_error", "param": None, "code": None}
    assert (refused.status_code, refused.json()) == (400, {"error": expected})
    own = ("content-type", "content-length", "x-request-id", "access-control-allow-origin")
    headers, granted = ({k: v for k, v in each.headers.items() if k not in own} for each in (refused, before))
    assert headers == granted and "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in request(app, "/v1/echo", headers=other | key).headers


def test_no_page_may_ask_by_default() -> None:
    response = request(make_app(), "/v1/echo", headers=PAGE)
    assert response.status_code == 200 and "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("path", ["/health", "/llm/health", "/llm/v1/echo", "/v1/echo"])
def test_a_proxy_may_leave_the_root_path_or_cut_it_off(path: str) -> None:
    """Open paths are open under it, too, and the others are not."""
    response = request(make_app(root_path="/llm", api_keys=KEYS), path)
    assert response.status_code == (200 if path.endswith("/health") else 401)
    assert request(make_app(root_path="/llm"), path).status_code == 200
    assert request(make_app(root_path="/llm"), f"/llmx{path}").status_code == 404


@pytest.mark.parametrize("root_path", ["/llm", "/v1", "/page"])
@pytest.mark.parametrize("said_by", ["config", "scope"])
def test_each_path_below_the_root_path_is_judged_once(root_path: str, said_by: str) -> None:
    """Also where the server's own paths begin as the root path does, and where a front says the root path, as Ray
    Serve does. Only the open paths are open, and Anthropic's clients are known."""
    config, scope = (root_path, "") if said_by == "config" else ("", root_path)
    app = make_app(root_path=config, api_keys=KEYS)
    key = {"x-api-key": KEYS[0]}
    assert request(app, f"{root_path}/v1/echo", root_path=scope, headers=key).status_code == 200
    assert request(app, f"{root_path}/health", root_path=scope).status_code == 200
    for prefix in (root_path, root_path * 2):
        assert request(app, f"{prefix}/v1/echo", root_path=scope).status_code in (401, 404)
    assert request(app, f"{root_path}/v1/messages", root_path=scope).status_code == 401
    response = request(app, f"{root_path}/v1/messages", root_path=scope, headers=key)
    assert response.status_code == 200 and "request-id" in response.headers
    assert request(app, f"{root_path}x/health", root_path=scope).status_code == 401
