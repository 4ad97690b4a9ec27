"""`EngineCore`: an engine, the two threads that run it, and one that watches them."""

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedattn_serve.async_engine.loop import EngineLoop, News
from pagedattn_serve.async_engine.watch import Watch
from pagedattn_serve.errors import describe
from pagedattn_serve.outputs import CacheMap, EngineStats
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine


class EngineFacts(NamedTuple):
    """What never changes of an engine. The names are those of `EngineArgs`, of `LLMEngine` and of the model."""

    architecture: str
    runs: str
    device: str
    dtype: str
    vocab_size: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    default_sampling_params: SamplingParams


def facts_of(engine: "LLMEngine") -> EngineFacts:
    runner = engine.model_runner
    return EngineFacts(
        architecture=runner.model.architecture,
        runs=runner.model.runs,
        device=str(runner.device),
        dtype=str(runner.model.dtype).removeprefix("torch."),
        vocab_size=runner.model.vocab_size,
        block_size=runner.block_size,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.scheduler.config.max_num_seqs,
        default_sampling_params=engine.get_default_sampling_params(),
    )


def stats_and_cache_map(engine: "LLMEngine") -> tuple[EngineStats, CacheMap]:
    return engine.stats(), engine.cache_map()


class RequestArgs(NamedTuple):
    """What a caller says of a request: the arguments of `LLMEngine.add_request`."""

    request_id: str
    prompt: Any
    sampling_params: Any
    arrival_time: float
    priority: Any
    cache_salt: Any


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
            request = self._engine.inputs.make_request(**args._asdict())
        except Exception as error:
            self._loop.refuse(key, error)
        except BaseException as error:  # such as a panic in a tokenizer
            self._loop.refuse(key, RuntimeError(describe(error)))
        else:
            if request.output_kind is RequestOutputKind.CUMULATIVE:
                request.output_kind = RequestOutputKind.DELTA
            self._loop.add(key, request)
