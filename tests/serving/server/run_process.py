"""`pagedattn serve` in a process of its own, as a user starts it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

SERVE = "import sys; from pagedattn_serve.cli import main; sys.exit(main(['serve', '--port', '0', *sys.argv[1:]]))"


class ServerProcess:
    """process; url, once it has told it; what it wrote is in the files."""

    def __init__(self, process: subprocess.Popen[bytes], stdout: Path, stderr: Path) -> None:
        self.process = process
        self._stdout = stdout
        self._stderr = stderr
        self.url = ""

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_until_it_serves(self, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not self.url:
            self.url = self._told_url()
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"it does not serve: {self.process.returncode}, {self.stderr}")
            time.sleep(0.02)

    def _told_url(self) -> str:
        for line in self.stdout.splitlines():
            if line.startswith("URL"):
                return line.split()[1]
        for line in self.stderr.splitlines():
            if line.startswith("{") and (url := json.loads(line).get("URL")):
                return str(url)
        return ""


@contextmanager
def server_process(
    directory: Path, *arguments: str, program: str = SERVE, environment: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server that has begun to serve; killed, if it still runs, in the end."""
    stdout, stderr = directory / "stdout", directory / "stderr"
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = start(program, arguments, out, err, environment or {})
    try:
        server = ServerProcess(process, stdout, stderr)
        server.wait_until_it_serves()
        yield server
    finally:
        process.kill()
        process.wait()


def start(
    program: str, arguments: tuple[str, ...], out: IO[bytes], err: IO[bytes], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if name != "PAGEDATTN_API_KEY"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdout=out, stderr=err, env=clean | environment)
