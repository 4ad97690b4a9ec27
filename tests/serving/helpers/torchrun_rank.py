"""A rank as torchrun starts one, here as a child of a warm process: python -m torchrun_rank FD PARENT

FD: tells what torchrun sets in the environment, as JSON.
"""

import json
import os
import socket
import sys

from pagedattn_serve.distributed.torchrun import serve_as_rank

MAX_BYTES = 1 << 12


def main(fd: int, _: int) -> None:
    with socket.socket(fileno=fd) as connection:
        os.environ.update(json.loads(connection.recv(MAX_BYTES)))
    serve_as_rank(int(os.environ["WORLD_SIZE"]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
