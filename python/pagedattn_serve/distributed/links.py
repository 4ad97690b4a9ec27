"""`LinkedCommunicator`: ranks that share memory, and sockets to the ranks that do not."""

import select
import socket
from contextlib import suppress
from io import FileIO

import torch
from torch import Tensor

from pagedattn_serve.distributed.communicator import SharedMemoryCommunicator

CHECK_SECONDS = 0.1  # between two looks at whether the other ranks go on


class LinkedCommunicator:
    """What communicators among more ranks than share memory have in common. As with `SharedMemoryCommunicator`, ranks
    join one group after the other.

    rank: among all ranks. peers: the ranks with which this one has connections.
    """

    def __init__(self, rank: int, near: SharedMemoryCommunicator, peers: list[int]) -> None:
        self.rank = rank
        self.peers = peers
        self._near = near  # of the ranks that share memory with this one
        self._links: dict[int, socket.socket] = {}  # by rank
        self._broken: str | None = None

    def create_group(self) -> FileIO:
        """The file of a new group of the ranks that share memory."""
        return self._near.create_group()

    def take_links(self, links: dict[int, socket.socket]) -> None:
        """Take the connections to the peers, by their ranks, for the group that comes next. They are closed with it."""
        self.leave()
        for rank, link in links.items():
            link.setblocking(False)
            self._links[rank] = link

    def join(self, group: FileIO) -> None:
        """Join the group of the ranks that share memory."""
        self._near.join(group)

    def leave(self) -> None:
        self._close_links()
        self._broken = None
        self._near.leave()

    @property
    def broken(self) -> str | None:
        return self._near.broken if self._broken is None else self._broken

    def abort(self, reason: str) -> None:
        """Break the group for all ranks: the peers see that their connections end, and break what they share."""
        self._near.abort(reason)
        self._close_links()

    def finish_step(self) -> None:
        """Nothing is left to wait for."""

    def _check_near(self) -> None:
        """Raise RuntimeError if the ranks that share memory have given up."""
        if (reason := self._near.broken) is not None:
            raise RuntimeError(f"the group is broken: {reason}")

    def _break(self, reason: str) -> RuntimeError:
        self._broken = reason
        self.abort(reason)
        return RuntimeError(f"the group is broken: {reason}")

    def _lost(self, rank: int) -> RuntimeError:
        return self._break(f"rank {rank} has died, or has left the group")

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()


class Transfer:
    """What goes to a peer and what comes from there, in one call. rank: of the peer."""

    def __init__(self, rank: int, link: socket.socket, to_send: memoryview, to_receive: memoryview) -> None:
        self.rank = rank
        self._link = link
        self._to_send = to_send
        self._to_receive = to_receive

    def proceed(self, events: int) -> int:
        """Send and receive what these events allow. Returns the events to wait for, 0 if it is done. Raises OSError."""
        if self._to_send and events & select.POLLOUT:
            with suppress(BlockingIOError):  # at the first call, when nobody knows whether there is room
                self._to_send = self._to_send[self._link.send(self._to_send) :]
        if self._to_receive and events & ~select.POLLOUT:
            num_bytes = self._link.recv_into(self._to_receive)
            if num_bytes == 0:
                raise ConnectionResetError
            self._to_receive = self._to_receive[num_bytes:]
        elif events & (select.POLLHUP | select.POLLERR):
            raise ConnectionResetError
        return select.POLLOUT * bool(self._to_send) | select.POLLIN * bool(self._to_receive)


def bytes_of(tensor: Tensor) -> memoryview:
    """Its memory, as sockets take it. The tensor is contiguous."""
    return tensor.view(-1).view(torch.uint8).numpy().data
