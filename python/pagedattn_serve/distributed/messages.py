"""What rank 0 and the other ranks tell each other.

    rank 0                                        another rank
    RankOrder  ->                                 starts, loads its slice of the model
                                          <-      Loaded
    CacheOrder ->                                 makes its cache
                                          <-      Ready
    Join       ->                                 joins a group, the first or a new one
                                          <-      Joined
    Step ...   ->   through the group's socket    runs it, and answers nothing
    closes the group's socket                     leaves the group
                                          <-      Left

In place of Loaded and Ready, Failed may come. All but Step go through the rank's `Channel`.
"""

import hashlib
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pagedattn_serve.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedattn_serve.execution.block_tables import TableChanges
from pagedattn_serve.execution.step_inputs import StepInputs

DIGEST_BYTES = 16
_NO_TABLES = np.zeros((0, 0), dtype=np.int32)

BlockPairs = list[tuple[int, int]]


class RankOrder(NamedTuple):
    """What a rank loads, and how it computes: with how many threads, on which CPUs (None: on any).

    checks_inputs: the rank answers each step with a digest.
    """

    rank: int
    world_size: int
    num_threads: int
    cpus: set[int] | None
    checks_inputs: bool
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig


class CacheOrder(NamedTuple):
    """What all ranks have room for, with nothing left open."""

    cache: CacheConfig
    scheduler: SchedulerConfig


class Loaded(NamedTuple):
    """The blocks that the rank has room for."""

    num_blocks: int
    num_host_blocks: int


class Ready(NamedTuple):
    pass


class Failed(NamedTuple):
    error: Exception


class Join(NamedTuple):
    """Comes with two descriptors: the group, and the socket for its steps. generation: the number of the group."""

    generation: int


class Joined(NamedTuple):
    generation: int


class Left(NamedTuple):
    """error: what failed on this rank; None if the rank left for what another one did."""

    generation: int
    error: Exception | None


class Step(NamedTuple):
    """Pairs of blocks to copy, and what the model reads; None if no sequence runs.

    The block tables are left out: a rank has them from the steps before, but for `changes`.
    """

    to_swap_out: BlockPairs
    to_swap_in: BlockPairs
    to_copy: BlockPairs
    inputs: StepInputs | None
    changes: TableChanges | None


def without_tables(inputs: StepInputs) -> StepInputs:
    return replace(inputs, block_tables=_NO_TABLES)


def digest(inputs: StepInputs, lengths: np.ndarray) -> bytes:
    """A hash of all that the model reads. lengths: [num_seqs], how many blocks of its table each sequence has."""
    is_used = np.arange(inputs.block_tables.shape[1]) < lengths[:, None]
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for array in (
        *(inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.block_tables[is_used], inputs.seq_lens),
        *(inputs.query_start_loc, inputs.sampling_rows, np.int64(inputs.max_seq_len)),
    ):
        found.update(b"" if array is None else array.tobytes())
    return found.digest()
