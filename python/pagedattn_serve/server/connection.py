"""One client's connection: uvicorn's, with limits of its own on those who send headers, or read answers, too slowly."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10  # of one request, with its line


class Connection(HttpToolsProtocol):
    """Set `timeout`, as `connection_class` does: the seconds in which the headers of a request have to come, counted
    from its first byte, or from the connection's start; and those in which a client has to take something of what was
    written, once it is more than the buffers hold. Whoever takes longer is cut off.
    """

    timeout: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None  # runs while headers are awaited
        self._write_timer: asyncio.TimerHandle | None = None  # runs while a client does not read
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        self._stop_timer()
        self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        self._write_timer = self.loop.call_later(self.timeout, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _start_timer(self) -> None:
        self._num_header_bytes = 0
        self._timer = self.loop.call_later(self.timeout, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_class(timeout: float) -> type[Connection]:
    return type("TimedConnection", (Connection,), {"timeout": timeout})
