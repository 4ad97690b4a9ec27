"""What one reader of `AsyncLLMEngine` waits at: a mailbox for the latest output of its request."""

import asyncio

from pagedattn_serve.outputs import RequestOutput


class Stream:
    """The outputs of one request on their way to its reader.

    Outputs are cumulative, so a later one takes the place of an earlier one that was not read: a slow reader costs
    nothing. All is for the event loop's thread; other threads may read the flags.

    is_left: nobody reads any more. is_aborted: the request is to end, and its reader to be told.
    """

    __slots__ = ("_error", "_output", "_waiter", "is_aborted", "is_left", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_left = False
        self.is_aborted = False
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Give the reader an output."""
        self._output = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream: once there is no more output, `get` raises the error."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """The latest output, when there is one that was not read. Raises what `fail` was given."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._output = self._output, None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():  # done: woken before, or cancelled
            self._waiter.set_result(None)
