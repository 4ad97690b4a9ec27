"""How far a long task is: on a terminal a line that is drawn again and again, elsewhere a few lines.

Nothing here takes a lock or starts a thread, and nothing outlives a `Progress` but what it has written. So an interrupt
may come at any line, a thread may die, and a process may fork or be killed amid a line: the next progress works, in
every thread and process. (tqdm shares a lock among a process and its children, which an interrupt leaves taken.)
"""

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Self, TypeVar

REDRAW_SECONDS = 0.1
LINE_SECONDS = 10.0  # between two lines where each line stays, as in a file

T = TypeVar("T")
Report = Callable[[int, int], object]


class Progress:
    """Shows how many of `total` are done, on standard error. The end of the context shows the last state.

    Args:
        name: of what is counted.
        shown: whether anything is shown; None: on a terminal alone.
        leave: whether the last state stays there.
        delay: seconds before anything is shown.
    """

    def __init__(
        self, total: int, name: str, *, shown: bool | None = True, leave: bool = True, delay: float = 0.0
    ) -> None:
        self._total, self._name, self._leave = total, name, leave
        self._is_terminal = is_terminal()
        self._is_shown = self._is_terminal if shown is None else shown
        self._count = 0
        self._width = 0  # of the line that a terminal shows
        self._started = time.monotonic()
        self._next = self._started + (delay if self._is_terminal else max(delay, LINE_SECONDS))
        self.update(0)

    def update(self, count: int = 1) -> None:
        """So many more are done."""
        self._count += count
        if self._is_shown and (now := time.monotonic()) >= self._next:
            self._next = now + (REDRAW_SECONDS if self._is_terminal else LINE_SECONDS)
            self._show(now)

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items, which are counted one by one."""
        with self:
            for item in items:
                yield item
                self.update()

    def close(self) -> None:
        """Show the last state, or leave nothing on the terminal. Nothing is shown afterwards."""
        if not self._is_shown:
            return
        self._is_shown = False
        if self._leave:
            self._show(time.monotonic())
            if self._is_terminal:
                write("\n")
        elif self._width:
            write("\r" + " " * self._width + "\r")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, now: float) -> None:
        if not self._is_terminal:
            write(self._text(now) + "\n")
            return
        text = self._text(now)[: num_columns() - 1]
        write("\r" + text.ljust(self._width))
        self._width = len(text)

    def _text(self, now: float) -> str:
        seconds = now - self._started
        text = f"{self._name}: {self._count}/{self._total} ({percent(self._count, self._total)}%), {clock(seconds)}"
        if self._count and seconds:
            text += f", {self._count / seconds:.3g} a second"
            if self._count < self._total:
                text += f", {clock((self._total - self._count) * seconds / self._count)} left"
        return text


def reported(items: Collection[T], name: str, report: Report | None) -> Iterator[T]:
    """The items. As they are done, `report(done, total)` is called: at the start, then for every quarter. Without
    `report` a terminal shows the progress."""
    if report is None:
        yield from Progress(len(items), name, shown=None, leave=False).over(items)
        return
    total = len(items)
    report(0, total)
    for done, item in enumerate(items, 1):
        yield item
        if 4 * done // total > 4 * (done - 1) // total:
            report(done, total)


def percent(count: int, total: int) -> int:
    return 100 * count // total if total else 100


def clock(seconds: float) -> str:
    """0:09, 12:34, 1:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_terminal() -> bool:
    with suppress(OSError, ValueError):  # standard error is closed
        return sys.stderr is not None and sys.stderr.isatty()
    return False


def num_columns() -> int:
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80


def write(text: str) -> None:
    """Write at once. What cannot be written is left out: nothing fails for its progress."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
