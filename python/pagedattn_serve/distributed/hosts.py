"""`HostsCommunicator`: what a rank's slice of a model asks of the other ranks, where these are on several hosts.

Every host has the same number of ranks: rank h * ranks_per_host + i is the i-th one of host h. The ranks of a host
share memory. Between hosts, the i-th ranks of all hosts have TCP connections with each other.

A sum is made in three steps. The ranks of each host add up. Each of them exchanges its share of the elements with its
peers on the other hosts, and adds up the shares. The ranks of each host put their shares together. An element is added
up in fp32 in the order of the hosts, so that all ranks and all runs have the same bits.
"""

import select
import socket
import time
from contextlib import suppress
from io import FileIO
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn_serve.distributed import communicator
from pagedattn_serve.distributed.communicator import SharedMemoryCommunicator
from pagedattn_serve.distributed.process_group import ProcessGroupCommunicator

CHECK_SECONDS = 0.1  # between two looks at whether the other ranks of the host go on


class Hosts(NamedTuple):
    """What a rank has to know of them. key: of the engine, for connections. ip: the address of the rank's host."""

    num_hosts: int
    key: bytes
    ip: str


class HostsCommunicator:
    """A `models.partition.Communicator`. As with `SharedMemoryCommunicator`, ranks join one group after the other.

    CPU graphs cannot hold its calls.
    """

    def __init__(self, rank: int, world_size: int, num_hosts: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._num_hosts = num_hosts
        ranks_per_host = world_size // num_hosts
        self._host, rank_on_host = divmod(rank, ranks_per_host)
        self._on_host = SharedMemoryCommunicator(rank_on_host, ranks_per_host)
        self.peers = [self._rank_on(host) for host in range(num_hosts) if host != self._host]
        self._links: dict[int, socket.socket] = {}  # by host
        self._broken: str | None = None

    def create_group(self) -> FileIO:
        """The file of a new group of the ranks of this host."""
        return self._on_host.create_group()

    def take_links(self, links: dict[int, socket.socket]) -> None:
        """Take the connections to the peers, by their ranks, for the group that comes next. They are closed with it."""
        self.leave()
        for rank, link in links.items():
            link.setblocking(False)
            self._links[rank // self._on_host.world_size] = link

    def join(self, group: FileIO) -> None:
        """Join the group of this host."""
        self._on_host.join(group)

    def leave(self) -> None:
        self._close_links()
        self._broken = None
        self._on_host.leave()

    @property
    def broken(self) -> str | None:
        return self._on_host.broken if self._broken is None else self._broken

    def abort(self, reason: str) -> None:
        """Break the group for all ranks: the peers see that their connections end, and break those of their hosts."""
        self._on_host.abort(reason)
        self._close_links()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        flat = self._on_host.all_reduce(tensor).view(-1)
        ranks_per_host = self._on_host.world_size
        share = -(-flat.numel() // ranks_per_host)
        if flat.numel() < share * ranks_per_host:
            flat = torch.nn.functional.pad(flat, (0, share * ranks_per_host - flat.numel()))
        first, *others = self._exchange(flat.view(ranks_per_host, share)[self._on_host.rank])
        total = first.to(torch.float32, copy=True)
        for other in others:
            total += other
        shares = self._on_host.all_gather(total.to(tensor.dtype))
        return shares.view(-1)[: tensor.numel()].view(tensor.shape)

    def all_gather(self, tensor: Tensor) -> Tensor:
        of_hosts = torch.stack(self._exchange(tensor.reshape(-1)))
        of_ranks = self._on_host.all_gather(of_hosts)  # [ranks_per_host, num_hosts, ...]
        return of_ranks.transpose(0, 1).reshape(self.world_size, *tensor.shape)

    def finish_step(self) -> None:
        """Nothing is left to wait for."""

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """The tensors of the peers and of this rank, in the order of the hosts."""
        own = own.contiguous()
        tensors = [own if host == self._host else torch.empty_like(own) for host in range(self._num_hosts)]
        if own.numel() == 0:
            return tensors
        assert len(self._links) + 1 == self._num_hosts
        to_send, patience = bytes_of(own), communicator.PATIENCE_SECONDS
        under_way: dict[int, _Transfer] = {}
        poll = select.poll()
        for host, link in self._links.items():
            transfer = _Transfer(self._rank_on(host), link, to_send, bytes_of(tensors[host]))
            under_way[link.fileno()] = transfer
            poll.register(link, self._proceed(transfer, select.POLLOUT))
        started = time.monotonic()
        while under_way:
            for descriptor, events in poll.poll(CHECK_SECONDS * 1000):
                if missing := self._proceed(under_way[descriptor], events):
                    poll.modify(descriptor, missing)
                else:
                    poll.unregister(descriptor)
                    del under_way[descriptor]
            if under_way and time.monotonic() - started > CHECK_SECONDS:
                if (reason := self._on_host.broken) is not None:
                    raise RuntimeError(f"the group is broken: {reason}")
                if time.monotonic() - started > patience:
                    [transfer, *_] = under_way.values()
                    raise self._break(f"rank {transfer.rank} has not come within {patience:g} seconds")
        return tensors

    def _proceed(self, transfer: "_Transfer", events: int) -> int:
        try:
            return transfer.proceed(events)
        except OSError:
            raise self._break(f"rank {transfer.rank} has died, or has left the group") from None

    def _break(self, reason: str) -> RuntimeError:
        self._broken = reason
        self.abort(reason)
        return RuntimeError(f"the group is broken: {reason}")

    def _rank_on(self, host: int) -> int:
        return host * self._on_host.world_size + self._on_host.rank

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()


class _Transfer:
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


AnyCommunicator = SharedMemoryCommunicator | HostsCommunicator | ProcessGroupCommunicator


def make_communicator(rank: int, world_size: int, num_hosts: int, device: str) -> AnyCommunicator:
    if device != "cpu":
        return ProcessGroupCommunicator(rank, world_size, torch.device(device))
    if num_hosts == 1:
        return SharedMemoryCommunicator(rank, world_size)
    return HostsCommunicator(rank, world_size, num_hosts)
