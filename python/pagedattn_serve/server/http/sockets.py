"""The sockets that a server listens on. They are made first of all: whether a port is free is known before a model is
loaded, and before the modules that load a model are imported."""

import ipaddress
import os
import socket
import stat

from pagedattn_serve.errors import ArgumentOSError

MAX_UDS_BYTES = 107  # of Linux


def bind_unix(path: str) -> list[socket.socket]:
    """A unix socket, which does not listen yet. A socket that another server has left behind is replaced.

    Raises OSError, which names what is wrong.
    """
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode) and not is_listened_on(path):
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise uds_error(path, error) from None
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise uds_error(path, error) from None
    return [bound]


def is_listened_on(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return False
    return True


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
    except OSError as error:
        got = f"{host} ({error.strerror})"
        raise ArgumentOSError("host", "a name or an address of this machine", got) from None
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            sockets.append(socket.socket(family, kind, protocol))
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
    return ArgumentOSError("port", f"one that is free on {host}", f"{port} ({error.strerror})")


def port_of(bound: socket.socket) -> int:
    port: int = bound.getsockname()[1]
    return port


def are_loopback(sockets: list[socket.socket]) -> bool:
    """Whether no other machine can reach any of the sockets."""
    names = [each.getsockname() for each in sockets if each.family != socket.AF_UNIX]
    return all(ipaddress.ip_address(name[0].partition("%")[0]).is_loopback for name in names)
