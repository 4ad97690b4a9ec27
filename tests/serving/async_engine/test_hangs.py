"""What hangs, and what only takes long: what the kernel says of processes, and what an engine tells of itself."""

import asyncio
import ctypes
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from async_runs import core_pid, greedy, play, read, until
from checkpoints import Checkpoint
from faulty_rank import HANGS
from server_process import wait_for
from warm_ranks import StartedRanks

from pagedattn_serve import DEMO_MODEL, AsyncLLMEngine, EngineArgs, EngineDeadError, LLMEngine
from pagedattn_serve.async_engine import process_core
from pagedattn_serve.async_engine.core import EngineLoop, Watch
from pagedattn_serve.async_engine.news_wire import framed
from pagedattn_serve.async_engine.process_core import ProcessCore
from pagedattn_serve.distributed.activity import HANG_SECONDS, LOOK_SECONDS, MAX_LOOKS, WAITS, WORKS, Activity, Pulse

STANDS_STILL = f"a step of the engine (process {os.getpid()}) has stood still for 3 seconds"


def test_a_hang_is_known_within_five_seconds() -> None:
    """The first look may be one after the hang, and a look of one process waits for that of another."""
    assert HANG_SECONDS + 3 * LOOK_SECONDS < 5


@contextmanager
def program(text: str) -> Iterator[Activity]:
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE) as process:
        try:
            yield Activity(process.pid)
        finally:
            process.kill()


def test_what_the_kernel_says_of_a_process() -> None:
    with program("while True: pass") as busy:
        wait_for(busy.works)
        wait_for(busy.works)  # and not as it starts alone
        assert not busy.is_stopped()
    with program("import sys; sys.stdin.read()") as idle:
        wait_for(lambda: not idle.works())
        pid = int(idle._process.name)
        os.kill(pid, signal.SIGSTOP)
        wait_for(idle.is_stopped)
        assert not idle.works()
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: not idle.is_stopped())
    assert not idle.works() and not idle.is_stopped()  # it has ended


@contextmanager
def watched(engine: LLMEngine, does: Callable[[threading.Event], object]) -> Iterator[Watch]:
    """A watch of an engine whose thread does this amid a step, until an event is set."""
    ends = threading.Event()
    thread = threading.Thread(target=does, args=(ends,))
    loop = EngineLoop(engine, lambda news: None)
    loop.is_at_work = True
    thread.start()
    try:
        yield Watch(engine, loop, thread, lambda hang: None)
    finally:
        ends.set()
        thread.join()


def spin(ends: threading.Event) -> None:
    while not ends.is_set():
        hashlib.sha256(bytes(1 << 20))  # which leaves Python to others


@contextmanager
def another_thread_that_spins() -> Iterator[None]:
    ends = threading.Event()
    thread = threading.Thread(target=spin, args=(ends,))
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_a_step_hangs_if_nothing_computes(engine: LLMEngine) -> None:
    """However long it takes. Other threads of Python, which serve callers, do not count; nor does the end of a step
    that came between two looks."""
    with another_thread_that_spins(), watched(engine, lambda ends: ends.wait()) as watch:
        wait_for(lambda: watch.look() == STANDS_STILL)
        for _ in range(2 * MAX_LOOKS):
            watch._loop.num_done += 1
            assert watch.look() is None
        wait_for(lambda: watch.look() is not None)
        watch._loop.is_at_work = False
        assert [watch.look() for _ in range(2 * MAX_LOOKS)] == [None] * 2 * MAX_LOOKS


def test_a_step_that_computes_does_not_hang(engine: LLMEngine) -> None:
    with watched(engine, spin) as watch:
        for _ in range(3 * MAX_LOOKS):
            time.sleep(0.01)  # meanwhile the thread does not wait for Python's lock
            assert watch.look() is None


def test_an_engine_in_a_thread_that_hangs_and_goes_on(engine: LLMEngine) -> None:
    free = threading.Event()

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            call = asyncio.create_task(serving.call(lambda _: free.wait()))
            await until(lambda: (status := serving.replicas()[0]).hang == STANDS_STILL and not status.is_well)
            assert serving.replicas()[0].is_running
            free.set()
            assert await call
            await until(lambda: serving.replicas()[0].is_well)

    play(main())


def test_a_rank_that_is_stopped_and_one_that_hangs_amid_a_step(llama: Checkpoint, ranks: StartedRanks) -> None:
    """The first is named at once, busy or idle. Of the second its main thread waits in native code for what never comes
    and rank 0 waits for the rank."""
    ranks.fault = "tokens"
    engine = LLMEngine(llama.path, num_blocks=40, tensor_parallel_size=2)
    ranks.fault = None
    pid = ranks.pids[-1]

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            await read(serving, [1, 2], greedy(2))
            assert serving.replicas()[0].is_well
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: serving.replicas()[0].hang == f"rank 1 (process {pid}) is stopped")
            os.kill(pid, signal.SIGCONT)
            await until(lambda: serving.replicas()[0].is_well)
            request = asyncio.create_task(read(serving, [1, HANGS], greedy(2)))
            await until(lambda: serving.replicas()[0].hang == STANDS_STILL)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) was killed by SIGKILL$"):
                await request

    play(main())


def pause_with_the_lock(_: LLMEngine) -> None:
    """As native code that deadlocks and keeps Python's lock."""
    ctypes.PyDLL(None).pause()


def test_a_core_that_is_stopped_and_one_whose_python_stands_still(
    text_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = StartedRanks()
    monkeypatch.setattr(process_core, "start_process", processes.start)
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(text_model, num_blocks=40))
    silent = f"the engine core (process {core_pid(engine)}) has not answered for 3 seconds"

    async def main() -> None:
        async with engine as serving:
            pid = core_pid(serving)
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: serving.replicas()[0].hang == f"{silent}: it is stopped")
            request = asyncio.create_task(read(serving, "the", greedy(2)))
            os.kill(pid, signal.SIGCONT)
            assert (await request).finished
            await until(lambda: serving.replicas()[0].is_well)
            call = asyncio.create_task(serving.call(pause_with_the_lock))
            await until(lambda: serving.replicas()[0].hang == silent)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
                await call
            assert serving.replicas()[0].hang is None

    play(main())


def test_a_core_that_speaks_between_looks_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often somebody looks."""
    process = SimpleNamespace(pid=os.getpid())
    monkeypatch.setattr(process_core, "start_process", lambda *_: process)
    monkeypatch.setattr(ProcessCore, "_look_soon", lambda _: None)
    core = ProcessCore(EngineArgs(DEMO_MODEL))
    hangs: list[str | None] = []
    core.on_hang = lambda: hangs.append(core.hang)
    for _ in range(2 * MAX_LOOKS):
        core._look()
        core.data_received(framed(("pulse", None)))
    assert hangs == []
    for _ in range(MAX_LOOKS):
        core._look()
    assert hangs == [f"the engine core (process {process.pid}) has not answered for 3 seconds"]
    core._socket.close()


def test_a_pulse_says_whether_its_thread_computes() -> None:
    """And ends with the connection."""
    ours, theirs = socket.socketpair()
    pulse = Pulse(theirs)  # of this thread
    pulse.start()
    ours.setblocking(False)
    while received(ours) != WORKS:
        pass
    ours.setblocking(True)
    while ours.recv(1) != WAITS:
        pass
    ours.close()
    pulse.join()


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except BlockingIOError:
        return b""
