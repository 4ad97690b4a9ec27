"""What a step of the model reads, as plain arrays: the runner makes them of a batch, and they can go to any process."""

from dataclasses import dataclass

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
