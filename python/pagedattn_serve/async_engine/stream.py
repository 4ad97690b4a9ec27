"""A mailbox for the outputs of one request that the reader of `AsyncLLMEngine.generate` has not read."""

import asyncio

from pagedattn_serve.outputs import RequestOutput


class Stream:
    """The outputs of one request on their way to its reader.

    A slow reader costs nothing, because only one output waits for the reader: deltas are added up, and any other output
    replaces the output before it. All is for the event loop's thread, but other threads may read the flags.

    has_deltas: whether the outputs are deltas; set before the first output.
    is_left: nobody reads any more. is_aborted: the request is to end, and the reader gets its last output.
    """

    __slots__ = ("_error", "_output", "_waiter", "has_deltas", "is_aborted", "is_left", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.has_deltas = False
        self.is_left = False
        self.is_aborted = False
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Give the reader an output."""
        if self.has_deltas and self._output is not None:
            self._output.add(output)
        else:
            self._output = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream: `get` gives the output that waits, then raises the error."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """Wait for an output that was not read. Raises the error of `fail`."""
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
