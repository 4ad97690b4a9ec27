"""Stop strings: what may still become one, however long they are."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.text.stop_strings import longest_stop_prefix

TEXTS = st.text("ab", max_size=8)


@given(text=TEXTS, stops=st.lists(st.text("ab", min_size=1, max_size=12), max_size=3))
def test_the_longest_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    lengths = [n for n in range(len(text) + 1) if any(len(s) > n and text.endswith(s[:n]) for s in stops)]
    assert longest_stop_prefix(text, tuple(stops)) == max(lengths, default=0)


@pytest.mark.parametrize("text", ["", "a short text"])
def test_a_stop_string_of_millions_of_characters_costs_nothing(text: str) -> None:
    stop = ("b" * 10_000_000,)
    started = time.thread_time()
    assert longest_stop_prefix(text, stop) == 0
    assert time.thread_time() - started < 0.1  # seconds; to try each length of it takes one or more
