"""Runs Python programs in children of a process that has imported torch and transformers before.

A new interpreter takes 2 to 5 seconds of CPU time for these imports. A child of the process, which is the server here,
takes none. The child imports the project's own modules, as a new interpreter does, and ends as a new interpreter ends:
with exit handlers, with the status of sys.exit, with a traceback.

A test needs a new interpreter where the test is about imports, or about variables that torch reads while torch is
imported (OMP_NUM_THREADS).
"""

import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

# Modules of others that take long. None may start threads: a child has none of its parent's.
PRELOADED = [
    "torch",
    "fastapi",
    "safetensors.torch",
    "uvicorn",
    "transformers.generation.continuous_batching",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
]
LARGEST_MESSAGE = 1 << 17


def run_python(
    *arguments: str | Path,
    stdin: str = "",
    stdout: IO[Any] | None = None,
    cwd: Path | None = None,
    timeout: float = 300,
) -> "subprocess.CompletedProcess[str]":
    """What subprocess.run returns for `python ARGUMENTS`, of which the first is -c, -m or the path of a program.

    stdout: where the program writes; captured if None.
    """
    command = [*map(str, arguments)]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        request = {"arguments": command, "cwd": str(cwd or Path.cwd()), "environment": dict(os.environ)}
        status = wait_for(request, [given.fileno(), (stdout or out).fileno(), err.fileno()], timeout)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, status, out.read().decode(), err.read().decode())


def wait_for(request: dict[str, Any], files: list[int], timeout: float) -> int:
    connection = server()
    socket.send_fds(connection, [json.dumps(request).encode()], files)
    pid = int(connection.recv(LARGEST_MESSAGE))
    connection.settimeout(timeout)
    try:
        return int(connection.recv(LARGEST_MESSAGE))
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        connection.settimeout(None)
        connection.recv(LARGEST_MESSAGE)
        raise subprocess.TimeoutExpired(request["arguments"], timeout) from None
    finally:
        connection.settimeout(None)


@functools.cache
def server() -> socket.socket:
    """A connection to the server, one server for all tests. The server ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        # numpy starts its threads as numpy is imported. Without a terminal, and with PYTHONUNBUFFERED empty, sys.stdout
        # is buffered, as it is for a program that writes to a file or a pipe.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
        nowhere = subprocess.DEVNULL
        subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=nowhere, stdout=nowhere)
    return ours


# ---- the server -----------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Forks a child for each request. In the child this function returns the request and the files; in the server it
    returns None, once nobody can ask any more."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, LARGEST_MESSAGE, 3)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            return json.loads(message), files
        for file in files:
            os.close(file)
        connection.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(request: dict[str, Any], files: list[int]) -> None:
    """Run the program of a request as the main program of this process."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    match request["arguments"]:
        case ["-c", code, *arguments]:
            sys.argv, sys.path[0] = ["-c", *arguments], ""
            exec(code, {"__name__": "__main__"})
        case ["-m", name, *arguments]:
            sys.argv, sys.path[0] = [name, *arguments], request["cwd"]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case [program, *_]:
            sys.argv, sys.path[0] = request["arguments"], str(Path(program).parent)
            runpy.run_path(program, run_name="__main__")


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a module of PRELOADED has started a thread"
    gc.collect()
    gc.freeze()  # a child neither looks through these objects nor copies their pages
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        asked = serve(connection)
    if asked is not None:
        become(*asked)


if __name__ == "__main__":
    main()
