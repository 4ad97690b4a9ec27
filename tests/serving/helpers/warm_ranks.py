"""Starts ranks as children of a process that has imported torch before: it takes a fifth of a second, not five. The
process is a child of that of warm_python.py.

The socket to rank 0, and the program that runs on it, are those of a rank that rank 0 starts itself.
"""

import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from server_process import START_SECONDS
from warm_python import wait_for

LARGEST_MESSAGE = 1 << 16
PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; import warm_ranks; warm_ranks.main()"


class WarmProcess:
    """What `subprocess.Popen` is for a program, as far as `workers.Worker` uses that."""

    def __init__(self, theirs: socket.socket, module: str, *arguments: str) -> None:
        self._server = server()
        socket.send_fds(self._server, [json.dumps(["start", module, *arguments]).encode()], [theirs.fileno()])
        self.pid = int(self._server.recv(LARGEST_MESSAGE))
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(self.pid)

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def poll(self) -> int | None:
        return self.wait() if select.select([self._pidfd], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("rank", timeout or 0)
            os.close(self._pidfd)
            self._server.send(json.dumps(["wait", self.pid]).encode())
            self.returncode = int(self._server.recv(LARGEST_MESSAGE))
        return self.returncode


class StartedRanks:
    """The ranks that tests have started. fault: of the next ones, as `faulty_rank` takes it. uses_gloo: the next ones
    compute together as `gloo_rank` has it."""

    def __init__(self) -> None:
        self.processes: list[WarmProcess] = []
        self.fault: str | None = None
        self.uses_gloo = False

    def start(self, module: str, theirs: socket.socket) -> WarmProcess:
        program: tuple[str, ...] = ("gloo_rank", module) if self.uses_gloo else (module,)
        if self.fault is not None:
            program = ("faulty_rank", self.fault, *program)
        self.processes.append(WarmProcess(theirs, *program))
        return self.processes[-1]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]


def memfds() -> list[str]:
    """The memory files that this process has open or mapped."""
    files = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this very directory
            files.append(os.readlink(each))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [each for each in [*files, *maps] if "memfd:" in each]


@functools.cache
def server() -> socket.socket:
    """A connection to the process, one for all tests. It ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        request = {"arguments": ["-c", PROGRAM, *sys.path], "cwd": os.getcwd(), "environment": dict(os.environ)}
        status = wait_for(request, [theirs.fileno(), 1, 2], START_SECONDS)
    assert status == 0
    return ours


def serve(connection: socket.socket) -> tuple[int, list[str]] | None:
    """Forks a child for each start. Returns socket, and module and arguments, in the child; None when nobody can ask
    any more."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, LARGEST_MESSAGE, 1)
        if not message:
            return None
        match json.loads(message):
            case ["start", *program]:
                pid = os.fork()
                if pid == 0:
                    return files[0], program
                os.close(files[0])
                connection.send(str(pid).encode())
            case ["wait", pid]:
                _, status = os.waitpid(pid, 0)
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def main() -> None:
    if os.fork() != 0:
        os._exit(0)  # who asked does not wait for the server, but for this process
    with open(os.devnull, "rb") as nowhere, socket.socket(fileno=os.dup(0)) as connection:
        os.dup2(nowhere.fileno(), 0)
        asked = serve(connection)
    if asked is not None:
        fd, [module, *arguments] = asked
        importlib.import_module(module).main(fd, *arguments)
