"""`pagedattn serve` as a process of its own, on a real socket, for tests of any environment: no more is imported."""

import json
import os
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

COMMAND = "import sys; from pagedattn_serve.cli import main; sys.exit(main(['serve', '--port', '0', *sys.argv[1:]]))"
# For tests of what happens amid requests: as `slow_steps`, a token takes some milliseconds. The engine's process calls
# the function that sets up its log, so that function slows the steps as well. The server's own log is set up before.
SLOW_COMMAND = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent / "serving" / "helpers")!r})
from slow_engine import set_up_logs_and_slow_steps
import pagedattn_serve.cli.serve as serve
make_engine = serve.make_engine
def make_slow_engine(*args):
    serve.set_up_logs = set_up_logs_and_slow_steps
    return make_engine(*args)
serve.make_engine = make_slow_engine
{COMMAND}
"""
START_SECONDS = 120  # on a busy machine
STOP_SECONDS = 60
WAIT_SECONDS = 120  # for what happens soon: no test fails because the machine is busy
AT_ONCE_SECONDS = 25  # the same, where the limits for which ranks wait for each other begin at 30
_SAMPLE = re.compile(r"(?:pagedattn:)?([^{ ]+)(?:\{(.*)\})? (\S+)")


class ServerProcess:
    """A server. Once it serves, url: http://127.0.0.1:PORT; model: what it calls its model."""

    def __init__(self, process: "subprocess.Popen[bytes]", stdout: Path, stderr: Path) -> None:
        self.process = process
        self._stdout = stdout
        self._stderr = stderr
        self.url = ""
        self.model = ""

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(encoding="utf-8")

    def wait_until_it_serves(self) -> None:
        end = time.monotonic() + START_SECONDS
        while not (facts := self._told_facts()):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"it does not serve: {self.process.returncode}, {self.stderr}")
            time.sleep(0.02)
        self.url, self.model = facts["URL"], facts["model"]

    def _told_facts(self) -> dict[str, str]:
        """The table that the server prints once it takes connections, with names in 15 columns and the URL last; or the
        line with these facts in a log in JSON. Empty before."""
        facts = {line[:15].strip(): line[15:].strip() for line in self.stdout.splitlines(keepends=True) if "\n" in line}
        if "URL" in facts:
            return facts
        lines = [json.loads(line) for line in self.stderr.splitlines() if line.startswith("{") and line.endswith("}")]
        return next((line for line in lines if "URL" in line), {})

    @property
    def core_pid(self) -> int:
        """The process of its engine: its one child."""
        [pid] = children_of(self.process.pid)
        return pid

    def metrics(self) -> dict[str, float]:
        """What /metrics says, by name without pagedattn: and labels but model_name: kv_cache_blocks{state="used"}."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        values = {}
        for line in lines:
            if match := _SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                kept = [label for label in (labels or "").split(",") if label and not label.startswith("model_name=")]
                values[f"{name}{{{','.join(kept)}}}" if kept else name] = float(value)
        return values

    def num_unfinished(self) -> float:
        """Requests that run or wait."""
        metrics = self.metrics()
        return sum(metrics[f"num_requests_{state}"] for state in ("running", "waiting", "swapped"))

    def num_used_blocks(self) -> float:
        return self.metrics()['kv_cache_blocks{state="used"}']

    def wait_until_idle(self, seconds: float = WAIT_SECONDS) -> None:
        """Wait until no request is left and no block is in use. Asserts that this happens within so many seconds."""
        wait_for(lambda: self.num_unfinished() == 0 and self.num_used_blocks() == 0, seconds)


@contextmanager
def running(
    *arguments: str,
    python: str,
    environment: Mapping[str, str] | None = None,
    program: str = COMMAND,
    launcher: Sequence[str] = (),
) -> Iterator[ServerProcess]:
    """`pagedattn serve ARGUMENTS` on a free port, once it serves; killed in the end, if it still runs.

    python: an interpreter that has pagedattn_serve. What it wrote can be read as long as the context lasts.
    launcher: a command that starts the command which follows.
    """
    with tempfile.TemporaryDirectory() as directory:
        stdout, stderr = Path(directory, "stdout"), Path(directory, "stderr")
        without_key = {name: value for name, value in os.environ.items() if name != "PAGEDATTN_API_KEY"}
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(
                [*launcher, python, "-c", program, *arguments],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env={**without_key, **(environment or {})},
            )
        try:
            server = ServerProcess(process, stdout, stderr)
            server.wait_until_it_serves()
            yield server
        finally:
            process.kill()
            process.wait()


@contextmanager
def serving(
    *arguments: str, python: str, environment: Mapping[str, str] | None = None, program: str = COMMAND
) -> Iterator[ServerProcess]:
    """As `running`, but SIGTERM ends it, unless it has ended before: asserts status 0, and that there was no
    traceback."""
    with running(*arguments, python=python, environment=environment, program=program) as server:
        yield server
        server.process.terminate()
        assert server.process.wait(STOP_SECONDS) == 0, server.stderr
        assert "Traceback" not in server.stderr, server.stderr


def children_of(pid: int) -> list[int]:
    """The processes that have this parent, including processes that have ended and that nobody has waited for."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended in between
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[1]) == pid:
                children.append(int(stat.parent.name))
    return children


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has stopped the process."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"


def wait_for(is_so: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Wait until `is_so` is true. Asserts that this happens within so many seconds."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not so after {seconds} seconds"
        time.sleep(0.01)


def in_pieces(stream: Callable[[], list[T]]) -> list[T]:
    """The pieces of the first stream that comes in more than one: tokens that wait for their reader come in one."""
    pieces: list[T] = []

    def are_several() -> bool:
        pieces[:] = stream()
        return len(pieces) > 1

    wait_for(are_several)
    return pieces
