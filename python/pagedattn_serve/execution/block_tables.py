"""The block tables of the running sequences as one array, kept from step to step: a step writes what is new in it."""

import numpy as np
import numpy.typing as npt

from pagedattn_serve.scheduling.batch import ScheduledSequence
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus


class BlockTables:
    """A row for each running sequence. Other sequences lose their rows when no row is free or most rows are theirs."""

    def __init__(self, max_num_seqs: int, max_num_blocks_per_seq: int) -> None:
        self._array = np.zeros((max_num_seqs, max_num_blocks_per_seq), dtype=np.int32)
        self._row_of: dict[Sequence, int] = {}
        self._free_rows = list(range(max_num_seqs))
        self._written: list[list[int] | None] = [None] * max_num_seqs  # the table that a row was written from

    def update(self, scheduled: list[ScheduledSequence]) -> npt.NDArray[np.int32]:
        """The block tables of a step, int32 [num_seqs, longest]; beyond a sequence's blocks, values are arbitrary."""
        if len(self._row_of) > 2 * len(scheduled):  # rows of ended sequences keep the sequences in memory
            self._take_back()
        rows = np.array([self._row(each) for each in scheduled], dtype=np.int64)
        tables = [each.block_table for each in scheduled]
        lengths = np.array([len(table) for table in tables], dtype=np.int64)
        # Only this entry changes while a sequence holds its blocks: a new block, or the copy of a shared block.
        self._array[rows, lengths - 1] = np.array([table[-1] for table in tables], dtype=np.int32)
        return self._array[rows, : lengths.max()]

    def clear(self) -> None:
        """Take all rows back."""
        self._row_of = {}
        self._free_rows = list(range(len(self._array)))

    def _row(self, scheduled: ScheduledSequence) -> int:
        row = self._row_of.get(scheduled.sequence)
        if row is not None and self._written[row] is scheduled.block_table:
            return row
        if row is None:
            if not self._free_rows:
                self._take_back()
            row = self._row_of[scheduled.sequence] = self._free_rows.pop()
        self._array[row, : len(scheduled.block_table)] = scheduled.block_table
        self._written[row] = scheduled.block_table
        return row

    def _take_back(self) -> None:
        self._row_of = {s: row for s, row in self._row_of.items() if s.status is SequenceStatus.RUNNING}
        self._free_rows = list(set(range(len(self._array))).difference(self._row_of.values()))
