"""Texts that end an output: where one begins, and what may still become one."""


def first_stop(text: str, stop_strings: tuple[str, ...], num_searched: int = 0) -> tuple[int, str] | None:
    """Where the earliest stop string begins in `text`, and which it is; None if there is none.

    Of several that begin there, the first in `stop_strings`. Those that end within the first `num_searched` characters
    do not count.
    """
    begins = [max(num_searched + 1 - len(stop), 0) for stop in stop_strings]
    found = ((at, i) for i, stop in enumerate(stop_strings) if (at := text.find(stop, begins[i])) >= 0)
    at, i = min(found, default=(-1, -1))
    return None if at < 0 else (at, stop_strings[i])


def longest_stop_prefix(text: str, stop_strings: tuple[str, ...]) -> int:
    """Characters at the end of `text` that begin a stop string, which the next token may complete."""
    longest = max(map(len, stop_strings), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(text.endswith(stop[:length]) for stop in stop_strings if len(stop) > length):
            return length
    return 0
