"""Ranks as on other hosts, without Ray: `LocalPlacement` starts them, and they are children of a warm process.

As a program it is such a rank, to which its socket tells rank, address and key.
"""

import os
import pickle
import socket
from typing import NoReturn

from warm_ranks import StartedRanks

from pagedattn_serve.distributed.channel import Address
from pagedattn_serve.errors import ExecutorDeadError

MAX_BYTES = 1 << 10


class LocalPlacement:
    """What `ray_placement.RayPlacement` is for several hosts, all of which are this one. faults: by rank."""

    ip = "127.0.0.1"

    def __init__(
        self, started: StartedRanks, num_hosts: int, faults: dict[int, str], num_ranks: int, cpus_per_rank: int
    ) -> None:
        self.num_hosts = num_hosts
        self._started = started
        self._faults = faults
        self._first = len(started.processes)

    def start(self, rank: int, address: Address, key: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._started.fault = self._faults.get(rank)
            self._started.start("remote_rank", theirs)
            self._started.fault = None
            ours.sendall(pickle.dumps((rank, address, key)))

    def check(self) -> None:
        for process in self._started.processes[self._first :]:
            if process.poll() is not None:
                raise ExecutorDeadError(f"process {process.pid} has ended")

    def give_back(self) -> None:
        pass


def main(fd: int) -> NoReturn:
    with socket.socket(fileno=fd) as connection:
        order = pickle.loads(connection.recv(MAX_BYTES))
    from pagedattn_serve.distributed.worker import serve_remote_rank

    serve_remote_rank(*order)
    os._exit(0)
