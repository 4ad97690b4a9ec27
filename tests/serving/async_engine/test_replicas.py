"""Several engine cores behind one `AsyncLLMEngine`: who gets a request, and what becomes of it when a replica dies.

One test has processes; in the others a fake stands for each process, which does what the test says.
"""

import asyncio
import dataclasses
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import methodcaller
from typing import Any, ClassVar

import pytest
import torch
from async_runs import census, expect_none_grown, greedy, play, read, until
from server_process import is_running
from slow_engine import slow_steps
from warm_ranks import StartedRanks

from pagedattn_serve import AsyncLLMEngine, EngineArgs, EngineDeadError, EngineStats, LLMEngine, RequestOutput
from pagedattn_serve.async_engine import process_core, replicas
from pagedattn_serve.async_engine.core import EngineFacts, News, ReplicaDeadError
from pagedattn_serve.outputs import CompletionOutput, RequestMetrics
from pagedattn_serve.requests.inputs import RequestArgs
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams

STATS = EngineStats(**{name: 0 for name in EngineStats.__slots__} | {"num_blocks": 8, "num_steps": 5})  # type: ignore[arg-type]
FACTS = EngineFacts("Fake", "native", "cpu", "float32", 99, 16, 1, 128, 8, SamplingParams(), False, "fp_none")


PAUSE = r"replica 0 died: .*; it is started anew in ([0-9.]+) seconds"


class FakeCore:
    """In the place of a `ProcessCore`: the test says what its engine does. faults: what the next ones raise as they
    load. made: all that there were."""

    faults: ClassVar[list[Exception | None]] = []
    made: ClassVar[list["FakeCore"]] = []
    facts = FACTS
    first_stats = STATS

    def __init__(self, engine_args: EngineArgs, initializer: Callable[[], object] | None = None) -> None:
        self.engine_args = engine_args
        self.pid = 1000 + len(self.made)
        self.fault = self.faults.pop(0) if self.faults else None
        self.is_started = self.is_interrupted = self.is_ended = False
        self.keys: list[int] = []
        self.args: list[RequestArgs] = []
        self.calls: list[int] = []
        self.hang: str | None = None
        self.on_hang: Callable[[], None] | None = None
        self.aborted: list[int] = []
        self.made.append(self)

    def wait_until_loaded(self) -> None:
        if isinstance(self.fault, TimeoutError):  # it takes long
            while not self.is_interrupted:
                time.sleep(0.001)
        if self.fault is not None:
            raise self.fault

    def interrupt_loading(self) -> None:
        self.is_interrupted = True

    def kill(self) -> None:
        self.is_ended = True

    async def start(self, deliver: Callable[[News], None], finish: Callable[[str | None], None]) -> None:
        self.deliver, self.finish = deliver, finish
        await asyncio.sleep(0.002)  # a connection is made
        self.is_started = True

    def add(self, key: int, args: RequestArgs) -> None:
        if args.prompt == "not to be pickled":
            raise TypeError("prompt: expected what can be pickled")
        assert self.is_started
        self.keys.append(key)
        self.args.append(args)

    def abort(self, key: int, is_left: bool) -> None:
        self.aborted.append(key)

    def call(self, key: int, f: Any) -> None:
        self.calls.append(key)

    def cancel(self, key: int) -> None:
        self.calls.remove(key)

    def stop(self) -> None:
        self.end(None)

    async def join(self) -> None:
        pass

    def end(self, error: str | None) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.finish(error)

    def take_hang(self, hang: str | None) -> None:
        self.hang = hang
        assert self.on_hang is not None
        self.on_hang()

    def tell(self, key: int, finished: bool) -> None:
        """The engine has the next token of a request."""
        completion = CompletionOutput(0, "x", [7], 0.0, None, "length" if finished else None)
        output = RequestOutput(str(key), None, [5], [completion], finished, RequestMetrics(0.0))
        self.deliver(News(STATS, queued=[key], outputs=[(key, output)]))


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeCore]]:
    """The fakes that were made; pauses are short."""
    FakeCore.faults, FakeCore.made = [], []
    monkeypatch.setattr(replicas, "ProcessCore", FakeCore)
    monkeypatch.setattr(replicas, "FIRST_PAUSE", 0.01)
    yield FakeCore.made


def num_threads(engine: LLMEngine) -> int:
    return torch.get_num_threads()


def make(model: str, number: int = 2) -> AsyncLLMEngine:
    return AsyncLLMEngine.from_engine_args(EngineArgs(model), data_parallel_size=number)


def test_a_replica_that_is_killed_amid_requests(text_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests end with an error, those of the other replica go on, clients that leave leave nothing behind, and
    the replica comes back."""
    monkeypatch.setattr(replicas, "FIRST_PAUSE", 0.01)
    processes = StartedRanks()
    monkeypatch.setattr(process_core, "start_process", processes.start)
    args = EngineArgs(text_model, num_blocks=40)
    slow = functools.partial(slow_steps, 0.05)  # the first requests are to last until a replica is stopped
    engine = AsyncLLMEngine.from_engine_args(args, initializer=slow, data_parallel_size=2)

    async def main() -> None:
        async with engine:
            streams = [engine.generate([i] * 9, greedy(100), request_id=str(i)) for i in range(4)]
            await asyncio.gather(*map(anext, streams))
            # stats may be some steps old
            await until(lambda: [each.stats.num_running for each in engine.replicas()] == [2, 2])
            assert engine.stats().num_running == 4 and engine.stats().num_blocks == 80
            maps = [(await engine.cache_map(replica))[1] for replica in range(2)]
            lost, kept = ([each.request_id for each in cache_map.requests] for cache_map in maps)
            assert sorted(lost + kept) == ["0", "1", "2", "3"]
            pid = engine.replicas()[0].pid
            assert pid is not None
            num_cpus = len(os.sched_getaffinity(0))
            assert await engine.call(num_threads) <= max(1, num_cpus // 2)
            await expect_a_hang_is_passed_by(engine, pid)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not engine.replicas()[0].is_running)
            assert engine.is_running
            for name in lost:
                with pytest.raises(EngineDeadError, match=rf"^replica 0 died: .* \(process {pid}\) was killed by SIGK"):
                    while True:
                        await anext(streams[int(name)])
            for name in kept:
                outputs = [output async for output in streams[int(name)]]
                assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 100
            await until(lambda: engine.replicas()[0].is_running)
            assert (engine.replicas()[0].num_restarts, engine.replicas()[1].num_restarts) == (1, 0)
            tasks = [asyncio.create_task(read(engine, [i] * 9, greedy(100))) for i in range(8)]
            await until(lambda: [each.stats.num_running for each in engine.replicas()] == [4, 4])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            stats = [await engine.call(methodcaller("stats"), replica) for replica in range(2)]
            assert [(each.num_running, each.num_used_blocks) for each in stats] == [(0, 0)] * 2
        assert engine.error is None and not engine.is_running

    async def expect_a_hang_is_passed_by(engine: AsyncLLMEngine, pid: int) -> None:
        """A request that a stopped replica has, and does not answer, has its answer from the other replica."""
        requests = [asyncio.create_task(read(engine, [9] * 9, greedy(3), request_id=f"{i}+")) for i in range(2)]
        os.kill(pid, signal.SIGSTOP)
        try:
            outputs = await asyncio.gather(*requests)
            assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
            await until(lambda: not engine.replicas()[0].is_well)
            assert engine.replicas()[0].hang == (
                f"the engine core (process {pid}) has not answered for 3 seconds: it is stopped"
            )
            assert engine.replicas()[1].is_well and engine.is_running
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: engine.replicas()[0].is_well)

    play(main())
    assert len(processes.pids) == 3 and not any(map(is_running, processes.pids))


def test_a_request_that_comes_amid_the_start_waits_for_its_end(cores: list[FakeCore], text_model: str) -> None:
    """And so does the end of the engine, whoever waits for the start: a core that has started by half cannot stop."""

    async def main() -> None:
        engine = make(text_model)
        start = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match=r"^the engine does not run yet$"):
            await engine.call(methodcaller("stats"))
        request = asyncio.create_task(read(engine, "the"))
        await asyncio.sleep(0)
        assert engine.num_unfinished == 0
        start.cancel()
        core = await held(cores)
        assert all(each.is_started for each in cores) and engine.is_running
        core.tell(core.keys[0], finished=True)
        assert (await request).finished
        await engine.shutdown()
        given_up = make(text_model)
        start = asyncio.create_task(given_up.start())
        await asyncio.sleep(0)
        start.cancel()
        await given_up.shutdown()
        assert len(cores) == 4 and all(core.is_started and core.is_ended for core in cores)

    play(main())


def holder(cores: list[FakeCore]) -> FakeCore | None:
    """The core that has got a request, has not ended and does not hang."""
    return next((core for core in cores if core.keys and not core.is_ended and core.hang is None), None)


async def held(cores: list[FakeCore]) -> FakeCore:
    """The holder, once there is one."""
    await until(lambda: holder(cores) is not None)
    core = holder(cores)
    assert core is not None
    return core


def test_a_request_without_an_output_is_tried_on_one_other_replica(cores: list[FakeCore], text_model: str) -> None:
    async def fail(num_times: int) -> None:
        for _ in range(num_times):
            (await held(cores)).end("it fell")

    async def main() -> None:
        async with make(text_model, 3) as engine:
            request = asyncio.create_task(read(engine, "the", request_id="a"))
            await fail(1)
            second = await held(cores)
            second.tell(second.keys.pop(), finished=True)
            assert (await request).finished
            request = asyncio.create_task(read(engine, "the", request_id="a"))
            await fail(2)
            with pytest.raises(ReplicaDeadError, match=r"^replica \d died: it fell$"):
                await request
            assert holder(cores) is None

    play(main())


def test_a_request_with_an_output_is_not_tried_again(cores: list[FakeCore], text_model: str) -> None:
    async def main() -> None:
        async with make(text_model) as engine:
            stream = engine.generate("the")
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            [core] = [core for core in cores if core.keys]
            core.tell(core.keys[0], finished=False)
            assert not (await first).finished
            core.end("it fell")
            with pytest.raises(ReplicaDeadError, match=f"^replica {cores.index(core)} died: it fell$"):
                await anext(stream)
            assert sum(len(core.keys) for core in cores) == 1 and engine.num_unfinished == 0

    play(main())


@pytest.mark.parametrize("hangs", [False, True])
def test_outputs_that_nobody_keeps_come_again(cores: list[FakeCore], text_model: str, hangs: bool) -> None:
    """What the reader has not got is forgotten, and so is what it says that it forgets: the second try is all that
    counts. It is the same request. The limit of requests that wait does not stop it."""

    def fail(core: FakeCore) -> None:
        if hangs:
            core.take_hang("it stands")
        else:
            core.end("it fell")

    async def main() -> None:
        params = SamplingParams(n=2, seed=3, output_kind=RequestOutputKind.DELTA)
        async with AsyncLLMEngine.from_engine_args(EngineArgs(text_model), 1, data_parallel_size=2) as engine:
            for num_read in range(2):
                asked: list[bool] = []
                stream = engine.generate("the", params, "a", forget=lambda asked=asked: asked.append(True) or True)  # type: ignore[misc, func-returns-value]
                first = asyncio.ensure_future(anext(stream))
                core = await held(cores)
                if num_read:
                    core.tell(core.keys[-1], finished=False)
                    await first
                    first = asyncio.ensure_future(anext(stream))
                    await asyncio.sleep(0)
                core.tell(core.keys[-1], finished=False)
                fail(core)
                [second] = [each for each in cores if each is not core and each.args and not each.is_ended]
                assert second.args[-1] == core.args[-1] and second.keys[-1] > core.keys[-1]
                assert core.aborted == ([core.keys[-1]] if hangs else [])
                second.tell(second.keys[-1], finished=True)
                last = await first
                assert last.finished and last.outputs[0].token_ids == [7] and bool(asked) == bool(num_read)
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
                assert engine.num_unfinished == 0 and engine._key_of == {}
                for each in cores:
                    each.keys.clear()
                if hangs:
                    core.take_hang(None)
                    core.aborted.clear()
                await until(lambda: all(each.is_running for each in engine.replicas()))

    play(main())


def test_a_request_that_was_aborted_is_not_tried_again(cores: list[FakeCore], text_model: str) -> None:
    async def main() -> None:
        async with make(text_model) as engine:
            request = asyncio.create_task(read(engine, "the", request_id="a"))
            await until(lambda: holder(cores) is not None)
            abort = asyncio.create_task(engine.abort("a"))
            await asyncio.sleep(0)
            core = holder(cores)
            assert core is not None and core.aborted == core.keys
            core.end("it fell")
            with pytest.raises(ReplicaDeadError):
                await request
            await abort
            assert holder(cores) is None

    play(main())


def test_a_replica_that_hangs_and_goes_on(cores: list[FakeCore], text_model: str) -> None:
    """Requests that come go to the other one. A request with an output waits. If all hang, requests wait at any, and
    the first one that goes on gets those without an output. A request that has moved does not move again."""

    async def main() -> None:
        async with make(text_model) as engine:
            stream = engine.generate("the", request_id="kept")
            first = asyncio.ensure_future(anext(stream))
            core = await held(cores)
            other = cores[1 - cores.index(core)]
            core.tell(core.keys[0], finished=False)
            await first
            core.take_hang("it stands")
            status = engine.replicas()[cores.index(core)]
            assert (status.is_running, status.is_well, status.hang) == (True, False, "it stands")
            assert not other.keys and not core.aborted
            requests = [asyncio.create_task(read(engine, "the")) for _ in range(8)]
            await until(lambda: len(other.keys) == 8)
            other.take_hang("it stands, too")
            assert engine.is_running and not any(each.is_well for each in engine.replicas())
            late = asyncio.create_task(read(engine, "the", request_id="late"))
            await until(lambda: len(core.keys) + len(other.keys) == 10)
            core.take_hang(None)
            assert [each.request_id for each in core.args].count("late") == 1 and len(core.keys) == 10
            assert engine.replicas()[cores.index(core)].is_well
            core.take_hang("it stands again")
            other.take_hang(None)
            assert len(core.keys) == 10 and len(other.keys) <= 9  # "late" moves now, if it has not moved before
            for each in cores:
                for key in each.keys:
                    each.tell(key, finished=True)
            assert all(each.finished for each in await asyncio.gather(*requests, late))
            assert (await anext(stream)).finished and engine.num_unfinished == 0

    play(main())


def test_a_replica_is_started_until_it_runs(
    cores: list[FakeCore], text_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time after a longer pause. While no replica runs, requests and calls say why."""

    async def main() -> None:
        async with make(text_model) as engine:
            FakeCore.faults += [OSError("gone"), None, OSError("gone"), OSError("gone"), None]
            cores[0].end("it fell")
            assert engine.is_running
            with pytest.raises(ReplicaDeadError, match=r"^replica 0 died: it fell$"):
                await engine.call(methodcaller("stats"))
            requests = []
            while not engine.replicas()[0].is_running:  # whenever they come, the other replica gets them
                requests.append(asyncio.create_task(read(engine, "the")))
                await asyncio.sleep(0.001)
            assert len(requests) - 1 <= len(cores[1].keys) <= len(requests)  # replica 0 may run when the last one comes
            requests.append(asyncio.create_task(read(engine, "the")))
            await asyncio.sleep(0)
            assert cores[-1].keys and len(cores[-1].keys) + len(cores[1].keys) == len(requests)
            assert engine.num_unfinished == len(requests)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            assert [each.num_restarts for each in engine.replicas()] == [2, 0]
            assert [each.error for each in engine.replicas()] == [None, None]
            assert engine.replicas()[0].pid == cores[-1].pid
            call = asyncio.create_task(engine.call(methodcaller("stats"), 0))
            await asyncio.sleep(0)
            cores[-1].deliver(News(dataclasses.replace(STATS, num_running=3)))
            assert engine.stats().num_running == 3
            began = time.monotonic()
            for core in (cores[-1], cores[1]):
                core.end("it fell")
            with pytest.raises(ReplicaDeadError):
                await call
            assert not engine.is_running and engine.error is None and engine.stats().num_running == 0
            for request in (anext(engine.generate("the")), engine.call(methodcaller("stats"))):
                with pytest.raises(EngineDeadError, match=r"replica 0 died: it fell; replica 1 died: it fell"):
                    await request
            await until(lambda: all(each.is_running for each in engine.replicas()))
            assert time.monotonic() - began > 0.04  # the third pause of replica 0
            told = [re.fullmatch(PAUSE, message) for message in caplog.messages]
            pauses = [float(match[1]) for match in told if match]
            assert pauses == [0.01 * 2**i for i in range(len(pauses))] and len(pauses) >= 3
            assert sum(each.num_restarts for each in engine.replicas()) == 6 and engine.stats().num_steps == 10

    play(main())


def test_no_two_engines_draw_the_same_numbers(cores: list[FakeCore], text_model: str) -> None:
    """Whichever replica, and however often it was started: each has another seed, the same ones in each run. Nothing
    else that an engine is made of differs."""

    async def main(args: EngineArgs) -> list[EngineArgs]:
        cores.clear()
        async with AsyncLLMEngine.from_engine_args(args, data_parallel_size=3) as engine:
            for restarts in range(2):
                for core in cores[-2:] if restarts else cores[:2]:
                    core.end("it fell")
                await until(lambda: all(each.is_running for each in engine.replicas()))
        return [core.engine_args for core in cores]

    args = EngineArgs(text_model, seed=5)
    seen = play(main(args))
    assert seen[0] == args and len(seen) == 7 and len({each.seed for each in seen}) == 7
    assert all(dataclasses.replace(each, seed=5) == args for each in seen)
    assert {each.seed for each in play(main(args))} == {each.seed for each in seen}
    arbitrary = dataclasses.replace(args, seed=None)
    assert set(play(main(arbitrary))) == {arbitrary}  # each draws a seed of its own


@pytest.mark.parametrize("fault", [None, TimeoutError("is interrupted")], ids=["pausing", "loading"])
def test_the_end_does_not_wait_for_a_replica_that_starts(
    cores: list[FakeCore], text_model: str, fault: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        if fault is None:
            monkeypatch.setattr(replicas, "FIRST_PAUSE", 60)
        async with make(text_model) as engine:
            FakeCore.faults += [fault]
            cores[0].end("it fell")
            while fault is not None and len(cores) < 3:
                await asyncio.sleep(0.001)
            assert len(cores) == (2 if fault is None else 3)
            request = asyncio.create_task(read(engine, "the"))
            await asyncio.sleep(0)
        with suppress(EngineDeadError):
            await request
        assert cores[1].is_ended and engine.num_unfinished == 0

    play(main())


def test_nothing_of_a_request_is_left(cores: list[FakeCore], text_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is answered, left, aborted, refused, or its replica dies or hangs: no container grows."""
    monkeypatch.setattr(replicas, "LONGEST_PAUSE", 0.01)
    each_kind = 12

    async def serve_all_kinds(engine: AsyncLLMEngine) -> None:
        for _ in range(each_kind):
            await until(lambda: all(each.is_well for each in engine.replicas()))
            del cores[:-2]  # those that have ended
            for core in cores:
                core.keys.clear()
                core.args.clear()
            requests = [asyncio.create_task(read(engine, [5] * 200, request_id=str(i))) for i in range(8)]
            await asyncio.sleep(0)
            with pytest.raises(TypeError):
                await read(engine, "not to be pickled")
            calls = [asyncio.create_task(engine.call(methodcaller("stats"), i % 2)) for i in range(2)]
            abort = asyncio.create_task(engine.abort("1"))
            await asyncio.sleep(0)
            requests[0].cancel()
            calls[0].cancel()
            hanging, other = cores
            hanging.take_hang("it stands")
            await asyncio.sleep(0)
            hanging.take_hang(None)
            for key in [*hanging.keys]:
                hanging.tell(key, finished=False)
            hanging.end("it fell")
            for key in other.keys:
                other.tell(key, finished=True)
            other.deliver(News(STATS, results=[(key, 0, None) for key in other.calls]))
            await asyncio.gather(*requests, *calls, abort, return_exceptions=True)
            assert engine.num_unfinished == 0

    async def main() -> None:
        async with make(text_model) as engine:
            await serve_all_kinds(engine)
            before = census()
            await serve_all_kinds(engine)
            expect_none_grown(before, census(), each_kind)
            assert {"Router._replica_of", "_Replica.to_compute", "Replicas._replica_of_call"} <= set(before)

    play(main())


def test_aborts_and_cancelled_calls_reach_the_replica(cores: list[FakeCore], text_model: str) -> None:
    async def main() -> None:
        async with make(text_model) as engine:
            request = asyncio.create_task(read(engine, "the", request_id="a"))
            await asyncio.sleep(0)
            [core] = [core for core in cores if core.keys]
            abort = asyncio.create_task(engine.abort("a"))
            await asyncio.sleep(0)
            assert core.aborted == core.keys and len(core.calls) == 1 and not abort.done()
            core.tell(core.keys[0], finished=True)
            core.deliver(News(STATS, results=[(core.calls.pop(), 0, None)]))
            await asyncio.gather(abort, request)
            with pytest.raises(TypeError, match="prompt: expected what can be pickled"):
                await read(engine, "not to be pickled")
            call = asyncio.create_task(engine.call(methodcaller("stats"), 1))
            await asyncio.sleep(0)
            assert len(cores[1].calls) == 1
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            assert cores[1].calls == []
            with pytest.raises(ValueError, match=r"replica: expected an int in \[0, 1\], got 2"):
                await engine.call(methodcaller("stats"), 2)

    play(main())


def test_a_replica_that_cannot_start_ends_all(cores: list[FakeCore], text_model: str) -> None:
    FakeCore.faults += [None, OSError("gone"), None]
    with pytest.raises(OSError, match=r"^gone$"):
        make(text_model, 3)
    assert len(cores) == 3 and all(core.is_ended for core in cores)
    with pytest.raises(ValueError, match=r"data_parallel_size: expected an int in \[1, 256\], got 0"):
        make(text_model, 0)


def test_replicas_on_cuda_are_refused(cores: list[FakeCore], text_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCore, "facts", FACTS._replace(device="cuda:0"))
    with pytest.raises(ValueError, match=r"data_parallel_size: expected 1 on CUDA, .*, got 2"):
        make(text_model)
    assert all(core.is_ended for core in cores)
