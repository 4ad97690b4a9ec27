"""Scheduler, requests of several sequences: forks, beams, gangs, copy-on-write, swapping, and groups too large to fit.

The fake engine checks each step: among others that gangs are whole, and that each sequence reads its own history.
"""

import pytest
from fake_engine import FakeEngine, make_engine, ran

from pagedattn_serve.scheduling.sequence import ScheduledBatch, SequenceGroup, SequenceStatus


def append_tokens(engine: FakeEngine, group: SequenceGroup) -> None:
    for sequence in group.sequences:
        sequence.output_token_ids += engine.new_tokens(1)


def step_until_preempted(engine: FakeEngine) -> SequenceGroup:
    for _ in range(100):
        preempted = engine.step().preempted
        if preempted:
            return preempted[0]
    raise AssertionError("nobody was preempted")


# ---- forks and copy-on-write ----------------------------------------------------------------------------------------


def test_a_group_forks_when_its_prompt_is_computed() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    group = engine.add(12, n=3, max_tokens=3)
    [first] = group.sequences
    batch = engine.step()
    assert ran(batch) == [(first, 8)] and batch.sequences[0].num_samples == 0
    batch = engine.step()
    assert ran(batch) == [(first, 4)] and batch.sequences[0].num_samples == 3
    assert len(group.sequences) == 3 and [sequence.sampling.index for sequence in group.sequences] == [0, 1, 2]
    assert engine.manager.num_used_blocks == 2 and engine.manager.num_table_entries == 6
    batch = engine.step()
    assert ran(batch) == [(sequence, 1) for sequence in group.sequences]
    assert [scheduled.num_samples for scheduled in batch.sequences] == [1, 1, 1]
    # Two copies of the block that is not full; who comes last to it keeps it.
    *copies, shared = (engine.manager.block_table(sequence)[1] for sequence in group.sequences)
    assert batch.blocks_to_copy == [(shared, copy) for copy in copies]
    assert engine.manager.num_used_blocks == 4
    assert not engine.step().blocks_to_copy


def test_a_full_prompt_block_is_never_copied() -> None:
    engine = make_engine()
    group = engine.add(8, n=3, max_tokens=4)
    engine.step()
    assert not engine.step().blocks_to_copy
    assert engine.manager.num_used_blocks == 4
    engine.drain()
    assert all(not sequence.output_token_ids for sequence in group.sequences)


def test_sequences_finish_one_by_one_and_the_last_frees_the_prompt() -> None:
    engine = make_engine()
    group = engine.add(8, n=3)
    engine.step()
    engine.step()
    for num_used_blocks in (3, 2, 0):
        engine.scheduler.finish(group, group.sequences[0], SequenceStatus.FINISHED_STOPPED)
        assert engine.manager.num_used_blocks == num_used_blocks
        engine.check()
    assert not engine.scheduler.has_unfinished


def test_a_fork_runs_alone_when_its_parent_has_finished() -> None:
    engine = make_engine()
    group = engine.add(8)
    [parent] = group.sequences
    for _ in range(3):
        engine.step()
    child = engine.scheduler.fork(group, parent, 1)
    engine.scheduler.finish(group, parent, SequenceStatus.FINISHED_STOPPED)
    assert ran(engine.scheduler.schedule()) == [(child, 1)]


@pytest.mark.parametrize("how", ["abort", "preempt by recompute", "preempt by swap", "restart"])
def test_shared_blocks_are_freed_once(how: str) -> None:
    """A trap: a block that several sequences hold is given back by each of them."""
    engine = make_engine(
        preemption_mode="swap" if how == "preempt by swap" else "recompute", policy="priority", num_host_blocks=8
    )
    group = engine.add(20, n=4)
    engine.step()
    engine.step()
    assert (engine.manager.num_used_blocks, engine.manager.num_table_entries) == (6, 12)
    if how == "abort":
        engine.scheduler.abort(group.request_id)
    elif how == "restart":
        engine.restart([group])
    else:
        engine.add(62, max_tokens=1, priority=-1)
        assert engine.step().preempted == [group]
    engine.check()
    assert engine.manager.num_free_blocks == 8
    assert engine.manager.num_used_host_blocks == (6 if how == "preempt by swap" else 0)
    engine.drain()


def test_a_group_makes_place_as_its_sequences_finish() -> None:
    engine = make_engine(max_num_seqs=4)
    group, other = engine.add(4, n=3), engine.add(4, n=2, max_tokens=3)
    engine.step()
    engine.step()
    assert engine.scheduler.waiting == [other]  # it needs two places from the first, although it begins with one
    engine.scheduler.finish(group, group.sequences[1], SequenceStatus.FINISHED_STOPPED)
    engine.step()
    assert engine.scheduler.running == [group, other]


def test_beams_keep_their_places() -> None:
    """There may be fewer of them for a while, and then as many as before."""
    engine = make_engine(max_num_seqs=4)
    group, other = engine.add(4, n=3, use_beam_search=True), engine.add(4, n=2)
    engine.step()
    engine.scheduler.finish(group, group.sequences[1], SequenceStatus.FINISHED_STOPPED)
    batch = engine.scheduler.schedule()
    assert engine.scheduler.waiting == [other] and len(batch.sequences) == 2


def test_forks_with_different_parents_in_one_step() -> None:
    """As beams go on: one is dropped, one forked twice, one once; who shares what is told apart at the next step."""
    engine = make_engine(num_blocks=16)
    group = engine.add(5, n=4, use_beam_search=True)
    scheduler = engine.scheduler
    engine.schedule_and_run()
    [a] = group.sequences
    b, c, d = (scheduler.fork(group, a, index) for index in (1, 2, 3))
    append_tokens(engine, group)
    for dropped, parents in (([d, b], [a, c]), ([a], [c]), ([], [])):
        engine.schedule_and_run()
        for sequence in dropped[:1]:
            scheduler.finish(group, sequence, SequenceStatus.FINISHED_STOPPED)
        children = [scheduler.fork(group, parent, 0) for parent in parents]
        for sequence in dropped[1:]:
            scheduler.finish(group, sequence, SequenceStatus.FINISHED_STOPPED)
        append_tokens(engine, group)
        engine.manager.check_integrity()
        if dropped == [a]:
            # c, its fork of now, and those of a and c before: a's child has a's block for itself.
            batch = engine.schedule_and_run()
            [pair] = batch.blocks_to_copy
            tables = {each.sequence: engine.manager.block_table(each.sequence) for each in batch.sequences}
            assert pair == (tables[children[0]][0], tables[c][0])
            assert len({table[0] for table in tables.values()}) == len(tables) == 4
            append_tokens(engine, group)
    scheduler.abort(group.request_id)
    assert engine.manager.num_free_blocks == 16


@pytest.mark.parametrize("num_blocks", [64, 14, 8])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_beams_read_their_own_histories(num_blocks: int, preemption_mode: str, enable_prefix_caching: bool) -> None:
    """Random forks and drops of three groups, also where they are preempted."""
    engine = make_engine(
        num_blocks,
        preemption_mode=preemption_mode,
        num_host_blocks=30,
        enable_prefix_caching=enable_prefix_caching,
        max_num_seqs=16,
    )
    for _ in range(3):
        engine.add(10, n=4, use_beam_search=True, max_tokens=14)
    engine.drain()
    scheduler = engine.scheduler
    assert engine.num_times["forked and dropped"] > 0
    assert (scheduler.num_recomputes + scheduler.num_swaps > 0) == (num_blocks < 64)


# ---- gangs ----------------------------------------------------------------------------------------------------------


def test_a_group_decodes_as_a_whole_or_not_at_all() -> None:
    engine = make_engine(max_num_batched_tokens=4)
    first, second = engine.add(1, n=3, max_tokens=4), engine.add(1, n=2, max_tokens=4)
    engine.step()
    late = engine.add(1)
    for _ in range(3):  # one token of the budget is left, which is too little for two, and not for who came later
        members = list(first.sequences)
        assert ran(engine.step()) == [(sequence, 1) for sequence in members]
        assert engine.scheduler.waiting == [late]
    assert not first.sequences and len(second.sequences[0].output_token_ids) == 1
    engine.drain()


def test_a_group_is_preempted_all_or_nothing() -> None:
    engine = make_engine(num_blocks=6, max_model_len=32)
    first = engine.add(7, max_tokens=20)
    second = engine.add(7, n=3, max_tokens=20)
    assert step_until_preempted(engine) is second
    assert {sequence.status for sequence in second.sequences} == {SequenceStatus.WAITING}
    assert engine.manager.num_used_blocks == len(engine.manager.block_table(first.sequences[0]))
    engine.drain()


def test_several_sequences_computed_again_share_what_they_have_in_common() -> None:
    """Without prefix caching, too: the first computes the shared block, the others only what is their own."""
    engine = make_engine(num_blocks=7, max_model_len=56, enable_prefix_caching=False)
    first = engine.add(31, max_tokens=10)
    group = engine.add(12, n=3, max_tokens=10)
    assert step_until_preempted(engine) is group and len(group.sequences) == 3
    num_tokens = group.sequences[0].num_tokens
    while first.sequences:
        engine.step()
    a, b, c = group.sequences
    [batch] = [batch for batch in [engine.step()] if batch.sequences]
    assert ran(batch) == [(a, num_tokens), (b, num_tokens - 8), (c, num_tokens - 8)]
    assert engine.manager.num_used_blocks == 1 + 3 * (-(-num_tokens // 8) - 1)
    engine.drain()


def test_last_tokens_are_held_back_until_all_can_be_computed() -> None:
    """A group goes on as a whole after it was computed again in chunks: none samples before the others."""
    engine = make_engine(num_blocks=7, max_model_len=56, max_num_batched_tokens=10, enable_prefix_caching=False)
    first = engine.add(31, max_tokens=10)
    group = engine.add(12, n=3, max_tokens=10)
    assert step_until_preempted(engine) is group and len(group.sequences) == 3
    num_tokens = group.sequences[0].num_tokens
    while first.sequences:
        engine.step()
    a, b, c = group.sequences
    num_left = {a: num_tokens, b: num_tokens - 8, c: num_tokens - 8}
    for _ in range(20):
        batch = engine.step()
        for sequence, num_new_tokens in ran(batch):
            num_left[sequence] -= num_new_tokens
        if any(scheduled.num_samples for scheduled in batch.sequences):
            break
        assert batch.num_tokens == 10 or sum(num_left.values()) == 3
        assert min(num_left.values()) >= 1
    assert [scheduled.num_samples for scheduled in batch.sequences] == [1, 1, 1]
    assert set(num_left.values()) == {0}
    engine.drain()


# ---- swapping -------------------------------------------------------------------------------------------------------


def make_swapping(**options: int | str) -> tuple[FakeEngine, SequenceGroup, SequenceGroup]:
    """An engine, a request that stays and a group of three that has to make room for it."""
    engine = make_engine(**options)
    return engine, engine.add(31, max_tokens=12), engine.add(12, n=3, max_tokens=12)


def test_auto_swaps_several_sequences_and_computes_one_again() -> None:
    engine, _, group = make_swapping(num_host_blocks=20)
    assert step_until_preempted(engine) is group and engine.scheduler.swapped == [group]
    assert (engine.scheduler.num_swaps, engine.scheduler.num_recomputes) == (1, 0)
    engine.drain()
    engine = make_engine(num_blocks=4, max_model_len=32, num_host_blocks=20)
    engine.add(8, max_tokens=20)
    single = engine.add(8, max_tokens=20)
    assert step_until_preempted(engine) is single and engine.scheduler.waiting == [single]
    assert (engine.scheduler.num_swaps, engine.scheduler.num_recomputes) == (0, 1)


def test_a_swapped_group_goes_on_where_it_was() -> None:
    engine, first, group = make_swapping(num_host_blocks=20, enable_prefix_caching=False)
    step_until_preempted(engine)
    computed = [sequence.num_computed_tokens for sequence in group.sequences]
    assert computed[0] > 12 and engine.manager.num_used_host_blocks == 4  # the shared block, and one for each
    while group in engine.scheduler.swapped:
        batch = engine.step()
    assert not first.sequences
    assert len(batch.blocks_to_swap_in) == 4 and engine.manager.num_used_host_blocks == 0
    assert ran(batch) == [(sequence, 1) for sequence in group.sequences]  # nothing is computed twice
    assert engine.manager.num_used_blocks == 1 + 3 * (-(-(computed[0] + 1) // 8) - 1)  # the first is shared still
    engine.drain()


def test_a_group_comes_back_only_if_the_reserve_stays_free_beside_those_that_run() -> None:
    """Else it is swapped out again as soon as one of them grows."""
    engine = make_engine(num_blocks=10, num_host_blocks=10, watermark=0.2, enable_prefix_caching=False)
    first, short, group = engine.add(31, max_tokens=9), engine.add(7, max_tokens=6), engine.add(12, n=3, max_tokens=12)
    assert step_until_preempted(engine) is group
    while short.sequences:
        engine.step()
    while first.sequences:  # its 4 blocks would fit, but not with 2 in reserve
        assert (engine.manager.num_used_host_blocks, engine.manager.num_free_blocks) == (4, 5)
        assert not engine.step().blocks_to_swap_in
    assert len(engine.step().blocks_to_swap_in) == 4
    engine.drain()


def test_a_group_as_wide_as_a_batch_comes_back() -> None:
    engine = make_engine(max_num_seqs=2, num_host_blocks=8)
    group = engine.add(8, n=2)
    engine.step()
    engine.scheduler._preempt_last(ScheduledBatch())
    assert engine.scheduler.swapped == [group]
    assert len(engine.scheduler.schedule().sequences) == 2


def test_nobody_who_came_later_is_admitted_while_a_group_is_swapped_out() -> None:
    engine, first, group = make_swapping(num_host_blocks=20)
    step_until_preempted(engine)
    late = engine.add(1, max_tokens=1)  # would fit
    while group in engine.scheduler.swapped:
        assert engine.scheduler.waiting == [late]
        engine.step()
    assert not first.sequences
    engine.drain()


def test_who_could_not_run_yet_stays_swapped_out() -> None:
    """There is room on the device, but others decode with all of the budget."""
    engine = make_engine(max_num_batched_tokens=2, policy="priority", preemption_mode="swap", num_host_blocks=8)
    worse = engine.add(30, priority=1)
    engine.step()
    large = engine.add(34, max_tokens=4)
    assert engine.step().preempted == [worse]
    while large.in_prefill:
        engine.step()
    first, second = engine.add(1, max_tokens=9), engine.add(1, max_tokens=20)
    while large.sequences or second.sequences[0].status is SequenceStatus.WAITING:
        engine.step()
    while first.sequences:
        assert engine.manager.num_free_blocks >= 6 and engine.scheduler.swapped == [worse]
        engine.step()
    batch = engine.step()
    assert ran(batch) == [(second.sequences[0], 1), (worse.sequences[0], 1)] and len(batch.blocks_to_swap_in) == 4
    engine.drain()


def test_without_room_on_the_host_all_is_computed_again() -> None:
    for num_host_blocks in (0, 3):
        engine, _, group = make_swapping(num_host_blocks=num_host_blocks, preemption_mode="swap")
        assert step_until_preempted(engine) is group and engine.scheduler.waiting == [group]
        assert (engine.scheduler.num_swaps, engine.manager.num_used_host_blocks) == (0, 0)
        engine.drain()
        assert engine.scheduler.num_recomputes > 0


def test_50_sequences_and_too_little_swap_space() -> None:
    """A trap: the host's pool runs out. They are computed again, and all come to their end."""
    engine = make_engine(
        num_blocks=57, max_model_len=100, max_num_seqs=64, max_num_batched_tokens=128, num_host_blocks=50
    )
    first, group = engine.add(44, max_tokens=40), engine.add(9, n=50, max_tokens=7)
    assert step_until_preempted(engine) is group and engine.manager.num_used_host_blocks == 0
    assert (engine.scheduler.num_recomputes, engine.scheduler.num_swaps) == (1, 0)
    members = list(group.sequences)
    engine.drain()
    assert {len(sequence.output_token_ids) for sequence in members} == {7} and len(members) == 50
    assert group.num_preemptions == 1 and not first.sequences


@pytest.mark.parametrize(("preemption_mode", "num_swaps"), [("auto", 0), ("swap", 1)])
def test_a_chunked_prefill_of_several_sequences_does_not_fill_the_swap_space(
    preemption_mode: str, num_swaps: int
) -> None:
    """A trap: until the prompt is computed it is one sequence; and it takes its blocks on the host only once."""
    engine = make_engine(
        max_num_batched_tokens=2,
        num_host_blocks=5,
        preemption_mode=preemption_mode,
        enable_prefix_caching=False,
    )
    first, group = engine.add(15, max_tokens=14), engine.add(36, n=2, max_tokens=4)
    assert step_until_preempted(engine) is group and group.in_prefill and len(group.sequences) == 1
    num_computed_tokens = group.sequences[0].num_computed_tokens
    assert (engine.scheduler.num_swaps, engine.manager.num_used_host_blocks) == (num_swaps, 5 * num_swaps)
    assert (num_computed_tokens > 0) == (num_swaps > 0)
    while first.sequences:
        engine.step()
    assert ran(engine.step()) == [(group.sequences[0], 2)]
    assert group.sequences[0].num_computed_tokens == num_computed_tokens + 2
    engine.drain()


def test_abort_of_a_swapped_out_group() -> None:
    engine, _, group = make_swapping(num_host_blocks=20)
    step_until_preempted(engine)
    engine.scheduler.finish(group, group.sequences[1], SequenceStatus.FINISHED_STOPPED)
    engine.check()
    engine.scheduler.abort(group.request_id)
    engine.check()
    assert engine.manager.num_used_host_blocks == 0 and not engine.scheduler.swapped
    engine.drain()


# ---- groups that cannot go on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_lone_group_that_can_never_fit_is_reported(preemption_mode: str) -> None:
    """A trap: it is preempted for ever, as it has the cache for itself and is too large for it."""
    engine = make_engine(num_blocks=6, max_model_len=48, preemption_mode=preemption_mode, num_host_blocks=20)
    group = engine.add(7, n=3)
    members = group.sequences
    for _ in range(100):
        batch = engine.schedule_and_run()
        if batch.outgrown:
            break
        for index in range(1, batch.sequences[0].num_samples):
            engine.scheduler.fork(group, group.sequences[0], index)
        append_tokens(engine, group)
    assert batch.outgrown == [group] and not batch.sequences and not batch.preempted
    assert {sequence.num_tokens for sequence in members} == {17}  # 3 x 3 blocks
    assert engine.scheduler.schedule().outgrown == [group]  # until the engine ends it
    engine.scheduler.abort(group.request_id)
    assert engine.manager.num_free_blocks == 6


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_group_that_outgrew_the_cache_while_preempted_is_reported_and_others_go_on(preemption_mode: str) -> None:
    engine = make_engine(num_blocks=6, max_model_len=48, preemption_mode=preemption_mode, num_host_blocks=20)
    first, group, later = engine.add(7, max_tokens=6), engine.add(7, n=3), engine.add(7, max_tokens=20)
    members = group.sequences
    engine.drain()
    assert engine.num_times["outgrown"] == 1 and not members
    assert group.num_preemptions > 0 and not first.sequences and not later.sequences


def test_what_was_swapped_out_for_a_group_that_outgrows_the_cache_is_copied() -> None:
    """The batch has no sequence to run then, and the scheduler takes none that was not copied for one that has run."""
    engine = make_engine(num_blocks=17, max_model_len=100, num_host_blocks=17)
    large, other = engine.add(10, n=6), engine.add(1, n=2, max_tokens=40)
    while other not in engine.scheduler.swapped:
        batch = engine.step()
    assert batch.outgrown == [large] and batch.blocks_to_swap_out and not batch.sequences
    engine.drain()
    engine = make_engine(num_blocks=17, max_model_len=100, num_host_blocks=17)
    large, other = engine.add(10, n=6), engine.add(1, n=2, max_tokens=40)
    while not (batch := engine.schedule()).blocks_to_swap_out:
        engine.runner.execute(batch)
        engine.scheduler.mark_computed(batch)
        for group in (large, other):
            for index in range(len(group.sequences), group.max_num_sequences):
                engine.scheduler.fork(group, group.sequences[0], index)
            append_tokens(engine, group)
    with pytest.raises(RuntimeError, match=r"^batch: expected one that has run, got blocks that were not copied$"):
        engine.scheduler.mark_computed(batch)


def test_pins_may_make_a_group_outgrow_the_cache_and_never_a_single_sequence() -> None:
    engine = make_engine(num_blocks=6, max_model_len=32)
    prefix = engine.new_tokens(16)
    assert engine.scheduler.pin_prefix(prefix) == 16
    engine.add([*prefix, 0], max_tokens=1)
    engine.drain()
    assert engine.num_pinned_blocks() == 2
    engine.add(7, max_tokens=25)
    engine.add(7, n=4)
    engine.drain()
    assert engine.num_times["outgrown"] == 1 and engine.num_pinned_blocks() == 2


# ---- misuse ---------------------------------------------------------------------------------------------------------


def test_only_who_holds_blocks_can_be_forked() -> None:
    engine = make_engine()
    group = engine.add(4, n=2)
    with pytest.raises(ValueError, match="holds no blocks"):
        engine.scheduler.fork(group, group.sequences[0], 1)
    assert len(group.sequences) == 1
