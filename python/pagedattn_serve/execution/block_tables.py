"""The block tables of the running sequences as one array, kept from step to step: a step writes what is new in it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedattn_serve.scheduling.batch import ScheduledSequence
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class TableChanges:
    """What a step writes in an array of block tables before it reads the rows of its sequences.

    rewritten: rows, each with the whole table that it holds from now on.
    last_blocks: rows whose tables end with another block, or with one more than before; the column of this block; and
        the block.
    rows: int64 [num_seqs], the row of each sequence. lengths: int64 [num_seqs], how many blocks each sequence has.
    """

    rewritten: list[tuple[int, list[int]]]
    last_blocks: list[tuple[int, int, int]]
    rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class TableArray:
    """Block tables, a row for each sequence. Two arrays that were given the same changes are the same, as far as the
    lengths of the tables go."""

    def __init__(self, num_rows: int, max_num_blocks_per_seq: int) -> None:
        self._array = np.zeros((num_rows, max_num_blocks_per_seq), dtype=np.int32)

    def apply(self, changes: TableChanges) -> npt.NDArray[np.int32]:
        """The block tables of a step, int32 [num_seqs, longest]; beyond a sequence's blocks, values are arbitrary."""
        for row, table in changes.rewritten:
            self._array[row, : len(table)] = table
        for row, column, block in changes.last_blocks:
            self._array[row, column] = block
        return self._array[changes.rows, : changes.lengths.max()]


class BlockTables:
    """A row for each running sequence. Other sequences lose their rows when no row is free or most rows are theirs."""

    def __init__(self, max_num_seqs: int, max_num_blocks_per_seq: int) -> None:
        self._array = TableArray(max_num_seqs, max_num_blocks_per_seq)
        self._row_of: dict[Sequence, int] = {}
        self._free_rows = list(range(max_num_seqs))
        self._written: list[list[int] | None] = [None] * max_num_seqs  # the table that a row was written from
        self._lengths = np.zeros(max_num_seqs, dtype=np.int64)  # of the tables that the rows hold
        self._rows: dict[ScheduledSequence, int] = {}  # of the step before

    def update(self, scheduled: list[ScheduledSequence]) -> tuple[npt.NDArray[np.int32], TableChanges]:
        """The block tables of a step, as `TableArray.apply` returns them, and what has changed since the step before.

        After `clear`, the changes of the steps from there on are enough for an array that has missed earlier ones.
        """
        if len(self._row_of) > 2 * len(scheduled):  # rows of ended sequences keep the sequences in memory
            self._take_back()
        rewritten: list[tuple[int, list[int]]] = []
        last_blocks: list[tuple[int, int, int]] = []
        before = self._rows
        row_of = [before[s] if s in before else self._row(s, rewritten, last_blocks) for s in scheduled]
        rows = np.array(row_of, dtype=np.int64)
        changes = TableChanges(rewritten, last_blocks, rows, self._lengths[rows])
        array = self._array.apply(changes)
        for row, table in rewritten:
            self._written[row] = table
        self._rows = dict(zip(scheduled, row_of, strict=True))
        return array, changes

    def clear(self) -> None:
        """Take all rows back."""
        self._row_of = {}
        self._free_rows = list(range(len(self._written)))
        self._written = [None] * len(self._written)
        self._rows = {}

    def _row(
        self,
        scheduled: ScheduledSequence,
        rewritten: list[tuple[int, list[int]]],
        last_blocks: list[tuple[int, int, int]],
    ) -> int:
        """The row of a sequence that was not in the step before, or whose table has changed since. What is to be
        written there is added to one of the lists."""
        table = scheduled.block_table
        row = self._row_of.get(scheduled.sequence)
        if row is None:
            if not self._free_rows:
                self._take_back()
            row = self._row_of[scheduled.sequence] = self._free_rows.pop()
        if self._written[row] is table:
            # Only this entry changes while a sequence holds its blocks: a new block, or the copy of a shared block.
            last_blocks.append((row, len(table) - 1, table[-1]))
        else:
            rewritten.append((row, table))
        self._lengths[row] = len(table)
        return row

    def _take_back(self) -> None:
        self._row_of = {s: row for s, row in self._row_of.items() if s.status is SequenceStatus.RUNNING}
        self._free_rows = list(set(range(len(self._written))).difference(self._row_of.values()))
