"""Texts that end an output: where one begins, and what may still become one."""

import copy
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from operator import itemgetter
from typing import Self

FIRST_SIGN = 0xD800  # a surrogate, which no decoded text has


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


class SpecialStops:
    """Stop strings that name special tokens, which a text may leave out: "mat.<|im_end|>" ends an output whose text
    has "mat." before this token.

    A sign, one character, stands for each such token: in `strings`, and in what is searched for them.
    signs: by token id.
    """

    def __init__(self, stop_strings: tuple[str, ...], special_texts: Mapping[int, str]) -> None:
        texts = sorted({text for text in special_texts.values() if text}, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        sign_of: dict[str, str] = {}
        self._given: dict[str, str] = {}  # the stop string of each that is searched for
        for stop_string in stop_strings:
            signed = pattern.sub(
                lambda found: sign_of.setdefault(found[0], chr(FIRST_SIGN + len(sign_of))), stop_string
            )
            if signed != stop_string:
                self._given.setdefault(signed, stop_string)
        self.strings = StopStrings(tuple(self._given))
        self.signs = {token_id: sign_of[text] for token_id, text in special_texts.items() if text in sign_of}

    def __bool__(self) -> bool:
        return bool(self._given)

    def given(self, found: str) -> str:
        """The stop string as its user wrote it."""
        return self._given[found]


class StopSearch:
    """The stop strings in the text of one output, which grows, and in the special tokens that the text leaves out."""

    __slots__ = ("_num_searched", "_sign_places", "_special_state", "_specials", "_state", "_stops")

    def __init__(self, stops: StopStrings, specials: SpecialStops | None) -> None:
        self._stops = stops
        self._specials = specials
        self._state = stops.start
        self._special_state = None if specials is None else specials.strings.start
        self._num_searched = 0  # characters of the text
        self._sign_places: list[int] = []  # where in the text special tokens were left out, in order

    def fork(self) -> Self:
        """The search of another output with the same text so far."""
        other = copy.copy(self)
        other._sign_places = list(self._sign_places)
        return other

    def find(self, text: str, left_out: int | None) -> tuple[int, str] | None:
        """Where the earliest stop string begins and which it is, of those that end in what is new of the text.

        left_out: the special token that came last, if the text leaves it out.
        """
        found, self._state = self._stops.search(text, self._num_searched, self._state)
        if self._specials is not None:
            found_special = self._find_special(text, left_out)
            found = min(filter(None, (found, found_special)), default=None)
        self._num_searched = len(text)
        return found

    def _find_special(self, text: str, left_out: int | None) -> tuple[int, str] | None:
        assert self._specials is not None and self._special_state is not None
        num_before = self._num_searched + len(self._sign_places)
        piece = text[self._num_searched :]
        if left_out is not None and left_out in self._specials.signs:
            piece += self._specials.signs[left_out]
            self._sign_places.append(len(text))
        found, self._special_state = self._specials.strings.search(piece, 0, self._special_state)
        if found is None:
            return None
        begin, stop_string = found
        return self._place(num_before + begin), self._specials.given(stop_string)

    def num_final(self, text: str, with_stop: bool) -> int:
        """How many characters of the text stay, whatever comes: the rest may begin a stop string. With the stop string
        left in the text, the rest stays as well, unless a special token is part of the stop string."""
        end = len(text) if with_stop else len(text) - self._stops.num_held_back(self._state)
        if self._specials is None:
            return end
        assert self._special_state is not None
        num_all = len(text) + len(self._sign_places)
        begin = self._place(num_all - self._specials.strings.num_held_back(self._special_state))
        return min(end, begin)

    def _place(self, place: int) -> int:
        """The place in the text of a place among the characters of the text and the signs."""
        for num_signs, sign_place in enumerate(self._sign_places):
            if place <= sign_place + num_signs:
                return place - num_signs
        return place - len(self._sign_places)
