"""Stop strings: where one begins, and what may still become one, however many and long they are."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.text.stop_strings import SpecialStops, StopSearch, StopStrings

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


SPECIALS = {7: "<a>", 8: "<b>"}
TOKENS = st.lists(st.sampled_from(["a", "b", "ab", 7, 8]), max_size=8)
SPECIAL_STOPS = st.lists(
    st.lists(st.sampled_from(["a", "b", "<a>", "<b>"]), min_size=1, max_size=3).map("".join), min_size=1, max_size=3
)


@given(tokens=TOKENS, stops=SPECIAL_STOPS, with_stop=st.booleans())
def test_stop_strings_with_special_tokens_that_the_text_leaves_out(
    tokens: list[str | int], stops: list[str], with_stop: bool
) -> None:
    """Found where the text, or the text with the special tokens that stop strings name, ends with a stop string."""
    search = StopSearch(StopStrings(tuple(stops)), SpecialStops(tuple(stops), SPECIALS))
    named = {token_id for token_id, special in SPECIALS.items() if special in "".join(stops)}
    text, final = "", ""
    pieces: list[str] = []  # characters of the text, and the special tokens among them
    for token in tokens:
        new = list(token) if isinstance(token, str) else [SPECIALS[token]] if token in named else []
        pieces += new
        text += token if isinstance(token, str) else ""
        found = search.find(text, None if isinstance(token, str) else token)
        places = []
        for all_pieces in (pieces, list(text) if isinstance(token, str) else []):
            for end in range(len(all_pieces) - len(new) + 1, len(all_pieces) + 1):
                begins = [begin for begin in range(end) if "".join(all_pieces[begin:end]) in stops]
                places += [sum(len(piece) == 1 for piece in all_pieces[:begin]) for begin in begins]
        assert (None if found is None else found[0]) == min(places, default=None)
        if found is not None:
            begin, stop = found
            assert stop in stops and (text[:begin] + stop * with_stop).startswith(final)  # nothing is taken back
            return
        final = text[: search.fork().num_final(text, with_stop)]


def search_of(*stops: str) -> StopSearch:
    return StopSearch(StopStrings(stops), SpecialStops(stops, SPECIALS))


def test_the_earliest_of_two_kinds_of_stop_strings() -> None:
    """One with a special token begins before one without, and both end with the same token."""
    search = search_of("b", "a<a>b")
    assert search.find("a", None) is None and search.find("a", 7) is None
    assert search.find("ab", None) == (0, "a<a>b")


def test_forks_know_their_own_special_tokens() -> None:
    search = search_of("<a>b")
    assert search.find("x", None) is None
    other = search.fork()
    assert other.find("xzz", None) is None and other.find("xzz", 7) is None
    assert search.find("xy", None) is None and search.find("xy", 7) is None
    assert search.find("xyb", None) == (2, "<a>b")


def test_a_special_token_whose_text_begins_with_that_of_another() -> None:
    assert SpecialStops(("<a>b",), {7: "<a>", 8: "<a>b"}).signs.keys() == {8}


def test_a_special_token_in_one_piece() -> None:
    """A stop string that is a part of a special token's text does not end an output whose text lacks the token."""
    assert not SpecialStops(("<", "a>", "cat"), SPECIALS)
