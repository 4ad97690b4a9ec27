"""Commands that may hang or take too long, each with a log and a limit of time; their outcomes, those of tests too."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 10.0  # after an interrupt, in which pytest writes its XML
OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED"
# What pytest -v writes of a test. Without an outcome it is the one that was running when the log ended, or one that
# took longer than faulthandler_timeout.
TEST_LINE = re.compile(rf"(?P<test>\S+\.py::.+?)(?: (?P<outcome>{OUTCOMES})\b.*| ?Timeout \(.*| ?)$")


@dataclass(frozen=True)
class Command:
    name: str  # of its files: NAME.log, NAME.xml
    argv: Sequence[str]
    seconds: float  # that it may take
    environment: Mapping[str, str] = field(default_factory=dict)


class Running:
    """A command in a process group of its own, which ends with it."""

    def __init__(self, command: Command, out: Path) -> None:
        self.command, self.log = command, out / f"{command.name}.log"
        self.started = time.monotonic()
        self.ended: float | None = None
        self._deadlines = [(command.seconds, signal.SIGINT), (command.seconds + GRACE_SECONDS, signal.SIGKILL)]
        self._is_late = False
        with self.log.open("w") as log:
            print(f"$ {shlex.join(command.argv)}", file=log, flush=True)
            self._process = subprocess.Popen(
                command.argv,
                cwd=ROOT,
                env=os.environ | command.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def has_ended(self) -> bool:
        """To be asked often: it is what stops a command that is late."""
        if self.ended is None and self._process.poll() is not None:
            self.kill()
        elif self.ended is None and self._deadlines and time.monotonic() - self.started > self._deadlines[0][0]:
            self._signal(self._deadlines.pop(0)[1])
            self._is_late = True
        return self.ended is not None

    def kill(self) -> None:
        """The command and whatever it has started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self.ended = self.ended or time.monotonic()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, number)

    def outcome(self) -> dict[str, Any]:
        """As it goes into summary.json."""
        assert self.ended is not None
        tests = read_tests(self.log) if "pytest" in self.command.argv else {}
        status = "passed" if self._process.returncode == 0 else "failed"
        if tests and not tests["counts"].get("passed"):
            status = "failed"  # all were skipped, or the run ended before the first
        return {
            "name": self.command.name,
            "status": "timed out" if self._is_late else status,
            "seconds": round(self.ended - self.started, 1),
            "exit_status": self._process.returncode,
            **tests,
        }


def read_tests(log: Path) -> dict[str, Any]:
    """Of a log of `pytest -v`: how many tests had which outcome, which failed, and which was running at the end. The
    log has them even where pytest was killed and wrote no XML."""
    outcomes: dict[str, str] = {}
    for line in log.read_text(errors="replace").splitlines():
        if match := TEST_LINE.match(line):
            outcomes[match["test"]] = (match["outcome"] or "unfinished").lower()
    failures = [test for test, outcome in outcomes.items() if outcome in ("failed", "error", "unfinished")]
    return {"counts": dict(Counter(outcomes.values())), "failures": failures}


def run_together(commands: Sequence[Command], out: Path) -> list[dict[str, Any]]:
    """The outcomes of commands that run at the same time. What is not installed is skipped."""
    running: list[Running] = []
    skipped = []
    try:
        for command in commands:
            if shutil.which(command.argv[0]) is None:
                reason = f"{command.argv[0]} was not found"
                skipped.append({"name": command.name, "status": "skipped", "seconds": 0.0, "reason": reason})
            else:
                running.append(Running(command, out))
        while not all([each.has_ended() for each in running]):
            time.sleep(0.05)
    finally:
        for each in running:
            each.kill()
    return [*skipped, *(each.outcome() for each in running)]
