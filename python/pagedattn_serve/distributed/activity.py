"""Whether processes hang: what the kernel says of their threads, and the pulse of ranks on other hosts.

Somebody looks every LOOK_SECONDS. What MAX_LOOKS looks after each other have seen is a hang. Looks are counted instead
of seconds, so that a process which was stopped itself, for instance with its machine, then blames nobody.
"""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

LOOK_SECONDS = 0.25
MAX_LOOKS = 12
HANG_SECONDS = LOOK_SECONDS * MAX_LOOKS
# CPU time of a thread between two looks that is no work: who waits for another rank wakes ten times a second.
IDLE_TICKS = 0.04 * LOOK_SECONDS * os.sysconf("SC_CLK_TCK")
WORKS, WAITS = b"w", b"-"  # what a pulse says


class Activity:
    """The threads of a process of this machine that compute.

    thread: the one that computes, of this process. The other threads that Python knows serve callers, or wait. Those
    that Python does not know are threads of the ops. None: of a process all of whose threads count.
    """

    def __init__(self, pid: int, thread: threading.Thread | None = None) -> None:
        self._process = Path(f"/proc/{pid}")
        self._thread = thread
        self._ticks: dict[str, int] = {}  # of CPU time until the last look, by thread
        self._sleeps: dict[str, str] = {}  # how often threads had slept that were ready to run at the last look

    def is_stopped(self) -> bool:
        """Whether the process is stopped, by SIGSTOP or a debugger."""
        try:
            return _read_stat(self._process)[0] in "Tt"
        except OSError:  # it has ended
            return False

    def works(self) -> bool:
        """Whether a thread has used the CPU since the last look, or waits for the disk, or all the time for the CPU."""
        others = set()
        if self._thread is not None:
            others = {str(each.native_id) for each in threading.enumerate() if each is not self._thread}
        before, self._ticks = self._ticks, {}
        sleeps_before, self._sleeps = self._sleeps, {}
        has_work = False
        with suppress(OSError):  # the process has ended
            for task in (self._process / "task").iterdir():
                with suppress(OSError):  # the thread has ended
                    if task.name not in others:
                        state, self._ticks[task.name] = _read_stat(task)
                        if state == "R":  # which on a busy machine is also who wakes for a moment
                            self._sleeps[task.name] = _read_sleeps(task)
                            has_work |= self._sleeps[task.name] == sleeps_before.get(task.name)
                        has_work |= state == "D"
        num_ticks = sum(ticks - before.get(name, 0) for name, ticks in self._ticks.items())
        return has_work or num_ticks > IDLE_TICKS


def _read_sleeps(task: Path) -> str:
    """The line that says how often a thread has slept so far."""
    return (task / "status").read_text(encoding="utf-8").rpartition("\nvoluntary_ctxt_switches:")[2].splitlines()[0]


def _read_stat(directory: Path) -> tuple[str, int]:
    """The state of a process or thread, and the ticks of CPU time that it has used."""
    fields = (directory / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


class LocalWatch:
    """Looks at a rank of this machine."""

    def __init__(self, pid: int) -> None:
        self._activity = Activity(pid)
        self._num_stopped = 0

    def look(self) -> str | None:
        """How the rank hangs; None if it does not."""
        self._num_stopped = self._num_stopped + 1 if self._activity.is_stopped() else 0
        return "is stopped" if self._num_stopped >= MAX_LOOKS else None

    def works(self) -> bool:
        return self._activity.works()

    def close(self) -> None:
        pass


class RemoteWatch:
    """Looks at a rank of another host, whose `Pulse` is at the other end of this connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._num_silent = 0
        self._last = WORKS

    def look(self) -> str | None:
        received = b""
        with suppress(OSError):  # nothing has come; or the rank has ended, which others see
            received = self._connection.recv(1 << 10, socket.MSG_DONTWAIT)
        if received:
            self._num_silent, self._last = 0, received[-1:]
        else:
            self._num_silent += 1
        return f"has not answered for {HANG_SECONDS:g} seconds" if self._num_silent >= MAX_LOOKS else None

    def works(self) -> bool:
        return self._last == WORKS

    def close(self) -> None:
        self._connection.close()


class Pulse(threading.Thread):
    """Tells rank 0 on another host every LOOK_SECONDS whether this process computes, in the thread that made the pulse
    or in threads of the ops. Ends with the connection."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(name="pagedattn-pulse", daemon=True)
        self._connection = connection
        self._activity = Activity(os.getpid(), threading.current_thread())

    def run(self) -> None:
        self._connection.settimeout(LOOK_SECONDS)
        with self._connection, suppress(OSError):
            while True:
                try:
                    self._connection.recv(1)
                    return  # nothing comes from there but the end
                except TimeoutError:
                    with suppress(TimeoutError):  # rank 0 has not read for a long time
                        self._connection.send(WORKS if self._activity.works() else WAITS)
