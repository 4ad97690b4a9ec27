"""What passes between rank 0 and another rank: messages, over a pair of Unix sockets or between machines.

A message that is interrupted was sent or was not, and was received or was not.

Between machines the connections are TCP. What passes are pickles, so both sides show first that they know the key of
the engine. The key itself comes by a way that is trusted already. Nothing is encrypted.
"""

import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, NamedTuple

MAX_BYTES = 1 << 16  # of a message
MAX_DESCRIPTORS = 4
SIZE = struct.Struct("!I")
START_SECONDS = 300.0  # that ranks wait for each other at the start
POLL_SECONDS = 0.1
HANDSHAKE_SECONDS = 5  # for the other side to answer, once it has begun
TIMEVAL = struct.Struct("ll")
# An idle connection to a machine that has vanished without a word breaks after 5 seconds.
KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}

Address = tuple[str, int]


class ChannelClosed(Exception):  # an end, not always an error
    """The other process has ended, or has closed its side."""


class Channel:
    """One side of a pair of Unix sockets, which keep messages whole (SOCK_SEQPACKET). A message may bring descriptors
    along."""

    def __init__(self, side: socket.socket) -> None:
        self.socket = side

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Raises ChannelClosed."""
        try:
            socket.send_fds(self.socket, [pickle.dumps(message)], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            raise ChannelClosed from None

    def receive(self, deadline: float | None = None) -> tuple[Any, list[int] | None]:
        """Wait for a message; returns the message and its descriptors; None in their place if this process may not
        open so many. Raises ChannelClosed; TimeoutError if no message has come at `deadline`, a time of
        `time.monotonic()`."""
        _wait_until(deadline, self.socket)
        try:
            received = socket.recv_fds(self.socket, MAX_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            raise ChannelClosed from None
        data, descriptors, flags, _ = received
        if not data:
            raise ChannelClosed
        if flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            return pickle.loads(data), None
        return pickle.loads(data), descriptors

    def has_message(self, timeout: float = 0) -> bool:
        """Whether `receive` would return or raise ChannelClosed at once, within so many seconds."""
        return happens(self.socket, select.POLLIN, timeout)

    def close(self) -> None:
        self.socket.close()


class NetworkChannel:
    """One side of a TCP connection. Each message goes behind its size."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, message: Any) -> None:
        """Raises ChannelClosed."""
        data = pickle.dumps(message)
        self.socket.settimeout(None)
        try:
            # At once: there is room for what fits into a message, as its receiver reads it before the next one comes.
            self.socket.sendall(SIZE.pack(len(data)) + data)
        except OSError:
            raise ChannelClosed from None

    def receive(self, deadline: float | None = None) -> tuple[Any, list[int]]:
        """As that of `Channel`; there are no descriptors."""
        needed = SIZE.size
        while True:
            # Nothing is taken before the whole message is there.
            self._wake_for(needed)
            _wait_until(deadline, self.socket)
            try:
                data = self.socket.recv(SIZE.size + MAX_BYTES, socket.MSG_PEEK)
            except TimeoutError as error:
                if error.errno is None:
                    raise
                raise ChannelClosed from None  # the connection's, whose machine has vanished
            except OSError:
                raise ChannelClosed from None
            if len(data) < needed:
                raise ChannelClosed
            [size] = SIZE.unpack_from(data)
            if size > MAX_BYTES:
                raise ChannelClosed
            needed = SIZE.size + size
            if len(data) >= needed:
                break
        message = self.socket.recv(needed)[SIZE.size :]
        self._wake_for(1)
        return pickle.loads(message), []

    def has_message(self, timeout: float = 0) -> bool:
        """As that of `Channel`."""
        return happens(self.socket, select.POLLIN, timeout)

    def close(self) -> None:
        self.socket.close()

    def _wake_for(self, num_bytes: int) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


def _wait_until(deadline: float | None, connection: socket.socket) -> None:
    connection.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))


def happens(file: socket.socket | FileIO, event: int, timeout: float | None) -> bool:
    """Whether an event of `select.poll` comes within so many seconds. `select.select` takes no descriptor from 1024
    on."""
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


class Hello(NamedTuple):
    """What a connection is for ("messages", "pulse" or "steps" with rank 0, "peers" with any other), and of which rank.
    generation: the number of the group that the connection belongs to."""

    purpose: str
    generation: int
    rank: int


class Listener:
    """Where connections of other machines arrive: a port of this address that was free."""

    def __init__(self, ip: str, key: bytes) -> None:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._socket = socket.create_server((ip, 0), family=family)
        self._key = key
        self.address: Address = self._socket.getsockname()[:2]

    def gather(self, expected: set[Hello], deadline: float, check: Callable[[], None]) -> dict[Hello, socket.socket]:
        """Wait for these connections. All others are closed, such as those of a group that was given up.

        check: is called again and again. What it raises ends the waiting. Raises TimeoutError at `deadline`, a time of
        `time.monotonic()`.
        """
        found: dict[Hello, socket.socket] = {}
        try:
            while missing := expected - found.keys():
                wait_until_readable(self._socket, deadline, check, f"rank {min(hello.rank for hello in missing)}")
                connection, _ = self._socket.accept()
                hello = _receive_hello(connection, self._key)
                if hello in missing:
                    found[hello] = connection
                else:
                    connection.close()
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        return found

    def close(self) -> None:
        self._socket.close()


def connect(address: Address, key: bytes, hello: Hello, deadline: float, check: Callable[[], None]) -> socket.socket:
    """A connection to a listener, which may be long in accepting it. `deadline` and `check` are as for `gather`."""
    connection = socket.create_connection(address, timeout=max(deadline - time.monotonic(), POLL_SECONDS))
    try:
        wait_until_readable(connection, deadline, check, f"the rank at {address[0]}")
        with _handshake(connection) as side:
            answer_challenge(side, key)
            deliver_challenge(side, key)
            side.send(hello)
    except BaseException:
        connection.close()
        raise
    return connection


def wait_until_readable(connection: socket.socket, deadline: float, check: Callable[[], None], name: str) -> None:
    while not wait([connection], POLL_SECONDS):
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} has not connected in time")


def has_hung_up(connection: socket.socket, timeout: float | None = 0) -> bool:
    """Whether the other side has closed the connection, or the connection breaks, within so many seconds. Messages may
    be left to read."""
    return happens(connection, select.POLLRDHUP, timeout)


def _receive_hello(connection: socket.socket, key: bytes) -> Any:
    """None from somebody who does not know the key, or leaves."""
    try:
        with _handshake(connection) as side:
            deliver_challenge(side, key)
            answer_challenge(side, key)
            return side.recv()
    except (AuthenticationError, OSError, EOFError):
        return None


@contextmanager
def _handshake(connection: socket.socket) -> "Iterator[Connection[Any, Any]]":
    """The connection as the functions of multiprocessing take it, with a limit of time for each answer."""
    connection.settimeout(None)  # the limit is the kernel's
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.pack(HANDSHAKE_SECONDS, 0))
    with Connection(os.dup(connection.fileno())) as side:
        yield side
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.pack(0, 0))
