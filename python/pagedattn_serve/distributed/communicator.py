"""`SharedMemoryCommunicator`: what a rank's slice of a model asks of the other ranks of this machine."""

from io import FileIO

from torch import Tensor

from pagedattn_ext import SharedMemoryGroup, ops

PATIENCE_SECONDS = 60.0  # that a rank waits for another one in a call. The ranks do the same work between two calls


class SharedMemoryCommunicator:
    """A `models.partition.Communicator` over memory that the ranks share.

    A group that has broken stays broken, so ranks join one group after the other; a model keeps its communicator.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group: SharedMemoryGroup | None = None

    def create_group(self) -> FileIO:
        """The file of a new group. Who has joined does not need it any more."""
        return FileIO(SharedMemoryGroup.create(self.world_size, timeout_seconds=PATIENCE_SECONDS), "r+")

    def join(self, group: FileIO) -> None:
        """Leave the group before, and join this one."""
        self.leave()
        self._group = SharedMemoryGroup(group.fileno(), self.rank)

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def broken(self) -> str | None:
        """Why the group is broken, None if it is not."""
        return None if self._group is None else self._group.broken

    def abort(self, reason: str) -> None:
        """Break the group for all ranks, so that none waits for this one."""
        if self._group is not None:
            self._group.abort(reason)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        assert self._group is not None
        return ops.all_reduce_shared(tensor.contiguous(), self._group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        assert self._group is not None
        return ops.all_gather_shared(tensor.reshape(-1), self._group).view(self.world_size, *tensor.shape)

    def finish_step(self) -> None:
        """Nothing is left to wait for."""
