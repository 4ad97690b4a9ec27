"""Ranks that torchrun has started, all with the same program: rank 0 is the engine, and the others serve it.

They meet at a Unix socket without a file, whose name comes from what torchrun tells each of them. Each looks at the
user of the other: what passes are pickles.
"""

import errno
import hashlib
import os
import signal
import socket
import struct
import sys
import time

from pagedattn_serve.distributed.channel import Channel
from pagedattn_serve.errors import ArgumentError

START_SECONDS = 300.0  # that ranks wait for each other at the start
POLL_SECONDS = 0.1
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
RANK = struct.Struct("i")

_listeners: list[socket.socket] = []  # of this process, at most one: as long as it is open, it keeps its name


def rank_of_torchrun(tensor_parallel_size: int) -> int | None:
    """The rank of this process; None if there is one rank, or if torchrun has not started this process.

    Raises ArgumentError if torchrun has started another number of processes, or some on other machines.
    """
    if tensor_parallel_size == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    for name, expected in (
        ("WORLD_SIZE", "as many as the processes that torchrun has started"),
        ("LOCAL_WORLD_SIZE", "processes of one machine, as many as torchrun has started there"),
    ):
        number = int(os.environ[name])
        if number != tensor_parallel_size:
            raise ArgumentError("tensor_parallel_size", f"{number}, {expected}", tensor_parallel_size)
    return int(os.environ["RANK"])


def serve_as_rank(tensor_parallel_size: int) -> None:
    """In a process that torchrun has started as rank 1 or up: serve rank 0 until it ends, then end the program. Returns
    in all other processes.

    A caller that makes an engine in another process calls this first, so that only rank 0 goes on.

    Raises ArgumentError as `rank_of_torchrun` does, TimeoutError if rank 0 makes no engine in time.
    """
    rank = rank_of_torchrun(tensor_parallel_size)
    if not rank:
        return
    channel = Channel(connect(rank))
    # Ctrl-C and torchrun signal all ranks. From here on rank 0 decides, and this process ends with rank 0.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from pagedattn_serve.distributed.worker import serve_rank  # which imports torch

    serve_rank(channel)
    sys.exit(0)


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
