"""The engine with ranks on two hosts, which are this one: what it computes, and what becomes of it when ranks fail.

The ranks of the second host have real connections, and memory that only they share. tests/ray_cluster has them on
machines of Ray.
"""

import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from checkpoints import Checkpoint
from engine_runs import run, token_ids
from failing_ranks import (
    GREEDY,
    add,
    error_of,
    expect_death_amid_a_step,
    expect_step_fails,
    fail_on_rank_0,
    interrupt_at_places,
)
from faulty_rank import HAS_OTHER_INPUTS, OTHER_CAPABILITIES, STOPS
from remote_rank import LocalPlacement
from server_process import is_running, wait_for
from test_interrupts import ROOT, expect_nothing_left
from warm_ranks import StartedRanks, memfds

from pagedattn_serve import LLMEngine, SamplingParams
from pagedattn_serve.distributed import communicator, launch, workers
from pagedattn_serve.distributed.activity import MAX_LOOKS
from pagedattn_serve.errors import ExecutorDeadError
from pagedattn_serve.execution.fingerprint import fingerprint

OPTIONS: dict[str, Any] = dict(num_blocks=40, enable_prefix_caching=False, distributed_executor_backend="ray")
FILES = {
    str(ROOT / f"distributed/{name}.py")
    for name in ("executor", "workers", "hosts", "links", "channel", "network", "remote")
}


@pytest.fixture
def start(
    llama: Checkpoint, ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLMEngine]]:
    """Makes an engine with so many ranks on two hosts, and these faults, by rank. In the end no process is left."""
    num_started, before = len(ranks.processes), memfds()

    def start(num_ranks: int, faults: dict[int, str] | None = None, **options: Any) -> LLMEngine:
        monkeypatch.setattr(launch, "RayPlacement", partial(LocalPlacement, ranks, 2, faults or {}))
        return LLMEngine(llama.path, **{**OPTIONS, "tensor_parallel_size": num_ranks, **options})

    yield start
    gc.collect()  # errors that the test has seen keep frames, and the frames keep engines
    wait_for(lambda: not any(map(is_running, ranks.pids[num_started:])))
    assert memfds() == before


def expect_right_tokens(engine: LLMEngine, llama: Checkpoint) -> None:
    expected = [tokens[:6] for tokens in llama.expected[:3]]
    assert token_ids(run(engine, llama.prompts[:3], GREEDY)) == expected
    expect_nothing_left(engine)


def expect_facts(engine: LLMEngine, *facts: object) -> None:
    """By what the fingerprint differs from that of as many ranks which are alike and on one host."""
    *of_one_host, found = engine._fingerprint.args
    assert found == facts
    assert (engine.system_fingerprint == fingerprint(*of_one_host)) == (not facts)


def test_tokens_are_those_of_hugging_face(start: Callable[..., LLMEngine], llama: Checkpoint) -> None:
    """Two ranks on each of two hosts, with chunks, swaps and copies of blocks."""
    engine = start(4, block_size=8, num_blocks=20, max_model_len=64, max_num_batched_tokens=19, preemption_mode="swap")
    params = SamplingParams(temperature=0, n=2, max_tokens=24, ignore_eos=True)
    outputs = run(engine, llama.prompts, params)
    for output, expected in zip(outputs, llama.expected, strict=True):
        assert [completion.token_ids for completion in output.outputs] == [expected] * 2
    assert engine.stats().num_swaps > 0
    expect_facts(engine, 2)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_step_that_fails_on_a_rank(
    start: Callable[..., LLMEngine], llama: Checkpoint, ranks: StartedRanks, rank: int
) -> None:
    """The error is that of the rank, wherever it is, and comes from no rank that waits for it. The engine goes on."""
    if rank == 1:
        ranks.fault = "tokens"
    engine = start(4, {rank: "tokens"})
    place = " on 127.0.0.1" if rank > 1 else ""
    expect_step_fails(engine, llama.prompts[:2], f"rank {rank} (process {ranks.pids[rank - 4]}{place})")
    expect_right_tokens(engine, llama)


def test_an_error_of_rank_0(
    start: Callable[..., LLMEngine], llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the step's, and no rank waits."""
    engine = start(2)
    add(engine, *llama.prompts[:2])
    fail_on_rank_0(engine, monkeypatch)
    engine.fail_batch("it failed")
    expect_right_tokens(engine, llama)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_rank_that_is_killed_amid_a_step(start: Callable[..., LLMEngine], ranks: StartedRanks, rank: int) -> None:
    """As when its machine goes down. The engine is broken for good, and says what died."""
    engine = start(4, {rank: "tokens"})
    death = f"ExecutorDeadError: rank {rank} (process {ranks.pids[rank - 4]} on 127.0.0.1) has ended"
    expect_death_amid_a_step(engine, death)


def test_a_rank_that_is_killed_between_steps(start: Callable[..., LLMEngine], ranks: StartedRanks) -> None:
    """An engine that has nothing to do asks for the health of its ranks."""
    engine = start(2)
    engine.check_health()
    os.kill(ranks.pids[-1], signal.SIGKILL)
    ranks.processes[-1].wait()
    death = f"ExecutorDeadError: rank 1 (process {ranks.pids[-1]} on 127.0.0.1) has ended"
    assert error_of(engine.check_health) == death


@pytest.mark.parametrize("fault", ["start", "load", "cache"])
def test_a_rank_that_is_killed_before_the_first_step(start: Callable[..., LLMEngine], fault: str) -> None:
    with pytest.raises(ExecutorDeadError, match=r"process \d+.* has ended$"):
        start(2, {1: fault})


def test_a_rank_that_is_killed_as_it_joins(start: Callable[..., LLMEngine]) -> None:
    """Rank 1 waits for it, and rank 0 for rank 1."""
    started = time.monotonic()
    with pytest.raises(ExecutorDeadError, match=r"^rank 3 \(process \d+ on 127.0.0.1\) has ended$"):
        start(4, {3: "join"})
    assert time.monotonic() - started < workers.ANSWER_SECONDS


def test_a_connection_breaks(start: Callable[..., LLMEngine], llama: Checkpoint) -> None:
    """The step fails and names the rank. The next step has connections anew."""
    engine = start(2)
    expect_right_tokens(engine, llama)
    expect_facts(engine)
    ranks: Any = engine.executor
    ranks._workers.communicator._links[1].shutdown(socket.SHUT_RDWR)
    add(engine, *llama.prompts[:3])
    assert error_of(engine.step) == ("RuntimeError: the group is broken: rank 1 has died, or has left the group")
    assert len(engine.fail_batch("it broke")) == 3
    expect_right_tokens(engine, llama)


def test_a_rank_that_has_less_room(start: Callable[..., LLMEngine]) -> None:
    """And other kernels."""
    engine = start(2, {1: "room"})
    assert engine.stats().num_blocks == 11
    expect_facts(engine, [OTHER_CAPABILITIES])


def test_a_rank_that_stops(
    start: Callable[..., LLMEngine], ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its machine vanishes without a word: after a stated time the error says which rank it is."""
    engine = start(2, {1: "tokens"})
    monkeypatch.setattr(communicator, "PATIENCE_SECONDS", 2)  # now: ranks that start on a busy machine take longer
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 0.2)
    add(engine, [1, STOPS])
    assert error_of(engine.step) == (
        f"ExecutorDeadError: rank 1 (process {ranks.pids[-1]} on 127.0.0.1) has not answered for 0.2 s, after "
        "RuntimeError: the group is broken: rank 1 has not come within 2 seconds"
    )
    os.kill(ranks.pids[-1], signal.SIGCONT)  # it sees that rank 0 has gone


def test_a_rank_that_is_silent(start: Callable[..., LLMEngine], ranks: StartedRanks) -> None:
    """It has a pulse as long as it is well; without one rank 0 says so, until the pulse comes back."""
    engine = start(2)
    executor, pid = engine.executor, ranks.pids[-1]
    silent = f"rank 1 (process {pid} on 127.0.0.1) has not answered for 3 seconds"
    wait_for(lambda: executor.find_hang() is None and not executor.at_work())  # the pulse says that nothing computes
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: [executor.find_hang() for _ in range(2 * MAX_LOOKS)] == [silent] * 2 * MAX_LOOKS)
    assert not executor.at_work()
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: executor.find_hang() is None)


def test_checks_of_inputs(
    start: Callable[..., LLMEngine], ranks: StartedRanks, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "1")
    engine = start(2, {1: "tokens"})
    expect_right_tokens(engine, llama)
    add(engine, [1, HAS_OTHER_INPUTS])
    assert error_of(engine.step) == (
        f"RuntimeError: PAGEDATTN_CHECK: the inputs of rank 1 (process {ranks.pids[-1]} on 127.0.0.1) are not those of "
        "rank 0"
    )


@pytest.mark.parametrize("joins", [False, True])
def test_interrupts(start: Callable[..., LLMEngine], llama: Checkpoint, joins: bool) -> None:
    """At places of what is new with ranks on other hosts, of steps and of a new group. How often a rank looks for what
    comes depends on time, so some places may not be reached again."""
    engine = start(2)
    assert interrupt_at_places(engine, lambda: expect_right_tokens(engine, llama), FILES, joins) > 0.5
