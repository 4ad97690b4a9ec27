"""Ranks that compute together through a process group, as ranks on CUDA do, which no test here can run. Gloo on CPU
tensors stands in for NCCL; the communicator, how ranks meet, and how a group breaks are the real ones.
"""

import gc
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from engine_runs import run, token_ids
from failing_ranks import GREEDY, add, error_of, expect_death_amid_a_step, expect_step_fails, fail_on_rank_0
from faulty_rank import RAISES, STOPS
from gloo_rank import use_gloo
from remote_rank import LocalPlacement
from server_process import AT_ONCE_SECONDS, is_running, wait_for
from test_interrupts import ROOT, Places, chosen, expect_nothing_left, shortest
from warm_ranks import StartedRanks

from pagedattn_serve import LLMEngine, SamplingParams
from pagedattn_serve import engine as engine_module
from pagedattn_serve.distributed import communicator, launch, process_group, workers
from pagedattn_serve.distributed.process_group import ProcessGroupCommunicator, connect_backend
from pagedattn_serve.errors import ExecutorDeadError

SMALL: dict[str, Any] = dict(num_blocks=40, enable_prefix_caching=False, tensor_parallel_size=2)
FILES = {str(ROOT / f"distributed/{name}.py") for name in ("executor", "workers", "process_group")}


@pytest.fixture
def start(
    llama: Checkpoint, ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLMEngine]]:
    """Makes an engine whose rank 1 has this fault. In the end no process is left."""
    use_gloo(monkeypatch)
    ranks.uses_gloo = True
    num_started = len(ranks.processes)

    def start_process(module: str, theirs: Any) -> object:
        try:
            return ranks.start(module, theirs)
        finally:
            ranks.fault = None

    monkeypatch.setattr(launch, "start_process", start_process)

    def start(fault: str | None, **options: Any) -> LLMEngine:
        ranks.fault = fault
        return LLMEngine(llama.path, **{**SMALL, **options})

    yield start
    ranks.fault, ranks.uses_gloo = None, False
    gc.collect()  # errors that the test has seen keep frames, and the frames keep engines
    wait_for(lambda: not any(map(is_running, ranks.pids[num_started:])))


def expect_right_tokens(engine: LLMEngine, llama: Checkpoint) -> None:
    expected = [tokens[:6] for tokens in llama.expected[:3]]
    assert token_ids(run(engine, llama.prompts[:3], GREEDY)) == expected
    expect_nothing_left(engine)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tokens_are_those_of_hugging_face(start: Callable[..., LLMEngine], llama: Checkpoint, num_ranks: int) -> None:
    """With chunks, swaps and copies of blocks."""
    options = dict(block_size=8, num_blocks=20, max_model_len=64, max_num_batched_tokens=19, preemption_mode="swap")
    engine = start(None, tensor_parallel_size=num_ranks, **options)
    assert isinstance(engine.executor._workers.communicator, ProcessGroupCommunicator)
    params = SamplingParams(temperature=0, n=2, max_tokens=24, ignore_eos=True)
    outputs = run(engine, llama.prompts, params)
    for output, expected in zip(outputs, llama.expected, strict=True):
        assert [completion.token_ids for completion in output.outputs] == [expected] * 2
    assert engine.stats().num_swaps > 0


def test_a_step_that_fails_on_a_rank(start: Callable[..., LLMEngine], llama: Checkpoint, ranks: StartedRanks) -> None:
    """The error is that of the rank, also for ranks that wait for it; and all ranks go on in a new group."""
    engine = start("tokens", tensor_parallel_size=4)
    expect_step_fails(engine, llama.prompts[:3], f"rank 1 (process {ranks.pids[-3]})")
    expect_right_tokens(engine, llama)


def test_ranks_on_two_hosts(
    start: Callable[..., LLMEngine], llama: Checkpoint, ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are in one group, and find its store on the host of rank 0."""
    monkeypatch.setattr(launch, "RayPlacement", partial(LocalPlacement, ranks, 2, {3: "tokens"}))
    engine = start(None, tensor_parallel_size=4, distributed_executor_backend="ray")
    expect_right_tokens(engine, llama)
    add(engine, [1, RAISES])
    assert error_of(engine.step) == (
        f"RuntimeError: rank 3 (process {ranks.pids[-1]} on 127.0.0.1): MemoryError: no memory amid a step"
    )
    engine.fail_batch("it failed")
    expect_right_tokens(engine, llama)


def test_an_error_of_rank_0(
    start: Callable[..., LLMEngine], llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the step's, and the other rank does not wait."""
    engine = start(None)
    add(engine, *llama.prompts[:2])
    fail_on_rank_0(engine, monkeypatch)
    engine.fail_batch("it failed")
    expect_right_tokens(engine, llama)


def test_a_rank_that_is_killed_amid_a_step(start: Callable[..., LLMEngine], ranks: StartedRanks) -> None:
    engine = start("tokens")
    death = f"ExecutorDeadError: rank 1 (process {ranks.pids[-1]}) was killed by SIGKILL"
    expect_death_amid_a_step(engine, death)


def test_a_rank_that_is_killed_as_it_connects(start: Callable[..., LLMEngine]) -> None:
    """Rank 0 would wait for it in the library, which nothing interrupts."""
    with pytest.raises(ExecutorDeadError, match=r"^rank 1 \(process \d+\) was killed by SIGKILL$"):
        start("join")


def test_a_rank_that_cannot_connect(start: Callable[..., LLMEngine]) -> None:
    """As where NCCL finds no way to the other ranks. It would be an error of num_blocks, as errors of the start are."""
    text = r"the ranks could not come together: rank 1 \(process \d+\): the ranks could not connect: RuntimeError: no "
    with pytest.raises(ExecutorDeadError, match=f"^{text}"):
        start("connect")


def test_a_rank_that_stops(
    start: Callable[..., LLMEngine], ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("tokens")
    monkeypatch.setattr(communicator, "PATIENCE_SECONDS", 2)  # now: ranks that start on a busy machine take longer
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 0.2)
    add(engine, [1, STOPS])
    assert error_of(engine.step) == (
        f"ExecutorDeadError: rank 1 (process {ranks.pids[-1]}) has not answered for 0.2 s, after RuntimeError: "
        "the group is broken: a rank has not come within 2 seconds"
    )


def test_two_engines_side_by_side(start: Callable[..., LLMEngine], llama: Checkpoint) -> None:
    engines = [start(None), start(None)]
    for engine in engines:
        add(engine, *llama.prompts[:2])
    for _ in range(6):
        outputs = [engine.step() for engine in engines]
    for each in outputs:
        assert token_ids(each) == [expected[:6] for expected in llama.expected[:2]]


def test_interrupts(start: Callable[..., LLMEngine], llama: Checkpoint) -> None:
    """At places of steps and of a new group. The next requests have their tokens."""
    engine = start(None)
    executor: Any = engine.executor
    expect_right_tokens(engine, llama)

    def run_once() -> None:
        executor._are_in_step = False
        expect_right_tokens(engine, llama)

    seen = shortest(run_once, FILES)
    for at in chosen(seen[: len(seen) // 2])[::4]:  # later ones may not come if ranks wait less
        executor._are_in_step = False
        with Places(at, FILES), pytest.raises(KeyboardInterrupt):
            expect_right_tokens(engine, llama)
        expect_nothing_left(engine)
        expect_right_tokens(engine, llama)


def test_nothing_is_left_open(
    start: Callable[..., LLMEngine], llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sockets, of stores and of the threads that watch, which take their time to end."""
    others = set(threading.enumerate())
    watch = process_group._Group._watch

    def watch_and_linger(*arguments: Any) -> None:
        watch(*arguments)
        time.sleep(0.2)

    monkeypatch.setattr(process_group._Group, "_watch", watch_and_linger)

    def num_open() -> int:
        gc.collect()
        assert others.issuperset(threading.enumerate())  # at once: a thread must not be left as the program ends
        return len(os.listdir("/proc/self/fd"))

    start(None)
    before = num_open()
    expect_right_tokens(start(None), llama)
    assert num_open() == before


def test_an_interrupt_as_a_group_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """When its thread runs already: the group is known, and the thread ends with it."""
    others = set(threading.enumerate())

    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

    monkeypatch.setattr(process_group, "Thread", Interrupted)
    rank = ProcessGroupCommunicator(0, 2, torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        rank.meet(torch.distributed.HashStore)
    rank.leave()
    assert others.issuperset(threading.enumerate())


def test_interrupts_of_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each line: in the end the backend is aborted, or its kernels would wait on the device."""
    aborted: set[int] = set()

    class Backend:
        def abort(self) -> None:
            aborted.add(at)

    monkeypatch.setattr(process_group, "connect_backend", lambda *_: Backend())
    rank = ProcessGroupCommunicator(0, 1, torch.device("cpu"))

    def abort(places: Places) -> None:
        rank.meet(torch.distributed.HashStore)
        rank.join(time.monotonic() + AT_ONCE_SECONDS, lambda: None)
        with places:
            rank.abort("for a reason")

    at = 0
    abort(places := Places(files=FILES))
    for at in range(1, places.count + 1):
        with pytest.raises(KeyboardInterrupt):
            abort(Places(at, FILES))
        rank.leave()
    assert aborted == set(range(places.count + 1)) and places.count > 5


class IdleBackend:
    """Is connected, and computes nothing."""

    def __init__(self) -> None:
        self.is_aborted = False

    def allreduce(self, *_: Any) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True


def test_an_engine_may_idle_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than a rank may take within a step."""
    monkeypatch.setattr(process_group, "connect_backend", lambda *_: IdleBackend())
    rank = ProcessGroupCommunicator(0, 1, torch.device("cpu"))
    rank.meet(torch.distributed.HashStore)
    rank.join(time.monotonic() + AT_ONCE_SECONDS, lambda: None)
    rank.watch({}, select.POLLIN)
    rank.all_reduce(torch.ones(1))
    rank.finish_step()
    monkeypatch.setattr(communicator, "PATIENCE_SECONDS", 0)
    time.sleep(5 * process_group.CHECK_SECONDS)  # the thread has looked several times
    assert rank.broken is None
    rank.all_reduce(torch.ones(1))
    wait_for(lambda: rank.broken == "a rank has not come within 0 seconds")
    rank.leave()


def test_a_group_that_breaks_as_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backend, which is there only now, is aborted as well."""
    backend = IdleBackend()

    def connect(*_: Any) -> IdleBackend:
        rank.abort("rank 1: no memory")
        return backend

    monkeypatch.setattr(process_group, "connect_backend", connect)
    rank = ProcessGroupCommunicator(0, 1, torch.device("cpu"))
    rank.meet(torch.distributed.HashStore)
    wait_for(lambda: backend.is_aborted)
    rank.leave()


def test_a_rank_that_is_in_no_group() -> None:
    """As memory is measured: shapes are right, and nobody is waited for."""
    alone = ProcessGroupCommunicator(1, 3, torch.device("cpu"))
    row = torch.arange(4.0)
    assert torch.equal(alone.all_reduce(row.clone()), row)
    assert torch.equal(alone.all_gather(row), torch.stack([row] * 3))
    alone.finish_step()


def test_how_nccl_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As no test can call it. By default its watchdog ends the process when another rank dies."""
    calls: list[Any] = []

    class ProcessGroupNCCL:
        class Options:
            _timeout = timedelta(minutes=10)

        def __init__(self, *arguments: Any) -> None:
            calls.append((*arguments[:-1], arguments[-1]._timeout, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]))

        def eager_connect_single_device(self, device: torch.device) -> None:
            calls.append(device)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    store, device = torch.distributed.HashStore(), torch.device("cuda:1")
    assert isinstance(connect_backend(store, 1, 2, device), ProcessGroupNCCL)
    assert calls == [(store, 1, 2, timedelta(days=1), "0"), device]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


@pytest.mark.parametrize(
    ("chosen_device", "options", "message"),
    [
        ("cuda", {}, "tensor_parallel_size: expected at most 1 on a machine with 1 CUDA devices"),
        ("cuda:0", {}, "device: expected cpu, or cuda without a number, for several ranks, got cuda:0"),
        ("cuda", {"distributed_executor_backend": "ray"}, "distributed_executor_backend: expected mp, or torchrun, on"),
    ],
)
def test_what_is_refused(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, chosen_device: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(engine_module, "choose_device", lambda _: chosen_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=f"^{message}"):
        LLMEngine(llama.path, tensor_parallel_size=2, **options)
