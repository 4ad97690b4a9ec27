"""The conditions under which the same requests run, and the requests run under them."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.outputs import EngineStats, RequestOutput
from pagedattn_serve.verification.workload import Answer, Case, answer_of

SMALL_STEP = 19  # tokens, so that most prompts run in chunks
THREADS = (1, 3)


@dataclass(frozen=True)
class Arrivals:
    """Which case comes, by its index, and after how many steps behind the one before. The next one comes earlier if
    there is nothing else to do. finds_prefixes: whether a request may find what an earlier one left in the cache.
    """

    cases: list[int]
    steps: list[int]
    finds_prefixes: bool = False


def alone(num_cases: int) -> Arrivals:
    return Arrivals(list(range(num_cases)), [1 << 30] * num_cases)


def at_once(num_cases: int) -> Arrivals:
    return Arrivals(list(range(num_cases)), [0] * num_cases)


def at_random(num_cases: int) -> Arrivals:
    """Each twice, in a random order, a few steps apart."""
    random_numbers = random.Random(1)
    cases = [*range(num_cases)] * 2
    random_numbers.shuffle(cases)
    return Arrivals(cases, [random_numbers.randrange(6) for _ in cases])


def again(num_cases: int) -> Arrivals:
    """All alone, then all alone again, on blocks of the first time."""
    return Arrivals([*range(num_cases)] * 2, [1 << 30] * 2 * num_cases, finds_prefixes=True)


def _steps(stats: EngineStats) -> str:
    return f"{stats.num_steps:,} steps"


@dataclass(frozen=True)
class Condition:
    """options: of the engine, beside the given ones; None takes the engine that ran the cases alone.

    happened: what the engine's counts say of the condition, in words; "" if what it is for did not happen.
    """

    name: str
    arrivals: Callable[[int], Arrivals]
    options: dict[str, Any] | None = None
    happened: Callable[[EngineStats], str] = field(default=_steps)
    num_threads: int | None = None


ALONE = Condition("alone", alone)


def conditions_of(engine: LLMEngine, args: EngineArgs, cases: Sequence[Case]) -> list[Condition]:
    """What is tried with this model. engine: one of the given options."""
    num_blocks = max(_most_blocks(case, args.block_size) for case in cases) + 1  # and the watermark
    longest = max(case.num_tokens for case in cases)
    few_blocks = {
        "num_blocks": num_blocks,
        "kv_cache_memory": None,
        "cpu_memory_utilization": None,
        "max_model_len": longest,
    }
    conditions = [
        Condition("alone again", alone),
        Condition("in one batch", at_once),
        Condition("in random batches", at_random),
        *(Condition(f"on {count} thread{'s' * (count > 1)}", at_once, num_threads=count) for count in THREADS),
    ]
    if engine.scheduler.block_manager.prefixes.is_on:
        conditions.append(Condition("after prefix hits", again, happened=_found))
    chunks = {"max_num_batched_tokens": SMALL_STEP}
    recompute, swap = few_blocks | {"preemption_mode": "recompute"}, few_blocks | {"preemption_mode": "swap"}
    conditions += [
        Condition("prompts in chunks", at_random, chunks),
        Condition("recomputed", at_once, recompute, _recomputed),
        Condition("recomputed, in chunks", at_random, recompute | chunks, _recomputed_by_time),
        Condition("swapped out and in", at_once, swap, _swapped),
    ]
    if engine.model_runner.has_graphs:
        conditions.append(Condition("without CPU graphs", at_once, {"enforce_eager": True}))
    if not engine.model_runner.model.states:
        drafts = {"speculation": "ngram"}
        conditions += [
            Condition("with speculation", at_once, drafts, _guessed),
            Condition("with speculation, alone", alone, drafts, _guessed),
        ]
    return conditions


def _most_blocks(case: Case, block_size: int) -> int:
    """Blocks that a case holds at its end: those full of its prompt once, all others for each of its sequences."""
    num_shared = len(case.prompt_token_ids) // block_size
    return num_shared + case.params.n * (-(-case.num_tokens // block_size) - num_shared)


def _found(stats: EngineStats) -> str:
    return f"{stats.num_found_tokens:,} tokens found" if stats.num_found_tokens else ""


def _recomputed(stats: EngineStats) -> str:
    return f"{stats.num_recomputes:,} preemptions" if stats.num_recomputes else ""


def _recomputed_by_time(stats: EngineStats) -> str:
    """Of chunks, whose sizes depend on the clock, and with them whether there is room."""
    return f"{stats.num_recomputes:,} preemptions"


def _swapped(stats: EngineStats) -> str:
    return f"{stats.num_swaps:,} preemptions" if stats.num_swaps else ""


def _guessed(stats: EngineStats) -> str:
    accepted, proposed = stats.num_accepted_tokens, stats.num_proposed_tokens
    return f"{accepted:,} of {proposed:,} guesses right" if proposed else ""


def run_cases(engine: LLMEngine, cases: Sequence[Case], condition: Condition) -> list[tuple[int, Answer]]:
    """The answers under a condition, each with the index of its case, in the order of arrival.

    Raises ValueError for a request that could not go on.
    """
    arrivals = condition.arrivals(len(cases))
    outputs: dict[str, RequestOutput] = {}
    with _threads(condition.num_threads):
        for i, (case, num_steps) in enumerate(zip(arrivals.cases, arrivals.steps, strict=True)):
            while num_steps and engine.has_unfinished_requests():
                outputs.update((output.request_id, output) for output in engine.step())
                num_steps -= 1
            salt = "shared" if arrivals.finds_prefixes else f"{condition.name} {i}"
            engine.add_request(str(i), cases[case].prompt_token_ids, cases[case].params, cache_salt=salt)
        while engine.has_unfinished_requests():
            outputs.update((output.request_id, output) for output in engine.step())
    return [(case, answer_of(outputs[str(i)])) for i, case in enumerate(arrivals.cases)]


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
