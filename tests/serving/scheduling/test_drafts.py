"""Drafts in the scheduler: they take nothing from anybody, and what was rejected is found by nobody.

Under any load there are few different tokens, so that a guess is often made and often wrong.
"""

import copy
import random
from dataclasses import replace

import pytest
from fake_engine import FakeEngine

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.requests.inputs import sequence_rules
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import ScheduledBatch, Sequence, SequenceGroup, TableArray


def make_scheduler(num_blocks: int = 40, **options: int | str | None) -> Scheduler:
    config = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=40, speculation="ngram") | options
    return Scheduler(SchedulerConfig(**config), CacheConfig(num_blocks=num_blocks, block_size=8, num_host_blocks=20))


def make_group(name: str, prompt: list[int], **params: int) -> SequenceGroup:
    return SequenceGroup(name, prompt, sequence_rules(SamplingParams(**{"max_tokens": None, **params})), 0.0)


def decoding(scheduler: Scheduler, prompt: list[int], output: int, **params: int) -> Sequence:
    """A sequence whose prompt is computed, and the first token drawn."""
    group = make_group(f"request {len(prompt)}", prompt, **params)
    scheduler.add(group)
    scheduler.mark_computed(scheduler.schedule())
    group.sequences[0].output_token_ids.append(output)
    return group.sequences[0]


def drafts(batch: ScheduledBatch) -> list[list[int]]:
    return [list(scheduled.draft_token_ids) for scheduled in batch.sequences]


# ---- how many ------------------------------------------------------------------------------------------------------


def test_no_drafts_unless_asked_for() -> None:
    scheduler = make_scheduler()
    decoding(scheduler, [1, 2, 3, 4] * 3, 1)
    assert drafts(scheduler.schedule()) == [[2, 3, 4, 1, 2]]
    assert scheduler.num_proposed_tokens == 5
    config = SchedulerConfig(max_model_len=64)
    scheduler = Scheduler(config, CacheConfig(num_blocks=8, block_size=8))
    decoding(scheduler, [1, 2, 3, 4] * 3, 1)
    assert drafts(scheduler.schedule()) == [[]]
    assert scheduler.num_proposed_tokens == 0


def test_no_drafts_beside_a_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_group("a", [1, 2, 3, 4] * 3))
    assert drafts(scheduler.schedule()) == [[]]


@pytest.mark.parametrize(("max_tokens", "count"), [(2, 0), (3, 1), (6, 4), (7, 5), (8, 5)])
def test_as_many_as_the_output_has_room_for(max_tokens: int, count: int) -> None:
    """One token of output is there, and one beside the drafts comes out of the step."""
    scheduler = make_scheduler()
    decoding(scheduler, [1, 2, 3, 4] * 3, 1, max_tokens=max_tokens)
    assert len(drafts(scheduler.schedule())[0]) == count


@pytest.mark.parametrize(("max_model_len", "count"), [(14, 0), (15, 1), (18, 4), (19, 5)])
def test_as_many_as_the_model_has_room_for(max_model_len: int, count: int) -> None:
    scheduler = make_scheduler(max_model_len=max_model_len)
    decoding(scheduler, [1, 2, 3, 4] * 3, 1)
    assert len(drafts(scheduler.schedule())[0]) == count


@pytest.mark.parametrize("params", [dict(n=2), dict(best_of=2)])
def test_none_for_several_sequences(params: dict[str, int]) -> None:
    scheduler = make_scheduler()
    decoding(scheduler, [1, 2, 3, 4] * 3, 1, **params)
    assert drafts(scheduler.schedule()) == [[]]


def test_none_with_logits_processors() -> None:
    scheduler = make_scheduler()
    decoding(scheduler, [1, 2, 3, 4] * 3, 1, logits_processors=[lambda token_ids, logits: logits])
    assert drafts(scheduler.schedule()) == [[]]


def test_the_budget_that_prompts_leave() -> None:
    scheduler = make_scheduler()
    groups = [make_group("a", [1, 2, 3, 4] * 3), make_group("b", [5, 6, 7, 8] * 3)]
    for group in groups:
        scheduler.add(group)
    scheduler.mark_computed(scheduler.schedule())
    for group, output in zip(groups, (1, 5), strict=True):
        group.sequences[0].output_token_ids.append(output)
    scheduler.add(make_group("long", list(range(20, 32))))
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=16)
    batch = scheduler.schedule()
    assert [scheduled.num_new_tokens for scheduled in batch.sequences] == [1, 1, 12]
    assert drafts(batch) == [[2, 3], [], []] and batch.num_tokens == 16


def test_the_blocks_that_are_free() -> None:
    """17 tokens are in 3 blocks; with 12 drafts 4 would be held, but others have the rest."""
    for num_blocks, count in ((3, 7), (4, 12)):
        scheduler = make_scheduler(num_blocks=num_blocks, max_model_len=24 if num_blocks == 3 else 32)
        sequence = decoding(scheduler, [1, 2, 3, 4] * 4, 1)
        scheduler.config = replace(scheduler.config, max_model_len=64, num_speculative_tokens=12)
        batch = scheduler.schedule()
        assert len(drafts(batch)[0]) == count
        assert len(scheduler.block_manager.block_table(sequence)) == num_blocks
        assert scheduler.block_manager.num_free_blocks == 0
        scheduler.mark_computed(batch)
        sequence.output_token_ids.append(9)
        scheduler.mark_verified(sequence, 0)
        assert scheduler.block_manager.num_used_blocks == 3
        scheduler.block_manager.check_integrity()


# ---- blocks --------------------------------------------------------------------------------------------------------


def test_blocks_for_drafts() -> None:
    cache_config = CacheConfig(num_blocks=4, block_size=8)
    manager = BlockManager(cache_config, TableArray(SchedulerConfig(max_model_len=64), cache_config))
    sequence = Sequence("a", list(range(7)))
    assert manager.allocate([sequence], keep_watermark=False)
    table = list(manager.block_table(sequence))
    assert manager.append_drafts(sequence, 1) == 1 and manager.block_table(sequence) == table
    assert manager.append_drafts(sequence, 2) == 2 and len(manager.block_table(sequence)) == 2
    assert manager.append_drafts(sequence, 20) == 20 and len(manager.block_table(sequence)) == 4
    assert manager.append_drafts(sequence, 30) == 25
    assert manager.block_table(sequence)[:1] == table
    manager.check_integrity()
    sequence.output_token_ids += [7, 8]
    manager.trim(sequence)
    assert len(manager.block_table(sequence)) == 2 and manager.num_free_blocks == 2
    manager.trim(sequence)
    assert len(manager.block_table(sequence)) == 2
    manager.check_integrity()


# ---- any load ------------------------------------------------------------------------------------------------------


class WithTwin(FakeEngine):
    """Before each step, a copy of the scheduler without drafts says what it would do."""

    def step(self, num_lines: int | None = None, fail_at: int | None = None) -> ScheduledBatch:
        memory = self.scheduler.block_manager.table_array.memory  # a view, which deepcopy does not know
        without = copy.deepcopy(self.scheduler, {id(memory): memoryview(bytearray(memory)).cast("i")})
        without._proposer = None
        expected, batch = without.schedule(), super().step(num_lines, fail_at)
        self.expect_the_same(batch, expected)
        self.num_times["found"] += any(
            not scheduled.sequence.output_token_ids and scheduled.num_new_tokens < scheduled.sequence.num_tokens
            for scheduled in expected.sequences
        )
        return batch

    def expect_the_same(self, batch: ScheduledBatch, expected: ScheduledBatch) -> None:
        """But for drafts, the order of the batch, and which free block is whose."""
        for name in ("sequences", "preempted"):
            ids = [
                [
                    (getattr(each, "sequence", each).request_id, getattr(each, "num_new_tokens", 0))
                    for each in getattr(b, name)
                ]
                for b in (batch, expected)
            ]
            assert sorted(ids[0]) == sorted(ids[1]), name
        for name in ("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy"):
            assert getattr(batch, name) == getattr(expected, name)
        assert batch.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert not batch.outgrown


@pytest.mark.parametrize("seed", range(4))
def test_any_load(seed: int) -> None:
    draw = random.Random(seed)
    scheduler_config = SchedulerConfig(
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=draw.choice((5, 12, 40)),
        speculation="ngram",
        num_speculative_tokens=draw.choice((1, 5, 20)),
        preemption_mode=draw.choice(("recompute", "swap")),
    )
    cache_config = CacheConfig(num_blocks=draw.randint(9, 16), block_size=8, num_host_blocks=20)
    engine = WithTwin(scheduler_config, cache_config, vocab_size=2, seed=seed)
    scheduler = engine.scheduler
    while len(engine.groups) < 40 or scheduler.has_unfinished:
        if len(engine.groups) < 40 and draw.random() < 0.3:
            prompt = [draw.choice((0, 0, 0, 1)) for _ in range(draw.randint(1, 30))]
            params = draw.choice((dict(), dict(max_tokens=1), dict(max_tokens=30), dict(n=2, max_tokens=9)))
            engine.add(prompt, **params)
        if scheduler.has_unfinished and draw.random() < 0.02:
            engine.abort(draw.choice(engine.groups).request_id)
        engine.step()
    engine.drain()
    assert engine.num_times["accepted"] > 50 and engine.num_times["rejected"] > 50
    assert scheduler.num_recomputes + scheduler.num_swaps > 0 and engine.num_times["found"] > 0
    assert scheduler._proposer is not None  # and nothing is kept of the finished
    assert not scheduler._proposer._positions and not scheduler._proposer._num_indexed
