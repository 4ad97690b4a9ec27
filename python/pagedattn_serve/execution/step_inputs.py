"""What a step of the model reads, as plain arrays: the runner makes them of a batch, and they can go to any process."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """The tokens of a step, one sequence after the other.

    token_ids, positions, slot_mapping: int64 [num_tokens].
    block_tables, seq_lens, query_start_loc, sampling_rows, max_seq_len: as in `AttentionMetadata`.
    """

    token_ids: Int64s
    positions: Int64s
    slot_mapping: Int64s
    block_tables: Int32s
    seq_lens: Int32s
    query_start_loc: Int32s | None
    sampling_rows: Int64s
    max_seq_len: int

    def rows_of_last_layer(self) -> tuple[npt.NDArray[Any], ...] | None:
        """The fields of `LastRows`. None, which is all rows, where few or none could be left out."""
        if self.query_start_loc is None or len(self.sampling_rows) >= len(self.token_ids):
            return None
        ends = self.query_start_loc[1:]
        begins = ends.astype(np.int64)
        sequences = np.searchsorted(ends, self.sampling_rows, side="right")
        np.minimum.at(begins, sequences, self.sampling_rows)
        starts = np.zeros_like(self.query_start_loc)
        np.cumsum(ends - begins, out=starts[1:])
        if starts[-1] == ends[-1]:
            return None
        left_out = begins - starts[:-1]  # of the rows before those of each sequence
        of_step = np.arange(starts[-1]) + np.repeat(left_out, ends - begins)
        return of_step, starts, self.sampling_rows - left_out[sequences]
