"""How the tests run an `AsyncLLMEngine`: what must be left when an event loop ends, and runners that wait or fail."""

import asyncio
import gc
import threading
from collections import Counter as Counts
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from queue import Queue, SimpleQueue
from types import ModuleType
from typing import Any, TypeVar

from pagedattn_serve import AsyncLLMEngine, LLMEngine, RequestOutput, SamplingParams
from pagedattn_serve.async_engine.core import ThreadCore
from pagedattn_serve.execution.sampler import SamplerOutput
from pagedattn_serve.scheduling.sequence import ScheduledBatch

T = TypeVar("T")
TIMEOUT = 240.0  # seconds, for what would hang otherwise
FAKE_TOKEN = 7


def play(main: Coroutine[Any, Any, T]) -> T:
    """Run it in an event loop. Asserts that no task, no thread and no unseen exception is left at its end."""
    unseen: list[dict[str, Any]] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        result = await asyncio.wait_for(main, TIMEOUT)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    before = set(threading.enumerate())
    result = asyncio.run(watched())
    assert set(threading.enumerate()) <= before
    gc.collect(1)  # what was never retrieved is told when it is collected
    assert not unseen
    return result


def expect_nothing_left(engine: LLMEngine) -> None:
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_swapped) == (0, 0, 0)
    assert (stats.num_used_blocks, stats.num_used_host_blocks, stats.num_used_slots) == (0, 0, 0)
    assert not engine.has_unfinished_requests()
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    manager.check_integrity()


async def read(engine: AsyncLLMEngine, *args: Any, **options: Any) -> RequestOutput:
    """The last output of a request."""
    outputs = [output async for output in engine.generate(*args, **options)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


def core_pid(engine: AsyncLLMEngine) -> int:
    """The process that the engine has to itself."""
    pid = engine.replicas()[0].pid
    assert pid is not None
    return pid


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def handed_over(serving: AsyncLLMEngine, num_requests: int) -> None:
    """Until so many requests are prepared and on their way to the engine's thread."""
    core = serving._core
    assert isinstance(core, ThreadCore)
    await until(lambda: core._loop._commands.qsize() + len(core._loop._keys) >= num_requests)


def census(_: object = None) -> Counts[str]:
    """How many objects of each class of the package there are in this process, and how many entries the containers of
    all objects of a class have, by the attribute's name. The same for the containers of its modules."""
    gc.unfreeze()  # what an engine's process has made before its first request counts, too
    gc.collect()
    counts: Counts[str] = Counts()
    for each in gc.get_objects():
        kind = type(each)
        if kind is ModuleType and each.__name__.startswith("pagedattn_serve"):
            name, attributes = each.__name__, vars(each)
        elif str(kind.__module__).startswith("pagedattn_serve"):
            name = kind.__qualname__
            counts[name] += 1
            slots = [slot for base in kind.__mro__ for slot in base.__dict__.get("__slots__", ())]
            attributes = getattr(each, "__dict__", {}) | {slot: getattr(each, slot, None) for slot in slots}
        else:
            continue
        for attribute, value in attributes.items():
            if isinstance(value, dict | list | set | deque | bytearray):
                counts[f"{name}.{attribute}"] += len(value)
            elif isinstance(value, SimpleQueue | Queue):
                counts[f"{name}.{attribute}"] += value.qsize()
    return counts


def expect_none_grown(before: Counts[str], after: Counts[str], num_requests: int) -> None:
    """Nothing has as many objects or entries more as there were requests of a kind in between."""
    grown = {name: count - before[name] for name, count in after.items() if count - before[name] >= num_requests}
    assert not grown, grown


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class Runner:
    """In the place of an engine's `ModelRunner.execute`: it notes the steps, holds them up, and fails.

    faults: for each of the next steps what it raises after the model was run, or None. batches: the request ids of each
    step. one_by_one: hold each step until it is released. is_held: whether one waits.
    """

    def __init__(
        self, engine: LLMEngine, faults: Iterable[BaseException | None] = (), one_by_one: bool = False
    ) -> None:
        self.faults = list(faults)
        self.batches: list[list[str]] = []
        self.is_held = False
        self._execute = engine.model_runner.execute
        self._free = threading.Event()
        self._one_by_one = one_by_one
        if not one_by_one:
            self._free.set()
        engine.model_runner.execute = self  # type: ignore[method-assign, assignment]

    def __call__(self, batch: ScheduledBatch) -> SamplerOutput:
        self.batches.append([scheduled.sequence.request_id for scheduled in batch.sequences])
        if not self._free.is_set():
            self.is_held = True
            assert self._free.wait(TIMEOUT)
            self.is_held = False
        if self._one_by_one:
            self.hold()
        sampled = self._execute(batch)
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        return sampled

    def hold(self) -> None:
        """Let the next step wait for `release`."""
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    def free(self) -> None:
        """Let all further steps go on, one after the other."""
        self._one_by_one = False
        self.release()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """In here no step ends, and one waits; there must be requests."""
        self.hold()
        try:
            await until(lambda: self.is_held)
            yield
        finally:
            self.release()


def fake_execute(batch: ScheduledBatch) -> SamplerOutput:
    """No model: one token for all."""
    num_rows = sum(scheduled.num_samples + len(scheduled.draft_token_ids) for scheduled in batch.sequences)
    return SamplerOutput([FAKE_TOKEN] * num_rows, [0.0] * num_rows, [None] * num_rows, [None] * num_rows)
