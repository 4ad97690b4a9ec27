"""`pagedattn serve` as a process of its own, on a real socket, for tests of any environment: no more is imported."""

import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import Queue
from threading import Thread

COMMAND = "import sys; from pagedattn_serve.cli import main; sys.exit(main())"
START_SECONDS = 120  # on a busy machine
STOP_SECONDS = 60
_SAMPLE = re.compile(r"(?:pagedattn:)?([^{ ]+)(?:\{(.*)\})? (\S+)")


class ServerProcess:
    """A server that runs. url: http://127.0.0.1:PORT; model: what it calls its model; pid: its process."""

    def __init__(self, process: "subprocess.Popen[str]", facts: dict[str, str], errors_file: str) -> None:
        self._process = process
        self._errors_file = errors_file
        self.url = facts["URL"]
        self.model = facts["model"]
        self.pid = process.pid

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

    def wait_until_idle(self, seconds: float = 10) -> None:
        """Until no request is left, nor a block in use; that it comes to this within so many seconds is asserted."""
        wait_for(lambda: self.num_unfinished() == 0 and self.num_used_blocks() == 0, seconds)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """The exit status, once it has ended."""
        return self._process.wait(seconds)

    def errors(self) -> str:
        """What it has written to standard error."""
        with open(self._errors_file, encoding="utf-8") as file:
            return file.read()


@contextmanager
def serving(
    *arguments: str, python: str, environment: Mapping[str, str] | None = None, status: int = 0
) -> Iterator[ServerProcess]:
    """`pagedattn serve ARGUMENTS` on a free port; SIGTERM ends it, unless it has ended before.

    python: an interpreter that has pagedattn_serve. Asserts the exit status, and that there was no traceback.
    """
    with tempfile.NamedTemporaryFile(suffix=".log") as errors_file:
        process = subprocess.Popen(
            [python, "-c", COMMAND, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors_file,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            server = ServerProcess(process, read_facts(process, errors_file.name), errors_file.name)
            yield server
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_SECONDS) == status, server.errors()
            assert "Traceback" not in server.errors(), server.errors()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def read_facts(process: "subprocess.Popen[str]", errors_file: str) -> dict[str, str]:
    """The table that a server prints once it takes connections: names in 15 columns, then values; the URL is last."""
    lines: Queue[str] = Queue()

    def read() -> None:
        assert process.stdout is not None
        while line := process.stdout.readline():
            lines.put(line)
        lines.put("")

    Thread(target=read, daemon=True).start()
    facts: dict[str, str] = {}
    end = time.monotonic() + START_SECONDS
    while "URL" not in facts:
        line = lines.get(timeout=end - time.monotonic())
        if not line:
            with open(errors_file, encoding="utf-8") as file:
                raise RuntimeError(f"the server ended before it served: {file.read()}")
        facts[line[:15].strip()] = line[15:].strip()
    return facts


def wait_for(is_so: Callable[[], bool], seconds: float = 10) -> None:
    """Asserts that it comes to be so within these seconds."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not so after {seconds} seconds"
        time.sleep(0.01)
