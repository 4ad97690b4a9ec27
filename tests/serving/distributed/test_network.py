"""Connections: who may connect, and that a message is received whole or not at all."""

import errno
import os
import pickle
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
from server_process import wait_for

from pagedattn_serve.distributed import channel
from pagedattn_serve.distributed.channel import (
    MAX_BYTES,
    SIZE,
    TIMEVAL,
    Channel,
    ChannelClosed,
    Hello,
    Listener,
    NetworkChannel,
    connect,
    has_hung_up,
)
from pagedattn_serve.distributed.communicator import SharedMemoryCommunicator
from pagedattn_serve.distributed.messages import Join, Left
from pagedattn_serve.distributed.worker import Rank

KEY = b"the key of an engine"
OURS = Hello("steps", generation=3, rank=1)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", KEY)
    yield listener
    listener.close()


def goes_on() -> None:
    pass


def in_seconds(seconds: float) -> float:
    return time.monotonic() + seconds


def test_who_is_expected_comes_in(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others do not, and keep nobody out: who has another key, says nothing, says anything, or is of another group."""
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 1)

    def call(key: bytes, hello: Hello) -> socket.socket:
        return connect(listener.address, key, hello, in_seconds(30), goes_on)

    with socket.create_connection(listener.address), socket.create_connection(listener.address) as noisy:
        noisy.sendall(100 * b"\0\0\0\5hello")
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(call, b"another key", OURS), pool.submit(call, KEY, OURS._replace(generation=2))]
            ours = pool.submit(lambda: wait(others) and call(KEY, OURS))
            [(hello, connection)] = listener.gather({OURS}, in_seconds(30), goes_on).items()
    assert hello == OURS and others[0].exception() is not None
    with connection, ours.result() as side:
        side.sendall(b"a step")
        assert connection.recv(6) == b"a step"


def test_a_connection_may_idle(listener: Listener) -> None:
    """For longer than an answer to the handshake may take. If the other machine has vanished, the kernel finds out."""
    with ThreadPoolExecutor() as pool:
        theirs = pool.submit(connect, listener.address, KEY, OURS, in_seconds(30), goes_on)
        [ours] = listener.gather({OURS}, in_seconds(30), goes_on).values()
    for side in (ours, theirs.result()):
        with side:
            limit = side.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.size)
            assert (side.gettimeout(), TIMEVAL.unpack(limit)) == (None, (0, 0))
            assert side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert side.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 5  # seconds; the system's are hours


class Bomb:
    """Is run by who unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self._path,))


def test_nothing_of_a_stranger_is_unpickled(listener: Listener, tmp_path: Path) -> None:
    with Client(listener.address) as stranger:
        for _ in range(3):
            stranger.send(Bomb(tmp_path / "exploded"))
        with pytest.raises(TimeoutError):
            listener.gather({OURS}, in_seconds(0.5), goes_on)
    assert not (tmp_path / "exploded").exists()


def test_waiting_ends(listener: Listener) -> None:
    """At the deadline, and when `check` raises: on both sides."""

    def check() -> None:
        raise RuntimeError("no more")

    with pytest.raises(TimeoutError, match=r"^rank 1 has not connected in time$"):
        listener.gather({OURS}, in_seconds(0), goes_on)
    with pytest.raises(RuntimeError, match="no more"):
        listener.gather({OURS}, in_seconds(30), check)
    with pytest.raises(TimeoutError):  # nobody accepts
        connect(listener.address, KEY, OURS, in_seconds(0), goes_on)
    with pytest.raises(RuntimeError, match="no more"):
        connect(listener.address, KEY, OURS, in_seconds(30), check)


def test_a_message_comes_whole_or_not_at_all() -> None:
    ours, theirs = (NetworkChannel(side) for side in tcp_pair())
    ours.send([1, 2])
    ours.send("x" * 60_000)
    assert theirs.has_message() and theirs.receive() == ([1, 2], [])
    assert theirs.receive(in_seconds(30)) == ("x" * 60_000, [])
    assert not theirs.has_message()
    data = pickle.dumps("later")
    message = SIZE.pack(len(data)) + data
    for i in range(len(message)):
        with pytest.raises(TimeoutError):
            theirs.receive(in_seconds(0))
        ours.socket.sendall(message[i : i + 1])
    assert theirs.receive(in_seconds(30)) == ("later", [])
    assert not has_hung_up(theirs.socket)
    ours.send("last")
    ours.socket.sendall(message[:-1])
    ours.close()
    assert has_hung_up(theirs.socket, timeout=30)
    assert theirs.receive() == ("last", [])
    with pytest.raises(ChannelClosed):
        theirs.receive()
    theirs.close()


def test_a_short_message_after_a_long_one() -> None:
    """Who has waited for all of a long message is woken by a few bytes again."""
    ours, theirs = (NetworkChannel(side) for side in tcp_pair())
    data = pickle.dumps("x" * 10_000)
    message = SIZE.pack(len(data)) + data
    with ThreadPoolExecutor() as pool:
        ours.socket.sendall(message[:10])
        received = pool.submit(theirs.receive, in_seconds(30))
        wait_for(lambda: theirs.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == len(message))
        ours.socket.sendall(message[10:])
        assert received.result() == ("x" * 10_000, [])
    ours.send("y")
    assert theirs.has_message(30) and theirs.receive() == ("y", [])
    ours.close()
    theirs.close()


def test_who_announces_too_long_a_message_is_not_waited_for() -> None:
    ours, theirs = tcp_pair()
    with ours, theirs:
        ours.sendall(SIZE.pack(MAX_BYTES + 1))
        with pytest.raises(ChannelClosed):
            NetworkChannel(theirs).receive(in_seconds(30))


@pytest.mark.parametrize("num_free", [0, 1])
def test_a_rank_without_a_free_descriptor(num_free: int) -> None:
    """It says so, and is as ready for the next group as before. None of the descriptors stays open."""
    sides = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(sides[0])
    rank = Rank.__new__(Rank)
    rank._channel, rank._communicator = Channel(sides[1]), SharedMemoryCommunicator(1, 2)
    channel.send(Join(3, None, None), (0, 1))
    free = os.dup(0)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + num_free, limits[1]))
    try:
        rank.serve_group()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    left, _ = channel.receive()
    assert isinstance(left, Left) and left.generation == 3
    assert isinstance(left.error, OSError) and left.error.errno == errno.EMFILE
    assert os.dup(0) == free
    os.close(free)
    for side in sides:
        side.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]
