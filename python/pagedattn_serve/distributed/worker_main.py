"""The process of a rank, which `Workers` starts: python -m pagedattn_serve.distributed.worker_main FD PARENT

FD: a socket to rank 0. PARENT: the process to die with; 0: end when the socket is closed, at the latest.
"""

import os
import socket
import sys
from typing import NoReturn

from pagedattn_serve.distributed.channel import Channel
from pagedattn_serve.distributed.processes import die_with


def main(fd: int, parent_pid: int) -> NoReturn:
    if parent_pid:
        die_with(parent_pid)
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    from pagedattn_serve.distributed.worker import serve_rank  # which imports torch

    serve_rank(channel)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # faster than the end of an interpreter that has torch


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
