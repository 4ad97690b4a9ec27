"""`pagedattn verify MODEL`: the same requests under many conditions, compared bit by bit."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pagedattn_serve.distributed.torchrun import rank_of_torchrun
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.outputs import EngineStats
from pagedattn_serve.verification.conditions import ALONE, Condition, conditions_of, run_cases
from pagedattn_serve.verification.trace import Origin, find_origin
from pagedattn_serve.verification.workload import LENGTHS, MAX_TOKENS, Difference, first_difference, make_cases

COUNTS = (
    "num_steps",
    "num_found_tokens",
    "num_recomputes",
    "num_swaps",
    "num_proposed_tokens",
    "num_accepted_tokens",
)


class Verified(NamedTuple):
    """How one condition went. happened: in words; "" if what the condition is for did not happen.

    difference: the first, with where it arose, if that was found.
    """

    condition: Condition
    num_requests: int
    happened: str
    difference: Difference | None = None
    origin: Origin | None = None


def verify(args: EngineArgs) -> Iterator[Verified]:
    """Each condition as it is done; the first is the cases alone, which all others are compared with. Where the first
    difference arose is looked for once. With ranks that torchrun has started there is one engine: what needs another
    one is not tried, nor looked for.

    Raises as `LLMEngine` does, and ValueError for a model that generates nothing or a request that could not go on.
    """
    engine = LLMEngine.from_engine_args(args)
    if not engine.model_runner.model.head:
        raise ArgumentError("model", "one that generates tokens", "one without a head")
    cases = make_cases(engine.model_runner.model.vocab_size, engine.max_model_len, max_num_sequences(engine))
    expected = [answer for _, answer in run_cases(engine, cases, ALONE)]
    yield Verified(ALONE, len(cases), ALONE.happened(engine.stats()))
    has_one_engine = rank_of_torchrun(args.num_ranks) is not None
    is_found = False
    for condition in conditions_of(engine, args, cases):
        # Threads are set in this process, and ranks are others.
        is_of_threads = condition.num_threads is not None and args.num_ranks > 1
        if is_of_threads or (condition.options is not None and has_one_engine):
            yield Verified(condition, 0, "")
            continue
        if condition.options is not None:
            del engine
            gc.collect()  # ranks end, and caches are free, before the next engine takes as much
            engine = LLMEngine.from_engine_args(replace(args, **condition.options))
        before = engine.stats()
        answers = run_cases(engine, cases, condition)
        happened = condition.happened(since(before, engine.stats()))
        differences = (first_difference(cases[i], expected[i], answer) for i, answer in answers)
        difference = next((each for each in differences if each is not None), None)
        origin = None
        if difference is not None and not is_found and not has_one_engine:
            del engine
            gc.collect()
            origin = find_origin(args, cases, difference.case, condition)
            is_found = origin is not None
            engine = LLMEngine.from_engine_args(args)
        yield Verified(condition, len(answers), happened, difference, origin)


def max_num_sequences(engine: LLMEngine) -> int:
    """Of a request: as many as may run at once, and as the cache holds of the longest, beside the watermark."""
    config, manager = engine.scheduler.config, engine.scheduler.block_manager
    longest = min(LENGTHS[-1] + MAX_TOKENS, engine.max_model_len)
    blocks_of_longest = -(-longest // manager.block_size) * len(manager.windows)
    return min(
        config.max_num_seqs, config.max_num_batched_tokens, max(1, (manager.num_blocks - 1) // blocks_of_longest)
    )


def since(before: EngineStats, stats: EngineStats) -> EngineStats:
    """The counts of what came after `before`."""
    return replace(stats, **{name: getattr(stats, name) - getattr(before, name) for name in COUNTS})
