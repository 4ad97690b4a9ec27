"""Child processes: how they start, on which CPUs they compute, and how they end with their parent.

Where a machine has several NUMA nodes, memory of another node takes longer to read, so a rank stays on one node, with
its slice of the weights. On a machine with one node the kernel places the ranks' threads better than a fixed plan
would: it knows who else is running.
"""

import ctypes
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NoReturn, Protocol

from pagedattn_serve.distributed.channel import happens

NODES = Path("/sys/devices/system/node")
PR_SET_PDEATHSIG = 1


def numa_nodes(allowed: set[int], nodes: Path = NODES) -> list[set[int]]:
    """The allowed CPUs of each NUMA node that has any; all as one node where the system does not tell."""
    found = []
    for file in sorted(nodes.glob("node*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node"))):
        cpus = parse_cpu_list(file.read_text(encoding="ascii")) & allowed
        if cpus:
            found.append(cpus)
    return found or [allowed]


def parse_cpu_list(text: str) -> set[int]:
    """ "0-3,8" is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        begin, _, end = part.partition("-")
        cpus.update(range(int(begin), int(end or begin) + 1))
    return cpus


def cpus_of_rank(rank: int, world_size: int, nodes: list[set[int]]) -> set[int] | None:
    """The CPUs that a rank binds to; None if it does not bind, because there is one node.

    With fewer ranks than nodes a rank has several nodes. With more ranks, the ranks of a node share its CPUs out, or
    use all of them if these are fewer than the ranks.
    """
    if len(nodes) == 1:
        return None
    if world_size <= len(nodes):
        begin, end = (len(nodes) * i // world_size for i in (rank, rank + 1))
        return set().union(*nodes[begin:end])
    node_of = [len(nodes) * i // world_size for i in range(world_size)]
    node = sorted(nodes[node_of[rank]])
    sharing = [i for i in range(world_size) if node_of[i] == node_of[rank]]
    place = sharing.index(rank)
    begin, end = (len(node) * i // len(sharing) for i in (place, place + 1))
    return set(node[begin:end] if len(node) >= len(sharing) else node)


def start_process(module: str, theirs: socket.socket) -> "subprocess.Popen[bytes]":
    """Start a process that calls `main(fd)` of a module. The process finds the modules that this process finds.

    The process ends with this one, and with the thread that called this if that is the main thread. The process ignores
    SIGINT and SIGTERM: this process decides when it ends.

    theirs: the process's end of a pair of sockets. fd: its descriptor there, which a child of the process does not get.
    """
    # The kernel kills the child at the end of the thread that made it. That is right for the main thread alone.
    by_kernel = threading.current_thread() is threading.main_thread()
    program = f"from {__name__} import run_child; run_child({module!r}, {theirs.fileno()}, {os.getpid()}, {by_kernel})"
    command = [sys.executable, "-P", "-c", program]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # The child inherits the mask, so neither signal reaches it, not even while Python starts. A terminal sends SIGINT
    # to all processes of a group; torchrun and systemd send SIGTERM to all processes that they have started.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_child(module: str, fd: int, parent_pid: int, by_kernel: bool) -> None:
    """In the process that `start_process` has started. parent_pid: the process to end with, however it ends. by_kernel:
    whether the kernel sees to that, or a thread."""
    if by_kernel:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        end_with(parent_pid)
    if os.getppid() != parent_pid:  # it ended before
        os._exit(1)
    os.set_inheritable(fd, False)  # or a child of this process would keep the socket open
    importlib.import_module(module).main(fd)


def end_with(parent_pid: int) -> None:
    """Let a thread end this process when the parent ends. The end of the socket does not tell: a child that the parent
    has forked has the socket, too."""
    with suppress(OSError):  # of a sandbox without pidfd_open: the end of the socket has to do there
        parent = PeerProcess(parent_pid)
        threading.Thread(target=_end_after, args=(parent,), name="pagedattn-parent", daemon=True).start()


def _end_after(parent: "PeerProcess") -> None:
    parent.wait()
    os._exit(1)


def end_child(status: int) -> NoReturn:
    """End a process that `start_process` has started, at once. The interpreter's own end takes long with torch, and
    crashes while a thread is amid a step or a tokenizer."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed
            with suppress(OSError):  # there is no place to write to, and nobody to tell
                stream.flush()
    os._exit(status)


class RankProcess(Protocol):
    """What `subprocess.Popen` and `PeerProcess` have in common."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class PeerProcess:
    """A process that somebody else has started, and ends: here it is watched. returncode: nobody tells."""

    returncode: int | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._file = FileIO(os.pidfd_open(pid))

    def poll(self) -> int | None:
        return 0 if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired("peer", timeout or 0)
        return 0

    def _has_ended(self, timeout: float | None) -> bool:
        return self._file.closed or happens(self._file, select.POLLIN, timeout)

    def kill(self) -> None:
        """Let it go. The process ends when its socket is closed."""
        self._file.close()


def how_it_ended(process: RankProcess) -> str:
    """In words, of a process that has been waited for."""
    status = process.returncode
    if status is None:
        return "has ended"
    return f"ended with status {status}" if status >= 0 else f"was killed by {_signal_name(-status)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
