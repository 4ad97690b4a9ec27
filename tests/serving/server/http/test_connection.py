"""Connections over real sockets: who is too slow, or sends too much, is cut off, and nobody else is."""

import asyncio
import json
import os
import resource
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import AT_ONCE_SECONDS, WAIT_SECONDS
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from pagedattn_serve.server.http import connection, run
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.middleware import add_middleware
from pagedattn_serve.server.http.run import Server
from pagedattn_serve.server.http.sockets import Listener, bind, bind_unix, listen, port_of

TIMEOUT = 0.3
REQUEST = b"GET / HTTP/1.1\r\nHost: server\r\n\r\n"
HELD = REQUEST.replace(b"/", b"/held", 1)
LONG_REQUEST = REQUEST[:-2] + b"X-A: " + b"b" * 50_000 + b"\r\n\r\n"
LONG_POST = b"POST /length HTTP/1.1\r\nHost: server\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70_000

CERTIFICATE = str(Path(__file__).with_name("localhost.pem"))  # with its key; until 2126

Client = Callable[[int], Awaitable[None]]


class FakeEngine:
    """As much of AsyncLLMEngine as a server's start and end ask of it."""

    error = None
    is_shut_down = False

    async def start(self) -> None:
        pass

    async def shutdown(self) -> None:
        self.is_shut_down = True


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


async def echo_length(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def two_parts(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"first "
        await asyncio.sleep(0.2)
        yield b"second"

    return StreamingResponse(parts())


def unanswered(left: list[str]) -> Callable[[Request], Awaitable[Response]]:
    """No answer as long as the client is there; notes in `left` that it has gone."""

    async def respond(request: Request) -> Response:
        left.append("begun")
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left.append("ended")
        return Response()

    return respond


def held(left: list[str]) -> Callable[[Request], Awaitable[Response]]:
    """No answer until `left` says "go on"; notes in `left` that the request has begun."""

    async def respond(request: Request) -> Response:
        left.append("begun")
        while "go on" not in left:
            await asyncio.sleep(0.01)
        return PlainTextResponse("held")

    return respond


def endless(left: list[str]) -> Callable[[Request], Awaitable[Response]]:
    """More than the buffers of a connection hold, for ever; notes in `left` that it was ended."""

    async def respond(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 65536
                    await asyncio.sleep(0)
            finally:
                left.append("ended")

        return StreamingResponse(parts())

    return respond


def with_server(
    client: Client, left: list[str] | None = None, sockets: list[socket.socket] | None = None, **config: Any
) -> None:
    """Run `client` on the port of a server, then end it. sockets: others to listen on; then the client gets 0."""

    async def run() -> None:
        routes = [Route("/", hello), Route("/length", echo_length, methods=["POST"]), Route("/parts", two_parts)]
        noted = left if left is not None else []
        routes += [Route("/endless", endless(noted)), Route("/unanswered", unanswered(noted))]
        routes += [Route("/held", held(noted))]
        app = Starlette(routes=routes)
        server_config = ServerConfig(port=0, **{"read_timeout": TIMEOUT} | config)
        add_middleware(app, server_config)
        engine = FakeEngine()
        server = Server(app, engine, server_config)  # type: ignore[arg-type]
        bound = sockets or bind("127.0.0.1", 0)
        listen("127.0.0.1", bound)
        serving = asyncio.create_task(server.serve(bound))
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await client(0 if sockets else port_of(bound[0]))
        finally:
            server.stop()
            await serving
        assert engine.is_shut_down and not server.server_state.connections

    asyncio.run(run())


async def seconds_until_cut(reader: asyncio.StreamReader) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    with suppress(ConnectionError):
        while await reader.read(65536):
            pass
    return loop.time() - started


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: ser"])
def test_headers_that_do_not_come(sent: bytes) -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert TIMEOUT * 0.5 < await seconds_until_cut(reader) < TIMEOUT + AT_ONCE_SECONDS

    with_server(client)


def test_headers_that_trickle() -> None:
    """However many bytes come, their time is counted from the first."""

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST[:-2])

        async def trickle() -> None:
            while True:
                await asyncio.sleep(TIMEOUT / 10)
                writer.write(b"X-A: b\r\n")

        trickling = asyncio.create_task(trickle())
        assert await seconds_until_cut(reader) < TIMEOUT + AT_ONCE_SECONDS
        trickling.cancel()

    with_server(client)


@pytest.mark.parametrize("before", [b"", LONG_POST])
def test_headers_without_end(before: bytes) -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(before + REQUEST[:-2])
        with suppress(ConnectionError):
            for _ in range(1000):
                writer.write(b"X-A: " + b"b" * 1000 + b"\r\n")
                await writer.drain()
        await seconds_until_cut(reader)

    with_server(client, read_timeout=3600)


@pytest.mark.parametrize("before", [b"", REQUEST], ids=["first", "second"])
@pytest.mark.parametrize("headers", [b"X-A: " + b"b" * 70_000, b"\r\n".join([b"a: b"] * 11_000)], ids=["one", "many"])
def test_long_headers_that_come_at_once(headers: bytes, before: bytes, tmp_path: Path) -> None:
    """The limit held only for headers that had not ended with a read."""
    path = str(tmp_path / "server")

    async def client(_: int) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.sendall(before + REQUEST[:-2] + headers + b"\r\n\r\n")  # all is there when the server reads
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        with suppress(ConnectionError):
            assert await reader.read(1) == b""
        writer.close()

    with_server(client, sockets=bind_unix(path), uds=path, read_timeout=WAIT_SECONDS)


@pytest.mark.parametrize(
    ("before", "answers"), [(LONG_POST, [b"70000"]), (LONG_REQUEST * 2, [b"hello"] * 2)], ids=["body", "headers"]
)
def test_headers_behind_other_requests(before: bytes, answers: list[bytes], tmp_path: Path) -> None:
    """Only their own bytes count. Here they come in one read with more bytes than headers may have."""
    path = str(tmp_path / "server")

    async def client(_: int) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.sendall(before + REQUEST[:30])  # all is there when the server reads
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n" + answer)
        writer.write(REQUEST[30:])
        await reader.readuntil(b"\r\n\r\nhello")
        writer.close()

    with_server(client, sockets=bind_unix(path), uds=path, read_timeout=WAIT_SECONDS)


def test_headers_that_come_while_another_request_runs() -> None:
    """The server does not read while requests wait, so it cuts nobody off for that. Afterwards it does."""
    left: list[str] = []

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HELD + REQUEST + REQUEST[:9])
        while not left:
            await asyncio.sleep(0.01)
        witness, _ = await asyncio.open_connection("127.0.0.1", port)
        await seconds_until_cut(witness)  # whose time began later
        writer.write(REQUEST[9:] + REQUEST[:9])
        left.append("go on")
        for answer in (b"held", b"hello", b"hello"):
            await reader.readuntil(b"\r\n\r\n" + answer)
        await seconds_until_cut(reader)

    with_server(client, left)


def test_no_file_is_free_for_a_connection(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Who is connected is served, others wait, and one warning says so."""
    tries: list[Listener] = []

    def accept(listener: Listener) -> tuple[socket.socket, Any]:
        tries.append(listener)
        return socket.socket.accept(listener)

    monkeypatch.setattr(Listener, "accept", accept)
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.01)
    monkeypatch.setattr(run, "WARNING_SECONDS", 3600.0)

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST)
        await reader.readuntil(b"hello")

    async def client(port: int) -> None:
        connected = await asyncio.open_connection("127.0.0.1", port)
        await ask(*connected)
        tries.clear()
        waiting = [socket.socket() for _ in range(3)]
        taken: list[int] = []
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for each in waiting:
                each.connect(("127.0.0.1", port))
            while len(tries) < 6:
                await ask(*connected)
        finally:
            for file in taken:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(tries) < 100  # asyncio takes a connection at a time, or it would try a backlog's number of times
        asyncio.get_running_loop().call_exception_handler({"message": "something else"})
        for each in waiting:
            reader, writer = await asyncio.open_connection(sock=each)
            await ask(reader, writer)
            writer.close()

    with_server(client, read_timeout=WAIT_SECONDS)
    waits, other = (record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR"))
    assert waits.startswith("a connection waits: Too many open files; this process may open ")
    assert other == "something else"


def test_an_idle_connection_stays() -> None:
    """Between two requests nobody owes anything."""

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(REQUEST)
            response = await reader.readuntil(b"hello")
            assert response.startswith(b"HTTP/1.1 200 OK\r\n") and b"x-request-id: " in response
            await asyncio.sleep(TIMEOUT * 2)

    with_server(client)


@pytest.mark.parametrize("num_parts", [1, 2, 9])
def test_an_offer_of_another_protocol_is_passed_by(num_parts: int) -> None:
    """Java's client offers HTTP/2 with each request, until one is answered in it."""
    request = (
        b"POST /length HTTP/1.1\r\nHost: server\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABk\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000
    )

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            for i in range(num_parts):
                writer.write(request[len(request) * i // num_parts : len(request) * (i + 1) // num_parts])
                await writer.drain()
                await asyncio.sleep(0.01)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            assert await reader.readexactly(4) == b"5000"

    with_server(client, read_timeout=WAIT_SECONDS)


def test_a_reader_that_stops_is_cut_off_and_its_request_ended() -> None:
    left: list[str] = []

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(REQUEST.replace(b"/", b"/endless", 1))
        await reader.readuntil(b"xxx")
        while not left:
            await asyncio.sleep(0.05)
        writer.close()

    with_server(client, left)
    assert left == ["ended"]


def test_a_reader_that_is_slow_is_not_cut_off() -> None:
    left: list[str] = []

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST.replace(b"/", b"/endless", 1))
        for _ in range(20):
            for _ in range(30):
                await reader.readexactly(65536)
            await asyncio.sleep(TIMEOUT / 10)
        assert not left
        writer.close()

    with_server(client, left)


@pytest.mark.parametrize("chunked", [False, True])
def test_who_sends_too_much_sees_why(chunked: bool) -> None:
    """A client that sends all of its body before it reads: the answer must not be lost with the connection."""

    async def client(port: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, send_and_read, port)

    def send_and_read(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            kind = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 30000000"
            connection.sendall(b"POST /length HTTP/1.1\r\nHost: server\r\n" + kind + b"\r\n\r\n")
            for _ in range(30):
                part = b"x" * 1_000_000
                connection.sendall(b"f4240\r\n" + part + b"\r\n" if chunked else part)
            if chunked:
                connection.sendall(b"0\r\n\r\n")
            response = b""
            while received := connection.recv(65536):
                response += received
        assert response.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in response

    with_server(client, read_timeout=WAIT_SECONDS, max_body_size=1_000_000)


def test_a_body_that_stops_coming() -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /length HTTP/1.1\r\nHost: server\r\nContent-Length: 100\r\n\r\nsome")
        assert (await reader.read(65536)).startswith(b"HTTP/1.1 408 ")
        await seconds_until_cut(reader)

    with_server(client)


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9\r\n\r\n", b"GET\r\n\r\n", b"\x00" * 99]
)
def test_what_is_not_http(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        status, *headers, body = (await reader.read()).decode().replace("\r\n\r\n", "\r\n").splitlines()
        assert status == "HTTP/1.1 400 Bad Request" and "content-type: application/json" in headers
        [request_id] = [each.removeprefix("x-request-id: ") for each in headers if each.startswith("x-request-id: ")]
        assert json.loads(body)["error"]["message"] == "Invalid HTTP request received."
        assert f"content-length: {len(body)}" in headers
        told = [record.fields for record in caplog.records if hasattr(record, "fields")]
        assert {"request_id": request_id, "status": 400} in told

    caplog.set_level("INFO")
    with_server(client, read_timeout=WAIT_SECONDS)


def answer_to(request: bytes, half_closes: bool = False) -> bytes:
    """All that a server sends to one who asks, ends its side if it half-closes, and waits for the server's end."""
    received = b""

    async def client(port: int) -> None:
        nonlocal received
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        if half_closes:
            writer.write_eof()
        received = await reader.read()
        writer.close()

    with_server(client, read_timeout=WAIT_SECONDS)
    return received


@pytest.mark.parametrize("path", [b"/", b"/parts"])
@pytest.mark.parametrize("half_closes", [False, True])
def test_http_1_0_knows_no_chunks(path: bytes, half_closes: bool) -> None:
    head, _, body = answer_to(b"GET " + path + b" HTTP/1.0\r\n\r\n", half_closes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"connection: close" in head
    assert b"transfer-encoding" not in head and (b"content-length" in head) == (path == b"/")
    assert body == (b"hello" if path == b"/" else b"first second")


def test_who_ends_its_side_gets_all_that_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `nc -N` does, here with two requests at once, the first of which has an answer in chunks."""
    monkeypatch.setattr(connection, "FIRST_PROBE_SECONDS", 0.05, raising=False)
    first, second = (REQUEST.replace(b"/", path, 1) for path in (b"/parts", b"/"))
    answer = answer_to(first + second, half_closes=True)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert b"6\r\nfirst \r\n6\r\nsecond\r\n0\r\n\r\n" in answer and answer.endswith(b"\r\n\r\nhello")


@pytest.mark.parametrize("request_", [b"", b"GET / HT", b"POST /length HTTP/1.1\r\nContent-Length: 5\r\n\r\nsome"])
def test_who_ends_its_side_within_a_request_gets_nothing(request_: bytes) -> None:
    assert answer_to(request_, half_closes=True) == b""


@pytest.mark.parametrize("path", [b"/unanswered", b"/endless"])
@pytest.mark.parametrize("how", ["closes", "resets"])
def test_a_client_that_goes_away_ends_its_request(monkeypatch: pytest.MonkeyPatch, path: bytes, how: str) -> None:
    """Whether its answer has begun or not. A client that closes looks like one that ends its side alone."""
    monkeypatch.setattr(connection, "FIRST_PROBE_SECONDS", 0.05)
    left: list[str] = []

    async def client(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as gone:
            if how == "resets":
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.sendall(REQUEST.replace(b"/", path, 1))
            while path == b"/unanswered" and not left:
                await asyncio.sleep(0.01)
        while "ended" not in left:
            await asyncio.sleep(0.01)

    with_server(client, left, read_timeout=WAIT_SECONDS)


def test_who_ends_its_side_and_waits_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to see whether it still is says nothing, and goes on until it is not."""
    monkeypatch.setattr(connection, "FIRST_PROBE_SECONDS", 0.05)
    left: list[str] = []

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST.replace(b"/", b"/unanswered", 1))
        writer.write_eof()
        for _ in range(3):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert left == ["begun"]
        writer.transport.abort()
        while "ended" not in left:
            await asyncio.sleep(0.01)

    with_server(client, left, read_timeout=WAIT_SECONDS)


def test_tls() -> None:
    """Answers whole and in parts, and a client that closes its side: TLS has no end of one side alone."""

    async def client(port: int) -> None:
        trusted = ssl.create_default_context(cafile=CERTIFICATE)
        async with httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=trusted) as https:
            assert (await https.get("/")).text == "hello" and (await https.get("/parts")).text == "first second"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted, server_hostname="localhost")
        writer.write(REQUEST)
        assert (await reader.read(100)).startswith(b"HTTP/1.1 200")
        writer.close()

    with_server(client, ssl_certfile=CERTIFICATE, read_timeout=WAIT_SECONDS)


def test_an_idle_client_of_tls_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never agrees to the end of TLS. Catches a server that waits for this as for an answer."""
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 3600)
    idle: list[ssl.SSLSocket] = []

    def connect(port: int) -> None:
        trusted = ssl.create_default_context(cafile=CERTIFICATE)
        connection = socket.create_connection(("127.0.0.1", port))
        idle.append(trusted.wrap_socket(connection, server_hostname="localhost"))
        idle[0].sendall(REQUEST)
        assert idle[0].recv(100).startswith(b"HTTP/1.1 200")

    async def client(port: int) -> None:
        await asyncio.to_thread(connect, port)

    with_server(client, ssl_certfile=CERTIFICATE, read_timeout=WAIT_SECONDS, shutdown_timeout=3600)
    idle[0].close()


def test_unix_socket(tmp_path: Path) -> None:
    """In place of one that a server has left behind, but never of one that has a server, or of another file."""
    path = str(tmp_path / "server")
    for each in bind_unix(path):
        each.close()
    sockets = bind_unix(path)
    in_use = rf"^uds: expected a path .*, got {path} \(Address already in use\)"
    with pytest.raises(OSError, match=in_use):  # of a server that still loads its model
        bind_unix(path)

    async def client(_: int) -> None:
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(base_url="http://localhost", transport=transport) as http:
            assert (await http.get("/")).text == "hello"
        with pytest.raises(OSError, match=in_use):
            bind_unix(path)

    with_server(client, sockets=sockets, uds=path, allowed_hosts=())
    other = tmp_path / "file"
    other.write_text("kept")
    with pytest.raises(OSError, match=r"^uds: expected a path .* \(Address already in use\)"):
        bind_unix(str(other))
    assert other.read_text() == "kept"
    with pytest.raises(OSError, match=r"^uds: expected a path of at most 107 bytes .* \(AF_UNIX path too long\)"):
        bind_unix(str(tmp_path / ("a" * 107)))
