"""What `Progress` shows, on a terminal and elsewhere. test_interrupts has what becomes of it under interrupts."""

import io
import os
import signal
import sys

import pytest

from pagedattn_serve import progress
from pagedattn_serve.progress import Progress, clock, reported


class Terminal(io.StringIO):
    """Shows what was written since the last carriage return."""

    def isatty(self) -> bool:
        return True

    @property
    def line(self) -> str:
        return self.getvalue().rpartition("\r")[2].rstrip(" ")


def on_terminal(patch: pytest.MonkeyPatch) -> Terminal:
    """Standard error from now on: each step is drawn. (No fixture: pytest puts its own back before a test begins.)"""
    terminal = Terminal()
    patch.setattr(progress, "REDRAW_SECONDS", 0.0)
    patch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_terminal_shows_a_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with Progress(4, "Requests") as shown:
        assert terminal.line == "Requests: 0/4 (0%), 0:00"
        shown.update(3)
        assert terminal.line.startswith("Requests: 3/4 (75%), 0:00, ") and " a second, " in terminal.line
        assert terminal.line.endswith(" left")
        shown.update()
    assert terminal.getvalue().count("\n") == 1 and terminal.getvalue().endswith("\n")
    assert terminal.line.startswith("Requests: 4/4 (100%), ") and " left" not in terminal.line
    shown.update()
    shown.close()
    last = terminal.getvalue().rpartition("\r")[2]  # with spaces behind it, if the line before was longer
    assert last.rstrip(" \n").endswith("a second") and last.endswith("\n"), "a progress that is over shows something"


def test_a_line_that_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    assert list(Progress(2, "Loading", leave=False).over("ab")) == ["a", "b"]
    assert terminal.line == "" and "2/2" in terminal.getvalue() and "\n" not in terminal.getvalue()


def test_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is too long would begin anew, and stay, at each step."""
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress, "num_columns", lambda: 12)
    with Progress(4, "Requests") as shown:
        shown.update(4)
        assert terminal.line == "Requests: 4"


def test_elsewhere_lines_stay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or a pipe gets the last line, and one now and then on the way; what is for a terminal alone shows
    nothing."""
    for _ in reported("ab", "Loading", report=None):
        pass
    with Progress(2, "Requests", shown=False) as shown:
        shown.update(2)
    assert capsys.readouterr() == ("", "")
    with Progress(2, "Requests") as shown:
        shown.update()
        shown.update()
    assert capsys.readouterr().err.startswith("Requests: 2/2 (100%), ")
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress(2, "Requests") as shown:
        shown.update()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        f"Requests: {n}" for n in ("0/2 (0%)", "1/2 (50%)", "1/2 (50%)")
    ]


def test_what_is_over_before_its_delay_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with Progress(3, "paged", delay=3600, leave=False) as shown:
        shown.update(3)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("total", [0, 1, 3, 4, 7, 100])
def test_quarters_are_told(total: int) -> None:
    reports: list[tuple[int, int]] = []
    assert list(reported(range(total), "Loading", lambda done, of: reports.append((done, of)))) == list(range(total))
    assert reports[0] == (0, total) and reports[-1] == (total, total)
    assert len(reports) == 1 + min(total, 4)
    assert all(4 * done >= i * total for i, (done, _) in enumerate(reports) if total >= 4)


def test_nothing_fails_for_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error may be closed, full, a pipe that nobody reads, or not there at all."""
    closed = Terminal()
    closed.close()
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as broken:
        for stderr in (None, closed, broken):
            monkeypatch.setattr(sys, "stderr", stderr)
            monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
            assert list(Progress(3, "Requests").over("abc")) == ["a", "b", "c"]
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writes)  # for what `broken` still has to write


class Forking(Terminal):
    """Forks amid a line: children make a progress of their own, and every second one is killed amid that."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: list[int] = []

    def write(self, text: str) -> int:
        if (pid := os.fork()) == 0:
            sys.stderr = Dying() if len(self.statuses) % 2 else Terminal()
            list(Progress(3, "of a child").over("abc"))
            os._exit(7)
        _, status = os.waitpid(pid, 0)
        self.statuses.append(os.waitstatus_to_exitcode(status))
        return super().write(text)


class Dying(Terminal):
    def write(self, text: str) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return len(text)


def test_children_that_are_forked_amid_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have progress of their own; one that is killed takes nothing with it."""
    on_terminal(monkeypatch)
    monkeypatch.setattr(sys, "stderr", forking := Forking())
    assert list(Progress(2, "Requests").over("ab")) == ["a", "b"]
    assert forking.statuses[:4] == [7, -signal.SIGKILL, 7, -signal.SIGKILL]
    terminal = on_terminal(monkeypatch)
    assert list(Progress(2, "Requests").over("ab")) == ["a", "b"] and "2/2" in terminal.line


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3600, "1:00:00")])
def test_times(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown
