"""`AsyncLLMEngine` when all goes well: what its readers get, who has to wait, and what stays behind."""

import asyncio
import dataclasses
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from async_runs import TIMEOUT, Runner, expect_nothing_left, fake_execute, greedy, handed_over, play, read, until
from engine_runs import completions, finish_all, run
from warm_python import run_python

from pagedattn_serve import (
    AsyncLLMEngine,
    EngineBusyError,
    EngineDeadError,
    LLMEngine,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from pagedattn_serve.async_engine.core import EngineLoop, News
from pagedattn_serve.requests.inputs import RequestArgs

pytestmark = pytest.mark.usefixtures("slow_steps")

PROMPTS = ["the cat", "on the mat", [5, 6, 7], "🙂"]
PARAMS = [
    greedy(9),
    SamplingParams(n=2, seed=3, max_tokens=6),
    SamplingParams(temperature=0, max_tokens=7, logprobs=2, prompt_logprobs=1),
    SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=5),
]

# Arguments of `generate` that are refused, the type of the error and a part of its message.
REFUSALS: list[tuple[Any, type[Exception], str]] = [
    (("",), ValueError, "prompt: expected 1 to"),
    (([5] * 500,), ValueError, "prompt: expected 1 to"),
    ((3,), TypeError, "prompt: expected a string"),
    (("a\udc80",), ValueError, "UTF-8"),
    (([10**6],), ValueError, "prompt_token_ids"),
    (("a", {"top_k": 3}), TypeError, "sampling_params"),
    (("a", None, 7), TypeError, "request_id"),
    (("a", None, "taken"), ValueError, "'taken' is taken"),
    (("a", None, None, 3), ValueError, "priority"),
    (("a", None, None, "high"), TypeError, "priority"),
]


@pytest.fixture
def small(text_model: str) -> LLMEngine:
    """With room for two requests at once."""
    return LLMEngine(text_model, num_blocks=40, max_num_seqs=2)


# ---- what readers get -----------------------------------------------------------------------------------------------


def test_the_outputs_are_those_of_the_engine(engine: LLMEngine) -> None:
    expected = run(engine, PROMPTS, PARAMS)

    async def main() -> list[Any]:
        async with AsyncLLMEngine(engine) as serving:
            return await asyncio.gather(*(read(serving, *each) for each in zip(PROMPTS, PARAMS, strict=True)))

    outputs = play(main())
    assert completions(outputs) == completions(expected)
    assert [output.prompt for output in outputs] == [output.prompt for output in expected]
    assert [output.prompt_token_ids for output in outputs] == [output.prompt_token_ids for output in expected]
    assert outputs[2].prompt_logprobs is not None and len(outputs[2].outputs[0].logprobs or ()) == 7
    assert len({output.request_id for output in outputs}) == 4 and all(len(o.request_id) == 32 for o in outputs)
    expect_nothing_left(engine)


def test_embeddings(engine: LLMEngine) -> None:
    engine.add_request("a", "the cat", PoolingParams(dimensions=4))
    [expected] = finish_all(engine)["a"]

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            [output] = [each async for each in serving.encode("the cat", PoolingParams(dimensions=4), "b")]
            assert (output.request_id, output.outputs.embedding) == ("b", expected.embedding)
            with pytest.raises(ValueError, match="dimensions: expected an int in"):
                await anext(serving.encode("the cat", PoolingParams(dimensions=4000)))
            with pytest.raises(TypeError, match="pooling_params: expected PoolingParams, got SamplingParams"):
                await anext(serving.encode("the cat", greedy(2)))  # type: ignore[arg-type]
            assert [each.outputs.hidden_size async for each in serving.encode("the cat")] == [48]

    play(main())
    expect_nothing_left(engine)


def test_default_sampling_and_a_request_id_of_the_callers(engine: LLMEngine) -> None:
    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            output = await read(serving, "the", request_id="mine")
            assert output.request_id == "mine"
            assert len(output.outputs[0].token_ids) == engine.get_default_sampling_params().max_tokens

    play(main())


def test_arrival_is_when_generate_is_first_asked(engine: LLMEngine) -> None:
    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            started = time.monotonic()
            metrics = (await read(serving, "the", greedy(1))).metrics
            assert metrics.first_token_time is not None and metrics.finished_time is not None
            assert started <= metrics.arrival_time < metrics.first_token_time <= metrics.finished_time

    play(main())


def test_a_reader_that_keeps_up_gets_every_token(engine: LLMEngine) -> None:
    runner = Runner(engine, one_by_one=True)

    async def main() -> list[int]:
        counts = []
        async with AsyncLLMEngine(engine) as serving:
            runner.release()
            async for output in serving.generate("the", greedy(6)):
                counts.append(len(output.outputs[0].token_ids))
                runner.release()  # for one step
                await until(lambda: runner.is_held or serving.num_unfinished == 0)
        return counts

    assert play(main()) == [1, 2, 3, 4, 5, 6]


def test_a_reader_that_stops_reading_misses_what_was_between_and_holds_up_nobody(engine: LLMEngine) -> None:
    runner = Runner(engine, one_by_one=True)

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            slow = serving.generate("the cat", greedy(30))
            runner.release()
            assert len((await anext(slow)).outputs[0].token_ids) == 1
            runner.free()
            fast = await asyncio.gather(*(read(serving, "on", greedy(40)) for _ in range(3)))
            assert {len(output.outputs[0].token_ids) for output in fast} == {40}
            await until(lambda: serving.num_unfinished == 0)
            await until(lambda: serving.stats().num_used_blocks == 0)  # counted again when the engine is idle
            rest = [output async for output in slow]
            assert [output.finished for output in rest] == [True]
            assert len(rest[0].outputs[0].token_ids) == 30

    play(main())


@pytest.mark.parametrize("params", [PARAMS[2], SamplingParams(n=2, seed=3, max_tokens=7)])
def test_deltas_that_nobody_has_read_are_added_up(engine: LLMEngine, params: SamplingParams) -> None:
    """What a reader gets who is slower than the engine says the same as the last of cumulative outputs."""
    [expected] = run(engine, ["the cat"], params)
    runner = Runner(engine, one_by_one=True)

    async def main() -> list[RequestOutput]:
        async with AsyncLLMEngine(engine) as serving:
            stream = serving.generate("the cat", dataclasses.replace(params, output_kind=RequestOutputKind.DELTA))
            runner.release()
            deltas = [await anext(stream)]
            for num_begun in (2, 3, 4):  # two steps end, and one is held
                await until(lambda num_begun=num_begun: runner.is_held and len(runner.batches) == num_begun)  # type: ignore[misc]
                if num_begun < 4:
                    runner.release()
            deltas.append(await anext(stream))
            runner.free()
            await until(lambda: serving.num_unfinished == 0)
            return [*deltas, *[delta async for delta in stream]]

    total, *others = deltas = play(main())
    assert [delta.finished for delta in deltas] == [False, False, True]
    assert deltas[-1].outputs[0].finish_reason == "length"
    assert all(len(delta.outputs[0].token_ids) < 7 for delta in deltas)
    for delta in others:
        total.add(delta)
    assert total == dataclasses.replace(expected, request_id=total.request_id)


def test_the_last_output_alone(engine: LLMEngine) -> None:
    async def main() -> list[RequestOutput]:
        async with AsyncLLMEngine(engine) as serving:
            params = dataclasses.replace(greedy(9), output_kind=RequestOutputKind.FINAL_ONLY)
            return [output async for output in serving.generate("the cat", params)]

    assert completions(play(main())) == completions(run(engine, ["the cat"], greedy(9)))


def test_the_event_loop_is_woken_once_a_step(engine: LLMEngine) -> None:
    runner = Runner(engine)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        wake, num_wakes = loop.call_soon_threadsafe, 0

        def counting(*args: Any, **options: Any) -> asyncio.Handle:
            nonlocal num_wakes
            num_wakes += 1
            return wake(*args, **options)

        async with AsyncLLMEngine(engine) as serving:
            runner.hold()
            readers = [asyncio.create_task(read(serving, [5, 6, i], greedy(12))) for i in range(8)]
            await until(lambda: serving.num_unfinished == 8 and runner.is_held)
            await handed_over(serving, 8)
            loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
            num_steps = len(runner.batches) - 1  # one has begun
            runner.release()
            await asyncio.gather(*readers)
            await serving.call(lambda _: None)
            del loop.call_soon_threadsafe
        # One for each step, one before the engine goes to sleep, one for the call.
        assert 0 <= num_wakes - (len(runner.batches) - num_steps) <= 3

    play(main())


# ---- refusals and back pressure -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "error", "message"), REFUSALS)
def test_a_wrong_request_is_refused_before_the_first_output(
    engine: LLMEngine, args: Any, error: type[Exception], message: str
) -> None:
    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            other = asyncio.create_task(read(serving, "the cat", greedy(20), request_id="taken"))
            await asyncio.sleep(0)
            with pytest.raises(error, match=message):
                await anext(serving.generate(*args))
            assert serving.num_unfinished == (not other.done())
            assert len((await other).outputs[0].token_ids) == 20
            assert serving.is_running and serving._in_hand == set()

    play(main())
    expect_nothing_left(engine)


def test_as_many_wait_as_may(small: LLMEngine) -> None:
    """Two run and three wait; then one more is refused, until there is room again."""
    runner = Runner(small)

    async def main() -> None:
        async with AsyncLLMEngine(small, max_waiting=3) as serving:
            running = [asyncio.create_task(read(serving, "the", greedy(60))) for _ in range(2)]
            await until(lambda: serving.stats().num_running == 2)
            async with runner.held():
                waiting = [asyncio.create_task(read(serving, "the", greedy(2))) for _ in range(3)]
                await asyncio.sleep(0)
                assert len(serving._in_hand) == 3
                with pytest.raises(EngineBusyError, match="max_waiting: expected fewer than 3 requests, got 3"):
                    await anext(serving.generate("the"))
            await until(lambda: serving.stats().num_waiting == 3)  # now it is the engine that has them
            with pytest.raises(EngineBusyError):
                await anext(serving.generate("the"))
            waiting.pop().cancel()
            await until(lambda: serving.stats().num_waiting < 3)
            waiting.append(asyncio.create_task(read(serving, "the", greedy(2))))
            await asyncio.gather(*running, *waiting, return_exceptions=True)
            assert [task.cancelled() for task in (*running, *waiting)] == [False] * 5

    play(main())
    expect_nothing_left(small)


@pytest.mark.parametrize("max_waiting", [0, -1, 1.5, None])
def test_max_waiting_is_checked(engine: LLMEngine, max_waiting: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="max_waiting"):
        AsyncLLMEngine(engine, max_waiting=max_waiting)


def test_what_is_no_engine() -> None:
    with pytest.raises(TypeError, match=r"^engine: expected an LLMEngine, got str$"):
        AsyncLLMEngine("a model")  # type: ignore[arg-type]
    for make in (AsyncLLMEngine.from_engine_args, LLMEngine.from_engine_args):
        with pytest.raises(TypeError, match=r"^engine_args: expected EngineArgs, got str$"):
            make("a model")  # type: ignore[arg-type]


def test_a_long_prompt_holds_up_neither_the_event_loop_nor_the_steps(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_request, may_go_on, has_begun = engine.inputs.make_request, threading.Event(), threading.Event()
    runner = Runner(engine, one_by_one=True)

    def slow(args: RequestArgs) -> Any:
        if args.request_id == "long":
            has_begun.set()
            assert may_go_on.wait(60)
        return make_request(args)

    monkeypatch.setattr(engine.inputs, "make_request", slow)

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            other = serving.generate("the", greedy(30))
            runner.release()
            await anext(other)
            long = asyncio.create_task(read(serving, "the " * 9, greedy(2), request_id="long"))
            await until(has_begun.is_set)
            runner.free()
            assert [output async for output in other][-1].finished
            assert not long.done() and serving.num_unfinished == 1
            may_go_on.set()
            output = await long
            assert (output.prompt, len(output.outputs[0].token_ids)) == ("the " * 9, 2)

    play(main())


# ---- leaving, aborting ----------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_takes_its_request_along_before_the_next_step(engine: LLMEngine) -> None:
    runner = Runner(engine)

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            stays = asyncio.create_task(read(serving, "the", greedy(30), request_id="stays"))
            leaves = serving.generate("the cat", greedy(30), request_id="leaves")
            await anext(leaves)
            async with runner.held():
                num_steps = len(runner.batches)  # the last of which runs
                await leaves.aclose()
                assert serving.num_unfinished == 1
            assert (await stays).finished
            assert all("leaves" not in batch for batch in runner.batches[num_steps:])

    play(main())
    expect_nothing_left(engine)


def test_a_reader_that_breaks_off(engine: LLMEngine) -> None:
    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            async for _ in serving.generate("the cat", greedy(100)):
                break
            await until(lambda: serving.num_unfinished == 0)  # the event loop closes the iterator
            await until(lambda: serving.stats().num_used_blocks == 0)

    play(main())
    assert engine.stats().num_output_tokens < 100


def test_a_generator_that_nobody_asks_is_no_request(engine: LLMEngine) -> None:
    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            generator = serving.generate("the")
            assert serving.num_unfinished == 0
            await generator.aclose()

    play(main())
    assert engine.stats().num_prompt_tokens == 0


@pytest.mark.parametrize("num_turns", range(12))
def test_a_task_may_be_cancelled_at_any_point(engine: LLMEngine, num_turns: int) -> None:
    """After so many turns of the event loop; in the first ones the request is on its way to the engine."""

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            task = asyncio.create_task(read(serving, "the", greedy(60)))
            for _ in range(num_turns):
                await asyncio.sleep(0.001 * (num_turns > 6))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert serving.num_unfinished == 0 and serving._in_hand == set()
            assert await serving.call(lambda engine: engine.stats().num_used_blocks) == 0
            assert len((await read(serving, "the", greedy(3))).outputs[0].token_ids) == 3

    play(main())
    expect_nothing_left(engine)


def hold_make_request(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until the event is set, no prompt gets prepared."""
    make_request, may_go_on = engine.inputs.make_request, threading.Event()

    def slow(args: RequestArgs) -> Any:
        assert may_go_on.wait(60)
        return make_request(args)

    monkeypatch.setattr(engine.inputs, "make_request", slow)
    return may_go_on


def test_leaving_while_the_prompt_is_prepared(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = hold_make_request(engine, monkeypatch)

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            first = asyncio.create_task(read(serving, "the", request_id="x"))
            await asyncio.sleep(0.01)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            again = asyncio.create_task(read(serving, "the", greedy(4), request_id="x"))  # the id is free again
            await asyncio.sleep(0.01)
            may_go_on.set()
            assert len((await again).outputs[0].token_ids) == 4

    play(main())
    expect_nothing_left(engine)


def test_outputs_of_a_request_that_was_left_do_not_reach_the_next_one_of_that_id(engine: LLMEngine) -> None:
    runner = Runner(engine)

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            first = serving.generate([5, 6], greedy(30), request_id="x")
            await anext(first)
            async with runner.held():
                await first.aclose()
                second = asyncio.create_task(read(serving, [9, 9, 9], greedy(2), request_id="x"))
                await handed_over(serving, 2)
            assert (await second).prompt_token_ids == [9, 9, 9]

    play(main())


def test_abort(engine: LLMEngine) -> None:
    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            await serving.abort("unknown")
            with pytest.raises(TypeError, match="request_id: expected a string or a list of strings, got int"):
                await serving.abort(5)  # type: ignore[arg-type]
            stream = serving.generate("the", greedy(60), request_id="x")
            await anext(stream)
            await serving.abort(["unknown", "x"])
            assert serving.num_unfinished == 0 and serving.stats().num_used_blocks == 0
            last = [output async for output in stream][-1]
            assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
            assert 0 < len(last.outputs[0].token_ids) < 60
            await serving.abort("x")

    play(main())
    expect_nothing_left(engine)


def test_abort_of_a_request_that_the_engine_has_not_got(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = hold_make_request(engine, monkeypatch)

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            reader = asyncio.create_task(read(serving, "the", request_id="x"))
            await asyncio.sleep(0.01)
            await serving.abort("x")
            may_go_on.set()
            output = await reader
            assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])

    play(main())
    expect_nothing_left(engine)


# ---- between two steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_left", [False, True])
def test_an_abort_that_comes_before_its_request(engine: LLMEngine, is_left: bool) -> None:
    """The request ends as it comes. Then its key is forgotten, with those of requests that never come."""
    news: list[News] = []
    loop = EngineLoop(engine, news.append)
    for key in (1, 2, 4):
        loop.abort(key, is_left)
    assert [loop.is_left(key) for key in range(4)] == [False] * 4  # the loop does not run yet
    loop.call(9, lambda _: loop.is_left(2))
    loop.add(2, engine.inputs.make_request(RequestArgs("a", "the", greedy(3))))
    loop.call(9, lambda _: dict(loop._aborted))
    loop.refuse(4, ValueError("no prompt"))
    loop.stop()
    assert loop.run() is None
    assert [result for each in news for _, result, _ in each.results] == [is_left, {4: is_left}]
    outputs = [(key, output.outputs[0].finish_reason) for each in news for key, output in each.outputs]
    assert outputs == ([] if is_left else [(2, "abort")])
    assert [key for each in news for key, _ in each.refused] == [4]
    assert (loop._aborted, loop._keys, loop._request_ids) == ({}, {}, {})
    expect_nothing_left(engine)


def test_call(engine: LLMEngine) -> None:
    def stop(_: LLMEngine) -> None:
        raise StopIteration("that is it")  # which no future takes

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            caller = threading.current_thread()
            assert await serving.call(lambda each: each is engine and threading.current_thread() is not caller)
            assert await serving.call(lambda each: each.register_prefix([5] * 16)) == 16
            with pytest.raises(ZeroDivisionError):
                await serving.call(lambda _: 1 // 0)
            with pytest.raises(RuntimeError, match="StopIteration"):
                await serving.call(stop)
            stream = serving.generate("the", greedy(40))
            await anext(stream)
            assert await serving.call(lambda each: each.stats().num_running) == 1  # amid steps
            await stream.aclose()
            assert serving._calls == {} and serving.is_running

    play(main())


def test_a_panic_amid_a_call_costs_no_request(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of a tokenizer is no Exception, and the engine begins anew. Catches readers that wait for ever."""

    class Panic(BaseException):
        pass

    def panic(*_: object, **__: object) -> None:
        raise Panic

    expected = completions(run(engine, ["the"], greedy(20)))

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            reader = asyncio.create_task(read(serving, "the", greedy(20)))
            await until(lambda: serving.stats().num_running == 1)
            with monkeypatch.context() as patch:
                patch.setattr(engine.inputs, "prompt_tokens", panic)
                with pytest.raises(Panic):
                    await serving.call(lambda each: each.register_prefix("the cat"))
            assert completions([await reader]) == expected
            assert serving.is_running

    play(main())


def test_a_call_that_is_cancelled_is_not_made(engine: LLMEngine) -> None:
    runner, made = Runner(engine), []

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            stream = serving.generate("the", greedy(40))
            await anext(stream)
            async with runner.held():
                call = asyncio.create_task(serving.call(lambda _: made.append(1)))
                await asyncio.sleep(0)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            await serving.call(lambda _: None)
            await stream.aclose()

    play(main())
    assert made == []


def test_stats_are_those_after_the_last_step(small: LLMEngine) -> None:
    async def main() -> None:
        serving = AsyncLLMEngine(small)
        assert serving.stats() == small.stats()
        async with serving:
            streams = [serving.generate("the", greedy(60)) for _ in range(3)]
            first = [asyncio.create_task(anext(stream)) for stream in streams]
            await until(lambda: serving.stats().num_waiting == 1)  # the first steps may come before the third request
            assert serving.stats().num_running == 2 and serving.stats().num_used_blocks >= 2
            for task in first:
                task.cancel()
            await asyncio.gather(*first, return_exceptions=True)
            for stream in streams:
                await stream.aclose()
            await serving.call(lambda _: None)
            assert serving.stats() == small.stats() and small.stats().num_used_blocks == 0

    play(main())


def test_an_idle_engine_sleeps(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            await read(serving, "the", greedy(2))
            await serving.call(lambda _: None)
            looks = 0

            def counted() -> bool:
                nonlocal looks
                looks += 1
                return False

            await asyncio.sleep(0.05)
            monkeypatch.setattr(engine, "has_unfinished_requests", counted)
            await asyncio.sleep(0.3)
            assert looks == 0
            monkeypatch.undo()

    play(main())


# ---- many of them ---------------------------------------------------------------------------------------------------


def test_many_readers_of_whom_some_leave(text_model: str) -> None:
    """With a cache that is small enough to preempt, a queue that is short enough to refuse."""
    engine = LLMEngine(text_model, num_blocks=24, block_size=8, max_num_seqs=16)
    rng = random.Random(0)
    ends: dict[str, int] = dict.fromkeys(("finished", "left", "cancelled", "refused"), 0)

    async def reader(serving: AsyncLLMEngine, i: int) -> None:
        num_tokens = rng.randrange(1, 30)
        leaves_after = rng.randrange(num_tokens) if rng.random() < 0.3 else None
        await asyncio.sleep(rng.random() * 0.5)
        stream = serving.generate([5 + i % 80, *range(5, 5 + rng.randrange(30))], greedy(num_tokens))
        end = "left"
        try:
            async for output in stream:
                count = len(output.outputs[0].token_ids)
                assert output.outputs[0].finish_reason == ("length" if output.finished else None)
                assert count == num_tokens or not output.finished
                if output.finished:
                    end = "finished"
                elif leaves_after is not None and count > leaves_after:
                    break
        except EngineBusyError:
            end = "refused"
        except asyncio.CancelledError:
            end = "cancelled"
        finally:
            await stream.aclose()
        ends[end] += 1

    async def main() -> None:
        async with AsyncLLMEngine(engine, max_waiting=256) as serving:
            tasks = [asyncio.create_task(reader(serving, i)) for i in range(512)]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0.01)
                rng.choice(tasks).cancel() if rng.random() < 0.5 else None
            await asyncio.gather(*tasks, return_exceptions=True)
            cancelled_before = sum(task.cancelled() for task in tasks)  # before they asked for anything
            assert sum(ends.values()) + cancelled_before == 512
            assert serving.num_unfinished == 0 and serving._in_hand == set()
            await serving.call(lambda _: None)
            assert serving.stats().num_running == serving.stats().num_waiting == 0

    play(main())
    expect_nothing_left(engine)
    assert all(ends[end] for end in ("finished", "left", "cancelled")), ends
    assert engine.stats().num_preemptions


def test_memory_is_flat(engine: LLMEngine) -> None:
    engine.model_runner.execute = fake_execute  # type: ignore[method-assign]

    async def main() -> list[int]:
        sizes = []
        async with AsyncLLMEngine(engine) as serving:
            for _ in range(3):
                for _ in range(10):
                    await asyncio.gather(*(read(serving, [5, 6, 7], greedy(2)) for _ in range(40)))
                sizes.append(tracemalloc.get_traced_memory()[0])
        return sizes

    tracemalloc.start()
    try:
        warm, middle, last = play(main())
    finally:
        tracemalloc.stop()
    assert last - middle < 40_000, (warm, middle, last)  # 400 requests, of 100 bytes each if one forgot them


# ---- the end --------------------------------------------------------------------------------------------------------


def test_shutdown_ends_what_is_in_flight(small: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    make_request, may_go_on = small.inputs.make_request, threading.Event()

    def slow(args: RequestArgs) -> Any:
        assert args.request_id != "prepared" or may_go_on.wait(60)
        return make_request(args)

    monkeypatch.setattr(small.inputs, "make_request", slow)

    async def main() -> None:
        serving = AsyncLLMEngine(small)
        await serving.start()
        readers = [asyncio.create_task(read(serving, "the", greedy(90))) for _ in range(4)]
        await until(lambda: serving.stats().num_waiting == serving.stats().num_running == 2)
        prepared = [asyncio.create_task(read(serving, "the", request_id=name)) for name in ("prepared", "after it")]
        await asyncio.sleep(0.01)
        call = asyncio.create_task(serving.shutdown())
        outputs = await asyncio.gather(*readers)
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 4
        for each in prepared:
            with pytest.raises(EngineDeadError, match="shut down"):
                await each
        assert not call.done()  # the preparing thread is still at work
        may_go_on.set()
        await call
        assert not serving.is_running and serving.error is None and serving.num_unfinished == 0

    play(main())
    expect_nothing_left(small)


def test_readers_do_not_wait_for_the_disk_when_the_engine_stops(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_written = threading.Event()
    monkeypatch.setattr(engine, "flush", lambda: is_written.wait(TIMEOUT))

    async def main() -> None:
        serving = AsyncLLMEngine(engine)
        await serving.start()
        stream = serving.generate("the", greedy(90))
        await anext(stream)
        end = asyncio.create_task(serving.shutdown())
        try:
            async with asyncio.timeout(20):
                last = [output async for output in stream][-1]
            assert last.outputs[0].finish_reason == "abort" and not end.done()
        finally:
            is_written.set()
        await end

    play(main())


def test_shutdown_may_come_twice_and_at_any_time(engine: LLMEngine) -> None:
    deaths: list[int] = []

    async def main() -> None:
        serving = AsyncLLMEngine(engine, on_death=lambda: deaths.append(1))
        async with serving:
            await asyncio.gather(serving.shutdown(), serving.shutdown())
            await serving.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await anext(serving.generate("the"))
            with pytest.raises(EngineDeadError, match="shut down"):
                await serving.call(lambda _: None)
            await serving.abort("x")
        never = AsyncLLMEngine(engine)
        await never.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await anext(never.generate("the"))

    play(main())
    assert deaths == []


def test_a_cancelled_shutdown_goes_on(engine: LLMEngine) -> None:
    runner = Runner(engine)

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            stream = serving.generate("the", greedy(60))
            await anext(stream)
            async with runner.held():
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(serving.shutdown(), 0.02)
            last = [output async for output in stream][-1]  # one from before may lie in the mailbox
            assert last.outputs[0].finish_reason == "abort"

    play(main())
    expect_nothing_left(engine)


def test_it_lives_once(engine: LLMEngine) -> None:
    async def main() -> None:
        serving = AsyncLLMEngine(engine)
        with pytest.raises(EngineDeadError, match=r"expected start\(\)"):
            await serving.call(lambda _: None)
        async with serving:
            with pytest.raises(RuntimeError, match="start"):
                await serving.start()
            assert serving.is_running
        with pytest.raises(RuntimeError, match="start"):
            await serving.start()
        async with AsyncLLMEngine(engine) as another:  # of the same engine
            assert (await read(another, "the", greedy(2))).finished

    play(main())


def test_the_event_loop_is_closed_while_it_runs(engine: LLMEngine) -> None:
    """Without a shutdown: the engine stops, as nobody is left to read."""
    before = set(threading.enumerate())
    runner = Runner(engine)

    async def main() -> AsyncLLMEngine:
        serving = AsyncLLMEngine(engine)
        await serving.start()
        stream = serving.generate("the", greedy(90))
        await anext(stream)
        streams.append(stream)  # so that nobody closes it
        runner.hold()
        await until(lambda: runner.is_held)
        return serving

    streams: list[Any] = []
    loop = asyncio.new_event_loop()
    serving = loop.run_until_complete(main())
    loop.close()
    assert not serving.is_running
    with pytest.raises(EngineDeadError, match=r"^the event loop that the engine was started in is closed$"):
        asyncio.run(anext(serving.generate("the")))
    runner.release()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before
    expect_nothing_left(engine)
    asyncio.run(serving.shutdown())
    with pytest.raises(EngineDeadError):
        asyncio.run(anext(serving.generate("the")))


def test_a_program_may_end_amid_a_step(text_model: str) -> None:
    program = (
        "import asyncio, sys\n"
        "from pagedattn_serve import AsyncLLMEngine, LLMEngine, SamplingParams\n"
        "async def main():\n"
        "    serving = AsyncLLMEngine(LLMEngine(sys.argv[1]))\n"
        "    await serving.start()\n"
        "    params = SamplingParams(max_tokens=100, ignore_eos=True)\n"
        "    streams.extend(serving.generate('the', params) for _ in range(64))\n"
        "    await asyncio.gather(*map(anext, streams))\n"
        "streams = []\n"
        "loop = asyncio.new_event_loop()\n"
        "loop.run_until_complete(main())\n"
    )
    done = run_python("-c", program, text_model, timeout=TIMEOUT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_another_event_loop_is_refused(engine: LLMEngine) -> None:
    """Nothing that comes in the engine's event loop would wake it. What runs there goes on."""

    def error_elsewhere(f: Callable[[], Any]) -> str:
        async def elsewhere() -> None:
            async with asyncio.timeout(TIMEOUT / 10):  # before `play` gives up, or the thread would keep it waiting
                await f()

        with pytest.raises(RuntimeError) as error:
            asyncio.run(elsewhere())
        return str(error.value)

    async def main() -> None:
        async with AsyncLLMEngine(engine) as serving:
            stream = serving.generate("the", greedy(40), request_id="mine")
            await anext(stream)
            methods: dict[str, Callable[[], Any]] = {
                "generate": lambda: anext(serving.generate("the")),
                "abort": lambda: serving.abort("mine"),
                "call": lambda: serving.call(lambda _: None),
                "cache_map": serving.cache_map,
                "shutdown": serving.shutdown,
            }
            for name, method in methods.items():
                error = await asyncio.to_thread(error_elsewhere, method)
                assert error == f"{name}: expected to be called in the event loop that start() was called in"
            assert [output async for output in stream][-1].outputs[0].finish_reason == "length"
            assert serving.is_running

    play(main())


def test_a_shutdown_when_the_event_loop_has_stopped(engine: LLMEngine) -> None:
    """As by a program that cleans up at its end."""
    loop = asyncio.new_event_loop()
    serving = AsyncLLMEngine(engine)
    loop.run_until_complete(serving.start())
    asyncio.run(serving.shutdown())
    assert not serving.is_running
    loop.close()
