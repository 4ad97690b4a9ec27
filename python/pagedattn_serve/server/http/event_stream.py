"""Answers that end as soon as the client goes away: `while_connected` for whole ones, `EventStream` for streams."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedattn_serve.server.http.errors import DONE, ApiError, ClientGoneError, last_events
from pagedattn_serve.server.http.logs import current_request

logger = logging.getLogger(__name__)

T = TypeVar("T")

SendEvents = Callable[[bytes], Awaitable[None]]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. If the client closes its connection, cancels `work` and raises ClientGoneError.
    receive: of a request whose body has been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends the events of `send_all`, then `done`.

    An error before the first event is raised, and gets a response of its own. A later error becomes what `fail` makes
    of it, the end of the stream; so does the time limit of the request. `send_all` is cancelled as soon as the client
    has gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        send_all: Callable[[SendEvents], Awaitable[None]],
        done: bytes = DONE,
        fail: Callable[[ApiError], bytes] = last_events,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._send_all = send_all
        self._done = done
        self._fail = fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._respond(send))
        except ClientGoneError:
            logger.debug("a client left its stream")

    async def _respond(self, send: Send) -> None:
        has_begun = False
        sending = asyncio.Lock()  # each prompt of a job has a task

        async def send_events(events: bytes) -> None:
            nonlocal has_begun
            async with sending:
                if not has_begun:
                    has_begun = True
                    if context := current_request.get():
                        context.fail = self._fail
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": events, "more_body": True})

        try:
            await self._send_all(send_events)
        except ApiError as error:
            if not has_begun:
                raise
            await _send_end(send, self._fail(error))
        except Exception:  # a bug; the middleware logs it
            if has_begun:
                await _send_end(send, self._fail(ApiError(500, "the server failed; its log says where")))
            raise
        else:
            await _send_end(send, self._done)


async def _send_end(send: Send, last: bytes) -> None:
    await send({"type": "http.response.body", "body": last})
