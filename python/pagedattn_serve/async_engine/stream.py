"""`Stream`: where the outputs of a request wait for their reader."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from pagedattn_serve.outputs import CompletionOutput, RequestOutput
from pagedattn_serve.requests.inputs import RequestArgs


class Stream:
    """The outputs of one request on their way to its reader, all in the event loop's thread.

    A slow reader costs nothing, because only one output waits for the reader: the engine's deltas are added up.

    args: of the request. key: of the request at the engine's core. wants_deltas: the reader gets what is new, not what
    there is so far. forget: asks the reader to forget what it has got, because all comes again; returns whether the
    reader does. is_aborted: somebody has asked for the end of the request.
    """

    __slots__ = (
        *("_error", "_forget", "_is_new", "_is_read", "_is_second_try", "_output", "_waiter"),
        *("args", "is_aborted", "key", "wants_deltas"),
    )

    def __init__(self, args: RequestArgs, key: int, wants_deltas: bool, forget: Callable[[], bool]) -> None:
        self.args = args
        self.key = key
        self.wants_deltas = wants_deltas
        self.is_aborted = False
        self._forget = forget
        self._is_read = False  # whether the reader has got an output
        self._is_second_try = False
        self._output: RequestOutput | None = None  # the sum of the deltas: of all, or of those that were not read
        self._is_new = False  # whether the reader has not read the sum
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: RequestOutput) -> None:
        """Give the reader an output."""
        if self._output is None:
            self._output = delta
        else:
            self._output.add(delta)
        self._is_new = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream: `get` gives the output that waits, then raises the error."""
        self._error = error
        self._wake()

    def may_begin_anew(self) -> bool:
        """Whether the request may go to another replica. Not if its reader has got an output and keeps it. And not a
        second time: of two replicas that died or hang, the request may be to blame."""
        if self._is_second_try or self.is_aborted:
            return False
        return not self._is_read or self._forget()

    def begin_anew(self, key: int) -> None:
        """The request begins once more, with this key."""
        self.key = key
        self._is_second_try = True
        self._is_read = self._is_new = False
        self._output = None

    async def get(self) -> RequestOutput:
        """Wait for an output that was not read. Raises the error of `fail`."""
        while not self._is_new:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output = self._output
        assert output is not None
        self._is_new, self._is_read = False, True
        if self.wants_deltas or output.finished:
            self._output = None
            return output
        return copy_of(output)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():  # done: woken before, or cancelled
            self._waiter.set_result(None)


def copy_of(output: RequestOutput) -> RequestOutput:
    """A copy with lists of its own, because the reader may write to them; the list of the prompt is shared."""
    logprobs = output.prompt_logprobs
    return replace(
        output,
        outputs=[_copy(completion) for completion in output.outputs],
        prompt_logprobs=None if logprobs is None else [*logprobs],
    )


def _copy(completion: CompletionOutput) -> CompletionOutput:
    logprobs = completion.logprobs
    return replace(completion, token_ids=[*completion.token_ids], logprobs=None if logprobs is None else [*logprobs])
