"""A rank as torchrun starts one, here as a child of a warm process."""

import json
import os
import socket

from pagedattn_serve.distributed.torchrun import serve_as_rank

MAX_BYTES = 1 << 12


def main(fd: int) -> None:
    """fd: a socket, which tells what torchrun sets in the environment, as JSON."""
    with socket.socket(fileno=fd) as connection:
        os.environ.update(json.loads(connection.recv(MAX_BYTES)))
    serve_as_rank(int(os.environ["WORLD_SIZE"]))
