"""A program that warm_python.py runs ends as the same program ends in a new interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import run_python

PROGRAMS = {
    "its end": "print('done')",
    "status": "import sys; print('half'); sys.exit(7)",
    "message": "import sys; sys.exit('no model')",
    "exception": "print('half'); [][0]",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "exit handlers": "import atexit; atexit.register(print, 'good-bye')",
    "threads": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "unflushed": "import os; print('lost'); os._exit(0)",
    "standard input": "import sys; print(input(), sys.stdin.read())",
    "arguments": "import sys; print(sys.argv[1:], sys.path[0], __name__)",
    "environment": "import os; print(os.environ['OF_THIS_TEST'], os.getcwd())",
}


@pytest.mark.parametrize(
    ("option", "name"), [*(("-c", name) for name in PROGRAMS), ("-m", "arguments"), ("file", "arguments")]
)
def test_programs(option: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_TEST", name)
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    path = tmp_path / "program_of_this_test.py"
    path.write_text(PROGRAMS[name])
    arguments = {"-c": ["-c", PROGRAMS[name]], "-m": ["-m", path.stem], "file": [path]}[option]
    warm = run_python(*arguments, "two words", stdin="one\ntwo\n", cwd=tmp_path)
    command = [sys.executable, *arguments, "two words"]
    cold = subprocess.run(command, input="one\ntwo\n", capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]  # of a traceback the last line


def test_a_program_imports_the_project_anew() -> None:
    program = "import sys; print('torch' in sys.modules, any(name.startswith('pagedattn') for name in sys.modules))"
    assert run_python("-c", program).stdout == "True False\n"


def test_a_program_that_takes_too_long(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    program = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    seconds = 0.5
    while not started.exists():  # it takes longer to start on a busy machine
        with pytest.raises(subprocess.TimeoutExpired):
            run_python("-c", program, timeout=seconds)
        seconds *= 2
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert run_python("-c", "print(1)").stdout == "1\n"
