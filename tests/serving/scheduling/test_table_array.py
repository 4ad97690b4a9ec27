"""TableArray and TableRows: whatever comes, grows, goes and is copied on write, row i of the array says what the block
manager's list says of the i-th sequence of the batch; so does the array of another rank, which is given the writes."""

import pickle
import resource
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.scheduling.block_allocator import OutOfBlocksError
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.sequence import ScheduledBatch, ScheduledSequence, Sequence, TableArray

BLOCK_SIZE = 8
MAX_LEN = 5 * BLOCK_SIZE


class Tables:
    """A block manager, and the array of another rank."""

    def __init__(self, num_rows: int, num_blocks: int) -> None:
        scheduler_config = SchedulerConfig(max_num_seqs=num_rows, max_model_len=MAX_LEN)
        cache_config = CacheConfig(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, watermark=0.0, num_host_blocks=num_blocks
        )
        self.manager = BlockManager(cache_config, TableArray(scheduler_config, cache_config))
        self.other_rank = TableArray(scheduler_config, cache_config)

    def start(self, num_tokens: int) -> Sequence:
        sequence = Sequence("a", [0] * num_tokens)
        assert self.manager.allocate([sequence], keep_watermark=False)
        return sequence

    def place(self, sequences: list[Sequence], num_plain: int = 0) -> ScheduledBatch:
        """A batch of these sequences, checked."""
        batch = ScheduledBatch([ScheduledSequence(each, 1, num_samples=1) for each in sequences], num_plain=num_plain)
        self.manager.place(batch)
        placed = [scheduled.sequence for scheduled in batch.sequences]
        assert set(placed[:num_plain]) == set(sequences[:num_plain]) and placed[num_plain:] == sequences[num_plain:]
        for write in pickle.loads(pickle.dumps(batch.table_writes)):
            self.other_rank.write(*write)
        for row, sequence in enumerate(placed):
            table = self.manager.block_table(sequence)
            assert self.manager.table_array.row(0, row, len(table)) == self.other_rank.row(0, row, len(table)) == table
        self.check()
        return batch

    def check(self) -> None:
        """The kernels read whole rows of blocks: entries beyond a table must be of the cache as well."""
        self.manager.check_integrity()
        for array in (self.manager.table_array, self.other_rank):
            assert all(0 <= block < self.manager.num_blocks for block in array.memory)


def test_rows_that_nobody_uses_take_no_memory() -> None:
    """A cache that is too large is refused before the memory is taken of as many sequences as it would hold."""

    def num_resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    cache_config = CacheConfig(num_blocks=8, block_size=BLOCK_SIZE)
    before = num_resident_bytes()
    array = TableArray(SchedulerConfig(max_num_seqs=10**7, max_model_len=MAX_LEN), cache_config)
    assert len(array.memory) == 5 * 10**7 and num_resident_bytes() - before < 10**7


class Life(RuleBasedStateMachine):
    """What a scheduler does, in any order: a sequence gets a token only after a step that ran it."""

    @initialize(num_rows=st.integers(1, 4), num_blocks=st.integers(5, 20))
    def begin(self, num_rows: int, num_blocks: int) -> None:
        self.num_rows = num_rows
        self.tables = Tables(num_rows, num_blocks)
        self.manager = self.tables.manager
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.swapped: list[Sequence] = []

    @rule(num_tokens=st.integers(1, MAX_LEN - 1))
    def admit(self, num_tokens: int) -> None:
        if len(self.running) < self.num_rows and -(-num_tokens // BLOCK_SIZE) <= self.manager.num_free_blocks:
            self.running.append(self.tables.start(num_tokens))

    @precondition(lambda self: self.preempted)
    @rule()
    def admit_again(self) -> None:
        if len(self.running) < self.num_rows and self.manager.allocate(self.preempted[-1:], keep_watermark=False):
            self.running.append(self.preempted.pop())

    @precondition(lambda self: self.swapped)
    @rule()
    def swap_in(self) -> None:
        if len(self.running) < self.num_rows:
            pairs = self.manager.swap_in(self.swapped[-1:], keep_watermark=False)
            if pairs is not None:
                self.running.append(self.swapped.pop())

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 3), end=st.sampled_from(["finished", "preempted", "swapped out"]))
    def stop(self, number: int, end: str) -> None:
        sequence = self.running.pop(number % len(self.running))
        if end == "swapped out" and self.manager.swap_out([sequence]) is not None:
            self.swapped.append(sequence)
            return
        self.manager.free(sequence)
        if end == "preempted":
            self.preempted.append(sequence)

    @precondition(lambda self: len(self.running) > 0)
    @rule(number=st.integers(0, 3), is_dropped=st.booleans())
    def fork(self, number: int, is_dropped: bool) -> None:
        """Beams fork before those that go are dropped. So there may be more sequences than rows until the next step."""
        parent = self.running[number % len(self.running)]
        child = parent.fork(0)
        self.manager.fork(parent, child)
        if is_dropped or len(self.running) == self.num_rows:
            self.manager.free(parent)
            self.running[self.running.index(parent)] = child
        else:
            self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(order=st.permutations(range(4)), num_left_out=st.integers(0, 2), num_plain=st.integers(0, 4))
    def step(self, order: list[int], num_left_out: int, num_plain: int) -> None:
        scheduled = []
        for sequence in [self.running[i] for i in order if i < len(self.running)][num_left_out:]:
            try:
                self.manager.append(sequence)
            except OutOfBlocksError:
                continue
            scheduled.append(sequence)
        self.tables.place(scheduled, min(num_plain, len(scheduled)))
        for sequence in scheduled:
            if sequence.num_tokens < MAX_LEN:
                sequence.output_token_ids.append(0)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 3), num_tokens=st.integers(1, 20), num_kept=st.integers(0, 20))
    def draft(self, number: int, num_tokens: int, num_kept: int) -> None:
        sequence = self.running[number % len(self.running)]
        try:
            self.manager.append(sequence)
        except OutOfBlocksError:
            return
        num_given = self.manager.append_drafts(sequence, min(num_tokens, MAX_LEN - sequence.num_tokens))
        self.manager.check_integrity()
        sequence.output_token_ids += [0] * min(num_given, num_kept)
        self.manager.trim(sequence)

    @rule()
    def clear(self) -> None:
        """An engine that begins anew: another rank may have missed any writes."""
        self.manager.clear()
        self.preempted += self.running + self.swapped
        self.running, self.swapped = [], []
        self.tables.other_rank.memory[:] = self.tables.other_rank.memory[::-1]

    @invariant()
    def check(self) -> None:
        if hasattr(self, "manager"):
            self.tables.check()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=max(100, settings.default.max_examples), stateful_step_count=50)


def test_only_one_moves_when_one_of_many_plain_decodes_ends() -> None:
    tables = Tables(8, 40)
    sequences = [tables.start(9 + i) for i in range(8)]
    tables.place(sequences, 8)
    tables.manager.free(sequences.pop(2))
    batch = tables.place(sequences, 7)
    assert [row for _, row, _, _ in batch.table_writes] == [2]
    assert [each.sequence for each in batch.sequences] == [*sequences[:2], sequences[-1], *sequences[2:-1]]


def test_tables_that_stay_are_not_written() -> None:
    tables = Tables(2, 8)
    sequences = [tables.start(9), tables.start(3)]
    tables.place(sequences)
    assert tables.place(sequences).table_writes == []
    assert tables.place(sequences[::-1], num_plain=2).table_writes == []


def test_a_row_is_kept_while_others_come_and_go() -> None:
    """One sequence is left out of every other step."""
    tables = Tables(3, 20)
    seldom, always = tables.start(17), tables.start(2)
    tables.place([always, seldom])
    for i in range(5):
        other = tables.start(1 + i)
        tables.place([always])
        assert len(tables.place([always, seldom, other]).table_writes) == 1
        tables.manager.free(other)
        seldom.output_token_ids.append(0)
        tables.manager.append(seldom)


def test_copy_on_write() -> None:
    tables = Tables(3, 8)
    parent = tables.start(12)
    tables.place([parent])
    children = [Sequence("c", [0] * 12) for _ in range(2)]
    for child in children:
        tables.manager.fork(parent, child)
    family = [children[1], parent, children[0]]
    tables.place(family)
    for sequence in family:
        sequence.output_token_ids.append(0)
    assert [len(tables.manager.append(sequence)) for sequence in family] == [1, 1, 0]
    tables.place(family)
    rows = [tables.manager.table_array.row(0, row, 2) for row in range(3)]
    assert len({first for first, _ in rows}) == 1 and len({last for _, last in rows}) == 3


def test_integrity_check_can_fail() -> None:
    tables = Tables(2, 8)
    sequences = [tables.start(9), tables.start(3)]
    tables.place(sequences)
    tables.manager.table_array.write(0, 1, 0, [7])
    try:
        tables.manager.check_integrity()
    except AssertionError as error:
        assert "row 1 of a: [7]" in str(error)
    else:
        raise AssertionError("a row that is wrong was not seen")
