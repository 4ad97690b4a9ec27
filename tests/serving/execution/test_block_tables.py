"""BlockTables: whatever comes, grows, goes and is copied on write, each row says what the block manager's list says."""

import pickle
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.execution.block_tables import BlockTables, TableArray
from pagedattn_serve.scheduling.batch import ScheduledSequence
from pagedattn_serve.scheduling.block_allocator import OutOfBlocksError
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus

BLOCK_SIZE = 8
MAX_LEN = 5 * BLOCK_SIZE


def make_manager(num_blocks: int) -> BlockManager:
    return BlockManager(
        CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, watermark=0.0, num_host_blocks=num_blocks)
    )


def start(manager: BlockManager, num_tokens: int) -> Sequence:
    """A new sequence that runs."""
    sequence = Sequence("a", [0] * num_tokens)
    assert manager.allocate([sequence], keep_watermark=False)
    sequence.status = SequenceStatus.RUNNING
    return sequence


def leave(manager: BlockManager, sequence: Sequence, status: SequenceStatus) -> None:
    manager.free(sequence)
    sequence.status = status


class MirroredTables(BlockTables):
    """With an array that is given the changes alone, as another process has it."""

    def __init__(self, max_num_seqs: int, max_num_blocks_per_seq: int) -> None:
        super().__init__(max_num_seqs, max_num_blocks_per_seq)
        self.mirror = TableArray(max_num_seqs, max_num_blocks_per_seq)

        self.scheduled: dict[Sequence, tuple[ScheduledSequence, list[int]]] = {}  # last, and its table as it was

    def schedule(self, sequence: Sequence, table: list[int]) -> ScheduledSequence:
        """As the scheduler does: the same object again, if the table has not changed."""
        scheduled, before = self.scheduled.get(sequence, (None, []))
        if scheduled is None or scheduled.block_table is not table or before != table:
            scheduled = ScheduledSequence(sequence, 1, table, num_samples=1)
        self.scheduled[sequence] = scheduled, list(table)
        return scheduled


def update(tables: MirroredTables, manager: BlockManager, sequences: Iterable[Sequence]) -> npt.NDArray[np.int32]:
    """A step with these sequences, checked."""
    scheduled = [tables.schedule(sequence, manager.block_table(sequence)) for sequence in sequences]
    array, changes = tables.update(scheduled)
    mirrored = tables.mirror.apply(pickle.loads(pickle.dumps(changes)))
    assert mirrored.dtype == array.dtype and mirrored.tolist() == array.tolist()
    lengths = [len(each.block_table) for each in scheduled]
    assert array.dtype == np.int32 and array.shape == (len(scheduled), max(lengths))
    assert [row[:n].tolist() for row, n in zip(array, lengths, strict=True)] == [s.block_table for s in scheduled]
    # The kernels read whole rows of blocks: those beyond the table must be of the cache as well.
    assert ((array >= 0) & (array < manager.num_blocks)).all()
    return array


class Life(RuleBasedStateMachine):
    """What a scheduler does, in any order: a sequence gets a token only after a step that ran it."""

    @initialize(num_rows=st.integers(1, 4), num_blocks=st.integers(5, 20))
    def begin(self, num_rows: int, num_blocks: int) -> None:
        self.num_rows = num_rows
        self.manager = make_manager(num_blocks)
        self.tables = MirroredTables(num_rows, MAX_LEN // BLOCK_SIZE)
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []

    @rule(num_tokens=st.integers(1, MAX_LEN - 1))
    def admit(self, num_tokens: int) -> None:
        if len(self.running) < self.num_rows and -(-num_tokens // BLOCK_SIZE) <= self.manager.num_free_blocks:
            self.running.append(start(self.manager, num_tokens))

    @precondition(lambda self: self.preempted)
    @rule()
    def admit_again(self) -> None:
        sequence = self.preempted[-1]
        if len(self.running) < self.num_rows and self.manager.allocate([sequence], keep_watermark=False):
            sequence.status = SequenceStatus.RUNNING
            self.running.append(self.preempted.pop())

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 3), status=st.sampled_from(SequenceStatus))
    def stop(self, number: int, status: SequenceStatus) -> None:
        sequence = self.running.pop(number % len(self.running))
        if status is SequenceStatus.RUNNING:
            status = SequenceStatus.WAITING
        leave(self.manager, sequence, status)
        if status is SequenceStatus.WAITING:
            self.preempted.append(sequence)

    @precondition(lambda self: 0 < len(self.running) < self.num_rows)
    @rule(number=st.integers(0, 3))
    def fork(self, number: int) -> None:
        parent = self.running[number % len(self.running)]
        child = Sequence("child", [0] * parent.num_tokens, status=SequenceStatus.RUNNING)
        self.manager.fork(parent, child)
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(numbers=st.sets(st.integers(0, 3), min_size=1), fails=st.sampled_from([False, False, False, True]))
    def step(self, numbers: set[int], fails: bool) -> None:
        """Of some that run. Where it fails before the tables are asked for, the same tokens wait for the next one."""
        scheduled = []
        for sequence in (self.running[i] for i in sorted(numbers) if i < len(self.running)):
            try:
                self.manager.append(sequence)
            except OutOfBlocksError:
                continue
            scheduled.append(sequence)
        if fails or not scheduled:
            return
        update(self.tables, self.manager, scheduled)
        for sequence in scheduled:
            if sequence.num_tokens < MAX_LEN:
                sequence.output_token_ids.append(0)

    @invariant()
    def check_integrity(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=max(100, settings.default.max_examples), stateful_step_count=50)


def test_more_sequences_than_rows() -> None:
    """Rows change hands over and over, of finished, aborted and preempted ones."""
    manager, tables = make_manager(12), MirroredTables(3, 4)
    ends = [status for status in SequenceStatus if status is not SequenceStatus.RUNNING]
    running = [start(manager, 9) for _ in range(3)]
    for i in range(40):
        update(tables, manager, running)
        leave(manager, running.pop(i % 3), ends[i % len(ends)])
        running.insert(0, start(manager, 1 + 7 * i % 25))
    manager.check_integrity()


def test_a_row_is_kept_while_others_come_and_go() -> None:
    """One sequence runs seldom; in between its row must not be given away."""
    manager, tables = make_manager(20), MirroredTables(2, 4)
    seldom = start(manager, 17)
    update(tables, manager, [seldom])
    for i in range(5):
        others = [start(manager, 25), start(manager, 1 + i)]
        for other in others:
            update(tables, manager, [other])
            leave(manager, other, SequenceStatus.FINISHED_LENGTH)
        update(tables, manager, [seldom])
        seldom.output_token_ids.append(0)
        manager.append(seldom)


def test_a_preempted_sequence_gets_other_blocks() -> None:
    """It may come back before anybody else needs its row, which still has the old ones."""
    manager, tables = make_manager(8), MirroredTables(2, 4)
    sequence = start(manager, 20)
    update(tables, manager, [sequence])
    before = list(manager.block_table(sequence))
    leave(manager, sequence, SequenceStatus.WAITING)
    other = start(manager, 9)
    sequence.status = SequenceStatus.RUNNING
    manager.allocate([sequence], keep_watermark=False)
    assert manager.block_table(sequence) != before
    update(tables, manager, [other, sequence])
    update(tables, manager, [sequence, other])


def test_copy_on_write() -> None:
    manager, tables = make_manager(8), MirroredTables(3, 4)
    parent = start(manager, 12)
    update(tables, manager, [parent])
    children = [Sequence("c", [0] * 12, status=SequenceStatus.RUNNING) for _ in range(2)]
    for child in children:
        manager.fork(parent, child)
    update(tables, manager, [*children, parent])
    family = [children[1], parent, children[0]]
    for sequence in family:
        sequence.output_token_ids.append(0)
    assert [manager.append(sequence) is not None for sequence in family] == [True, True, False]
    rows = update(tables, manager, family)
    assert len(set(rows[:, 0])) == 1 and len(set(rows[:, 1])) == 3


def test_an_array_that_was_given_out_stays_as_it_is() -> None:
    """A device may still read it when the next step is made."""
    manager, tables = make_manager(8), MirroredTables(2, 4)
    sequences = [start(manager, 8), start(manager, 3)]
    array = update(tables, manager, sequences)
    before = array.copy()
    for sequence in sequences:
        sequence.output_token_ids.append(0)
        manager.append(sequence)
    update(tables, manager, sequences)
    leave(manager, sequences.pop(), SequenceStatus.FINISHED_STOPPED)
    update(tables, manager, [*sequences, start(manager, 16)])
    assert (array == before).all()


def test_tables_that_stay_are_not_written() -> None:
    manager, tables = make_manager(8), MirroredTables(2, 4)
    sequences = [start(manager, 9), start(manager, 3)]
    update(tables, manager, sequences)
    scheduled = [tables.schedule(each, manager.block_table(each)) for each in sequences]
    _, changes = tables.update(scheduled)
    assert (changes.rewritten, changes.last_blocks) == ([], [])


def test_all_rows_are_free_after_clear() -> None:
    manager, tables = make_manager(20), MirroredTables(2, MAX_LEN // BLOCK_SIZE)
    first, second = start(manager, 9), start(manager, 20)
    update(tables, manager, [first])
    update(tables, manager, [first, second])
    tables.clear()
    update(tables, manager, [start(manager, 17), start(manager, 3)])


def test_after_clear_the_changes_are_enough_for_an_array_that_missed_a_step() -> None:
    """Of sequences that go on with their blocks, too."""
    manager, tables = make_manager(20), MirroredTables(3, MAX_LEN // BLOCK_SIZE)
    sequences = [start(manager, 9), start(manager, 20)]
    update(tables, manager, sequences)
    sequences.append(start(manager, 12))
    tables.update([ScheduledSequence(each, 1, manager.block_table(each), num_samples=1) for each in sequences])
    tables.mirror = TableArray(3, MAX_LEN // BLOCK_SIZE)
    tables.clear()
    update(tables, manager, sequences[::-1])
