"""Which sequence's block tables each row of a batch's array holds."""

from pagedattn_serve.scheduling.sequence import ScheduledSequence, Sequence, TableArray, TableWrite

Tables = list[list[int]]  # of a sequence, one for each group of layers: the physical block of each logical block
# In a table, in place of each block that is not held any more, behind the window. These are the first of the table.
RELEASED = -1


def held(tables: Tables) -> list[int]:
    """The blocks of tables that were not given back."""
    return [block for table in tables for block in table[table.count(RELEASED) :]]


class TableRows:
    """Whose tables each row of the array has: row i has those of the i-th sequence of the batch.

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

    def write(self, sequence: Sequence, group: int, column: int, blocks: list[int]) -> None:
        """A table of a sequence has these blocks from this column on. Nothing is written if it has no row."""
        row = self._row_of.get(sequence)
        if row is not None:
            self._array.write(group, row, column, blocks)
            self._writes.append((group, row, column, blocks))

    def take_back(self, sequence: Sequence) -> None:
        """Let the row of a sequence be nobody's. Nothing happens if it has no row."""
        row = self._row_of.pop(sequence, None)
        if row is not None:
            self._sequences[row] = None

    def place(
        self, batch: list[ScheduledSequence], num_movable: int, tables: dict[Sequence, Tables]
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

    def _give(self, row: int, sequence: Sequence, tables: Tables) -> None:
        before = self._sequences[row]
        if before is not None:
            self.take_back(before)
        self.take_back(sequence)
        self._sequences[row] = sequence
        self._row_of[sequence] = row
        for group, table in enumerate(tables):
            begin = table.count(RELEASED)  # before it, the array keeps what it has: nobody looks there
            self.write(sequence, group, begin, table[begin:])

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

    def check_integrity(self, tables: dict[Sequence, Tables]) -> None:
        """Raise AssertionError unless each row holds the tables of its sequence."""
        rows = {sequence: row for row, sequence in enumerate(self._sequences) if sequence is not None}
        assert rows == self._row_of, f"rows {rows}, by sequence {self._row_of}"
        for sequence, row in rows.items():
            for group, table in enumerate(tables[sequence]):
                begin, found = table.count(RELEASED), self._array.row(group, row, len(table))
                assert found[begin:] == table[begin:], (
                    f"row {row} of {sequence.request_id}: {found}, but its blocks are {table}"
                )
