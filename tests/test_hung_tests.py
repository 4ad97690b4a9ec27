"""A run whose tests hang one after the other ends, and says which: the plugin `hung_tests`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each test that hangs leaves a thread that hangs: the interpreter would wait for it at its end. The alarm is that of
# pytest-timeout, which no test here waits for.
TESTS = """
import signal
import threading
import pytest

def hang():
    thread = threading.Thread(target=threading.Event().wait)
    thread.start()
    signal.raise_signal(signal.SIGALRM)
    thread.join()

def test_first(): hang()
def test_good(): pass
@pytest.fixture(scope="module")
def hanging(): hang()
def test_second(hanging): pass
def test_that_has_the_failure_of_the_second(hanging): pass
def test_third(): hang()
def test_that_is_not_run(): pass
"""
ENDLESS = """
import threading
import hung_tests
import pytest

hung_tests.END_SECONDS = 0.01

@pytest.fixture(scope="session", autouse=True)
def endless():
    yield
    threading.Event().wait()
"""


def run(directory: Path, tests: str, *names: str) -> tuple[int, str]:
    (directory / "test_hanging.py").write_text(tests)
    (directory / "pytest.ini").write_text("[pytest]\ntimeout = 300\naddopts = -q -p hung_tests -p no:cacheprovider\n")
    command = [sys.executable, "-m", "pytest", *(f"test_hanging.py::{name}" for name in names)]
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout


@pytest.mark.parametrize("conftest", ["", ENDLESS], ids=["", "the end hangs, too"])
def test_the_third_is_the_last(tmp_path: Path, conftest: str) -> None:
    (tmp_path / "conftest.py").write_text(conftest)
    status, output = run(tmp_path, TESTS)
    assert status == 1
    hung = [f"test_hanging.py::test_{name}" for name in ("first", "second", "third")]
    told = [line for line in output.splitlines() if line.endswith("over its limit")]
    assert told == [f"{name} ran over its limit" for name in hung]
    assert "test_that_is_not_run" not in output
    if not conftest:
        assert f"! 3 tests ran over their limit: {', '.join(hung)} !" in output
        assert "\n2 failed, 1 passed, 2 errors in " in output


def test_fewer_do_not_end_the_run_but_it_ends(tmp_path: Path) -> None:
    status, output = run(tmp_path, TESTS, "test_first", "test_good", "test_third")
    assert status == 1 and "2 failed, 1 passed" in output


def test_this_run_has_the_plugin(request: pytest.FixtureRequest) -> None:
    assert request.config.pluginmanager.hasplugin("hung_tests")
