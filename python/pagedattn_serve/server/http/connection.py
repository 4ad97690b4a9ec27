"""One client's connection: uvicorn's, with limits for clients that send headers, or read answers, too slowly.

It also answers clients of HTTP/1.0, and clients that end their side of the connection once they have asked.
"""

import asyncio
import logging
import secrets
import sys
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pagedattn_serve.server.http.errors import ApiError, encode_json, to_utf8

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10  # of one request, with the line of method and path
FIRST_PROBE_SECONDS = 0.25  # the second probe comes after twice as long, and shows whether the client is there
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"  # means nothing to a client, and may come any number of times before an answer


class Connection(HttpToolsProtocol):
    """`connection_class` sets `timeout`, in seconds. A client that takes longer is cut off:

    - the headers of a request have to come within `timeout` of its first byte, of the connection's start, or of the
      last answer to a request before;
    - once more was written than the buffers hold, the client has to take some of it within `timeout`.
    """

    timeout: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None  # runs while headers are awaited
        self._write_timer: asyncio.TimerHandle | None = None  # runs while a client does not read
        self._probe_timer: asyncio.TimerHandle | None = None  # runs while a client that sends no more waits
        self._num_header_bytes = 0  # while headers are awaited: how long they are, at least
        self._received = b""  # the bytes that the parser is reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays, because a client that will send no more still waits for answers.

        A client that has gone away looks the same until something is written to it. The parts of a stream are written
        to it. Until an answer begins, probes are, at longer and longer intervals; HTTP/1.0 does not know probes.
        """
        is_tls = self.transport.get_extra_info("sslcontext") is not None  # which has no end of one side
        if is_tls or self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self._stop_timer()
        self.cycle.keep_alive = False
        if self._probe_timer is None and self.scope["http_version"] != "1.0":
            self._probe_timer = self.loop.call_later(FIRST_PROBE_SECONDS, self._probe, FIRST_PROBE_SECONDS)
        return True

    def _probe(self, seconds: float) -> None:
        if self.pipeline or not self.cycle.response_started:
            if not self.pipeline:  # else the answer to an earlier request may be under way
                self.transport.write(PROBE)
            self._probe_timer = self.loop.call_later(seconds * 2, self._probe, seconds * 2)

    def data_received(self, data: bytes) -> None:
        self._received = data
        self._num_header_bytes += len(data)
        super().data_received(data)
        if self._timer is not None and self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        # Their last read was not counted, and may have been their only one. The 4 are of ": " and the line's end.
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            self.transport.abort()
            raise OverflowError  # the parser stops at it
        if not self._is_offer():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._num_header_bytes = 0  # what follows in the same read is not counted: the parser does not tell its length
        if not self._is_offer():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._timer is not None:  # the next request has begun, and perhaps was not read while this one ran
            self._start_timer()
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, without_chunks(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def _is_offer(self) -> bool:
        """Whether the request offers another protocol. Java's client offers HTTP/2 in each request."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Replaces uvicorn's method: the server declines the offer by answering in HTTP/1.1.

        The parser has stopped behind the headers, without the body. So it begins anew, with a request that offers
        nothing.
        """
        error = sys.exception()
        if not isinstance(error, httptools.HttpParserUpgrade) or not self._is_offer():
            return super()._unsupported_upgrade_warning()
        lines = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        rest = self._received[error.args[0] :]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def send_400_response(self, msg: str) -> None:
        """Replaces uvicorn's method, for what is no HTTP: the answer has the shape and the id that all answers have."""
        if self.transport.is_closing():  # cut off for its headers
            return
        request_id = secrets.token_hex(16)
        logger.info("request", extra={"fields": {"request_id": request_id, "status": 400}})
        body = to_utf8(encode_json(ApiError(400, msg).body))
        headers = (
            b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[400] + headers % (len(body), request_id.encode()) + body)
        self.transport.close()

    def pause_writing(self) -> None:
        self._write_timer = self.loop.call_later(self.timeout, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.timeout, self._end_if_idle)

    def _end_if_idle(self) -> None:
        """Headers are late. While an answer is under way, it may be the server that does not read."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
        else:
            self._start_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """The app for a client of HTTP/1.0, which does not know chunks: the end of the connection ends an answer without a
    length.

    uvicorn does not look at the version. But it sends no chunks where it knows a length, so it is told each part's.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_whole(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_whole)

    return answer


def connection_class(timeout: float) -> type[Connection]:
    return type("TimedConnection", (Connection,), {"timeout": timeout})
