"""What tests of failing ranks ask of an engine, whichever host its ranks are on."""

import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
from faulty_rank import IS_KILLED, RAISES
from server_process import AT_ONCE_SECONDS
from test_interrupts import Places, chosen, expect_nothing_left, shortest
from warm_ranks import memfds

from pagedattn_serve import LLMEngine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def add(engine: LLMEngine, *prompts: list[int]) -> None:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), None, GREEDY, prompt)


def error_of(step: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, ChildProcessError)) as error:
        step()
    return f"{type(error.value).__name__}: {error.value}"


def fail_on_rank_0(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails there raises what failed."""

    def fail(*_: object) -> None:
        raise MemoryError("no memory on rank 0")

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match=r"^no memory on rank 0$"):
        patch.setattr(engine.model_runner.model, "forward", fail)
        engine.step()


def expect_step_fails(engine: LLMEngine, prompts: list[list[int]], rank: str) -> None:
    """The step in which a rank raises says so, soon, and ends all requests, also those of these prompts, which ran
    before. rank: as errors call the rank, with its process."""
    add(engine, *prompts)
    engine.step()
    engine.add_request("bad", None, GREEDY, [1, RAISES])
    started = time.monotonic()
    assert error_of(engine.step) == f"RuntimeError: {rank}: MemoryError: no memory amid a step"
    assert time.monotonic() - started < AT_ONCE_SECONDS
    assert len(engine.fail_batch("it failed")) == len(prompts) + 1


def expect_death_amid_a_step(engine: LLMEngine, death: str) -> None:
    """The step in which a rank is killed says so, soon, and so do all later steps; what needs no rank still works."""
    add(engine, [1, IS_KILLED])
    started = time.monotonic()
    assert error_of(engine.step) == death
    assert time.monotonic() - started < AT_ONCE_SECONDS
    assert len(engine.fail_batch("it died")) == 1
    engine.add_request("next", None, GREEDY, [1, 2])
    assert error_of(engine.step) == death
    assert engine.abort_request("next") is not None
    expect_nothing_left(engine)


def interrupt_at_places(
    engine: LLMEngine, expect_right_tokens: Callable[[], None], files: set[str], joins: bool
) -> float:
    """Interrupt steps at places in these files, or the joining of a new group. The next requests have their tokens, and
    no memory is left. Returns the share of the places that were reached."""
    executor: Any = engine.executor
    expect_right_tokens()

    def run_once() -> None:
        executor._are_in_step = not joins
        expect_right_tokens()

    seen = shortest(run_once, files)
    before = memfds()
    ends_of_joining = [i for i, (name, _) in enumerate(seen) if name == "Executor._join"]
    were_reached = []
    for at in chosen(seen[: ends_of_joining[-1] if joins else None]):
        were_reached.append(False)
        try:
            with Places(at, files):
                run_once()
        except KeyboardInterrupt:
            were_reached[-1] = True
        expect_nothing_left(engine)
        expect_right_tokens()
    assert len(memfds()) == len(before)
    return mean(were_reached)
