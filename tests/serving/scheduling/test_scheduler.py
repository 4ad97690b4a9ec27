"""Scheduler, requests of one sequence: admission, chunks, preemption, abort, restart, errors.

The fake engine checks each step. Groups, prefix caching and priorities have files of their own.
"""

import pytest
from fake_engine import FakeEngine, make_engine, ran

from pagedattn_serve.requests.inputs import sequence_rules
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.sequence import Sequence, SequenceGroup, SequenceRules, SequenceStatus


def add(engine: FakeEngine, prompt_len: int, max_tokens: int = 1000) -> Sequence:
    [sequence] = engine.add(prompt_len, max_tokens).sequences
    return sequence


def sequences_of(groups: list[SequenceGroup]) -> list[Sequence]:
    return [sequence for group in groups for sequence in group.sequences]


def test_one_sequence_prefills_then_decodes() -> None:
    engine = make_engine()
    a = add(engine, 10, max_tokens=3)
    assert [ran(engine.step()) for _ in range(3)] == [[(a, 10)], [(a, 1)], [(a, 1)]]
    assert a.status is SequenceStatus.FINISHED_LENGTH and len(a.output_token_ids) == 3
    assert not engine.step().sequences


def test_a_long_prompt_runs_in_chunks_behind_decodes() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    a = add(engine, 4)
    b = add(engine, 13)
    c = add(engine, 1)
    assert ran(engine.step()) == [(a, 4), (b, 4)]
    assert ran(engine.step()) == [(a, 1), (c, 1), (b, 6)]
    batch = engine.step()
    assert ran(batch) == [(a, 1), (c, 1), (b, 3)]
    assert [scheduled.num_samples for scheduled in batch.sequences] == [1, 1, 1]
    assert len(a.output_token_ids) == 3 and len(b.output_token_ids) == 1


def test_a_chunk_amid_the_prompt_samples_nothing() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    a = add(engine, 9)
    assert [scheduled.num_samples for scheduled in engine.step().sequences] == [0]
    assert not a.output_token_ids
    assert [scheduled.num_samples for scheduled in engine.step().sequences] == [1]


def test_more_decodes_than_budget_run_in_arrival_order() -> None:
    engine = make_engine(max_num_batched_tokens=2)
    a, b = add(engine, 1, max_tokens=4), add(engine, 1, max_tokens=4)
    c = add(engine, 1, max_tokens=1)
    assert ran(engine.step()) == [(a, 1), (b, 1)]
    assert ran(engine.step()) == [(a, 1), (b, 1)]
    engine.drain()
    assert c.status is SequenceStatus.FINISHED_LENGTH


def test_max_num_seqs() -> None:
    engine = make_engine(max_num_seqs=2)
    a, b, c = (add(engine, 1, max_tokens=n) for n in (3, 1, 1))
    assert ran(engine.step()) == [(a, 1), (b, 1)]
    assert ran(engine.step()) == [(a, 1), (c, 1)]


def test_admission_is_strictly_in_order() -> None:
    engine = make_engine(num_blocks=8)
    a, b, c = add(engine, 20), add(engine, 40), add(engine, 1)
    assert ran(engine.step()) == [(a, 20)]  # b needs 5 blocks and one in reserve, 5 are free; c would fit but waits
    assert sequences_of(engine.scheduler.waiting) == [b, c]


def test_a_lone_sequence_may_use_the_reserve() -> None:
    engine = make_engine(num_blocks=8)
    a = add(engine, 63)
    assert ran(engine.step()) == [(a, 63)]
    engine.drain()
    assert a.status is SequenceStatus.FINISHED_LENGTH and a.num_tokens == 64


def test_a_preempted_request_keeps_its_place_and_is_computed_again_as_a_prompt() -> None:
    """Two traps: losing the place; and taking the re-prefill for a decode, as there is output already."""
    engine = make_engine(num_blocks=4, max_model_len=32, enable_prefix_caching=False)
    a, b = add(engine, 8), add(engine, 8)
    engine.step()
    assert engine.scheduler.block_manager.num_free_blocks == 2
    for _ in range(8):
        engine.step()
    assert a.num_tokens == b.num_tokens == 17  # both ask for a third block now
    batch = engine.step()
    assert sequences_of(batch.preempted) == [b] and ran(batch) == [(a, 1)]
    assert engine.scheduler.num_recomputes == batch.preempted[0].num_preemptions == 1
    assert b.status is SequenceStatus.WAITING and len(b.output_token_ids) == 9
    c = add(engine, 1)
    assert sequences_of(engine.scheduler.waiting) == [b, c]
    while a.status is SequenceStatus.RUNNING:
        assert ran(engine.step()) == [(a, 1)]
    batch = engine.step()
    assert ran(batch) == [(b, 17)] and batch.sequences[0].num_samples == 1  # c would take the reserve
    assert len(b.output_token_ids) == 10
    engine.drain()


def test_a_long_recompute_runs_in_chunks_that_sample_nothing_before_the_end() -> None:
    engine = make_engine(num_blocks=4, max_model_len=32, max_num_batched_tokens=8, enable_prefix_caching=False)
    a, b = add(engine, 8, max_tokens=10), add(engine, 8)
    while not engine.step().preempted:
        pass
    while a.status is SequenceStatus.RUNNING:
        engine.step()
    assert b.num_tokens == 15
    for num_new_tokens, num_samples in ((8, 0), (7, 1)):
        batch = engine.step()
        assert ran(batch) == [(b, num_new_tokens)] and batch.sequences[0].num_samples == num_samples
    assert b.num_tokens == 16


def test_a_sequence_can_be_its_own_victim() -> None:
    engine = make_engine(num_blocks=3, max_model_len=24)
    a, b = add(engine, 7), add(engine, 6)
    for _ in range(3):
        assert not engine.step().preempted
    assert engine.manager.num_free_blocks == 0  # a took the last one, and b needs one now
    batch = engine.step()
    assert sequences_of(batch.preempted) == [b] and ran(batch) == [(a, 1)]
    engine.drain()


def test_a_prefill_in_progress_can_be_the_victim() -> None:
    engine = make_engine(num_blocks=4, max_model_len=32, max_num_batched_tokens=2)
    a = add(engine, 6)
    for _ in range(3):
        engine.step()
    b = add(engine, 15)
    for _ in range(10):
        assert ran(engine.step()) == [(a, 1), (b, 1)]
    assert a.num_tokens == 17 and b.num_computed_tokens == 10
    batch = engine.step()
    assert sequences_of(batch.preempted) == [b] and ran(batch) == [(a, 1)] and b.num_computed_tokens == 0
    engine.drain()


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    engine = make_engine(num_blocks=4, max_model_len=32, max_num_seqs=2)
    a, b = add(engine, 8), add(engine, 8)
    c = add(engine, 1)
    for _ in range(9):
        engine.step()
    batch = engine.step()
    assert sequences_of(batch.preempted) == [b] and ran(batch) == [(a, 1)]
    assert sequences_of(engine.scheduler.waiting) == [b, c]


@pytest.mark.parametrize(
    ("preemption_mode", "num_host_blocks"), [("auto", 20), ("recompute", 20), ("swap", 20), ("swap", 0)]
)
def test_a_small_cache_preempts_and_everything_finishes(preemption_mode: str, num_host_blocks: int) -> None:
    engine = make_engine(
        num_blocks=6, max_model_len=48, preemption_mode=preemption_mode, num_host_blocks=num_host_blocks
    )
    sequences = [add(engine, 5 + 3 * i, max_tokens=20) for i in range(6)]
    engine.drain()
    swaps = preemption_mode == "swap" and num_host_blocks > 0
    assert (engine.scheduler.num_swaps > 0, engine.scheduler.num_recomputes > 0) == (swaps, not swaps)
    assert all(len(sequence.output_token_ids) == 20 for sequence in sequences)


def test_abort() -> None:
    engine = make_engine(max_num_seqs=1)
    a, b = engine.add(4), engine.add(4)
    engine.step()
    for group in (b, a):  # one waits, one runs
        [sequence] = group.sequences
        assert engine.scheduler.abort(group.request_id) is group
        assert sequence.status is SequenceStatus.FINISHED_ABORTED and not group.sequences
        engine.check()
    assert not engine.scheduler.has_unfinished and engine.manager.num_used_blocks == 0
    assert engine.scheduler.abort(a.request_id) is None and engine.scheduler.abort("unknown") is None


def test_a_group_that_leaves_the_queue_is_not_compared_with_those_before_it() -> None:
    num_compared = 0

    class Watched(SequenceGroup):
        __hash__ = SequenceGroup.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return self is other

    scheduler = make_engine().scheduler
    groups = [Watched(str(i), [1], SequenceRules(), 0.0) for i in range(100)]
    for group in groups:
        scheduler.add(group)
    num_compared = 0
    for i in (98, 50):
        scheduler.abort(str(i))
        del groups[i]
    assert num_compared == 0
    assert [each.request_id for each in scheduler.waiting] == [each.request_id for each in groups]


def test_restart() -> None:
    """Those named wait anew, in order and without blocks; the others are forgotten."""
    engine = make_engine(num_blocks=8, max_model_len=48, num_host_blocks=8)
    groups = [engine.add(8, max_tokens=20, n=n) for n in (1, 4, 1, 2)]
    engine.step()
    engine.step()
    scheduler, kept = engine.scheduler, [groups[3], groups[0], groups[2]]
    engine.restart(kept)
    assert scheduler.waiting == [groups[0], *groups[2:]] and scheduler.running == scheduler.swapped == []
    assert (engine.manager.num_used_blocks, engine.manager.num_cached_blocks) == (0, 0)
    assert {(s.status, s.num_computed_tokens) for s in sequences_of(kept)} == {(SequenceStatus.WAITING, 0)}
    engine.manager.check_integrity()
    scheduler.add(SequenceGroup(groups[1].request_id, [1], SequenceRules(), 0.0))
    with pytest.raises(ValueError, match="is taken"):
        scheduler.add(SequenceGroup(kept[0].request_id, [1], SequenceRules(), 0.0))
    engine.groups.remove(groups[1])
    scheduler.abort(groups[1].request_id)
    engine.drain()


def test_restart_of_swapped_out_groups_gives_the_host_blocks_back() -> None:
    engine = make_engine(num_blocks=4, max_model_len=32, preemption_mode="swap", num_host_blocks=4)
    engine.add(8)
    engine.add(8)
    while not engine.step().preempted:
        pass
    assert engine.manager.num_used_host_blocks == 2
    engine.restart(engine.unfinished)
    assert engine.manager.num_used_host_blocks == 0
    engine.drain()


def test_errors() -> None:
    with pytest.raises(ValueError, match="at most 64 tokens, what 8 blocks of 8 hold, got 65"):
        make_engine(num_blocks=8, max_model_len=65)
    engine = make_engine(max_model_len=16)
    scheduler = engine.scheduler
    for prompt_len in (0, 16):
        with pytest.raises(ValueError, match=rf"^prompt: expected 1 to 15 tokens .*, got {prompt_len}$"):
            engine.add(prompt_len)
    group = engine.add(15)
    [sequence] = group.sequences
    same_id = SequenceGroup("request 0", [1], SequenceRules(), 0.0)
    with pytest.raises(ValueError, match="'request 0' is taken"):
        scheduler.add(same_id)
    with pytest.raises(ValueError, match=r"expected a finished one, got SequenceStatus\.WAITING"):
        scheduler.finish(group, sequence, SequenceStatus.WAITING)
    for stranger in (same_id, group):
        with pytest.raises(ValueError, match="'request 0' is not an unfinished sequence"):
            scheduler.finish(stranger, same_id.sequences[0], SequenceStatus.FINISHED_STOPPED)
    scheduler.finish(group, sequence, SequenceStatus.FINISHED_STOPPED)
    with pytest.raises(ValueError, match="not an unfinished"):
        scheduler.finish(group, sequence, SequenceStatus.FINISHED_STOPPED)
    group.sequences.append(sequence)
    with pytest.raises(ValueError, match=r"expected a new sequence, got .*FINISHED_STOPPED"):
        scheduler.add(group)
    assert not scheduler.has_unfinished


def test_a_priority_needs_the_policy() -> None:
    with pytest.raises(ValueError, match='priority: expected 0, as the scheduling policy is "fcfs", got 1'):
        make_engine().add(4, priority=1)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_num_seqs": 3}, r"at most 3 \(max_num_seqs\)"),
        ({"max_num_batched_tokens": 2}, r"at most 2 \(max_num_batched_tokens\)"),
        ({"num_blocks": 5, "max_model_len": 40}, r"at most 3 \(blocks of the cache beside the prompt's\)"),
    ],
)
def test_more_sequences_than_can_run_at_once(limits: dict[str, int], expected: str) -> None:
    engine = make_engine(**limits)
    with pytest.raises(ValueError, match=f"^n: expected {expected}, got 4$"):
        engine.add(20, n=4)
    rules = sequence_rules(SamplingParams(n=1, best_of=4))
    with pytest.raises(ValueError, match=f"^best_of: expected {expected}, got 4$"):
        engine.scheduler.add(SequenceGroup("a", list(range(20)), rules, 0.0))
    assert not engine.scheduler.has_unfinished
    engine.add(20, n=2)
    engine.drain()


def test_misuse_by_the_engine_is_caught() -> None:
    engine = make_engine()
    engine.add(4)
    engine.schedule_and_run()
    with pytest.raises(AssertionError, match="was the sampled one not appended"):
        engine.scheduler.schedule()
