"""Texts that end an output: where one begins, and what may still become one."""


def first_stop(text: str, stop_strings: tuple[str, ...]) -> int | None:
    """Where the earliest stop string begins in `text`; None if there is none."""
    return min((at for stop in stop_strings if (at := text.find(stop)) >= 0), default=None)


def longest_stop_prefix(text: str, stop_strings: tuple[str, ...]) -> int:
    """Characters at the end of `text` that begin a stop string, which the next token may complete."""
    for length in range(max(map(len, stop_strings), default=0) - 1, 0, -1):
        if any(text.endswith(stop[:length]) for stop in stop_strings if len(stop) > length):
            return length
    return 0
