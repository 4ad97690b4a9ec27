"""An engine that runs in threads, for callers in an event loop, here or in another process.

`EngineLoop` steps the engine. `EngineCore` has the threads: one makes requests of prompts, one runs the loop, and that
of `Watch` looks whether the engine hangs. `ThreadCore` is an `EngineCore` in the process of its event loop.
"""

import asyncio
import atexit
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedattn_serve.distributed.activity import HANG_SECONDS, LOOK_SECONDS, MAX_LOOKS, Activity
from pagedattn_serve.errors import ExecutorDeadError, describe
from pagedattn_serve.outputs import CacheMap, EngineStats, RequestOutput
from pagedattn_serve.requests.inputs import RequestArgs
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine
    from pagedattn_serve.requests.request import Request

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then the requests are not to blame
CHECK_SECONDS = 1.0  # between checks of an engine that has nothing to do
STATS_PAUSE = 50  # as a multiple of the time of counting, which is long with many blocks


class EngineBusyError(RuntimeError):
    """As many requests wait as may; this one was not queued."""


class EngineDeadError(RuntimeError):
    """The engine does not run: not yet, not any more, or it broke."""


class ReplicaDeadError(EngineDeadError):
    """The replica that had the request died. Other replicas go on, and this one is started anew."""


class EngineFacts(NamedTuple):
    """What never changes of an engine. The names are those of `EngineArgs`, of `LLMEngine` and of the model.

    num_groups: groups of layers, each of which has blocks of its own.
    """

    architecture: str
    runs: str
    device: str
    dtype: str
    vocab_size: int
    block_size: int
    num_groups: int
    max_model_len: int
    max_num_seqs: int
    default_sampling_params: SamplingParams
    scores_pairs: bool
    system_fingerprint: str

    def num_tokens(self, num_blocks: int) -> int:
        """Tokens that so many blocks hold of all layers."""
        return num_blocks // self.num_groups * self.block_size


def facts_of(engine: "LLMEngine") -> EngineFacts:
    runner = engine.model_runner
    return EngineFacts(
        architecture=runner.model.architecture,
        runs=runner.model.runs,
        device=str(runner.device),
        dtype=str(runner.model.dtype).removeprefix("torch."),
        vocab_size=runner.model.vocab_size,
        block_size=runner.block_size,
        num_groups=len(runner.windows),
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.scheduler.config.max_num_seqs,
        default_sampling_params=engine.get_default_sampling_params(),
        scores_pairs=engine.inputs.scores_pairs,
        system_fingerprint=engine.system_fingerprint,
    )


def stats_and_cache_map(engine: "LLMEngine") -> tuple[EngineStats, CacheMap]:
    return engine.stats(), engine.cache_map()


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
                self._send_news(with_stats=False)  # at once: the disk may take long
                self._engine.flush()
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
            if not isinstance(error, Exception):  # the engine would begin anew, without requests that somebody reads
                self._add_outputs(self._engine.fail_batch(describe(error)))

    def _stop(self) -> None:
        self._is_stopping = True


class Watch(Thread):
    """Looks every LOOK_SECONDS at an engine that another thread runs.

    The engine hangs if a rank of the model is stopped, or does not answer. And it hangs if a step, or a call, neither
    ends nor has work: no thread of any rank computes, and none waits for the CPU or the disk. A step that computes may
    take as long as it takes.

    thread: the one that runs the loop. tell: is called after each look with what hangs, and how; None if nothing does.
    """

    def __init__(
        self, engine: "LLMEngine", loop: EngineLoop, thread: Thread, tell: Callable[[str | None], None]
    ) -> None:
        super().__init__(name="pagedattn-watch", daemon=True)
        self._executor = engine.executor
        self._loop = loop
        self._tell = tell
        self._activity = Activity(os.getpid(), thread)
        self._num_done = -1  # of the loop, at the last look
        self._num_idle = 0
        self._end = Event()

    def end(self) -> None:
        self._end.set()

    def run(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            self._tell(self.look())

    def look(self) -> str | None:
        """What hangs, and how."""
        hang = self._executor.find_hang()
        is_same, self._num_done = self._loop.num_done == self._num_done, self._loop.num_done
        is_idle = False
        if is_same and self._loop.is_at_work:
            works = [self._activity.works(), self._executor.at_work()]  # a look at each of them
            is_idle = not any(works)
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if hang is None and self._num_idle >= MAX_LOOKS:
            hang = f"a step of the engine (process {os.getpid()}) has stood still for {HANG_SECONDS:g} seconds"
        return hang


class EngineCore:
    """Runs an engine: one thread makes requests of prompts, one after the other, and the engine's thread steps.

    publish: called with the news in the engine's thread.
    finish: called in the engine's thread when the engine has ended, with what broke it, or None after `stop`.
    tell_hang: called all the time in a thread of its own, as that of `Watch`.

    Any thread may call the methods. `add` has to get its keys in rising order, from one thread.
    """

    def __init__(
        self,
        engine: "LLMEngine",
        publish: Callable[[News], None],
        finish: Callable[[str | None], None],
        tell_hang: Callable[[str | None], None],
    ) -> None:
        self._engine = engine
        self._finish = finish
        self._loop = EngineLoop(engine, publish)
        self._is_stopping = False
        self._calls: dict[int, Callable[[LLMEngine], object]] = {}  # that may still be cancelled
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # for the preparing thread; None ends it
        self._preparing = Thread(target=self._run_jobs, name="pagedattn-prepare", daemon=True)
        self._thread = Thread(target=self._run, name="pagedattn-engine", daemon=True)
        self._watch = Watch(engine, self._loop, self._thread, tell_hang)

    def start_threads(self) -> None:
        self._preparing.start()
        self._thread.start()
        self._watch.start()

    def add(self, key: int, args: RequestArgs) -> None:
        """Queue a request. Its outputs will be deltas, unless the last one is the only one."""
        self._jobs.put(partial(self._prepare, key, args))

    def refuse(self, key: int, error: Exception) -> None:
        """In place of `add`: the caller of the request gets the error."""
        self._jobs.put(partial(self._loop.refuse, key, error))

    def abort(self, key: int, is_left: bool) -> None:
        """End a request. is_left: nobody reads its outputs any more."""
        self._loop.abort(key, is_left)

    def call(self, key: int, f: Callable[["LLMEngine"], object], replica: int = 0) -> None:
        """Call `f` between two steps, unless `cancel` comes before. replica: 0, because there is one engine."""
        self._calls[key] = f
        self._loop.call(key, partial(self._call, key))

    def cancel(self, key: int) -> None:
        """Do not make a call that was not made yet."""
        self._calls.pop(key, None)

    def stop(self) -> None:
        """End after the step that runs."""
        self._is_stopping = True
        self._loop.stop()

    def join_threads(self) -> None:
        """Wait for the end of all threads."""
        for thread in (self._thread, self._preparing, self._watch):
            thread.join()

    def _call(self, key: int, engine: "LLMEngine") -> object:
        f = self._calls.pop(key, None)
        return None if f is None else f(engine)

    def _run(self) -> None:
        """The engine's thread."""
        error = self._loop.run()
        self._is_stopping = True
        self._jobs.put(None)
        self._watch.end()
        self._finish(error)

    def _run_jobs(self) -> None:
        """The preparing thread."""
        while (job := self._jobs.get()) is not None:
            job()

    def _prepare(self, key: int, args: RequestArgs) -> None:
        if self._is_stopping:
            return
        if self._loop.is_left(key):
            self._loop.refuse(key, RuntimeError("the reader has left"))
            return
        try:
            request = self._engine.make_request(args)
        except Exception as error:
            self._loop.refuse(key, error)
        except BaseException as error:  # such as a panic in a tokenizer
            self._loop.refuse(key, RuntimeError(describe(error)))
        else:
            if request.output_kind is RequestOutputKind.CUMULATIVE:
                request.output_kind = RequestOutputKind.DELTA
            self._loop.add(key, request)


class ThreadCore(EngineCore):
    """An `EngineCore` that tells its news in the event loop which `start` runs in."""

    def __init__(self, engine: "LLMEngine") -> None:
        super().__init__(engine, self._publish, self._end, self._take_hang)
        self.hang: str | None = None
        self.facts = facts_of(engine)
        self.first_stats = engine.stats()
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def start(self, deliver: Callable[[News], None], finish: Callable[[str | None], None]) -> None:
        """deliver, finish: called with the news, and with what ended the engine (None after `stop`)."""
        self._event_loop = asyncio.get_running_loop()
        self._deliver, self._tell_end = deliver, finish
        self.start_threads()
        atexit.register(self._stop_at_exit)

    async def join(self) -> None:
        """Wait until nothing of the core is left."""
        if self._event_loop is not None:
            await asyncio.to_thread(self.join_threads)
            atexit.unregister(self._stop_at_exit)

    def _publish(self, news: News) -> None:
        self._tell(self._deliver, news)

    def _end(self, error: str | None) -> None:
        self._tell(self._tell_end, error)

    def _take_hang(self, hang: str | None) -> None:
        self.hang = hang

    def _tell(self, f: Callable[..., object], *args: Any) -> None:
        """Call `f` in the event loop. If the event loop is closed, nobody is left, and the engine stops."""
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(f, *args)
        except RuntimeError:
            if not self._event_loop.is_closed():
                raise
            self.stop()

    def _stop_at_exit(self) -> None:
        """For a program that ends without `shutdown`: a step that runs at the interpreter's end ends in abort()."""
        self.stop()
        self.join_threads()
