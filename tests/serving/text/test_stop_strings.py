"""Stop strings: where one begins, and what may still become one, however many and long they are."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.text.stop_strings import StopStrings

PIECES = st.lists(st.text("ab", max_size=4), max_size=4)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5)


@given(pieces=PIECES, stops=STOPS)
def test_equal_to_a_search_for_each(pieces: list[str], stops: list[str]) -> None:
    """After each piece of a text: of the stop strings that end in that piece, the one that begins first."""
    searched = StopStrings(tuple(stops))
    state, text = searched.start, ""
    for piece in pieces:
        begin, text = len(text), text + piece
        ends = range(begin + 1, len(text) + 1)
        found = [(end - len(s), i) for end in ends for i, s in enumerate(stops) if text[:end].endswith(s)]
        expected = min(found, default=None)
        stop, state = searched.search(text, begin, state)
        assert stop == (None if expected is None else (expected[0], stops[expected[1]]))
        lengths = [n for n in range(len(text) + 1) if any(len(s) > n and text.endswith(s[:n]) for s in stops)]
        assert searched.num_held_back(state) == max(lengths)


@pytest.mark.parametrize("text", ["", "a short text"])
def test_a_stop_string_of_millions_of_characters_costs_nothing(text: str) -> None:
    started = time.thread_time()
    searched = StopStrings(("b" * 10_000_000,))
    _, state = searched.search(text, 0, searched.start)
    assert searched.num_held_back(state) == 0
    assert time.thread_time() - started < 0.1  # seconds; to look at each character of it takes one or more
