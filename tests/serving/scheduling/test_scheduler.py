"""Scheduler: admission, chunks, preemption, errors; and random load on tiny caches with a fake runner.

The fake runner stands for engine, model and sampler: it does to the scheduler what the engine does, and checks at each
step that the cache gives each sequence its own history back.
"""

import itertools

import pytest
from fake_cache import FakeCache
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.batch import ScheduledBatch
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus


class FakeEngine:
    """A scheduler with a cache of tokens for a model; every token it is given or makes is unique."""

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self.scheduler = Scheduler(scheduler_config, cache_config)
        self.cache = FakeCache(cache_config)
        self.new_token = itertools.count()
        self.sequences: list[Sequence] = []  # all that were ever added, in arrival order

    def add(self, prompt_len: int, max_tokens: int = 1000) -> Sequence:
        prompt = [next(self.new_token) for _ in range(prompt_len)]
        arrival = len(self.sequences)
        sequence = Sequence(f"request {arrival}", prompt, SamplingParams(max_tokens=max_tokens), float(arrival))
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self.check_batch(batch)
        self.cache.copy(batch.blocks_to_copy)
        for scheduled in batch.sequences:
            sequence, table = scheduled.sequence, scheduled.block_table
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + scheduled.num_new_tokens
            self.cache.write(table, start, sequence.tokens(start, end))
        for scheduled in batch.sequences:  # after all writes, so that none went to another's slot
            sequence, end = scheduled.sequence, scheduled.sequence.num_computed_tokens + scheduled.num_new_tokens
            assert self.cache.read(scheduled.block_table, end) == sequence.tokens(0, end)
            assert scheduled.samples == (end == sequence.num_tokens)
        self.scheduler.mark_computed(batch)
        for sequence in [scheduled.sequence for scheduled in batch.sequences if scheduled.samples]:
            sequence.output_token_ids.append(next(self.new_token))
            if len(sequence.output_token_ids) == sequence.sampling_params.max_tokens:
                self.scheduler.finish(sequence, SequenceStatus.FINISHED_STOPPED)
            elif sequence.num_tokens == self.scheduler.config.max_model_len:
                self.scheduler.finish(sequence, SequenceStatus.FINISHED_LENGTH)
        self.check()
        return batch

    def drain(self) -> None:
        """The oldest sequence computes a token or more at each step, so there are never more steps than tokens."""
        left = [sequence for sequence in self.sequences if not sequence.status.is_finished]
        bound = len(left) * self.scheduler.config.max_model_len
        for _ in range(bound):
            if not self.scheduler.has_unfinished:
                break
            assert self.step().sequences
        assert not self.scheduler.has_unfinished
        assert self.scheduler.block_manager.num_used_blocks == 0
        assert self.scheduler.schedule() == ScheduledBatch()

    def check_batch(self, batch: ScheduledBatch) -> None:
        config, manager = self.scheduler.config, self.scheduler.block_manager
        assert batch.num_tokens <= config.max_num_batched_tokens
        assert batch.is_empty == (not self.scheduler.has_unfinished)
        for scheduled in batch.sequences:
            sequence = scheduled.sequence
            assert sequence in self.scheduler.running and scheduled.num_new_tokens > 0
            assert scheduled.block_table == manager.block_table(sequence)
            assert len(scheduled.block_table) * manager.block_size >= sequence.num_tokens
        for sequence in batch.preempted:
            assert sequence in self.scheduler.waiting and sequence.num_computed_tokens == 0
            assert all(scheduled.sequence.num_computed_tokens > 0 for scheduled in batch.sequences)  # none admitted
        # In arrival order, and nobody is left out while there is budget, a place and room.
        running = self.scheduler.running
        assert [scheduled.sequence for scheduled in batch.sequences] == running[: len(batch.sequences)]
        if batch.num_tokens < config.max_num_batched_tokens:
            assert len(batch.sequences) == len(running)
            if self.scheduler.waiting and not batch.preempted and len(running) < config.max_num_seqs:
                assert not manager.can_allocate(self.scheduler.waiting[0], keep_watermark=True)

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.block_manager.check_integrity()
        queue = [*scheduler.running, *scheduler.waiting]
        # One queue in arrival order, each once: nobody runs before an earlier arrival that still waits.
        assert queue == [sequence for sequence in self.sequences if not sequence.status.is_finished]
        assert (scheduler.num_running, scheduler.num_waiting) == (len(scheduler.running), len(scheduler.waiting))
        assert scheduler.num_running <= scheduler.config.max_num_seqs
        assert {sequence.status for sequence in scheduler.running} <= {SequenceStatus.RUNNING}
        assert {sequence.status for sequence in scheduler.waiting} <= {SequenceStatus.WAITING}
        assert scheduler.num_preemptions == sum(sequence.num_preemptions for sequence in self.sequences)
        assert all(sequence.num_uncomputed_tokens <= 1 for sequence in scheduler.running[:-1])
        blocks = {b for sequence in scheduler.running for b in scheduler.block_manager.block_table(sequence)}
        assert scheduler.block_manager.num_used_blocks == len(blocks)


def make_engine(
    num_blocks: int = 8, max_model_len: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 64
) -> FakeEngine:
    scheduler_config = SchedulerConfig(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    return FakeEngine(scheduler_config, CacheConfig(num_blocks=num_blocks, block_size=8))


def ran(batch: ScheduledBatch) -> list[tuple[Sequence, int]]:
    return [(scheduled.sequence, scheduled.num_new_tokens) for scheduled in batch.sequences]


def test_one_sequence_prefills_then_decodes() -> None:
    engine = make_engine()
    a = engine.add(10, max_tokens=3)
    assert [ran(engine.step()) for _ in range(3)] == [[(a, 10)], [(a, 1)], [(a, 1)]]
    assert a.status is SequenceStatus.FINISHED_STOPPED and len(a.output_token_ids) == 3
    assert engine.step().is_empty


def test_a_long_prompt_runs_in_chunks_beside_decodes() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    a = engine.add(4)
    b = engine.add(13)
    c = engine.add(1)
    assert ran(engine.step()) == [(a, 4), (b, 4)]
    assert ran(engine.step()) == [(a, 1), (b, 7)]
    batch = engine.step()
    assert ran(batch) == [(a, 1), (b, 2), (c, 1)]
    assert [scheduled.samples for scheduled in batch.sequences] == [True, True, True]
    assert len(a.output_token_ids) == 3 and len(b.output_token_ids) == 1


def test_more_decodes_than_budget_run_in_arrival_order() -> None:
    engine = make_engine(max_num_batched_tokens=2)
    a, b = engine.add(1, max_tokens=4), engine.add(1, max_tokens=4)
    c = engine.add(1, max_tokens=1)
    assert ran(engine.step()) == [(a, 1), (b, 1)]
    assert ran(engine.step()) == [(a, 1), (b, 1)]
    engine.drain()
    assert c.status is SequenceStatus.FINISHED_STOPPED


def test_max_num_seqs() -> None:
    engine = make_engine(max_num_seqs=2)
    a, b, c = (engine.add(1, max_tokens=n) for n in (3, 1, 1))
    assert ran(engine.step()) == [(a, 1), (b, 1)]
    assert ran(engine.step()) == [(a, 1), (c, 1)]


def test_admission_is_strictly_in_order() -> None:
    engine = make_engine(num_blocks=8)
    a, b, c = engine.add(20), engine.add(40), engine.add(1)
    assert ran(engine.step()) == [(a, 20)]  # b needs 5 blocks and one in reserve, 5 are free; c would fit but waits
    assert list(engine.scheduler.waiting) == [b, c]


def test_a_lone_sequence_may_use_the_reserve() -> None:
    engine = make_engine(num_blocks=8)
    a = engine.add(63)
    assert ran(engine.step()) == [(a, 63)]
    engine.drain()
    assert a.status is SequenceStatus.FINISHED_LENGTH and a.num_tokens == 64


def test_the_latest_arrival_is_preempted_and_recomputed() -> None:
    engine = make_engine(num_blocks=4, max_model_len=32)
    a, b = engine.add(8), engine.add(8)
    engine.step()
    assert engine.scheduler.block_manager.num_free_blocks == 2
    for _ in range(8):
        engine.step()
    assert a.num_tokens == b.num_tokens == 17  # both ask for a third block now
    batch = engine.step()
    assert batch.preempted == [b] and ran(batch) == [(a, 1)]
    assert (b.num_preemptions, a.num_preemptions, engine.scheduler.num_preemptions) == (1, 0, 1)
    assert b.status is SequenceStatus.WAITING and len(b.output_token_ids) == 9
    c = engine.add(1)
    assert list(engine.scheduler.waiting) == [b, c]  # b kept its place
    while a.status is SequenceStatus.RUNNING:
        assert ran(engine.step()) == [(a, 1)]
    assert ran(engine.step()) == [(b, 17)]  # its output is recomputed as if it were prompt
    engine.drain()


def test_a_sequence_can_be_its_own_victim() -> None:
    engine = make_engine(num_blocks=3, max_model_len=24)
    a, b = engine.add(7), engine.add(6)
    for _ in range(3):
        assert not engine.step().preempted
    assert engine.scheduler.block_manager.num_free_blocks == 0  # a took the last one, and b needs one now
    batch = engine.step()
    assert batch.preempted == [b] and ran(batch) == [(a, 1)]
    engine.drain()


def test_a_prefill_in_progress_can_be_the_victim() -> None:
    engine = make_engine(num_blocks=4, max_model_len=32, max_num_batched_tokens=2)
    a = engine.add(6)
    for _ in range(3):
        engine.step()
    b = engine.add(15)
    for _ in range(10):
        assert ran(engine.step()) == [(a, 1), (b, 1)]
    assert a.num_tokens == 17 and b.num_computed_tokens == 10
    batch = engine.step()
    assert batch.preempted == [b] and ran(batch) == [(a, 1)] and b.num_computed_tokens == 0
    engine.drain()


def test_a_shared_last_block_is_copied_before_the_step() -> None:
    engine = make_engine()
    a = engine.add(4)
    engine.step()
    scheduler, manager = engine.scheduler, engine.scheduler.block_manager
    manager.fork(a, Sequence("fork", list(range(a.num_tokens)), SamplingParams(), 0.0))
    [shared] = manager.block_table(a)
    batch = scheduler.schedule()
    [own] = batch.sequences[0].block_table
    assert batch.blocks_to_copy == [(shared, own)] and shared != own


def test_small_cache_preempts_and_everything_finishes() -> None:
    engine = make_engine(num_blocks=6, max_model_len=48)
    sequences = [engine.add(5 + 3 * i, max_tokens=20) for i in range(6)]
    engine.drain()
    assert engine.scheduler.num_preemptions > 0
    assert all(len(sequence.output_token_ids) == 20 for sequence in sequences)


def test_abort() -> None:
    engine = make_engine(max_num_seqs=1)
    a, b = engine.add(4), engine.add(4)
    engine.step()
    for sequence in (b, a):  # one waits, one runs
        assert engine.scheduler.abort(sequence.request_id) is sequence
        assert sequence.status is SequenceStatus.FINISHED_ABORTED
        engine.check()
    assert not engine.scheduler.has_unfinished and engine.scheduler.block_manager.num_used_blocks == 0
    assert engine.scheduler.abort(a.request_id) is None and engine.scheduler.abort("unknown") is None


def test_restart() -> None:
    """Those named wait anew, in order and without blocks; the others are forgotten."""
    engine = make_engine(num_blocks=6, max_model_len=48)
    sequences = [engine.add(5 + 3 * i, max_tokens=20) for i in range(4)]
    engine.step()
    engine.step()
    scheduler, kept = engine.scheduler, [sequences[0], *sequences[2:]]
    scheduler.restart(kept)
    assert (list(scheduler.waiting), scheduler.running, scheduler.block_manager.num_used_blocks) == (kept, [], 0)
    assert {(s.status, s.num_computed_tokens) for s in kept} == {(SequenceStatus.WAITING, 0)}
    scheduler.block_manager.check_integrity()
    scheduler.add(Sequence(sequences[1].request_id, [1], SamplingParams(), 0.0))
    with pytest.raises(ValueError, match="is taken"):
        scheduler.add(Sequence(kept[0].request_id, [1], SamplingParams(), 0.0))


def test_errors() -> None:
    with pytest.raises(ValueError, match="at most 64 tokens, what 8 blocks of 8 hold, got 65"):
        make_engine(num_blocks=8, max_model_len=65)
    engine = make_engine(max_model_len=16)
    for prompt_len in (0, 16):
        with pytest.raises(ValueError, match=rf"^prompt: expected 1 to 15 tokens .*, got {prompt_len}$"):
            engine.add(prompt_len)
    a = engine.add(15)
    with pytest.raises(ValueError, match="'request 0' is taken"):
        engine.scheduler.add(Sequence("request 0", [1], SamplingParams(), 0.0))
    with pytest.raises(ValueError, match=r"expected a finished one, got SequenceStatus\.WAITING"):
        engine.scheduler.finish(a, SequenceStatus.WAITING)
    with pytest.raises(ValueError, match="'request 0' is not an unfinished sequence"):
        engine.scheduler.finish(Sequence("request 0", [1], SamplingParams(), 0.0), SequenceStatus.FINISHED_STOPPED)
    engine.scheduler.finish(a, SequenceStatus.FINISHED_STOPPED)
    with pytest.raises(ValueError, match=r"expected a new sequence, got SequenceStatus\.FINISHED_STOPPED"):
        engine.scheduler.add(a)
    with pytest.raises(ValueError, match="not an unfinished"):
        engine.scheduler.finish(a, SequenceStatus.FINISHED_STOPPED)


def test_misuse_by_the_engine_is_caught() -> None:
    engine = make_engine()
    engine.add(4)
    engine.scheduler.mark_computed(engine.scheduler.schedule())
    with pytest.raises(AssertionError, match="was the sampled one not appended"):
        engine.scheduler.schedule()

    engine = make_engine(num_blocks=1, max_model_len=8)
    a = engine.add(7)
    for _ in range(2):  # to 9 tokens, where 8 were the limit
        engine.scheduler.mark_computed(engine.scheduler.schedule())
        a.output_token_ids.append(0)
    with pytest.raises(AssertionError, match="outgrew the cache"):
        engine.scheduler.schedule()


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts and steps on a tiny cache; FakeEngine checks each action, and at the end all finish."""

    @initialize(num_blocks=st.integers(2, 8), max_num_seqs=st.integers(1, 5), max_num_batched_tokens=st.integers(1, 40))
    def start(self, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_model_len = 8 * num_blocks - 3
        self.engine = make_engine(num_blocks, self.max_model_len, max_num_seqs, max_num_batched_tokens)

    @rule(data=st.data(), max_tokens=st.integers(1, 40))
    def add(self, data: st.DataObject, max_tokens: int) -> None:
        self.engine.add(data.draw(st.integers(1, self.max_model_len - 1)), max_tokens)

    @rule(num_steps=st.integers(1, 10))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @rule(index=st.integers(0, 9))
    def abort(self, index: int) -> None:
        queue = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
        for sequence in queue[index : index + 1]:
            assert self.engine.scheduler.abort(sequence.request_id) is sequence

    @invariant()
    def consistent(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
