"""What becomes of an engine whose ranks fail, die or stop, or that is interrupted: the real processes, with faults."""

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import httpx
import pytest
from async_runs import play, read
from checkpoints import Checkpoint
from engine_runs import token_ids
from failing_ranks import (
    GREEDY,
    add,
    error_of,
    expect_death_amid_a_step,
    expect_step_fails,
    fail_on_rank_0,
    interrupt_at_places,
)
from faulty_rank import HAS_OTHER_INPUTS, IS_KILLED, RAISES, STOPS
from server_process import (
    STOP_SECONDS,
    WAIT_SECONDS,
    children_of,
    is_running,
    is_stopped,
    running,
    wait_for,
)
from test_interrupts import ROOT, expect_nothing_left
from warm_ranks import StartedRanks

from pagedattn_serve import LLM, AsyncLLMEngine, EngineDeadError, LLMEngine
from pagedattn_serve.distributed import communicator, workers
from pagedattn_serve.errors import ExecutorDeadError

SMALL: dict[str, Any] = dict(num_blocks=40, enable_prefix_caching=False, tensor_parallel_size=2)
FILES = {str(ROOT / "execution/model_runner.py")} | {
    str(ROOT / f"distributed/{name}.py") for name in ("executor", "workers", "communicator", "channel")
}


@pytest.fixture
def start(llama: Checkpoint, ranks: StartedRanks) -> Iterator[Callable[..., LLMEngine]]:
    """Makes an engine with a rank that has this fault. In the end no process is left."""
    num_started = len(ranks.processes)
    ends: list[Any] = []  # of the ranks of each engine; they do not keep the engine

    def start(fault: str | None, **options: Any) -> LLMEngine:
        ranks.fault = fault
        engine = LLMEngine(llama.path, **SMALL, **options)
        executor: Any = engine.executor
        ends.append(executor._workers.close)
        return engine

    yield start
    ranks.fault = None
    gc.collect()  # errors that the test has seen keep frames, and the frames keep engines
    kept = [end for end in ends if end.alive]
    for end in kept:
        end()
    wait_for(lambda: not any(map(is_running, ranks.pids[num_started:])))
    assert not kept, "an engine is kept: by a bug, or by the traceback of this test, if the test has failed"


def finish(engine: LLMEngine) -> dict[str, list[int]]:
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output.outputs[0].token_ids) for output in engine.step())
    return outputs


def test_a_step_that_fails_on_a_rank(start: Callable[..., LLMEngine], llama: Checkpoint, ranks: StartedRanks) -> None:
    """The error is that of the rank. Its requests end, and all others go on: with the right tokens, as if anew."""
    engine = start("tokens")
    expect_step_fails(engine, llama.prompts[:3], f"rank 1 (process {ranks.pids[-1]})")
    add(engine, *llama.prompts[:3])
    assert finish(engine) == {str(i): llama.expected[i][:6] for i in range(3)}
    expect_nothing_left(engine)


def test_a_step_that_failed_may_be_tried_again(start: Callable[..., LLMEngine], llama: Checkpoint) -> None:
    """The caches may hold anything then, so all requests are computed anew."""
    engine = start("tokens", preemption_mode="swap")
    add(engine, *llama.prompts[:3])
    engine.step()
    engine.add_request("bad", None, GREEDY, [1, RAISES])
    error_of(engine.step)
    outputs = finish(engine)
    assert [outputs[str(i)] for i in range(3)] == [expected[:6] for expected in llama.expected[:3]]
    assert len(outputs["bad"]) == 6
    expect_nothing_left(engine)


def test_an_error_of_rank_0(
    start: Callable[..., LLMEngine], llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the step's, and the other rank does not wait."""
    engine = start(None)
    add(engine, *llama.prompts[:2])
    fail_on_rank_0(engine, monkeypatch)
    assert finish(engine) == {str(i): llama.expected[i][:6] for i in range(2)}


def test_a_rank_that_is_killed_amid_a_step(start: Callable[..., LLMEngine], ranks: StartedRanks) -> None:
    """The engine is broken for good, and says what died; what needs no rank still works."""
    engine = start("tokens")
    death = f"ExecutorDeadError: rank 1 (process {ranks.pids[-1]}) was killed by SIGKILL"
    expect_death_amid_a_step(engine, death)


def test_an_async_engine_tells_of_a_rank_that_is_killed(start: Callable[..., LLMEngine]) -> None:
    """At its first step without the rank, not at the third one that fails."""
    engine = start("tokens")

    async def main() -> str | None:
        async with AsyncLLMEngine(engine) as serving:
            with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) was killed by SIGKILL$"):
                await read(serving, {"prompt_token_ids": [1, IS_KILLED]}, GREEDY)
        return serving.error

    assert (play(main()) or "").startswith("ExecutorDeadError: rank 1")


@pytest.mark.parametrize("fault", ["start", "load", "cache"])
def test_a_rank_that_is_killed_before_the_first_step(start: Callable[..., LLMEngine], fault: str) -> None:
    with pytest.raises(ExecutorDeadError, match=r"^rank 1 \(process \d+\) was killed by SIGKILL$"):
        start(fault)


def test_a_rank_whose_standard_output_is_closed(ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with its channel, as all others do, not in an error."""
    monkeypatch.setattr(ranks, "fault", "output")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = ranks.start("pagedattn_serve.distributed.worker", theirs)
    assert process.wait(WAIT_SECONDS) == 0


def test_a_rank_without_memory_for_its_slice(start: Callable[..., LLMEngine]) -> None:
    with pytest.raises(MemoryError, match=r"^no memory for a slice$"):
        start("memory")


def test_a_rank_that_has_less_room(start: Callable[..., LLMEngine], llama: Checkpoint) -> None:
    """All ranks have as many blocks as that one."""
    engine = start("room")
    add(engine, *llama.prompts[:3])
    assert finish(engine) == {str(i): llama.expected[i][:6] for i in range(3)}
    assert (engine.stats().num_blocks, engine.stats().num_host_blocks) == (11, 5)


def test_a_rank_that_stops(
    start: Callable[..., LLMEngine], ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a breakpoint, or where memory is swapped out: after a stated time the error says which rank it is."""
    monkeypatch.setattr(communicator, "PATIENCE_SECONDS", 2)  # of the group, within which the ranks also meet
    engine = start("tokens")
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 0.2)  # now: ranks that start on a busy machine take longer
    add(engine, [1, STOPS])
    rank = f"rank 1 (process {ranks.pids[-1]})"
    assert error_of(engine.step) == (
        f"ExecutorDeadError: {rank} has not answered for 0.2 s, after RuntimeError: all_reduce_shared: the group is "
        f"broken: {rank} has not come within 2 seconds: it is stopped"
    )


@pytest.mark.timeout(method="thread")  # the signal of the other method is the one that the test sends
def test_an_interrupt_while_a_rank_is_stopped(
    start: Callable[..., LLMEngine], ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to wait until the engine has lost its patience."""
    engine = start("tokens")
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 0.2)
    add(engine, [1, STOPS])

    interrupted = threading.Event()

    def interrupt(*_: Any) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def press_keys() -> None:
        """Once the rank is stopped. As users do, more than once: a signal that comes before a thread sleeps wakes
        nobody."""
        wait_for(lambda: is_stopped(ranks.pids[-1]))
        while not interrupted.wait(0.5):
            os.kill(os.getpid(), signal.SIGALRM)

    previous = signal.signal(signal.SIGALRM, interrupt)
    thread = threading.Thread(target=press_keys)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, previous)
    add(engine, [1, 2])
    assert error_of(engine.step) == (f"ExecutorDeadError: rank 1 (process {ranks.pids[-1]}) has not answered for 0.2 s")


def test_checks_of_inputs(
    start: Callable[..., LLMEngine], ranks: StartedRanks, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "1")
    engine = start("tokens")
    add(engine, *llama.prompts[:3])
    assert finish(engine) == {str(i): llama.expected[i][:6] for i in range(3)}
    add(engine, [1, HAS_OTHER_INPUTS])
    assert error_of(engine.step) == (
        f"RuntimeError: PAGEDATTN_CHECK: the inputs of rank 1 (process {ranks.pids[-1]}) are not those of rank 0"
    )


def test_two_engines_side_by_side(start: Callable[..., LLMEngine], llama: Checkpoint) -> None:
    engines = [start(None), start(None)]
    for engine in engines:
        add(engine, *llama.prompts[:2])
    for _ in range(6):
        outputs = [engine.step() for engine in engines]
    for each in outputs:
        assert token_ids(each) == [expected[:6] for expected in llama.expected[:2]]


# ---- interrupts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def llm(llama: Checkpoint, ranks: StartedRanks) -> LLM:
    return LLM(llama.path, block_size=8, max_num_batched_tokens=19, **SMALL)


def expect_right_tokens(llm: LLM, llama: Checkpoint) -> None:
    outputs = llm.generate(prompt_token_ids=llama.prompts[:3], sampling_params=GREEDY, use_tqdm=False)
    assert token_ids(outputs) == [expected[:6] for expected in llama.expected[:3]]


@pytest.mark.parametrize("joins", [False, True])
def test_interrupts(llm: LLM, llama: Checkpoint, joins: bool) -> None:
    """At places of what is new with several ranks, of steps and of a new group. The next requests have their tokens,
    and no memory is left."""
    assert interrupt_at_places(llm.llm_engine, lambda: expect_right_tokens(llm, llama), FILES, joins) == 1


@pytest.mark.timeout(method="thread")  # the signal of the other method is the one that the test sends
def test_real_signals(llm: LLM, llama: Checkpoint) -> None:
    """Between lines and within calls, at times spread over the whole of a run. A run may take less time than the one
    that was measured: then there are more of them."""
    expect_right_tokens(llm, llama)
    started = time.perf_counter()
    expect_right_tokens(llm, llama)
    seconds = time.perf_counter() - started
    hits = 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for i in count():
            if i >= 30 and hits > 5:
                break
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + i % 30 * seconds / 30)
                expect_right_tokens(llm, llama)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            expect_right_tokens(llm, llama)
            expect_nothing_left(llm.llm_engine)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_server_whose_rank_is_killed() -> None:
    """While nothing is to do: the server ends with status 1, and says what died. If the rank is stopped, /health says
    so, until the rank goes on."""
    with running("--tensor-parallel-size", "2", python=sys.executable) as server:

        def health() -> httpx.Response:
            return httpx.get(f"{server.url}/health", timeout=WAIT_SECONDS)

        [rank] = children_of(server.core_pid)
        os.kill(rank, signal.SIGSTOP)
        wait_for(lambda: health().status_code == 503)
        error = health().json()["error"]
        assert (error["message"], error["code"]) == (f"rank 1 (process {rank}) is stopped", "engine_hangs")
        os.kill(rank, signal.SIGCONT)
        wait_for(lambda: health().status_code == 200)
        os.kill(rank, signal.SIGKILL)
        assert server.process.wait(STOP_SECONDS) == 1
        assert f"rank 1 (process {rank}) was killed by SIGKILL" in server.stderr and "Traceback" not in server.stderr
