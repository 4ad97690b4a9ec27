"""The block tables of a step as one array, which the ops read in place. The block manager writes what changes."""

from array import array

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.scheduling.sequence import ScheduledSequence, Sequence, TableWrite


class TableArray:
    """int32 [max_num_seqs, max_num_blocks_per_seq], zeros at first.

    memory: the array, one row after the other, at the same address for ever.
    """

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self.num_rows = scheduler_config.max_num_seqs
        self.num_columns = -(-scheduler_config.max_model_len // cache_config.block_size)
        self.memory = array("i", bytes(4 * self.num_rows * self.num_columns))

    def write(self, row: int, column: int, blocks: list[int]) -> None:
        """Put blocks into a row, from this column on."""
        begin = row * self.num_columns + column
        for i, block in enumerate(blocks, begin):
            self.memory[i] = block

    def row(self, row: int, length: int) -> list[int]:
        """The first blocks of a row."""
        begin = row * self.num_columns
        return self.memory[begin : begin + length].tolist()


class TableRows:
    """Whose table each row of the array is: row i is that of the i-th sequence of the batch.

    A sequence that is left out of a batch keeps its row until another sequence gets the row.
    """

    def __init__(self, array: TableArray) -> None:
        self._array = array
        self.clear()

    def clear(self) -> None:
        """Take all rows back."""
        self._sequences: list[Sequence | None] = [None] * self._array.num_rows  # by row
        self._row_of: dict[Sequence, int] = {}
        self._writes: list[TableWrite] = []

    def write(self, sequence: Sequence, column: int, blocks: list[int]) -> None:
        """The table of a sequence has these blocks from this column on. Nothing is written if it has no row."""
        row = self._row_of.get(sequence)
        if row is not None:
            self._array.write(row, column, blocks)
            self._writes.append((row, column, blocks))

    def take_back(self, sequence: Sequence) -> None:
        """Let the row of a sequence be nobody's. Nothing happens if it has no row."""
        row = self._row_of.pop(sequence, None)
        if row is not None:
            self._sequences[row] = None

    def place(
        self, batch: list[ScheduledSequence], num_movable: int, tables: dict[Sequence, list[int]]
    ) -> list[TableWrite]:
        """Give each sequence of a batch its row. Returns all writes since the last call, in order.

        The first `num_movable` change their order so that those that have a row among the first keep it: when one of
        many ends, only one other moves.
        """
        batch[:num_movable] = self._in_rows(batch[:num_movable])
        sequences = [scheduled.sequence for scheduled in batch]
        if sequences != self._sequences[: len(sequences)]:
            for row, sequence in enumerate(sequences):
                if self._sequences[row] is not sequence:
                    self._give(row, sequence, tables[sequence])
        writes, self._writes = self._writes, []
        return writes

    def _give(self, row: int, sequence: Sequence, table: list[int]) -> None:
        before = self._sequences[row]
        if before is not None:
            self.take_back(before)
        self.take_back(sequence)
        self._sequences[row] = sequence
        self._row_of[sequence] = row
        self.write(sequence, 0, list(table))

    def _in_rows(self, batch: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Those that have a row in their rows, and the others in what is left."""
        num_rows, row_of = len(batch), self._row_of
        in_rows: list[ScheduledSequence | None] = [None] * num_rows
        others = []
        for scheduled in batch:
            row = row_of.get(scheduled.sequence, num_rows)
            if row < num_rows:
                in_rows[row] = scheduled
            else:
                others.append(scheduled)
        rest = iter(others)
        return [next(rest) if scheduled is None else scheduled for scheduled in in_rows]

    def check_integrity(self, tables: dict[Sequence, list[int]]) -> None:
        """Raise AssertionError unless each row holds the table of its sequence."""
        rows = {sequence: row for row, sequence in enumerate(self._sequences) if sequence is not None}
        assert rows == self._row_of, f"rows {rows}, by sequence {self._row_of}"
        for sequence, row in rows.items():
            table, found = tables[sequence], self._array.row(row, len(tables[sequence]))
            assert found == table, f"row {row} of {sequence.request_id}: {found}, but its blocks are {table}"
