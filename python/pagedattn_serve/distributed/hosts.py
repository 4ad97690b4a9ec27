"""`HostsCommunicator`: what a rank's slice of a model asks of the other ranks, where these are on several hosts.

Every host has the same number of ranks: rank h * ranks_per_host + i is the i-th one of host h. The ranks of a host
share memory. Between hosts, the i-th ranks of all hosts have TCP connections with each other.

A sum is made in three steps. The ranks of each host add up. Each of them exchanges its share of the elements with its
peers on the other hosts, and adds up the shares. The ranks of each host put their shares together. An element is added
up in fp32 in the order of the hosts, so that all ranks and all runs have the same bits.
"""

import select
import time
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn_serve.distributed import communicator
from pagedattn_serve.distributed.communicator import SharedMemoryCommunicator
from pagedattn_serve.distributed.links import CHECK_SECONDS, LinkedCommunicator, Transfer, bytes_of


class Hosts(NamedTuple):
    """What a rank has to know of them. key: of the engine, for connections. ip: the address of the rank's host."""

    num_hosts: int
    key: bytes
    ip: str


class HostsCommunicator(LinkedCommunicator):
    """A `models.partition.Communicator`. CPU graphs cannot hold its calls."""

    def __init__(self, rank: int, world_size: int, num_hosts: int) -> None:
        ranks_per_host = world_size // num_hosts
        self._host, rank_on_host = divmod(rank, ranks_per_host)
        peers = [peer for peer in range(rank_on_host, world_size, ranks_per_host) if peer != rank]
        super().__init__(rank, SharedMemoryCommunicator(rank_on_host, ranks_per_host), peers)
        self.world_size = world_size
        self._num_hosts = num_hosts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        flat = self._near.all_reduce(tensor).view(-1)
        ranks_per_host = self._near.world_size
        share = -(-flat.numel() // ranks_per_host)
        if flat.numel() < share * ranks_per_host:
            flat = torch.nn.functional.pad(flat, (0, share * ranks_per_host - flat.numel()))
        first, *others = self._exchange(flat.view(ranks_per_host, share)[self._near.rank])
        total = first.to(torch.float32, copy=True)
        for other in others:
            total += other
        shares = self._near.all_gather(total.to(tensor.dtype))
        return shares.view(-1)[: tensor.numel()].view(tensor.shape)

    def all_gather(self, tensor: Tensor) -> Tensor:
        of_hosts = torch.stack(self._exchange(tensor.reshape(-1)))
        of_ranks = self._near.all_gather(of_hosts)  # [ranks_per_host, num_hosts, ...]
        return of_ranks.transpose(0, 1).reshape(self.world_size, *tensor.shape)

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """The tensors of the peers and of this rank, in the order of the hosts."""
        own = own.contiguous()
        tensors = [own if host == self._host else torch.empty_like(own) for host in range(self._num_hosts)]
        if own.numel() == 0:
            return tensors
        assert len(self._links) + 1 == self._num_hosts
        to_send, patience = bytes_of(own), communicator.PATIENCE_SECONDS
        under_way: dict[int, Transfer] = {}
        poll = select.poll()
        for rank, link in self._links.items():
            transfer = Transfer(rank, link, to_send, bytes_of(tensors[rank // self._near.world_size]))
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
                self._check_near()
                if time.monotonic() - started > patience:
                    [transfer, *_] = under_way.values()
                    raise self._break(f"rank {transfer.rank} has not come within {patience:g} seconds")
        return tensors

    def _proceed(self, transfer: Transfer, events: int) -> int:
        try:
            return transfer.proceed(events)
        except OSError:
            raise self._lost(transfer.rank) from None
