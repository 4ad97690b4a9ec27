"""The sockets that a server listens on. They are made first of all: whether a port is free is known before a model is
loaded, and before the modules that load a model are imported."""

import errno
import ipaddress
import os
import socket
import stat
from contextlib import suppress

from pagedattn_serve.errors import ArgumentOSError

MAX_UDS_BYTES = 107  # of Linux
NUM_WAITING = 2048  # connections that the kernel takes before the server does, at most


class Listener(socket.socket):
    """A socket on which NUM_WAITING connections may wait, whatever number `listen` is told.

    asyncio tells the socket the number of connections that asyncio takes at once, which has to be small: if no file is
    free for the first, asyncio tries all others at once, and later once more for each of them.
    """

    def listen(self, backlog: int = NUM_WAITING, /) -> None:
        super().listen(NUM_WAITING)


def bind_unix(path: str) -> list[socket.socket]:
    """A unix socket, which does not listen yet. A socket that another server has left behind is replaced.

    Raises OSError, which names what is wrong.
    """
    bound = Listener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_abandoned(path)
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise uds_error(path, error) from None
    return [bound]


def remove_abandoned(path: str) -> None:
    """Remove a unix socket that no process has. Raises OSError."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode) and not is_bound(path):
            os.unlink(path)


def is_bound(path: str) -> bool:
    """Whether a process has the unix socket. It need not listen: of a socket that a process has, the kernel says to
    one of another kind that the kinds differ."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        return other.connect_ex(path) != errno.ECONNREFUSED


def uds_error(path: str, error: OSError) -> OSError:
    expected = f"a path of at most {MAX_UDS_BYTES} bytes where a socket can be made"
    return ArgumentOSError("uds", expected, f"{path} ({error.strerror or error})")


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of a host. They do not listen yet: clients shall not wait until the model is loaded.

    port: 0 takes any free port, the same for all addresses.

    Raises OSError, which names what is wrong, and leaves no socket open.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # of a name with an empty part, such as a..b
        raise host_error(host, error) from None
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            sockets.append(Listener(family, kind, protocol))
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sockets[-1].bind((address[0], port, *address[2:]))
            port = port_of(sockets[0])
    except OSError as error:
        for each in sockets:
            each.close()
        raise port_error(host, port, error) from None
    return sockets


def listen(host: str, sockets: list[socket.socket]) -> None:
    """Take connections from here on. Raises OSError if another process has begun to listen on the port since `bind`."""
    try:
        for each in sockets:
            each.listen()
    except OSError as error:
        raise port_error(host, port_of(sockets[0]), error) from None


def port_error(host: str, port: int, error: OSError) -> OSError:
    if error.errno == errno.EADDRNOTAVAIL:
        return host_error(host, error)
    return ArgumentOSError("port", f"one that is free on {host}", f"{port} ({error.strerror})")


def host_error(host: str, error: OSError | UnicodeError) -> OSError:
    reason = error.strerror if isinstance(error, OSError) else error
    return ArgumentOSError("host", "a name or an address of this machine", f"{host} ({reason})")


def port_of(bound: socket.socket) -> int:
    port: int = bound.getsockname()[1]
    return port


def are_loopback(sockets: list[socket.socket]) -> bool:
    """Whether no other machine can reach any of the sockets."""
    names = [each.getsockname() for each in sockets if each.family != socket.AF_UNIX]
    return all(ipaddress.ip_address(name[0].partition("%")[0]).is_loopback for name in names)
