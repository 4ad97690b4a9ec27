"""What passes between rank 0 and another rank: messages, over a pair of Unix sockets or between machines.

A message that is interrupted was sent or was not, and was received or was not.
"""

import pickle
import select
import socket
import struct
import time
from typing import Any

MAX_BYTES = 1 << 16  # of a message
MAX_DESCRIPTORS = 2
SIZE = struct.Struct("!I")


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

    def receive(self, deadline: float | None = None) -> tuple[Any, list[int]]:
        """Wait for a message; returns the message and its descriptors. Raises ChannelClosed; TimeoutError if no message
        has come at `deadline`, a time of `time.monotonic()`."""
        _wait_until(deadline, self.socket)
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, MAX_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            raise ChannelClosed
        return pickle.loads(data), descriptors

    def has_message(self, timeout: float = 0) -> bool:
        """Whether `receive` would return or raise ChannelClosed at once, within so many seconds."""
        return _is_readable(self.socket, timeout)

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
        return _is_readable(self.socket, timeout)

    def close(self) -> None:
        self.socket.close()

    def _wake_for(self, num_bytes: int) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


def _wait_until(deadline: float | None, connection: socket.socket) -> None:
    connection.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))


def _is_readable(connection: socket.socket, timeout: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
