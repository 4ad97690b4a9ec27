"""Processes of one machine that compute together: the memory that they share, for `ops.all_reduce_shared` and
`ops.all_gather_shared`."""

from math import inf
from types import TracebackType

from . import _C
from .ops._call import to_int


class SharedMemoryGroup:
    """One rank of a group of processes.

    A driver makes the memory, the processes join, each as another rank:

    >>> descriptor = SharedMemoryGroup.create(world_size=2)  # in the driver
    >>> group = SharedMemoryGroup(descriptor, rank=0)        # in each process, with its rank
    >>> os.close(descriptor)
    >>> ops.all_reduce_shared(hidden, group)

    The descriptor is a file without a name. It comes to another process as any descriptor does: to a child through
    `multiprocessing.reduction.DupFd` or `subprocess`'s `pass_fds`, to a process of the same user as
    `os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)`. Who has joined does not need it any more. The memory goes back
    to the system with the last process that has joined or holds a descriptor.

    All ranks must call the same ops in the same order, with inputs of the same size and dtype. A rank that has arrived
    waits for those that have not; it spins for 50 us, then sleeps. The group breaks if a rank dies, closes the group,
    calls something else or does not come within the group's `timeout_seconds`. Then every rank that waits, within a
    second, and every later call raises RuntimeError with the same sentence, which names the rank. A broken group stays
    broken. If a process has not joined yet, nobody sees that it dies, and the others wait for `timeout_seconds`.

    Python raises KeyboardInterrupt when a waiting op is over. That is a second after the signal at the latest, in the
    thread that the signal comes to: if the other ranks have not come by then, the group breaks. If a process forks, the
    child must not use the group.
    """

    def __init__(self, descriptor: int, rank: int) -> None:
        """Join as `rank`. The descriptor stays open, and is the caller's to close.

        Raises ValueError if the descriptor is not from `create`, if there is no such rank, or if it has joined before.
        Raises OSError if there is not enough memory.
        """
        self._group: _C.SharedGroup | None = _C.SharedGroup(
            to_int("SharedMemoryGroup", "descriptor", descriptor), to_int("SharedMemoryGroup", "rank", rank)
        )
        self.rank = rank
        self.world_size = self._group.world_size
        self.handle = self._group.handle  # what the raw ops take; 0 when the group is closed

    @staticmethod
    def create(world_size: int, max_bytes: int = 1 << 20, timeout_seconds: float = 300.0) -> int:
        """A descriptor of new memory for `world_size` ranks. The caller closes it.

        Args:
            max_bytes: of a rank's input that go through the memory at once; larger inputs go in pieces. A rank takes
                twice as much memory. Pieces of a MiB are faster than smaller ones: what a CPU fetches from
                another CPU's own cache is slower than what it finds in the cache that both share.
            timeout_seconds: how long a rank waits for another one before the group breaks.
        """
        if not isinstance(timeout_seconds, (int, float)) or isinstance(timeout_seconds, bool):
            got = type(timeout_seconds).__name__
            raise TypeError(f"SharedMemoryGroup: timeout_seconds: expected a number, got {got}")
        try:
            seconds = float(timeout_seconds)
        except OverflowError:
            seconds = inf  # which is refused
        name = "SharedMemoryGroup"
        return _C.SharedGroup.create(
            to_int(name, "world_size", world_size), to_int(name, "max_bytes", max_bytes), seconds
        )

    @property
    def broken(self) -> str | None:
        """Why the group is broken, None if it is not."""
        return self._open().broken() or None

    def abort(self, reason: str) -> None:
        """Break the group for all ranks, if it is not broken: for a rank that cannot go on. The reason is a text
        of one character or more, none of them null."""
        if not isinstance(reason, str):
            raise TypeError(f"SharedMemoryGroup: reason: expected a str, got {type(reason).__name__}")
        if not reason or "\0" in reason:
            raise ValueError(f"SharedMemoryGroup: reason: expected some characters, none of them null, got {reason!r}")
        self._open().abort(reason)

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        if self._group is not None:
            self._group.close()
            self._group, self.handle = None, 0

    def __enter__(self) -> "SharedMemoryGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> _C.SharedGroup:
        if self._group is None:
            raise ValueError("SharedMemoryGroup: expected a group that is open, got a closed one")
        return self._group
