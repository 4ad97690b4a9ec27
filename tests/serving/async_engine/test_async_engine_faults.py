"""What a step that raises costs: `LLMEngine.fail_batch`, and `AsyncLLMEngine` around it."""

import asyncio
from typing import Any

import pytest
from async_runs import Runner, expect_nothing_left, greedy, handed_over, play, read, until
from engine_runs import completions, finish_all, run

from pagedattn_serve import AsyncLLMEngine, EngineDeadError, LLMEngine, RequestOutput, SamplingParams

pytestmark = pytest.mark.usefixtures("slow_steps")

OUT_OF_MEMORY = "MemoryError: no memory for the step"


class Panic(BaseException):
    """As the one that pyo3 raises for a panic of Rust, in a tokenizer."""


@pytest.fixture
def small(text_model: str) -> LLMEngine:
    """With room for two requests at once."""
    return LLMEngine(text_model, num_blocks=40, max_num_seqs=2)


# ---- the engine alone -----------------------------------------------------------------------------------------------


def test_fail_batch_ends_the_requests_of_the_batch(small: LLMEngine) -> None:
    expected = run(small, ["the cat", "on", "the mat"], greedy(8))
    for name, prompt in (("a", "the cat"), ("b", "on"), ("c", "the mat")):
        small.add_request(name, prompt, greedy(8))
    for _ in range(3):
        small.step()
    Runner(small, [MemoryError()])
    with pytest.raises(MemoryError):
        small.step()
    failed = small.fail_batch("out of memory")
    assert [(output.request_id, output.finished, output.error) for output in failed] == [
        ("a", True, "out of memory"),
        ("b", True, "out of memory"),
    ]
    for output, reference in zip(failed, expected, strict=False):
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].token_ids == reference.outputs[0].token_ids[:3]
        assert output.metrics.finished_time is not None
    small.scheduler.block_manager.check_integrity()
    outputs = finish_all(small)
    assert completions([outputs["c"][-1]]) == completions(expected[2:])
    expect_nothing_left(small)


def test_those_that_go_on_are_computed_anew(text_model: str) -> None:
    """With swaps and shared blocks of which the failing step had done a part."""
    engine = LLMEngine(text_model, num_blocks=10, block_size=8, max_num_seqs=6, preemption_mode="swap")
    params = [
        SamplingParams(n=2, best_of=3, seed=1, max_tokens=12, ignore_eos=True),
        SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=12, ignore_eos=True),
        greedy(12),
        SamplingParams(n=2, seed=2, max_tokens=12, ignore_eos=True),
    ]
    prompts = [[*range(5, 5 + n)] for n in (14, 9, 17, 11)]
    expected = run(engine, prompts, params)
    assert engine.stats().num_swaps
    runner = Runner(engine)
    ends: set[str | None] = set()
    for failing in range(2, 30, 3):
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), sampling_params=param, prompt_token_ids=prompt)
        runner.faults = [None] * failing + [RuntimeError("broken")]
        finished: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            try:
                outputs = engine.step()
            except RuntimeError:
                outputs = engine.fail_batch("broken")
                assert {output.request_id for output in outputs} == set(runner.batches[-1])
            finished.update((output.request_id, output) for output in outputs if output.finished)
            engine.scheduler.block_manager.check_integrity()
        assert sorted(finished) == ["0", "1", "2", "3"]
        for name, output in finished.items():
            ends.add(output.error)
            if output.error is None:
                assert completions([output]) == completions([expected[int(name)]])
        expect_nothing_left(engine)
    assert ends == {None, "broken"}


@pytest.mark.parametrize("where", ["schedule", "mark_computed", "finish"])
def test_a_fault_in_another_part_of_the_step(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    expected = run(engine, ["the cat", "on"], greedy(3))

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    engine.add_request("a", "the cat", greedy(3))
    engine.add_request("b", "on", greedy(3))
    engine.step()
    engine.step()
    monkeypatch.setattr(engine.scheduler, where, broken)
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
    monkeypatch.undo()
    failed = engine.fail_batch("as it was broken")
    outputs = finish_all(engine)
    if where == "schedule":  # nobody's fault
        assert failed == [] and completions([each[-1] for each in outputs.values()]) == completions(expected)
    else:
        assert [(output.request_id, output.error) for output in failed] == [
            ("a", "as it was broken"),
            ("b", "as it was broken"),
        ]
        assert [len(output.outputs[0].token_ids) for output in failed] == [3 if where == "finish" else 2, 2]
    expect_nothing_left(engine)


def test_fail_batch_without_a_failing_step(engine: LLMEngine) -> None:
    [expected] = run(engine, ["the cat"], greedy(5))
    assert engine.fail_batch("nothing") == []
    engine.add_request("a", "the cat", greedy(5))
    engine.step()
    assert engine.fail_batch("nothing") == []
    assert completions([finish_all(engine)["a"][-1]]) == completions([expected])


# ---- with readers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [MemoryError("no memory for the step"), RuntimeError("x"), Panic("rust")])
def test_a_step_that_raises_costs_the_requests_of_its_batch(small: LLMEngine, fault: BaseException) -> None:
    expected = run(small, ["the mat"], greedy(8))
    runner = Runner(small)

    async def main() -> None:
        async with AsyncLLMEngine(small, on_death=pytest.fail) as serving:
            failing = [asyncio.create_task(read(serving, "the cat", greedy(50))) for _ in range(2)]
            await until(lambda: serving.stats().num_running == 2)
            waiting = asyncio.create_task(read(serving, "the mat", greedy(8)))
            await until(lambda: serving.stats().num_waiting == 1)
            runner.faults = [None, fault]
            for output in await asyncio.gather(*failing):
                assert (output.outputs[0].finish_reason, output.error) == (
                    "error",
                    f"{type(fault).__name__}: {fault}",
                )
                assert 0 < len(output.outputs[0].token_ids) < 50
            assert completions([await waiting]) == completions(expected)
            assert serving.is_running and serving.error is None

    play(main())
    expect_nothing_left(small)


def test_three_failing_steps_in_a_row_end_the_engine(small: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(small, [None, None, *(MemoryError("no memory for the step") for _ in range(3))])
    deaths: list[tuple[bool, bool, str | None]] = []
    ends: list[str] = []

    async def reader(serving: AsyncLLMEngine) -> None:
        try:
            output = await read(serving, "the cat", greedy(50))
            ends.append(f"{output.outputs[0].finish_reason} {output.error}")
        except EngineDeadError as error:
            ends.append(f"{error}")

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def on_death() -> None:
            deaths.append((asyncio.get_running_loop() is loop, serving.is_running, serving.error))

        async with AsyncLLMEngine(small, on_death=on_death) as serving:
            runner.hold()
            readers = [asyncio.create_task(reader(serving)) for _ in range(8)]
            await until(lambda: serving.num_unfinished == 8 and runner.is_held)
            await handed_over(serving, 8)
            runner.release()
            await asyncio.gather(*readers)
            with pytest.raises(EngineDeadError, match=OUT_OF_MEMORY):
                await anext(serving.generate("the"))
            with pytest.raises(EngineDeadError, match=OUT_OF_MEMORY):
                await serving.call(lambda _: None)
            assert serving.num_unfinished == 0 and serving._in_hand == set()
            with pytest.raises(RuntimeError, match="start"):
                await serving.start()

    play(main())
    # Two requests failed with the first step, two with the second; the engine took the others along.
    assert ends.count(f"error {OUT_OF_MEMORY}") == 4 and ends.count(f"the engine broke: {OUT_OF_MEMORY}") == 4
    assert deaths == [(True, False, OUT_OF_MEMORY)]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "CRITICAL"]
    expect_nothing_left(small)


def test_a_good_step_between_failing_ones(small: LLMEngine) -> None:
    runner = Runner(small, [MemoryError(), MemoryError(), None, MemoryError(), MemoryError()])

    async def main() -> None:
        async with AsyncLLMEngine(small) as serving:
            runner.hold()
            readers = [asyncio.create_task(read(serving, [5, 6, i], greedy(3))) for i in range(10)]
            await until(lambda: serving.num_unfinished == 10 and runner.is_held)
            await handed_over(serving, 10)
            runner.release()
            outputs = await asyncio.gather(*readers)
            assert [output.outputs[0].finish_reason for output in outputs].count("length") >= 2
            assert serving.is_running

    play(main())
    expect_nothing_left(small)


@pytest.mark.parametrize("fault", [KeyboardInterrupt("^C"), SystemExit(3)])
@pytest.mark.parametrize("place", ["step", "call"])
def test_what_ends_a_program_ends_the_engine(engine: LLMEngine, fault: BaseException, place: str) -> None:
    runner = Runner(engine)
    deaths: list[int] = []

    def broken(_: LLMEngine) -> None:
        raise fault

    async def main() -> None:
        async with AsyncLLMEngine(engine, on_death=lambda: deaths.append(1)) as serving:
            reader = asyncio.create_task(read(serving, "the cat", greedy(90)))
            await until(lambda: serving.stats().num_running == 1)
            if place == "step":
                runner.faults = [fault]
            else:
                with pytest.raises(EngineDeadError, match=type(fault).__name__):
                    await serving.call(broken)
            with pytest.raises(EngineDeadError, match=type(fault).__name__):
                await reader
            assert not serving.is_running and serving.error == f"{type(fault).__name__}: {fault}"

    play(main())
    assert deaths == [1]
    expect_nothing_left(engine)


def test_a_broken_engine_that_cannot_be_put_in_order(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    Runner(engine, [None, RuntimeError("broken")])

    def also_broken(*_: Any) -> None:
        raise ValueError("also broken")

    monkeypatch.setattr(engine.scheduler, "restart", also_broken)

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            readers = [read(serving, "the cat", greedy(90)) for _ in range(3)]
            for end in await asyncio.gather(*readers, return_exceptions=True):
                assert isinstance(end, EngineDeadError) and "also broken" in str(end)

    play(main())


@pytest.mark.parametrize(
    ("place", "fault"),
    [("make_request", RuntimeError("x")), ("make_request", Panic("rust")), ("queue_request", RuntimeError("x"))],
)
def test_a_fault_before_the_first_step_is_of_that_request(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, place: str, fault: BaseException
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise fault

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            with monkeypatch.context() as patch:
                patch.setattr(engine if place == "queue_request" else engine.inputs, place, broken)
                with pytest.raises(RuntimeError, match=str(fault)):
                    await anext(serving.generate("the"))
            assert (await read(serving, "the", greedy(2))).finished
            assert serving._in_hand == set()

    play(main())


def test_the_last_output_is_read_before_the_death_is_heard_of(engine: LLMEngine) -> None:
    runner = Runner(engine, one_by_one=True)

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            slow = serving.generate("the cat", greedy(6))
            runner.release()
            await anext(slow)
            runner.free()
            await until(lambda: serving.num_unfinished == 0)
            runner.faults = [None, KeyboardInterrupt()]
            late = serving.generate("the cat", greedy(90))
            await anext(late)
            await until(lambda: not serving.is_running)
            assert len((await anext(slow)).outputs[0].token_ids) == 6
            with pytest.raises(StopAsyncIteration):
                await anext(slow)
            with pytest.raises(EngineDeadError):
                while True:
                    await anext(late)

    play(main())
