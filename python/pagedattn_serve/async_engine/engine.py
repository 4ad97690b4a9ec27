"""`AsyncLLMEngine`.

A request goes from the event loop to the engine's core, which makes it ready and queues it between two steps. After
each step the core sends the event loop one message, with all that the step brought.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from itertools import count
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from pagedattn_serve.async_engine.core import (
    EngineBusyError,
    EngineDeadError,
    EngineFacts,
    News,
    ReplicaDeadError,
    ThreadCore,
    stats_and_cache_map,
)
from pagedattn_serve.async_engine.process_core import ProcessCore
from pagedattn_serve.async_engine.replicas import Replicas
from pagedattn_serve.async_engine.stream import Stream
from pagedattn_serve.config import MAX_REPLICAS, check_int
from pagedattn_serve.distributed.torchrun import serve_as_rank
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import ArgumentTypeError
from pagedattn_serve.outputs import (
    CacheMap,
    EmbeddingRequestOutput,
    EngineStats,
    ReplicaStatus,
    RequestOutput,
    embedding_output,
)
from pagedattn_serve.pooling_params import PoolingParams
from pagedattn_serve.requests.inputs import Prompt, RequestArgs, Texts
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.text.tokenizer import load_tokenizer
from pagedattn_serve.vllm_arguments import ASYNC_CALL_ARGUMENTS, ASYNC_ENGINE_ARGUMENTS, refuse

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine

T = TypeVar("T")


class Core(Protocol):
    """An engine that runs beside the event loop. Its methods are called in the event loop; none but `join` waits.

    facts: of the engine. first_stats: before the first step.
    """

    facts: EngineFacts
    first_stats: EngineStats

    async def start(self, deliver: Callable[[News], None], finish: Callable[[str | None], None]) -> None:
        """Begin. deliver: is called with the news after each step. finish: is called once, when the engine has ended,
        with what broke it, or None after `stop`."""

    def add(self, key: int, args: RequestArgs) -> None: ...
    def abort(self, key: int, is_left: bool) -> None: ...
    def call(self, key: int, f: Callable[["LLMEngine"], object], replica: int) -> None: ...
    def cancel(self, key: int) -> None: ...
    def stop(self) -> None: ...
    async def join(self) -> None: ...


def load_texts(core: ProcessCore | Replicas) -> Texts:
    """The tokenizer of a process's engine, loaded here beside the model there. Waits for the model, too."""
    args = core.engine_args
    try:
        tokenizer = load_tokenizer(args.model, args.tokenizer, args.allow_download)
    except BaseException:
        core.kill()
        raise
    core.wait_until_loaded()
    return Texts(tokenizer, core.facts.vocab_size)


class AsyncLLMEngine:
    """An `LLMEngine` that runs beside the event loop, and whose requests are asynchronous iterators.

    Args:
        engine: an LLMEngine runs in a thread of its own. Nobody else may step it or change its requests while it runs
            here. A ProcessCore has an engine in a process of its own, and Replicas have several.
        max_waiting: most requests that do not run yet. The engine refuses further requests.
        on_death: called in the event loop when the engine has broken (`error` says why), but not after `shutdown`. It
            may also be set before `start`.

    A step that raises ends the requests of its batch, with finish_reason "error"; other requests go on. The third such
    step in a row breaks the engine, as does KeyboardInterrupt or SystemExit in its thread: then all unfinished requests
    raise EngineDeadError.

    An AsyncLLMEngine starts once: by `start`, or with its first request. Only `stats` may be called outside of the
    event loop that it was started in. What never changes may be read by any thread: `facts`, and the tokenizer in
    `texts`.
    """

    def __init__(
        self,
        engine: "LLMEngine | ProcessCore | Replicas",
        max_waiting: int = 1024,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        check_int("max_waiting", max_waiting, 1)
        self._core: Core
        if isinstance(engine, ProcessCore | Replicas):
            self._core, self.texts = engine, load_texts(engine)
        elif not hasattr(engine, "inputs"):  # its class would import torch
            raise ArgumentTypeError("engine", "an LLMEngine", type(engine).__name__)
        else:
            self._core, self.texts = ThreadCore(engine), engine.inputs.texts
        self.facts = self._core.facts
        self.error: str | None = None
        self.on_death = on_death
        self._max_waiting = max_waiting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None  # of the core
        self._is_running = False
        self._is_stopping = False
        self._keys = count()  # of requests and calls
        self._streams: dict[int, Stream] = {}  # of the unfinished requests, by key
        self._key_of: dict[str, int] = {}  # by request id
        self._in_hand: set[int] = set()  # keys of requests that the engine had not got at the last news
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_waiting = 0  # in the engine's queue, at the last news
        self._stats = self._core.first_stats

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        max_waiting: int = 1024,
        on_death: Callable[[], None] | None = None,
        initializer: Callable[[], object] | None = None,
        data_parallel_size: int = 1,
        **of_vllm: Any,
    ) -> Self:
        """An engine in a process of its own, which has Python's lock to itself. Waits until the model is loaded.

        The arguments of `generate` and `call` go to that process, so pickle has to know them: no lambdas, and no
        functions of the main program. initializer: is called in the process first, for instance to set up its log.

        data_parallel_size: how many replicas of the engine there are, each in a process of its own. `Router` says which
        replica gets a request. If a replica dies or hangs, a request whose reader has got no output begins once more on
        another replica. Of a replica that died, all other requests raise EngineDeadError; of one that hangs, they wait
        until it goes on. A replica that died is started anew; `error` stays None.

        of_vllm: arguments of vLLM's `from_engine_args`, at values that mean what happens here anyway.

        Call this in the main thread. Raises what `LLMEngine` does, and ChildProcessError if the process dies. If the
        process dies later, all unfinished requests raise EngineDeadError, which says how it died.
        """
        refuse(of_vllm, ASYNC_ENGINE_ARGUMENTS, "from_engine_args")
        if not isinstance(engine_args, EngineArgs):
            raise ArgumentTypeError("engine_args", "EngineArgs", type(engine_args).__name__)
        check_int("max_waiting", max_waiting, 1)  # before the process is started
        check_int("data_parallel_size", data_parallel_size, 1, MAX_REPLICAS)
        if data_parallel_size == 1:
            serve_as_rank(engine_args.num_ranks)  # and not come back, in ranks that torchrun has started
            return cls(ProcessCore(engine_args, initializer), max_waiting, on_death)
        if (share := engine_args.cpu_memory_utilization) is not None:
            engine_args = replace(engine_args, cpu_memory_utilization=share / data_parallel_size)
        return cls(Replicas(engine_args, data_parallel_size, initializer), max_waiting, on_death)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.shutdown()

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests. Of several replicas one that runs is enough."""
        is_open = not self._is_stopping and self._loop is not None and not self._loop.is_closed()
        return is_open and any(each.is_running for each in self.replicas())

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output has not come yet."""
        return len(self._streams)

    def stats(self) -> EngineStats:
        """The stats after the last step, or, if counting takes long, after an earlier step; of several replicas the
        sum. Any thread may call this, and no call waits. `call(LLMEngine.stats)` is exact."""
        return self._stats

    def replicas(self) -> list[ReplicaStatus]:
        """Each of the engine's cores; without data_parallel_size there is one. Any thread may call this."""
        if isinstance(self._core, Replicas):
            return self._core.status()
        assert isinstance(self._core, ProcessCore | ThreadCore)
        pid = self._core.pid if isinstance(self._core, ProcessCore) else None
        return [ReplicaStatus(pid, self._is_running, self.error, 0, self._stats, self._core.hang)]

    async def start(self) -> None:
        """Let the engine run. Raises RuntimeError the second time."""
        if self._loop is not None or self._is_stopping:
            raise RuntimeError("start: expected to be called once; make another AsyncLLMEngine of the same engine")
        await self._start_once()

    async def _start_once(self) -> None:
        """Start unless somebody has, and wait until the engine runs. If a caller is cancelled, the start goes on: a
        core that has started by half could neither run nor stop."""
        if self._starting is None and not self._is_stopping:
            self._loop = asyncio.get_running_loop()
            # Not in the context of the first request, which would be that of all that the core does.
            self._starting = self._loop.create_task(self._start(), context=Context())
        if self._starting is not None:
            await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self._core.start(self._deliver, self._finish)
        self._is_running = self.error is None

    async def shutdown(self) -> None:
        """Stop after the step that runs; may be called more than once.

        Requests in the engine end with finish_reason "abort". Requests whose prompts are being prepared raise
        EngineDeadError. If the process of an engine has not stopped after 30 seconds, because it hangs or its step
        takes long, it is killed, and all its requests raise EngineDeadError.

        If the event loop that the engine was started in is closed, `shutdown` may be called in another one; of an
        engine in a thread, also if that event loop has stopped.
        """
        if self._loop is None or self._loop.is_running() or not isinstance(self._core, ThreadCore):
            self._check_loop("shutdown")
        self._is_stopping = True
        starting = self._starting
        if starting is not None and not starting.done() and not starting.get_loop().is_closed():
            await asyncio.wait([starting])
        self._core.stop()
        await self._core.join()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        forget: Callable[[], bool] = lambda: False,
        **of_vllm: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, of the kind that `SamplingParams.output_kind` says; the last one is finished.

        The arguments are those of `LLMEngine.add_request`. The default request_id is random, so nobody can guess it. A
        reader that is slower than the engine gets the latest output, or the sum of the deltas that it has not read. If
        the reader leaves (`aclose`, a cancelled task), the request ends before the next step. The first request starts
        the engine, unless `start` has been called.

        If the replica that has the request dies or hangs, the request begins once more on another replica, unless the
        reader has got an output. forget: is asked then if the reader has got outputs. If it returns True, the reader
        has to drop them, and all outputs come from the beginning.

        of_vllm: arguments of vLLM's `generate`, at values that mean what happens here anyway.

        Raises TypeError, ValueError (as `LLMEngine.add_request`) and EngineBusyError before the first output, and
        EngineDeadError at any time.
        """
        refuse(of_vllm, ASYNC_CALL_ARGUMENTS, "generate")
        self._check_loop("generate")
        arrival_time = time.monotonic()
        await self._start_once()
        request_id = secrets.token_hex(16) if request_id is None else request_id
        args = RequestArgs(request_id, prompt, sampling_params, None, arrival_time, priority, cache_salt)
        stream = self._admit(args, forget)
        try:
            self._core.add(stream.key, args)
            is_finished = False
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                yield output
        finally:
            self._leave(stream)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **of_vllm: Any,
    ) -> AsyncGenerator[EmbeddingRequestOutput, None]:
        """The embedding of a prompt, as the one output. Arguments and errors are those of `generate`. Raises
        RuntimeError for a request that was aborted or could not go on."""
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise ArgumentTypeError("pooling_params", "PoolingParams", type(params).__name__)
        async for output in self.generate(prompt, params, request_id, priority, cache_salt, lambda: False, **of_vllm):
            if output.embedding is None:
                raise RuntimeError(output.error or "the request was aborted")
            yield embedding_output(output)

    async def abort(self, request_id: str | list[str] | tuple[str, ...] | set[str]) -> None:
        """End a request, or each of several: its last output has finish_reason "abort". Nothing happens if a request is
        unknown or finished."""
        self._check_loop("abort")
        if isinstance(request_id, list | tuple | set):
            for each in request_id:
                await self.abort(each)
            return
        if not isinstance(request_id, str):
            raise ArgumentTypeError("request_id", "a string or a list of strings", type(request_id).__name__)
        key = self._key_of.get(request_id)
        if key is not None and self._is_running:
            self._streams[key].is_aborted = True
            replica = self._core.replica_of(key) if isinstance(self._core, Replicas) else 0
            self._core.abort(key, is_left=False)
            with suppress(EngineDeadError):  # a dead engine has ended the request, too
                await self.call(methodcaller("get_num_unfinished_requests"), replica)  # returns after the abort

    async def call(self, f: Callable[["LLMEngine"], T], replica: int = 0) -> T:
        """Call `f` with the engine between two steps. It may look at everything, but neither step nor abort. Returns or
        raises what `f` does. Raises EngineDeadError if the engine ends before the call. replica: whose engine."""
        self._check_loop("call")
        check_int("replica", replica, 0, len(self.replicas()) - 1)
        self._check_running()
        future: asyncio.Future[tuple[T, BaseException | None]] = asyncio.get_running_loop().create_future()
        key = next(self._keys)
        self._calls[key] = future
        try:
            self._core.call(key, f, replica)
            result, error = await future
        except asyncio.CancelledError:
            self._core.cancel(key)
            raise
        finally:
            del self._calls[key]
        if error is not None:
            raise error
        return result

    async def cache_map(self, replica: int = 0) -> tuple[EngineStats, CacheMap]:
        """`LLMEngine.stats` and `LLMEngine.cache_map` of a replica, of one moment. Raises EngineDeadError."""
        self._check_loop("cache_map")
        return await self.call(stats_and_cache_map, replica)

    # ---- in the event loop ------------------------------------------------------------------------------------------

    def _check_loop(self, method: str) -> None:
        """Raise RuntimeError in another event loop than that of the start. Of a closed event loop nobody can shut the
        engine down, so then any other may."""
        if self._loop is None or self._loop.is_closed():
            return
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(f"{method}: expected to be called in the event loop that start() was called in")

    def _check_running(self) -> None:
        if not self.is_running:
            raise EngineDeadError(self._why_dead())

    def _why_dead(self) -> str:
        if self.error is not None:
            return f"the engine broke: {self.error}"
        if self._is_stopping:
            return "the engine was shut down"
        if self._loop is None or self._starting is None:
            return "the engine does not run: expected start() before"
        if self._loop.is_closed():
            return "the event loop that the engine was started in is closed"
        if not self._starting.done():
            return "the engine does not run yet"
        return "; ".join(f"replica {i} died: {each.error}" for i, each in enumerate(self.replicas()))

    def _admit(self, args: RequestArgs, forget: Callable[[], bool]) -> Stream:
        request_id, params = args.request_id, args.sampling_params
        self._check_running()
        if not isinstance(request_id, str):
            raise ArgumentTypeError("request_id", "a string", type(request_id).__name__)
        if request_id in self._key_of:
            raise ValueError(f"request_id: {request_id!r} is taken by an unfinished request")
        num_waiting = len(self._in_hand) + self._num_waiting
        if num_waiting >= self._max_waiting:
            raise EngineBusyError(f"max_waiting: expected fewer than {self._max_waiting} requests, got {num_waiting}")
        if params is None:
            params = self.facts.default_sampling_params
        wants_deltas = getattr(params, "output_kind", None) is RequestOutputKind.DELTA  # the core checks the type
        stream = Stream(args, next(self._keys), wants_deltas, forget)
        self._keep(stream)
        return stream

    def _keep(self, stream: Stream) -> None:
        self._streams[stream.key], self._key_of[stream.args.request_id] = stream, stream.key
        self._in_hand.add(stream.key)

    def _begin_anew(self, stream: Stream) -> None:
        """Let another replica have a request."""
        self._forget(stream)
        stream.begin_anew(next(self._keys))
        self._keep(stream)
        self._core.add(stream.key, stream.args)

    def _leave(self, stream: Stream) -> None:
        if stream.key in self._streams:
            self._forget(stream)
            if self._is_running:
                self._core.abort(stream.key, is_left=True)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.key], self._key_of[stream.args.request_id]
        self._in_hand.discard(stream.key)

    def _deliver(self, news: News) -> None:
        self._stats = news.stats
        self._num_waiting = news.num_waiting
        self._in_hand.difference_update(news.queued)
        for key, error in news.refused:
            if (stream := self._streams.get(key)) is not None:
                if isinstance(error, ReplicaDeadError) and self.is_running and stream.may_begin_anew():
                    self._begin_anew(stream)
                else:
                    self._forget(stream)
                    stream.fail(error)
        for key, output in news.outputs:
            if (stream := self._streams.get(key)) is not None:
                if output.finished:
                    self._forget(stream)
                stream.put(output)
        for key, result, raised in news.results:
            if (future := self._calls.get(key)) is not None and not future.done():
                future.set_result((result, raised))
        for key in news.stuck:
            if (stream := self._streams.get(key)) is not None and stream.may_begin_anew():
                self._core.abort(key, is_left=True)
                self._begin_anew(stream)

    def _finish(self, error: str | None) -> None:
        """The engine has ended: nothing comes any more."""
        self._is_running = False
        self.error = error
        for stream in list(self._streams.values()):
            self._forget(stream)
            stream.fail(EngineDeadError(self._why_dead()))
        for future in self._calls.values():
            if not future.done():
                future.set_result((None, EngineDeadError(self._why_dead())))
        if error is not None and self.on_death is not None:
            self.on_death()
