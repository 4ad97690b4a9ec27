"""Ranks on other hosts, as rank 0 sees them: how they start, connect and end."""

import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from socket import socket
from typing import NamedTuple, Protocol

from pagedattn_serve.distributed.channel import START_SECONDS, Address, Hello, Listener, NetworkChannel, has_hung_up
from pagedattn_serve.distributed.hosts import Hosts
from pagedattn_serve.distributed.messages import Arrived


class Placement(Protocol):
    """Who starts the ranks on other hosts.

    num_hosts: all, that of rank 0 among them. ip: the address of this host at which rank 0 listens.
    """

    num_hosts: int
    ip: str

    def start(self, rank: int, address: Address, key: bytes) -> None:
        """Let a rank on another host connect to this address."""

    def check(self) -> None:
        """Raise ExecutorDeadError if a rank that was started has ended."""

    def give_back(self) -> None:
        """Give back what was taken for the ranks."""


class RemoteProcess:
    """The process of a rank on another host, which is watched by its connection. returncode: nobody tells."""

    returncode: int | None = None

    def __init__(self, connection: socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection

    def poll(self) -> int | None:
        return 0 if self._connection.fileno() < 0 or has_hung_up(self._connection) else None

    def wait(self, timeout: float | None = None) -> int:
        if self._connection.fileno() >= 0 and not has_hung_up(self._connection, timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return 0

    def kill(self) -> None:
        """Let it go. The process ends when its connection is closed."""
        self._connection.close()


class RemoteRank(NamedTuple):
    """A rank that has connected. pulse: at its other end is a `Pulse`. ip: of its host. nodes: the CPUs there, of each
    NUMA node."""

    rank: int
    channel: NetworkChannel
    pulse: socket
    process: RemoteProcess
    ip: str
    nodes: list[set[int]]


class OtherHosts:
    """The hosts without rank 0. Their ranks connect to a port of this host; with the order to start they get its number
    and the key.

    num_hosts: all, that of rank 0 among them. address: where rank 0 listens, as the other hosts see it.
    """

    def __init__(self, placement: Placement, world_size: int) -> None:
        self.num_hosts = placement.num_hosts
        self.ranks_per_host = world_size // placement.num_hosts
        self._ranks = range(self.ranks_per_host, world_size)
        self._placement = placement
        self._key = secrets.token_bytes(32)
        self._listener = Listener(placement.ip, self._key)
        self.address = self._listener.address
        self.close = self._listener.close

    def seen_from(self, ip: str) -> Hosts:
        """What a rank on the host with this address has to know."""
        return Hosts(self.num_hosts, self._key, ip)

    def start(self) -> Iterator[RemoteRank]:
        """Start the ranks, and wait until they have connected. Raises what fails on one."""
        for rank in self._ranks:
            self._placement.start(rank, self._listener.address, self._key)
        waiting = {Hello(purpose, 0, rank) for rank in self._ranks for purpose in ("messages", "pulse")}
        deadline = time.monotonic() + START_SECONDS
        found = self._listener.gather(waiting, deadline, self._placement.check)
        for rank in self._ranks:
            connection, pulse = (found[Hello(purpose, 0, rank)] for purpose in ("messages", "pulse"))
            self.address = (connection.getsockname()[0], self._listener.address[1])
            channel = NetworkChannel(connection)
            arrived: Arrived
            arrived, _ = channel.receive(deadline)
            process = RemoteProcess(connection, arrived.pid)
            yield RemoteRank(rank, channel, pulse, process, connection.getpeername()[0], arrived.nodes)

    def connect(
        self, generation: int, peers: list[int], deadline: float, check: Callable[[], None]
    ) -> tuple[dict[int, socket], dict[int, socket]]:
        """The connections of a group, by rank: of all ranks for their steps, and of rank 0's peers. Raises as
        `Listener.gather` does."""
        steps = {Hello("steps", generation, rank) for rank in self._ranks}
        links = {Hello("peers", generation, rank) for rank in peers}
        found = self._listener.gather(steps | links, deadline, check)
        return {hello.rank: found[hello] for hello in steps}, {hello.rank: found[hello] for hello in links}


def absolute(model: str | PathLike[str]) -> str | PathLike[str]:
    """The path of a directory as processes find it that have another working directory."""
    directory = Path(model).expanduser()
    return directory.absolute() if directory.is_dir() else model
