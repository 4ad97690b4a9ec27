"""Texts that end an output: where one begins, and what may still become one."""

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Self


class StopState:
    """The longest beginning of a stop string that a text ends with: a node of the automaton of Aho and Corasick (1975).

    depth: characters of this beginning.
    begin, end: the stop strings that have this beginning, a range of the sorted stop strings.
    shorter: the state of the text without the first character of the beginning; None if nothing is begun.
    found: the longest stop string that the text ends with, by its place among the given ones; None if there is none.
    next: the state after one more character, for each character that came.
    """

    __slots__ = ("begin", "depth", "end", "found", "next", "shorter")

    def __init__(self, depth: int, begin: int, end: int, shorter: Self | None, found: int | None) -> None:
        self.depth = depth
        self.begin = begin
        self.end = end
        self.shorter = shorter
        self.found = found
        self.next: dict[str, StopState] = {}


class StopStrings:
    """The stop strings of a request. Each character of a text is looked at once, however many and long they are.

    States are made when texts reach them. So a stop string of a million characters takes time and memory only if a text
    holds a long part of it.

    start: the state of an empty text.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._given = stop_strings
        self._sorted = sorted(set(stop_strings))
        self._place = {text: place for place, text in reversed(list(enumerate(stop_strings)))}
        self.start = StopState(0, 0, len(self._sorted), None, None)

    def search(self, text: str, begin: int, state: StopState) -> tuple[tuple[int, str] | None, StopState]:
        """Where the earliest stop string begins and which it is, and the state at the end of `text`.

        Only stop strings that end after the first `begin` characters count; `state` is the state of these characters.
        None if there is no stop string. Of several that begin in one place, it is the one that was given first.
        """
        earliest: tuple[int, int] | None = None
        for end, character in enumerate(text[begin:], begin + 1):
            state = state.next.get(character) or self._step(state, character)
            if state.found is not None:
                found = (end - len(self._given[state.found]), state.found)
                earliest = found if earliest is None else min(earliest, found)
        return None if earliest is None else (earliest[0], self._given[earliest[1]]), state

    def num_held_back(self, state: StopState) -> int:
        """Characters at the end of a text that begin a stop string, which the next token may complete."""
        while self._is_whole(state) and state.end - state.begin == 1:  # no other stop string goes on from there
            assert state.shorter is not None
            state = state.shorter
        return state.depth

    def _is_whole(self, state: StopState) -> bool:
        """Whether the beginning is a stop string itself: the first of its range."""
        return state.depth > 0 and len(self._sorted[state.begin]) == state.depth

    def _step(self, state: StopState, character: str) -> StopState:
        """Make the state after one more character, which no text has reached yet."""
        missing: list[StopState] = []
        at: StopState | None = state
        while at is not None and character not in at.next:
            missing.append(at)
            at = at.shorter
        after = self.start if at is None else at.next[character]
        for at in reversed(missing):  # the shortest beginning first, as the longer ones build on it
            begin, end = self._going_on(at, character)
            if begin < end:
                text = self._sorted[begin]
                found = self._place[text] if len(text) == at.depth + 1 else after.found
                after = StopState(at.depth + 1, begin, end, after, found)
            at.next[character] = after
        return after

    def _going_on(self, state: StopState, character: str) -> tuple[int, int]:
        """The range of a state's stop strings that have this character next."""
        next_character = itemgetter(state.depth)
        begin = state.begin + self._is_whole(state)
        begin = bisect_left(self._sorted, character, begin, state.end, key=next_character)
        return begin, bisect_right(self._sorted, character, begin, state.end, key=next_character)
