"""Ranks that torchrun has started, all with the same program: rank 0 is the engine, and the others serve it.

The ranks of one machine meet at a Unix socket without a file, whose name comes from what torchrun tells each of them.
Each looks at the user of the other: what passes are pickles. Ranks on other machines connect to a port of rank 0, which
they find in torchrun's store, with the key. Whoever reaches the store can read the key.
"""

import errno
import hashlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from pagedattn_serve.distributed.channel import START_SECONDS, Address, Channel
from pagedattn_serve.errors import ArgumentError

POLL_SECONDS = 0.1
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
RANK = struct.Struct("i")

_listeners: list[socket.socket] = []  # of this process, at most one: as long as it is open, it keeps its name


def rank_of_torchrun(num_ranks: int) -> int | None:
    """The rank of this process; None if there is one rank, or if torchrun has not started this process.

    Raises ArgumentError if torchrun has started another number of processes, or not the same number on each machine.
    """
    if num_ranks == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    number = fact("WORLD_SIZE")
    if number != num_ranks:
        expected = f"{number}, as many as the processes that torchrun has started (of all stages together)"
        raise ArgumentError("tensor_parallel_size", expected, num_ranks)
    on_each = fact("LOCAL_WORLD_SIZE")
    if on_each * fact("GROUP_WORLD_SIZE") != number:
        expected = "processes that torchrun has started, the same number on each machine"
        raise ArgumentError("tensor_parallel_size", expected, f"{on_each} of {number} on this one")
    return fact("RANK")


def fact(name: str) -> int:
    return int(os.environ[name])


def serve_as_rank(num_ranks: int) -> None:
    """In a process that torchrun has started as rank 1 or up: serve rank 0 until it ends, then end the program. Returns
    in all other processes.

    A caller that makes an engine in another process calls this first, so that only rank 0 goes on.

    Raises ArgumentError as `rank_of_torchrun` does, TimeoutError if rank 0 makes no engine in time.
    """
    rank = rank_of_torchrun(num_ranks)
    if not rank:
        return
    serve: Callable[[], None]
    if rank < fact("LOCAL_WORLD_SIZE"):
        channel = Channel(connect(rank))
        from pagedattn_serve.distributed.worker import serve_rank  # which imports torch

        serve = partial(serve_rank, channel)
    else:
        address, key = find_rank_0(rank)
        from pagedattn_serve.distributed.worker import serve_remote_rank

        serve = partial(serve_remote_rank, rank, address, key)
    # Ctrl-C and torchrun signal all ranks. From here on rank 0 decides, and this process ends with rank 0.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve()
    sys.exit(0)


class TorchrunPlacement:
    """The machines of torchrun, which has started every rank already.

    ip: all addresses of this machine, since nobody tells by which one the others reach it.
    """

    def __init__(self) -> None:
        self.num_hosts = fact("GROUP_WORLD_SIZE")
        self.ip = "::" if ":" in os.environ["MASTER_ADDR"] else "0.0.0.0"

    def start(self, rank: int, address: Address, key: bytes) -> None:
        open_store().set(str(rank), f"{address[1]} {key.hex()}")

    def check(self) -> None:
        """torchrun ends all ranks if one ends."""

    def give_back(self) -> None:
        """Nothing was taken."""


def find_rank_0(rank: int) -> tuple[Address, bytes]:
    """Where rank 0 listens to this rank of another machine, and the key, once rank 0 makes an engine."""
    deadline = time.monotonic() + START_SECONDS
    store = open_store()
    while not store.check([str(rank)]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has made no engine within {START_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
    port, key = store.get(str(rank)).decode().split()
    return (os.environ["MASTER_ADDR"], int(port)), bytes.fromhex(key)


def open_store() -> Any:
    """The one of torchrun, which is on the machine of rank 0."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented all the same

    host, port, limit = os.environ["MASTER_ADDR"], fact("MASTER_PORT"), timedelta(seconds=START_SECONDS)
    store = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
    return PrefixStore(f"pagedattn/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def listen() -> socket.socket:
    """Rank 0's socket, at which the others come. Its name stays taken until this process ends.

    Raises RuntimeError for a second engine in this process: the other ranks serve the first one and end with it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address())
        listener.listen()
        listener.settimeout(START_SECONDS)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        text = "a program that torchrun has started has one engine with tensor_parallel_size, and this is a second one"
        raise RuntimeError(text) from None
    _listeners.append(listener)
    return listener


def accept(listener: socket.socket) -> tuple[int, socket.socket, int]:
    """Wait for the next rank: its number, the connection and its process."""
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise TimeoutError(f"a rank that torchrun has started has not come within {START_SECONDS:g} s") from None
        pid, uid = peer_of(connection)
        if uid == os.geteuid():
            connection.settimeout(START_SECONDS)
            [rank] = RANK.unpack(connection.recv(RANK.size))
            return rank, connection, pid
        connection.close()


def connect(rank: int) -> socket.socket:
    """A connection to rank 0, once it listens."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(address())
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 has made no engine within {START_SECONDS:g} s") from None
            time.sleep(POLL_SECONDS)
            continue
        if peer_of(connection)[1] != os.geteuid():
            connection.close()
            raise PermissionError("rank 0 is a process of another user")
        connection.send(RANK.pack(rank))
        return connection


def address() -> str:
    """A name of Linux's abstract namespace. No other run on this machine has the same port."""
    facts = [os.environ[name] for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    # A name has 107 bytes at most, and a run id may be longer.
    return "\0pagedattn/" + hashlib.sha256("\n".join(facts).encode()).hexdigest()


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(data)
    return pid, uid
