"""`AsyncLLMEngine` with its engine in a process of its own. What both kinds of core share, test_async_engine.py has.

Most tests use one process, in an event loop that lasts as long as the module.
"""

import asyncio
import dataclasses
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import pytest
from async_runs import TIMEOUT, census, core_pid, expect_none_grown, greedy, play, read
from engine_runs import run
from server_process import WAIT_SECONDS, children_of, in_pieces, is_running, wait_for
from slow_engine import slow_steps
from test_async_engine import PARAMS, PROMPTS, REFUSALS
from warm_ranks import StartedRanks

from pagedattn_serve import (
    DEMO_MODEL,
    ArgumentError,
    AsyncLLMEngine,
    EngineArgs,
    EngineBusyError,
    EngineDeadError,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from pagedattn_serve.async_engine import process_core
from pagedattn_serve.async_engine.news_wire import Frames
from pagedattn_serve.async_engine.process_core import ProcessCore
from pagedattn_serve.errors import portable

T = TypeVar("T")
HELPERS = str(Path(__file__).parents[1] / "helpers")
LONG = greedy(90)


class Shared:
    """An engine that runs, and the event loop that it runs in."""

    def __init__(self, runner: asyncio.Runner, engine: AsyncLLMEngine) -> None:
        self.runner = runner
        self.engine = engine

    def play(self, main: Coroutine[Any, Any, T]) -> T:
        """Run it. Asserts that no request and no block is left in the engine."""

        async def checked() -> T:
            result = await asyncio.wait_for(main, TIMEOUT)
            assert self.engine.num_unfinished == 0 and self.engine._in_hand == set() and self.engine._calls == {}
            stats, cache_map = await self.engine.cache_map()
            assert (stats.num_used_blocks, cache_map.requests) == (0, ())
            return result

        return self.runner.run(checked())


@pytest.fixture(scope="module")
def shared(text_model: str) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        args = EngineArgs(text_model, num_blocks=40)
        engine = AsyncLLMEngine.from_engine_args(args, max_waiting=100, initializer=slow_steps)
        runner.run(engine.start())
        yield Shared(runner, engine)
        pid = core_pid(engine)
        runner.run(engine.shutdown())
    assert engine.error is None and pid not in children_of(os.getpid())


def start_fast(patch: pytest.MonkeyPatch) -> StartedRanks:
    """Let cores start as children of a process that has imported torch. For what does not hang on whose children they
    are, nor on signals that reach them while they start."""
    started = StartedRanks()
    patch.setattr(process_core, "start_process", started.start)
    return started


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> StartedRanks:
    return start_fast(monkeypatch)


# ---- what readers get -----------------------------------------------------------------------------------------------


def test_the_outputs_are_those_of_the_engine(shared: Shared, engine: LLMEngine) -> None:
    expected = run(engine, PROMPTS, PARAMS)

    async def main() -> list[RequestOutput]:
        return await asyncio.gather(*(read(shared.engine, *each) for each in zip(PROMPTS, PARAMS, strict=True)))

    outputs = shared.play(main())
    for output, reference in zip(outputs, expected, strict=True):
        assert output == dataclasses.replace(reference, request_id=output.request_id)
        times = output.metrics
        assert times.first_token_time is not None and times.finished_time is not None
        assert times.arrival_time < times.first_token_time <= times.finished_time <= time.monotonic()


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("params", [PARAMS[2], SamplingParams(n=2, seed=3, max_tokens=7)], ids=["logprobs", "two"])
def test_every_kind_of_outputs(
    shared: Shared, engine: LLMEngine, params: SamplingParams, kind: RequestOutputKind
) -> None:
    [expected] = run(engine, ["the cat"], params)

    async def main() -> list[RequestOutput]:
        stream = shared.engine.generate("the cat", dataclasses.replace(params, output_kind=kind))
        return [output async for output in stream]

    # Of a reader that lags, deltas wait in one; the first run with more shows that they are not held back to the end.
    outputs = shared.play(main()) if kind is RequestOutputKind.FINAL_ONLY else in_pieces(lambda: shared.play(main()))
    *before, last = outputs
    if kind is RequestOutputKind.DELTA:
        last = outputs[0]
        for delta in outputs[1:]:
            last.add(delta)
    assert last == dataclasses.replace(expected, request_id=last.request_id)
    if kind is RequestOutputKind.FINAL_ONLY:
        assert before == []
    if kind is RequestOutputKind.CUMULATIVE:
        texts = [output.outputs[0].text for output in outputs]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_a_slow_reader_misses_nothing_and_holds_up_nobody(shared: Shared) -> None:
    async def main() -> None:
        params = dataclasses.replace(greedy(60), output_kind=RequestOutputKind.DELTA)
        slow = shared.engine.generate("the cat", params)
        total = await anext(slow)
        assert len((await read(shared.engine, "on", LONG)).outputs[0].token_ids) == 90
        async for delta in slow:
            total.add(delta)
        assert total.finished and len(total.outputs[0].token_ids) == 60

    shared.play(main())


@pytest.mark.parametrize(("args", "error", "message"), REFUSALS)
def test_a_wrong_request_is_refused_with_the_same_error(
    shared: Shared, args: Any, error: type[Exception], message: str
) -> None:
    async def main() -> None:
        other = asyncio.create_task(read(shared.engine, "the cat", greedy(9), request_id="taken"))
        await asyncio.sleep(0)
        with pytest.raises(error, match=message):
            await anext(shared.engine.generate(*args))
        assert len((await other).outputs[0].token_ids) == 9

    shared.play(main())


def test_errors_have_their_fields(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(ArgumentError) as raised:
            await anext(shared.engine.generate([10**6]))
        assert (raised.value.argument, raised.value.got) == ("prompt_token_ids", "1000000")

    shared.play(main())


def double(token_ids: list[int], logits: Any) -> Any:
    return logits * 2


def test_what_cannot_go_to_another_process_is_refused_by_name(shared: Shared) -> None:
    def with_processor(f: Callable[..., Any]) -> SamplingParams:
        return dataclasses.replace(greedy(3), logits_processors=[f])

    async def main() -> None:
        serving = shared.engine
        with pytest.raises(TypeError, match="logits_processors: expected what can be pickled, because the engine runs"):
            await anext(serving.generate("the", with_processor(lambda _, logits: logits)))
        double.__module__ = "a_main_program"
        try:
            sys.modules["a_main_program"] = sys.modules[__name__]
            with pytest.raises(TypeError, match=r"sampling_params: expected what a process can load .*a_main_program"):
                await anext(serving.generate("the", with_processor(double)))
            with pytest.raises(TypeError, match=r"f: expected what a process can load .*a_main_program"):
                await serving.call(double)
        finally:
            double.__module__ = __name__
            del sys.modules["a_main_program"]
        with pytest.raises(TypeError, match="prompt: expected what can be pickled"):
            await anext(serving.generate(lambda: "the"))
        assert (await read(serving, "the", with_processor(double))).outputs[0].finish_reason == "length"

    shared.play(main())


def fail_at_the_third(token_ids: list[int], logits: Any) -> Any:
    if len(token_ids) == 2:
        raise ValueError("planted")
    return logits


EACH_KIND = 12


async def serve_all_kinds(serving: AsyncLLMEngine) -> None:
    """EACH_KIND requests of each end, and as many calls."""
    several = SamplingParams(n=2, seed=1, max_tokens=4, logprobs=1)
    beams = SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=4)
    failing = dataclasses.replace(greedy(5), logits_processors=[fail_at_the_third])

    async def leave(num_outputs: int) -> None:
        async with aclosing(serving.generate("the", LONG)) as stream:
            for _ in range(num_outputs):
                await anext(stream, None)  # None: it has ended already

    async def abort(name: str) -> None:
        request = asyncio.create_task(read(serving, "the", LONG, request_id=name))
        await asyncio.sleep(0)
        await serving.abort(name)
        assert (await request).outputs[0].finish_reason == "abort"

    for i in range(EACH_KIND):
        for params in (greedy(3), several, beams, dataclasses.replace(several, output_kind=RequestOutputKind.DELTA)):
            assert (await read(serving, "the cat", params)).finished
        failed = await read(serving, "the cat", failing)
        assert failed.error is not None and "planted" in failed.error and len(failed.outputs[0].token_ids) == 2
        with pytest.raises(ArgumentError):
            await read(serving, [10**6])
        with pytest.raises(TypeError):
            await read(serving, lambda: "the")
        await leave(i % 3)
        await abort(str(i))
        cancelled = asyncio.create_task(read(serving, "the", LONG))
        await asyncio.sleep(0)
        cancelled.cancel()
        call = asyncio.create_task(serving.call(methodcaller("stats")))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(cancelled, call, return_exceptions=True)
    await read(serving, "the", greedy(1))  # with it go the keys of those that never came
    await serving.call(methodcaller("stats"))  # the news of all are sent


def test_nothing_of_a_request_is_left(text_model: str, warm: StartedRanks) -> None:
    """Neither here nor in the engine's process: no container grows with the requests, however they ended."""

    async def main() -> None:
        args = EngineArgs(text_model, num_blocks=40, enable_prefix_caching=False)
        async with AsyncLLMEngine.from_engine_args(args) as serving:
            await serve_all_kinds(serving)
            before, before_there = census(), await serving.call(census)
            await serve_all_kinds(serving)
            expect_none_grown(before_there, await serving.call(census), EACH_KIND)
            expect_none_grown(before, census(), EACH_KIND)
            for name in ("NewsPacker._metrics", "EngineLoop._aborted", "UnfinishedRequests.by_id"):
                assert name in before_there  # it is looked at

    play(main())


# ---- leaving, aborting, calls ---------------------------------------------------------------------------------------


def test_abort_and_leaving(shared: Shared) -> None:
    async def main() -> None:
        serving = shared.engine
        stream = serving.generate("the", LONG, request_id="x")
        await anext(stream)
        await serving.abort("x")
        last = [output async for output in stream][-1]
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        assert 0 < len(last.outputs[0].token_ids) < 90
        early = asyncio.create_task(read(serving, "the", LONG, request_id="x"))  # the id is free again
        await asyncio.sleep(0)
        await serving.abort("x")
        assert (await early).outputs[0].finish_reason == "abort"
        async with aclosing(serving.generate("the", LONG)) as left:
            await anext(left)
        tasks = [asyncio.create_task(read(serving, "the", LONG)) for _ in range(20)]
        for turns, task in enumerate(tasks):
            await asyncio.sleep(0.001 * (turns % 3))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stats = await serving.call(methodcaller("stats"))
        assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0

    shared.play(main())


def test_as_many_wait_as_may(shared: Shared) -> None:
    async def main() -> None:
        readers = [asyncio.create_task(read(shared.engine, "the", greedy(2))) for _ in range(100)]
        await asyncio.sleep(0)
        with pytest.raises(EngineBusyError):
            await anext(shared.engine.generate("the"))
        await asyncio.gather(*readers)

    shared.play(main())


def test_calls(shared: Shared) -> None:
    async def main() -> None:
        serving = shared.engine
        assert await serving.call(methodcaller("register_prefix", [5] * 16)) == 16
        with pytest.raises(ArgumentError, match="prefix: expected 1 to"):
            await serving.call(methodcaller("register_prefix", []))
        with pytest.raises(TypeError, match="f: expected a function that can be pickled"):
            await serving.call(lambda engine: engine.stats())
        with pytest.raises(TypeError, match="call: expected a result that can be pickled"):
            await serving.call(methodcaller("__getattribute__", "inputs"))
        async with aclosing(serving.generate("the", LONG, request_id="mine")) as stream:
            await anext(stream)
            stats, cache_map = await serving.cache_map()
            assert [request.request_id for request in cache_map.requests] == ["mine"] and stats.num_running == 1
            assert serving.stats().num_running == 1

    shared.play(main())


def test_one_message_for_all_that_is_said_in_a_turn(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    core = shared.engine._core
    assert isinstance(core, ProcessCore) and core._transport is not None
    written: list[bytes] = []
    write = core._transport.write
    monkeypatch.setattr(
        core, "_transport", type("Transport", (), {"write": lambda _, data: (written.append(data), write(data))})()
    )

    async def main() -> None:
        await asyncio.gather(*(read(shared.engine, "the", greedy(3)) for _ in range(8)))

    shared.runner.run(main())
    assert len(written) == 1 and len(Frames().feed(written[0])) == 8


# ---- errors ---------------------------------------------------------------------------------------------------------


class OfAPackage(OSError):
    pass


class Unlike(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__("text")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ArgumentError("top_k", "an int", 3, "prompt 1 of 2"), "ArgumentError: prompt 1 of 2: top_k: expected an int"),
        (FloatingPointError("logits: expected numbers"), "FloatingPointError: logits: expected numbers"),
        (FileNotFoundError(2, "No such file", "x"), "FileNotFoundError: [Errno 2] No such file: 'x'"),
        (OfAPackage("lost"), "OSError: lost"),
        (Unlike(1, 2), "RuntimeError: Unlike: text"),
        (ValueError(lambda: 1), "ValueError: <function"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_errors_that_cross(error: Exception, expected: str) -> None:
    crossed = pickle.loads(pickle.dumps(portable(error)))
    assert f"{type(crossed).__name__}: {crossed}".startswith(expected)


# ---- the end of a process -------------------------------------------------------------------------------------------


def test_a_process_that_is_killed_amid_streams(text_model: str) -> None:
    """A core that is killed is known within a second; whoever reads or calls gets an error that says what died."""
    deaths: list[bool] = []

    async def main() -> None:
        async with AsyncLLMEngine.from_engine_args(EngineArgs(text_model), initializer=slow_steps) as serving:
            serving.on_death = lambda: deaths.append(serving.is_running)
            streams = [serving.generate("the", LONG) for _ in range(4)]
            await asyncio.gather(*map(anext, streams))
            pid = core_pid(serving)
            os.kill(pid, signal.SIGKILL)
            message = rf"the engine broke: the engine core \(process {pid}\) was killed by SIGKILL"
            for stream in streams:
                with pytest.raises(EngineDeadError, match=message):
                    while True:
                        await anext(stream)
            assert not serving.is_running and serving.num_unfinished == 0
            for request in (anext(serving.generate("the")), serving.call(methodcaller("stats"))):
                with pytest.raises(EngineDeadError, match=message):
                    await request
            assert serving.stats().num_running >= 0 and deaths == [False]
        assert pid not in children_of(os.getpid())

    play(main())


def test_the_end_does_not_wait_for_a_process_that_hangs(
    text_model: str, warm: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed, and its requests end with the engine. That is no death of which the engine tells."""
    monkeypatch.setattr(process_core, "STOP_SECONDS", 0.05)

    async def main() -> None:
        serving = AsyncLLMEngine.from_engine_args(EngineArgs(text_model))
        async with serving:
            [pid] = warm.pids
            os.kill(pid, signal.SIGSTOP)
            request = asyncio.create_task(read(serving, "the", LONG))
            await asyncio.sleep(0)
            assert serving.num_unfinished == 1
        with pytest.raises(EngineDeadError, match=r"^the engine was shut down$"):
            await request
        assert serving.error is None
        await serving.shutdown()

    play(main())
    assert warm.processes[0].returncode == -signal.SIGKILL


NAME: ContextVar[str] = ContextVar("NAME")


@pytest.mark.usefixtures("warm")
def test_nothing_but_a_request_runs_in_the_context_of_a_request(text_model: str) -> None:
    """Neither what the first request starts, nor what follows if the process dies in the turn in which a request comes:
    the log would tell all of it as news of this request."""
    names: list[str] = []

    async def ask(serving: AsyncLLMEngine, name: str) -> None:
        NAME.set(name)
        await read(serving, "the", greedy(1))

    async def main() -> None:
        serving = AsyncLLMEngine.from_engine_args(EngineArgs(text_model))
        serving.on_death = lambda: names.append(NAME.get("none"))
        await asyncio.create_task(ask(serving, "the first"))
        request = asyncio.create_task(ask(serving, "another"))
        await asyncio.sleep(0)  # what it says to the core is sent in the next turn
        core = serving._core
        assert isinstance(core, ProcessCore)
        os.kill(core.pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(core._socket, 0)
        assert poll.poll(1000 * WAIT_SECONDS) == [(core._socket.fileno(), select.POLLHUP)]
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            await request
        await serving.shutdown()

    play(main())
    assert names == ["none"]


def exit_in_step() -> None:
    from pagedattn_serve.execution.model_runner import ModelRunner

    def execute(*_: Any) -> None:
        os._exit(7)

    ModelRunner.execute = execute  # type: ignore[method-assign, assignment]


@pytest.mark.usefixtures("warm")
def test_a_process_that_is_killed_while_idle_and_one_that_ends_by_itself(text_model: str) -> None:
    async def main() -> None:
        dead = asyncio.Event()
        ended = AsyncLLMEngine.from_engine_args(EngineArgs(text_model), on_death=dead.set, initializer=exit_in_step)
        pid = core_pid(ended)
        async with ended:
            with pytest.raises(EngineDeadError, match=rf"\(process {pid}\) ended with status 7$"):
                await read(ended, "the", greedy(2))
            await dead.wait()
        dead.clear()
        idle = AsyncLLMEngine.from_engine_args(EngineArgs(text_model), on_death=dead.set)
        pid = core_pid(idle)
        async with idle:
            os.kill(pid, signal.SIGKILL)
            await dead.wait()
            assert idle.error == f"the engine core (process {pid}) was killed by SIGKILL"

    play(main())


class WithoutSocket:
    """A process that goes on when its socket has closed."""

    def __init__(self, module: str, theirs: socket.socket) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.side = theirs.dup()

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL


def test_a_process_that_goes_on_without_its_socket_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it was to stop, nobody says later that it has not."""
    monkeypatch.setattr(process_core, "start_process", WithoutSocket)
    monkeypatch.setattr(process_core, "END_SECONDS", 0)

    async def main() -> list[str | None]:
        core: Any = ProcessCore(EngineArgs(DEMO_MODEL))
        ends: list[str | None] = []
        await core.start(lambda _: None, ends.append)
        core.stop()
        core._process.side.close()
        await core.join()
        assert core._stopping.cancelled()
        return ends

    assert play(main()) == [f"the engine core (process {os.getpid()}) was killed by SIGKILL"]


def test_a_process_that_is_killed_at_its_start(text_model: str) -> None:
    core = ProcessCore(EngineArgs(text_model))
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(ChildProcessError, match=r"\(process \d+\) was killed by SIGKILL while it loaded the model"):
        core.wait_until_loaded()
    assert core.pid not in children_of(os.getpid())


def refuse(text: str) -> None:
    raise OfAPackage(text)


def test_errors_of_the_start_are_those_of_the_engine(llama: Any, tmp_path: Path, warm: StartedRanks) -> None:
    with pytest.raises(FileNotFoundError, match=r"model: expected a directory with a config[.]json, got no/such/model"):
        AsyncLLMEngine.from_engine_args(EngineArgs("no/such/model"))
    with pytest.raises(FileNotFoundError, match="tokenizer: expected a directory with"):
        AsyncLLMEngine.from_engine_args(EngineArgs(llama.path, tokenizer=tmp_path))
    with pytest.raises(OSError, match=r"^planted$"):
        AsyncLLMEngine.from_engine_args(EngineArgs(llama.path), initializer=partial(refuse, "planted"))
    with pytest.raises(ValueError, match="max_waiting"):
        AsyncLLMEngine.from_engine_args(EngineArgs(llama.path), max_waiting=0)
    assert len(warm.processes) >= 3
    assert all(process.returncode is not None for process in warm.processes), "one that nobody has waited for"


def test_many_starts_leave_nothing_open(text_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the processes end at once, because loading a model takes seconds."""

    async def start_and_stop() -> None:
        async with AsyncLLMEngine.from_engine_args(EngineArgs(text_model)):
            pass

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    with monkeypatch.context() as patch:
        warm = start_fast(patch)
        play(start_and_stop())
        before, children = num_open(), children_of(os.getpid())
        play(start_and_stop())
        asyncio.run(AsyncLLMEngine.from_engine_args(EngineArgs(text_model)).shutdown())  # it was never started
        assert all(process.returncode is not None for process in warm.processes), "one that nobody has waited for"
    monkeypatch.setattr(sys, "executable", "/bin/true")
    for _ in range(100):
        with pytest.raises(ChildProcessError, match="ended with status 0 while it loaded the model"):
            ProcessCore(EngineArgs(text_model)).wait_until_loaded()
    assert num_open() == before and children_of(os.getpid()) == children


def test_the_end_may_come_amid_the_start(text_model: str, warm: StartedRanks) -> None:
    """When the connection is being made, through which the process would hear of the end."""

    async def main() -> None:
        serving = AsyncLLMEngine.from_engine_args(EngineArgs(text_model))
        start = asyncio.create_task(serving.start())
        await asyncio.sleep(0)
        await asyncio.gather(serving.shutdown(), start)
        assert not serving.is_running and serving.error is None

    play(main())
    assert warm.processes[0].returncode == 0


def close_standard_output() -> None:
    """As Python has it in a process that is started with descriptor 1 closed."""
    sys.stdout = None  # type: ignore[assignment]


def test_a_process_whose_standard_output_is_closed(text_model: str, warm: StartedRanks) -> None:
    """It ends as all others do, not in an error."""

    async def main() -> None:
        args = EngineArgs(text_model)
        async with AsyncLLMEngine.from_engine_args(args, initializer=close_standard_output) as serving:
            assert (await read(serving, "the", greedy(1))).finished

    play(main())
    assert warm.processes[0].returncode == 0


FRONT = """
import asyncio, os, sys, time
from pagedattn_serve import AsyncLLMEngine, EngineArgs, SamplingParams
from slow_engine import slow_steps

def make():
    return AsyncLLMEngine.from_engine_args(EngineArgs(sys.argv[1]), initializer=slow_steps)

def keep_sockets_open():
    if (pid := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    print(pid, flush=True)

async def main(serving):
    async with serving:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        streams = [serving.generate("the", params) for _ in range(4)]
        await asyncio.gather(*map(anext, streams))
        print(serving.replicas()[0].pid, flush=True)
        PLACE

async def main_of_another_thread():
    await main(await asyncio.to_thread(make))
"""
SLEEP = "time.sleep(60)"  # the event loop does not turn


@pytest.mark.parametrize(
    ("place", "program"),
    [
        # The end of the socket does not tell: the kernel's signal has to do, and of another thread's core, a thread.
        (f"keep_sockets_open(); {SLEEP}", "asyncio.run(main(make()))"),
        (f"keep_sockets_open(); {SLEEP}", "asyncio.run(main_of_another_thread())"),
        ("raise SystemExit(3)", "asyncio.run(main(make()))"),
    ],
)
def test_no_process_outlives_its_front(text_model: str, place: str, program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([HELPERS, *sys.path])}
    command = [sys.executable, "-c", FRONT.replace("PLACE", place) + program, text_model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        keeper = int(front.stdout.readline()) if "keep_sockets_open" in place else None
        if SLEEP in place:
            front.kill()
        try:
            assert front.wait(60) == (-signal.SIGKILL if SLEEP in place else 3)
            wait_for(lambda: not is_running(pid))
        finally:
            if keeper is not None:
                os.kill(keeper, signal.SIGKILL)


def test_a_process_of_another_thread_outlives_that_thread(text_model: str) -> None:
    """The kernel tells a child of the end of the thread that made it: only the main thread's counts."""

    made: list[AsyncLLMEngine] = []
    thread = threading.Thread(target=lambda: made.append(AsyncLLMEngine.from_engine_args(EngineArgs(text_model))))
    thread.start()
    thread.join()

    async def main() -> None:
        async with made[0] as serving:
            assert (await read(serving, "the", greedy(2))).finished

    play(main())
