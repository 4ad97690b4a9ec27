"""Commands that may hang or take too long, each with a log and a limit of time; and outcomes, of tests too."""

import contextlib
import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 10.0  # after an interrupt, in which pytest says what failed
# Where the tools of CUDA lie if PATH does not say.
TOOL_FOLDERS = (
    *("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/usr/local/nvidia/bin"),
    "/opt/nvidia/nsight-compute/*",
)
OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
# What pytest -v writes of a test. A test without an outcome was running when the log ended, or took too long.
TEST_LINE = re.compile(
    rf"(?P<test>\S+\.py::.+?)(?: <- \S+)?(?: (?P<outcome>{OUTCOMES})\b.*| ?(?:Timeout \(|\++ Timeout \+).*| ?)$"
)


@dataclass(frozen=True)
class Command:
    name: str  # of its log: NAME.log
    argv: Sequence[str]
    seconds: float  # that it may take
    environment: Mapping[str, str] = field(default_factory=dict)
    # Called when a process has failed, with what it wrote. Returns the command that goes on behind it; None: nothing is
    # left.
    go_on: Callable[[str], Sequence[str] | None] | None = None


def hear_interrupts() -> None:
    """For a new process. A shell lets its background commands, and all that they start, ignore SIGINT. A pytest that is
    interrupted because it is late could not say what failed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Running:
    """A command in a process group of its own, which ends with it."""

    def __init__(self, command: Command, out: Path) -> None:
        self.command, self.log = command, out / f"{command.name}.log"
        self.log.write_text("")
        self.started = time.monotonic()
        self.ended: float | None = None
        self._deadlines = [(command.seconds, signal.SIGINT), (command.seconds + GRACE_SECONDS, signal.SIGKILL)]
        self._is_late = False
        self._start(command.argv)

    def _start(self, argv: Sequence[str]) -> None:
        with self.log.open("a") as log:
            self._log_begin = log.tell()
            new_line = "\n" if log.tell() else ""  # a process that was killed may have ended within a line
            print(f"{new_line}$ {shlex.join(argv)}", file=log, flush=True)
            self._process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=os.environ | self.command.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=hear_interrupts,
            )

    def has_ended(self) -> bool:
        """Has to be called often: this call stops a command that is late, and goes on behind one that ended early."""
        if self.ended is None and self._process.poll() is not None:
            self._kill_processes()
            if (argv := self._what_is_left()) is None:
                self.ended = time.monotonic()
            else:
                self._start(argv)
        elif self.ended is None and self._deadlines and time.monotonic() - self.started > self._deadlines[0][0]:
            self._signal(self._deadlines.pop(0)[1])
            self._is_late = True
        return self.ended is not None

    def _what_is_left(self) -> Sequence[str] | None:
        if self.command.go_on is None or self._is_late or self._process.returncode == 0:
            return None
        return self.command.go_on(self.log.read_bytes()[self._log_begin :].decode(errors="replace"))

    def kill(self) -> None:
        """The command and whatever it has started."""
        self._kill_processes()
        self.ended = self.ended or time.monotonic()

    def _kill_processes(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, number)

    def outcome(self) -> dict[str, Any]:
        """As it goes into summary.json."""
        assert self.ended is not None
        tests = read_tests(self.log) if "pytest" in self.command.argv else {}
        status = "passed" if self._process.returncode == 0 else "failed"
        if tests and (tests["failures"] or not tests["counts"].get("passed")):
            status = "failed"  # all were skipped, or an earlier process of the command ended early
        return {
            "name": self.command.name,
            "status": "timed out" if self._is_late else status,
            "seconds": round(self.ended - self.started, 1),
            "exit_status": self._process.returncode,
            **tests,
        }


def outcomes_of_tests(text: str) -> dict[str, str]:
    """The outcome of each test, from what `pytest -v` wrote, even if pytest was killed. A test that was running at the
    end is "unfinished"."""
    outcomes: dict[str, str] = {}
    for line in text.splitlines():
        if match := TEST_LINE.match(line):
            outcomes[match["test"]] = (match["outcome"] or "unfinished").lower()
    return outcomes


def read_tests(log: Path) -> dict[str, Any]:
    """How many tests of a log had each outcome, and which tests failed or did not end."""
    outcomes = outcomes_of_tests(log.read_text(errors="replace"))
    failures = [test for test, outcome in outcomes.items() if outcome in ("failed", "error", "unfinished")]
    return {"counts": dict(Counter(outcomes.values())), "failures": failures}


def not_run(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "status": "not run", "seconds": 0.0, "reason": reason}


def run_together(
    commands: Sequence[Command], out: Path, meanwhile: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """The outcomes of commands that run at the same time. What is not installed is not run. `meanwhile` is called again
    and again."""
    running: list[Running] = []
    left_out = []
    try:
        for command in commands:
            if shutil.which(command.argv[0]) is None:
                left_out.append(not_run(command.name, f"{command.argv[0]} was not found"))
            else:
                running.append(Running(command, out))
        while not all([each.has_ended() for each in running]):
            meanwhile()
            time.sleep(0.05)
    finally:
        for each in running:
            each.kill()
    return [*left_out, *(each.outcome() for each in running)]


def path_with_tools(first: Path) -> str:
    """PATH with `first` at its beginning and TOOL_FOLDERS at its end."""
    folders = [str(first), *filter(None, os.environ.get("PATH", "").split(os.pathsep))]
    return os.pathsep.join(folders + [folder for pattern in TOOL_FOLDERS for folder in sorted(glob.glob(pattern))])
