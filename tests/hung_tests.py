"""A plugin of pytest: a run whose tests hang one after the other ends after the third, with their names.

pytest-timeout fails a test that is over its limit, and goes on. But what has made three tests hang makes others hang,
each for as long as its limit is. A run also ends where a fixture hangs that is torn down after a failure, which neither
pytest-timeout nor pytest's faulthandler looks at, and where a thread hangs that the interpreter waits for at its end.
"""

import faulthandler
import os
import sys
from collections.abc import Generator

import pytest

MAX_HUNG = 3
END_SECONDS = 300.0  # for a failed test to be torn down, and for the process to end after the last test

HUNG = pytest.StashKey[dict[str, BaseException]]()  # the tests, by name: what has ended each


def pytest_configure(config: pytest.Config) -> None:
    config.stash[HUNG] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    hung = item.config.stash[HUNG]
    if call.excinfo is None or "from pytest-timeout" not in report.longreprtext:
        return report
    error = call.excinfo.value
    if item.nodeid in hung or any(error is each for each in hung.values()):  # a fixture that has failed before
        return report
    hung[item.nodeid] = error
    item.config.get_terminal_writer().line(f"\n{item.nodeid} ran over its limit", flush=True)
    if len(hung) == MAX_HUNG:
        item.session.shouldfail = f"{MAX_HUNG} tests ran over their limit: {', '.join(hung)}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_exception_interact() -> None:
    """A test has failed: here the other two plugins take their limits back, and it is still to be torn down."""
    limit_the_end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    limit_the_end()


def limit_the_end() -> None:
    """From now on there are END_SECONDS; then the process ends with the stacks of its threads, and status 1."""
    faulthandler.dump_traceback_later(END_SECONDS, exit=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if config.stash.get(HUNG, None):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the interpreter's own end would wait for threads that hang
