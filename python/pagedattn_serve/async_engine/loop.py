"""The loop around `LLMEngine.step`, which `EngineCore` runs in a thread."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from pagedattn_serve.errors import ExecutorDeadError, describe
from pagedattn_serve.outputs import EngineStats, RequestOutput

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine
    from pagedattn_serve.requests.request import Request

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then the requests are not to blame
CHECK_SECONDS = 1.0  # between checks of an engine that has nothing to do
STATS_PAUSE = 50  # as a multiple of the time of counting, which is long with many blocks


@dataclass(slots=True)
class News:
    """What happened since the last news. Requests and calls go by the keys that they came with.

    queued: requests that the engine has got or refused.
    refused: requests that the engine refused, and why.
    outputs: requests and their outputs, in order; each output says what is new.
    results: calls, with what the function returned or raised.
    num_waiting: requests in the engine's queue.
    stats: the engine's, perhaps of some steps before.
    stuck: requests of an engine that hangs, while others of several engines do not.
    """

    stats: EngineStats
    num_waiting: int = 0
    queued: list[int] = field(default_factory=list)
    refused: list[tuple[int, Exception]] = field(default_factory=list)
    outputs: list[tuple[int, RequestOutput]] = field(default_factory=list)
    results: list[tuple[int, Any, BaseException | None]] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)


class EngineLoop:
    """Steps while there are requests, and sleeps while there are none.

    publish: called in the loop's thread with the news, after each step, and before a step if somebody waits for news.

    is_at_work, num_done: whether the loop steps or follows a call, and how often it has done so. Any thread may read
    them.

    Any thread may call `add`, `refuse`, `abort`, `call` and `stop`. The loop follows the calls in order, between two
    steps. Each request has a key, and requests come in the order of their keys, but an abort may come before its
    request.
    """

    def __init__(self, engine: "LLMEngine", publish: Callable[[News], None]) -> None:
        self.is_at_work = False
        self.num_done = 0
        self._engine = engine
        self._publish = publish
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._request_ids: dict[int, str] = {}  # of the requests that the engine has, by key
        self._keys: dict[str, int] = {}  # the same the other way round
        self._last_key = -1  # of the requests that have come
        self._aborted: dict[int, bool] = {}  # keys of aborted requests that have not come; whether the reader has left
        self._news = News(engine.stats())
        self._stats_due = 0.0  # of time.monotonic
        self._is_stopping = False
        self._num_failed_steps = 0

    # ---- for any thread ---------------------------------------------------------------------------------------------

    def add(self, key: int, request: "Request") -> None:
        """Queue a request, unless its reader has left."""
        self._commands.put(partial(self._add, key, request))

    def refuse(self, key: int, error: Exception) -> None:
        """Tell that there is no such request, and why."""
        self._commands.put(partial(self._refuse, key, error))

    def abort(self, key: int, is_left: bool) -> None:
        """End a request. Unless its reader has left, the reader gets a last output."""
        self._commands.put(partial(self._abort, key, is_left))

    def is_left(self, key: int) -> bool:
        """Whether the loop knows that the reader of a request that has not come has left."""
        return self._aborted.get(key, False)

    def call(self, key: int, f: Callable[["LLMEngine"], object]) -> None:
        """Call `f`."""
        self._commands.put(partial(self._call, key, f))

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
            error = describe(broken)
            # The text of ExecutorDeadError says all: what failed is another process.
            logger.critical("the engine ends: %s", error, exc_info=not isinstance(broken, ExecutorDeadError))
        try:
            outputs = self._engine.abort_request(list(self._keys))
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
                try:
                    command = self._commands.get(timeout=CHECK_SECONDS)
                except Empty:
                    self._engine.check_health()
                    continue
            self.is_at_work = True
            command()
            self._rest()
        return False

    def _rest(self) -> None:
        self.is_at_work = False
        self.num_done += 1

    def _step(self) -> None:
        self.is_at_work = True
        try:
            outputs = self._engine.step()
            self._num_failed_steps = 0
        except (KeyboardInterrupt, SystemExit, ExecutorDeadError):
            raise
        except BaseException as error:  # a panic in a tokenizer is no Exception
            self._num_failed_steps += 1
            if self._num_failed_steps == MAX_FAILED_STEPS:
                raise
            logger.exception("a step failed: the requests of its batch end")
            outputs = self._engine.fail_batch(describe(error))
        self._rest()
        self._add_outputs(outputs)
        self._send_news(with_stats=time.monotonic() >= self._stats_due)

    def _add_outputs(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            key = self._keys.get(output.request_id)
            if key is not None:  # else somebody added the request with `call`
                self._news.outputs.append((key, output))
                if output.finished:
                    del self._keys[output.request_id], self._request_ids[key]

    def _send_news(self, with_stats: bool) -> None:
        news = self._news
        if with_stats:
            started = time.thread_time()
            news.stats = self._engine.stats()
            self._stats_due = time.monotonic() + STATS_PAUSE * (time.thread_time() - started)
        news.num_waiting = len(self._engine.scheduler.waiting)
        self._news = News(news.stats)
        self._publish(news)

    def _come(self, key: int) -> bool | None:
        """Note that a request has come. Returns None, or if it was aborted before, whether its reader has left."""
        self._news.queued.append(key)
        self._last_key = key
        is_left = self._aborted.get(key)
        if self._aborted:  # requests with lower keys never come
            self._aborted = {each: left for each, left in self._aborted.items() if each > key}
        return is_left

    def _add(self, key: int, request: "Request") -> None:
        is_left = self._come(key)
        if is_left:
            return
        try:
            self._engine.queue_request(request)
        except Exception as error:  # of this request alone, whatever the error is
            self._news.refused.append((key, error))
            return
        request_id = request.group.request_id
        self._keys[request_id], self._request_ids[key] = key, request_id
        if is_left is not None:
            self._abort(key, is_left)

    def _refuse(self, key: int, error: Exception) -> None:
        self._come(key)
        self._news.refused.append((key, error))

    def _abort(self, key: int, is_left: bool) -> None:
        if key > self._last_key:
            self._aborted[key] = is_left
        elif key in self._request_ids:
            self._add_outputs(self._engine.abort_request([self._request_ids[key]]))

    def _call(self, key: int, f: Callable[["LLMEngine"], object]) -> None:
        try:
            self._news.results.append((key, f(self._engine), None))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the caller gets the error
            self._news.results.append((key, None, error))

    def _stop(self) -> None:
        self._is_stopping = True
