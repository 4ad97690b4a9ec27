"""The loop around `LLMEngine.step` that `AsyncLLMEngine` runs in a thread."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from pagedattn_serve.async_engine.stream import Stream
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import EngineStats, RequestOutput
from pagedattn_serve.requests.request import Request

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then the requests are not to blame
STATS_PAUSE = 50  # as a multiple of the time of counting, which is long with many blocks


@dataclass(slots=True)
class News:
    """What happened since the last news.

    queued: streams whose requests the engine has got or refused.
    refused: streams whose requests the engine refused, and why.
    outputs: streams and their outputs, in order.
    results: futures of `EngineLoop.call`, with what the function returned or raised.
    num_waiting: requests in the engine's queue.
    stats: the engine's, perhaps of some steps before.
    """

    stats: EngineStats
    num_waiting: int = 0
    queued: list[Stream] = field(default_factory=list)
    refused: list[tuple[Stream, Exception]] = field(default_factory=list)
    outputs: list[tuple[Stream, RequestOutput]] = field(default_factory=list)
    results: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = field(default_factory=list)


class EngineLoop:
    """Steps while there are requests, and sleeps while there are none.

    publish: called in the loop's thread with the news, after each step, and before a step if somebody waits for news.

    Any thread may call `add`, `abort`, `call` and `stop`. The loop follows the calls in order, between two steps.
    """

    def __init__(self, engine: LLMEngine, publish: Callable[[News], None]) -> None:
        self._engine = engine
        self._publish = publish
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[str, Stream] = {}  # by the ids of the requests that the engine has
        self._news = News(engine.stats())
        self._stats_due = 0.0  # of time.monotonic
        self._is_stopping = False
        self._num_failed_steps = 0

    # ---- for any thread ---------------------------------------------------------------------------------------------

    def add(self, stream: Stream, request: Request) -> None:
        """Queue a request, unless its reader has left."""
        self._commands.put(partial(self._add, stream, request))

    def abort(self, stream: Stream) -> None:
        """End the request of a stream. A reader that is still there gets the last output."""
        self._commands.put(partial(self._abort, stream))

    def call(self, f: Callable[[LLMEngine], object], future: asyncio.Future[Any]) -> None:
        """Call `f`, unless `future` is done by then."""
        self._commands.put(partial(self._call, f, future))

    def stop(self) -> None:
        """Let `run` return."""
        self._commands.put(self._stop)

    # ---- in the loop's thread ---------------------------------------------------------------------------------------

    def run(self) -> str | None:
        """Run until `stop`, or until the engine breaks; returns what broke it. All requests of the loop end."""
        error = None
        try:
            while self._take_commands():
                self._step()
        except BaseException as broken:  # KeyboardInterrupt and SystemExit among them
            logger.critical("the engine ends", exc_info=True)
            error = describe(broken)
        try:
            outputs = self._engine.abort_request(list(self._streams))
            if error is None:
                self._add_outputs(outputs)
            self._send_news(with_stats=True)
        except BaseException:  # the log already says that the engine is broken
            logger.exception("requests of a broken engine were not aborted")
        return error

    def _take_commands(self) -> bool:
        """Follow the calls of other threads; wait for one if there is nothing to step. Returns False to stop."""
        while not self._is_stopping:
            is_idle = not self._engine.has_unfinished_requests()
            try:
                command = self._commands.get(block=False)
            except Empty:
                if self._news.refused or self._news.outputs or self._news.results or is_idle:
                    self._send_news(with_stats=True)
                if not is_idle:
                    return True
                command = self._commands.get()
            command()
        return False

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
            self._num_failed_steps = 0
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in a tokenizer is no Exception
            self._num_failed_steps += 1
            if self._num_failed_steps == MAX_FAILED_STEPS:
                raise
            logger.exception("a step failed: the requests of its batch end")
            outputs = self._engine.fail_batch(describe(error))
        self._add_outputs(outputs)
        self._send_news(with_stats=time.monotonic() >= self._stats_due)

    def _add_outputs(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:  # else somebody added the request with `call`
                self._news.outputs.append((stream, output))
                if output.finished:
                    del self._streams[output.request_id]

    def _send_news(self, with_stats: bool) -> None:
        news = self._news
        if with_stats:
            started = time.thread_time()
            news.stats = self._engine.stats()
            self._stats_due = time.monotonic() + STATS_PAUSE * (time.thread_time() - started)
        news.num_waiting = len(self._engine.scheduler.waiting)
        self._news = News(news.stats)
        self._publish(news)

    def _add(self, stream: Stream, request: Request) -> None:
        self._news.queued.append(stream)
        if stream.is_left:
            return
        try:
            self._engine.queue_request(request)
        except Exception as error:  # of this request alone, whatever the error is
            self._news.refused.append((stream, error))
            return
        self._streams[stream.request_id] = stream
        if stream.is_aborted:
            self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is stream:
            self._add_outputs(self._engine.abort_request([stream.request_id]))

    def _call(self, f: Callable[[LLMEngine], object], future: asyncio.Future[Any]) -> None:
        if future.done():
            return
        try:
            self._news.results.append((future, f(self._engine), None))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the caller gets the error
            self._news.results.append((future, None, error))

    def _stop(self) -> None:
        self._is_stopping = True


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
