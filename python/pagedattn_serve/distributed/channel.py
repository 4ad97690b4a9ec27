"""What passes between rank 0 and another rank: messages over a pair of Unix sockets.

The socket keeps messages whole (SOCK_SEQPACKET), so that one which is interrupted was sent or was not. A message may
bring descriptors along.
"""

import pickle
import socket
import time
from typing import Any

MAX_BYTES = 1 << 16  # of a message
MAX_DESCRIPTORS = 2


class ChannelClosed(Exception):  # an end, not always an error
    """The other process has ended, or has closed its side."""


class Channel:
    """One side of it."""

    def __init__(self, side: socket.socket) -> None:
        self._socket = side

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Raises ChannelClosed."""
        try:
            socket.send_fds(self._socket, [pickle.dumps(message)], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            raise ChannelClosed from None

    def receive(self, deadline: float | None = None) -> tuple[Any, list[int]]:
        """Wait for a message; returns the message and its descriptors. Raises ChannelClosed; TimeoutError if no message
        has come at `deadline`, a time of `time.monotonic()`."""
        self._socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, MAX_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            raise ChannelClosed
        return pickle.loads(data), descriptors

    def close(self) -> None:
        self._socket.close()
