"""What rank 0 and the other ranks tell each other.

    rank 0                                        another rank
                                          <-      Arrived, if it is on another host
    RankOrder  ->                                 starts, loads its slice of the model
                                          <-      Loading, some times
                                          <-      Loaded
    CacheOrder ->                                 makes its cache
                                          <-      Ready
    MakeGroup  ->                                 makes the memory of a group, if it is the first rank of another
                                                  host or stage
                                          <-      GroupMade
    Join       ->                                 joins a group, the first or a new one
                                          <-      Joined
    Step ...   ->   through the group's socket    runs it, and answers nothing
    closes the group's socket                     leaves the group
                                          <-      Left

In place of Loaded and Ready, Failed may come; in place of GroupMade and Joined, Left. All but Step go through the
rank's channel.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from pagedattn_serve.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedattn_serve.distributed.channel import Address
from pagedattn_serve.distributed.hosts import Hosts
from pagedattn_serve.execution.model_runner import BlockPairs, StepInputs
from pagedattn_serve.scheduling.sequence import StateCopies, TableWrite

DIGEST_BYTES = 16


class Arrived(NamedTuple):
    """The process of the rank, and the CPUs that it may use, of each NUMA node."""

    pid: int
    nodes: list[set[int]]


class RankOrder(NamedTuple):
    """What a rank loads, and how it computes: with how many threads, on which CPUs (None: on any).

    num_stages: into which the layers are split. hosts: None if all ranks are on one. checks_inputs: the rank answers
    each step with a digest. model: its device is cpu or cuda, where each rank of a host has another one.
    """

    rank: int
    world_size: int
    num_stages: int
    num_threads: int
    cpus: set[int] | None
    hosts: Hosts | None
    checks_inputs: bool
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig


class CacheOrder(NamedTuple):
    """What all ranks have room for, with nothing left open. addresses: where each rank listens."""

    cache: CacheConfig
    scheduler: SchedulerConfig
    addresses: list[Address | None]


class Loading(NamedTuple):
    """How many of the rank's weights are loaded, and the number of all."""

    done: int
    total: int


class Loaded(NamedTuple):
    """The blocks and states that the rank has room for, where it listens to ranks on other hosts, and what chooses its
    kernels."""

    num_blocks: int
    num_host_blocks: int
    num_state_slots: int
    num_host_state_slots: int
    address: Address | None
    capabilities: tuple[str, str]


class Ready(NamedTuple):
    pass


class Failed(NamedTuple):
    error: Exception


class MakeGroup(NamedTuple):
    generation: int


class GroupMade(NamedTuple):
    """path: of the group's memory, as long as the rank has it open."""

    generation: int
    path: str


class Join(NamedTuple):
    """generation: the number of the group.

    path: of the group's memory. store: where ranks on CUDA meet, whose group has no memory. peers: the ranks whose
        sockets come along.
    On the host of rank 0, descriptors come along: the socket for the steps of the group; the memory of the group, if it
    has no path; and sockets to the stages before and behind. On another host the rank connects to rank 0 and its peers.
    """

    generation: int
    path: str | None
    store: Address | None
    peers: tuple[int, ...] = ()


class Joined(NamedTuple):
    generation: int


class Left(NamedTuple):
    """error: what failed on this rank; None if the rank left for what another one did."""

    generation: int
    error: Exception | None


class Step(NamedTuple):
    """Pairs of blocks and of states to copy, what is new in the block tables, and what the model reads; None if no
    sequence runs.

    table_writes: as in `ScheduledBatch`. A rank has the other entries of its `TableArray` from the steps before.
    cuts: of the inputs into pieces, as `pipeline.cut` gives them.
    """

    to_swap_out: BlockPairs
    to_swap_in: BlockPairs
    to_copy: BlockPairs
    of_states: StateCopies
    table_writes: list[TableWrite]
    inputs: StepInputs | None
    cuts: list[int]


def digest(inputs: StepInputs, block_tables: np.ndarray, block_size: int) -> bytes:
    """A hash of all that the model reads. block_tables: int32 [num_groups, num_seqs, num_blocks]."""
    checkpoints = [number for checkpoint in inputs.state_checkpoints for number in checkpoint]
    is_used = np.arange(block_tables.shape[2]) * block_size < inputs.seq_lens[:, None]
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for array in (
        *(inputs.token_ids, inputs.positions, inputs.slot_mappings, block_tables[:, is_used], inputs.seq_lens),
        *(inputs.query_start_loc, inputs.sampling_rows, np.int64(inputs.max_seq_len), np.int64(inputs.num_pooled)),
        *(np.array(inputs.state_slots, np.int64), np.array(checkpoints, np.int64)),
    ):
        found.update(b"" if array is None else array.tobytes())
    return found.digest()
