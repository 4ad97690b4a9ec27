"""Slots of states: shared after a fork, copied before a write, moved to the host, kept as checkpoints, handed on."""

import pytest

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.scheduling import state_slots
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import ScheduledBatch, ScheduledSequence, Sequence, TableArray
from pagedattn_serve.scheduling.state_slots import StateSlots


def sequences_of(*lengths: int) -> list[Sequence]:
    return [Sequence(f"request {i}", list(range(length))) for i, length in enumerate(lengths)]


def test_forked_sequences_share_a_slot_until_one_runs() -> None:
    slots = StateSlots(3, 3)
    parent, child, other = sequences_of(4, 4, 4)
    slots.take(parent)
    slots.fork(parent, child)
    slots.fork(parent, other)
    assert len(set(slots.slot_of.values())) == 1 == slots.num_used_slots
    shared = slots.slot_of[parent]
    slots.swap_out([parent, child, other])  # one copy for all
    slots.swap_in([parent, child, other])
    copies = slots.take_copies()
    assert (len(copies.to_swap_out), len(copies.to_swap_in), copies.to_copy) == (1, 1, [])
    shared = slots.slot_of[parent]
    for sequence in (parent, child, other):
        slots.make_own(sequence)
    assert slots.slot_of[other] == shared  # the last one keeps it
    assert slots.take_copies().to_copy == [(shared, slots.slot_of[parent]), (shared, slots.slot_of[child])]
    slots.check_integrity({parent, child, other}, set())
    for sequence in (parent, child, other):
        slots.free(sequence)
    assert slots.num_used_slots == 0 and not slots.take_copies()


def test_checkpoints_have_the_slots_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = StateSlots(2, 0)
    first, second = sequences_of(20, 20)
    slots.take(first)
    batch = ScheduledBatch([ScheduledSequence(first, 20, 1)])
    keys = [b"a", b"b", b"c", b"d"]
    monkeypatch.setattr(state_slots, "CHECKPOINT_TOKENS", 5)
    [kept] = slots.plan_checkpoints(batch, 5, lambda _, num_blocks: keys[:num_blocks])  # the others have no slot
    assert (kept.sequence, kept.num_new_tokens) == (0, 5) and kept.slot != slots.slot_of[first]
    assert not slots.has_checkpoint(b"a")  # not before the step has run
    slots.publish_checkpoints()
    assert [slots.has_checkpoint(key) for key in keys] == [True, False, False, False]
    slots.take_copy(second, b"a")  # in the last slot, which is that of the checkpoint
    assert slots.slot_of[second] == kept.slot and not slots.take_copies()
    slots.check_integrity({first, second}, set())
    assert not slots.have_room([first])


@pytest.mark.parametrize(("num_tokens", "expected"), [(15, [10]), (16, [15])])
def test_a_prompt_leaves_a_checkpoint_before_its_last_token(num_tokens: int, expected: list[int]) -> None:
    slots = StateSlots(4, 0)
    [sequence] = sequences_of(num_tokens)
    slots.take(sequence)
    batch = ScheduledBatch([ScheduledSequence(sequence, num_tokens, 1)])
    keys = [b"a", b"b", b"c"]
    kept = slots.plan_checkpoints(batch, 5, lambda _, num_blocks: keys[:num_blocks])
    assert [checkpoint.num_new_tokens for checkpoint in kept] == expected


def test_a_registered_prefix_keeps_its_checkpoint() -> None:
    """Amid a period of tokens, beside running sequences, whatever other prompts leave, and after all is forgotten."""
    config = CacheConfig(num_blocks=20, block_size=4, num_state_slots=3)
    scheduler = Scheduler(SchedulerConfig(max_model_len=40, max_num_seqs=2), config)
    manager, slots = scheduler.block_manager, scheduler.block_manager.states
    assert scheduler.pin_prefix(list(range(10))) == 8
    with pytest.raises(ArgumentError, match=r"prefix: expected at most 1 registered prefixes, .* got 2"):
        scheduler.pin_prefix(list(range(50, 60)))
    assert scheduler.pin_prefix([1, 2, 3]) == 0  # no block, and no state

    def compute(sequence: Sequence) -> int:
        """How many tokens the sequence finds."""
        assert manager.allocate([sequence], keep_watermark=False)
        found = sequence.num_computed_tokens
        batch = ScheduledBatch([ScheduledSequence(sequence, sequence.num_tokens - found, 1)])
        manager.place(batch)
        sequence.num_computed_tokens = sequence.num_tokens
        manager.publish(sequence, 0, sequence.num_tokens // 4)
        slots.publish_checkpoints()
        return found

    for _ in range(2):
        [first] = sequences_of(18)
        assert compute(first) == 0
        others = [Sequence("other", list(range(100 * i, 100 * i + 18))) for i in range(1, 4)]
        for other in others:  # each leaves a checkpoint, for which there is one slot
            assert compute(other) == 0
            manager.free(other)
        [again] = sequences_of(10)
        assert compute(again) == 8
        assert not slots.have_room([first])
        manager.check_integrity()
        manager.clear()


def test_what_sequences_share_is_computed_by_the_first() -> None:
    """As after a preemption: the others wait, and begin with copies."""
    config = CacheConfig(num_blocks=20, block_size=4, num_state_slots=3)
    manager = BlockManager(config, TableArray(SchedulerConfig(max_model_len=40, max_num_seqs=3), config))
    first, second, third = sequences_of(11, 13, 6)
    assert manager.allocate([first, second, third], keep_watermark=False)
    assert [each.num_computed_tokens for each in (first, second, third)] == [0, 8, 4]
    states, group = manager.states, [first, second, third]
    assert states.limits(group) == [4, 0, 0]
    first.num_computed_tokens = 4
    states.hand_on(group)
    assert states.take_copies().to_copy == [(states.slot_of[first], states.slot_of[third])]
    assert states.limits(group) == [4, 0, 2]
    first.num_computed_tokens = 8
    states.hand_on(group)
    assert states.take_copies().to_copy == [(states.slot_of[first], states.slot_of[second])]
    assert states.limits(group) == [3, 5, 2]
    manager.check_integrity()


def test_more_sequences_than_slots_are_refused() -> None:
    cache_config = CacheConfig(num_blocks=8, block_size=4, num_state_slots=2)
    with pytest.raises(ArgumentError, match="max_num_seqs: expected at most 2, the sequences whose states"):
        Scheduler(SchedulerConfig(max_model_len=16, max_num_seqs=3), cache_config)
