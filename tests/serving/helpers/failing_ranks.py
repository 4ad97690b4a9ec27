"""What tests of failing ranks ask of an engine, whichever host its ranks are on."""

import time
from collections.abc import Callable

import pytest
from faulty_rank import IS_KILLED
from server_process import AT_ONCE_SECONDS
from test_interrupts import expect_nothing_left

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
