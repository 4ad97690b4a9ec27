"""`AsyncLLMEngine`.

A prompt goes from the event loop to the preparing thread, which makes a request of it, and on to the engine's thread,
which takes it between two steps. After each step the event loop is woken once, with all that the step brought.
"""

import asyncio
import atexit
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self, TypeVar

from pagedattn_serve.async_engine.loop import EngineLoop, News, describe
from pagedattn_serve.async_engine.stream import Stream
from pagedattn_serve.config import check_int
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.errors import ArgumentTypeError
from pagedattn_serve.outputs import EngineStats, RequestOutput
from pagedattn_serve.requests.prompts import Prompt
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams

T = TypeVar("T")


class EngineBusyError(RuntimeError):
    """As many requests wait as may; this one was not queued."""


class EngineDeadError(RuntimeError):
    """The engine does not run: not yet, not any more, or it broke."""


class AsyncLLMEngine:
    """An `LLMEngine` in a thread of its own, whose requests are asynchronous iterators.

    Args:
        engine: nobody else may step it or change its requests while it runs here. Anybody may read what never changes:
            tokenizer, max_model_len and get_default_sampling_params().
        max_waiting: most requests that do not run yet. The engine refuses further requests.
        on_death: called in the event loop when the engine has broken (`error` says why), but not after `shutdown`.

    A step that raises ends the requests of its batch, with finish_reason "error"; other requests go on. The third such
    step in a row breaks the engine, as does KeyboardInterrupt or SystemExit in its thread: then all unfinished requests
    raise EngineDeadError.

    An AsyncLLMEngine starts once. Only `stats` may be called outside of the event loop that `start` runs in.
    """

    def __init__(self, engine: LLMEngine, max_waiting: int = 1024, on_death: Callable[[], None] | None = None) -> None:
        check_int("max_waiting", max_waiting, 1)
        self.engine = engine
        self.error: str | None = None
        self._max_waiting = max_waiting
        self._on_death = on_death
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_running = False
        self._is_stopping = False
        self._streams: dict[str, Stream] = {}  # of the unfinished requests
        self._in_hand: set[Stream] = set()  # streams whose requests the engine had not got at the last news
        self._calls: set[asyncio.Future[Any]] = set()
        self._num_waiting = 0  # in the engine's queue, at the last news
        self._stats = engine.stats()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # for the preparing thread; None ends it
        self._engine_loop = EngineLoop(engine, partial(self._tell, self._deliver))
        self._preparing = Thread(target=self._run_jobs, name="pagedattn-prepare", daemon=True)
        self._thread = Thread(target=self._run, name="pagedattn-engine", daemon=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.shutdown()

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return self._is_running and not self._is_stopping and self._loop is not None and not self._loop.is_closed()

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output has not come yet."""
        return len(self._streams)

    def stats(self) -> EngineStats:
        """The stats after the last step, or, if counting takes long, after an earlier step. Any thread may call this,
        and no call waits. `call(LLMEngine.stats)` is exact."""
        return self._stats

    async def start(self) -> None:
        """Start the threads. Raises RuntimeError the second time."""
        if self._loop is not None or self._is_stopping:
            raise RuntimeError("start: expected to be called once; make another AsyncLLMEngine of the same engine")
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._preparing.start()
        self._thread.start()
        atexit.register(self._stop_at_exit)
        self._is_running = True

    async def shutdown(self) -> None:
        """Stop after the step that runs; may be called more than once.

        Requests in the engine end with finish_reason "abort". Requests whose prompts are being prepared raise
        EngineDeadError.
        """
        self._is_stopping = True
        if self._loop is None:
            return
        self._engine_loop.stop()
        if not self._loop.is_closed():
            await asyncio.shield(self._ended)
        self._thread.join()
        atexit.unregister(self._stop_at_exit)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, of the kind that `SamplingParams.output_kind` says; the last one is finished.

        The arguments are those of `LLMEngine.add_request`. The default request_id is random, so nobody can guess it. A
        reader that is slower than the engine gets the latest output, or the sum of the deltas that it has not read. If
        the reader leaves (`aclose`, a cancelled task), the request ends before the next step.

        Raises TypeError, ValueError (as `LLMEngine.add_request`) and EngineBusyError before the first output, and
        EngineDeadError at any time.
        """
        options = {"arrival_time": time.monotonic(), "priority": priority, "cache_salt": cache_salt}
        stream = self._admit(secrets.token_hex(16) if request_id is None else request_id)
        try:
            self._jobs.put(partial(self._prepare, stream, prompt, sampling_params, options))
            finished = False
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            self._leave(stream)

    async def abort(self, request_id: str) -> None:
        """End a request: its last output has finish_reason "abort". Nothing happens if it is unknown or finished."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.is_aborted = True  # for a request that the engine has not got yet
            self._engine_loop.abort(stream)
            with suppress(EngineDeadError):  # a dead engine has ended the request, too
                await self.call(lambda _: None)

    async def call(self, f: Callable[[LLMEngine], T]) -> T:
        """Call `f` in the engine's thread between two steps. It may look at everything, but neither step nor abort.
        Returns or raises what `f` does. Raises EngineDeadError if the engine ends before the call."""
        self._check_running()
        future: asyncio.Future[tuple[T, BaseException | None]] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        try:
            self._engine_loop.call(f, future)
            result, error = await future
        finally:
            self._calls.discard(future)
        if error is not None:
            raise error
        return result

    # ---- in the event loop ------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if not self.is_running:
            raise EngineDeadError(self._why_dead())

    def _why_dead(self) -> str:
        if self.error is not None:
            return f"the engine broke: {self.error}"
        return "the engine was shut down" if self._is_stopping else "the engine does not run: expected start() before"

    def _admit(self, request_id: str) -> Stream:
        self._check_running()
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("generate: expected to be called in the event loop that start() was called in")
        if not isinstance(request_id, str):
            raise ArgumentTypeError("request_id", "a string", type(request_id).__name__)
        if request_id in self._streams:
            raise ValueError(f"request_id: {request_id!r} is taken by an unfinished request")
        num_waiting = len(self._in_hand) + self._num_waiting
        if num_waiting >= self._max_waiting:
            raise EngineBusyError(f"max_waiting: expected fewer than {self._max_waiting} requests, got {num_waiting}")
        stream = Stream(request_id)
        self._streams[request_id] = stream
        self._in_hand.add(stream)
        return stream

    def _leave(self, stream: Stream) -> None:
        stream.is_left = True
        if self._streams.get(stream.request_id) is stream:
            self._forget(stream)
            self._engine_loop.abort(stream)

    def _forget(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
        self._in_hand.discard(stream)

    def _refuse(self, stream: Stream, error: Exception) -> None:
        self._forget(stream)
        stream.fail(error)

    def _deliver(self, news: News) -> None:
        self._stats = news.stats
        self._num_waiting = news.num_waiting
        self._in_hand.difference_update(news.queued)
        for stream, error in news.refused:
            self._refuse(stream, error)
        for stream, output in news.outputs:
            if output.finished:
                self._forget(stream)
            stream.put(output)
        for future, result, raised in news.results:
            if not future.done():
                future.set_result((result, raised))

    def _finish(self, error: str | None) -> None:
        """The engine has ended: nothing comes any more."""
        self._is_running = False
        self.error = error
        for stream in list(self._streams.values()):
            self._refuse(stream, EngineDeadError(self._why_dead()))
        for future in self._calls:
            if not future.done():
                future.set_result((None, EngineDeadError(self._why_dead())))
        if error is not None and self._on_death is not None:
            self._on_death()

    def _stop_at_exit(self) -> None:
        """For a program that ends without `shutdown`: a step that runs at the interpreter's end ends in abort()."""
        self._is_stopping = True
        self._engine_loop.stop()
        self._thread.join()

    # ---- in the other threads ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        """The engine's thread."""
        error = self._engine_loop.run()
        self._tell(self._finish, error)
        self._jobs.put(None)
        self._preparing.join()
        self._tell(self._ended.set_result, None)

    def _run_jobs(self) -> None:
        """The preparing thread."""
        while (job := self._jobs.get()) is not None:
            job()

    def _prepare(
        self, stream: Stream, prompt: Prompt, sampling_params: SamplingParams | None, options: dict[str, Any]
    ) -> None:
        if stream.is_left or self._is_stopping:
            return
        try:
            request = self.engine.inputs.make_request(stream.request_id, prompt, sampling_params, **options)
        except Exception as error:
            self._tell(self._refuse, stream, error)
        except BaseException as error:  # such as a panic in a tokenizer
            self._tell(self._refuse, stream, RuntimeError(describe(error)))
        else:
            stream.has_deltas = request.output_kind is RequestOutputKind.DELTA
            self._engine_loop.add(stream, request)

    def _tell(self, f: Callable[..., object], *args: Any) -> None:
        """Call `f` in the event loop. If the event loop is closed, nobody is left, and the engine stops."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(f, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            self._engine_loop.stop()
