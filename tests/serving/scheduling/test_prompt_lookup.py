"""PromptLookup: what it proposes is what a search through the whole sequence finds, however the sequence came about."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.scheduling.prompt_lookup import NGRAM_SIZE, PromptLookup
from pagedattn_serve.scheduling.sequence import Sequence


def make_sequence(prompt: list[int], output: list[int] | None = None) -> Sequence:
    return Sequence("a", prompt, output_token_ids=list(output or []))


def searched(tokens: list[int], count: int) -> list[int]:
    """As `propose`, by looking at every place from the end on; a token at a time, so that a copy may overlap itself."""
    for position in range(len(tokens) - 1, NGRAM_SIZE - 1, -1):
        if tokens[position - NGRAM_SIZE : position] == tokens[-NGRAM_SIZE:]:
            longer = list(tokens)
            for i in range(count):
                longer.append(longer[position + i])
            return longer[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], [4, 5, 6, 7]),
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]),
        ([1, 2, 3, 4, 9, 9, 1, 2, 3, 5, 8, 8, 1, 2, 3], [5, 8, 8, 1]),  # the last time counts
        ([1, 2, 3, 9, 8, 1, 2], []),
        ([7, 7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),  # with what goes on repeating itself
        ([7, 7, 7], []),  # nothing has followed yet
        ([7, 7], []),
        ([7], []),
    ],
)
def test_what_followed_the_last_time(tokens: list[int], expected: list[int]) -> None:
    assert PromptLookup().propose(make_sequence(tokens), 4) == expected == searched(tokens, 4)
    assert PromptLookup().propose(make_sequence(tokens[:2], tokens[2:]), 4) == expected


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.lists(st.integers(0, 2), max_size=4)))
def test_as_a_search_while_tokens_come(prompt: list[int], additions: list[list[int]]) -> None:
    lookup, sequence = PromptLookup(), make_sequence(prompt)
    for count, tokens in enumerate(additions, 1):
        sequence.output_token_ids += tokens
        assert lookup.propose(sequence, count) == searched(prompt + sequence.output_token_ids, count)
        assert lookup.propose(sequence, 3) == searched(prompt + sequence.output_token_ids, 3)  # asking changes nothing


def test_sequences_do_not_know_of_each_other() -> None:
    lookup = PromptLookup()
    first, second = make_sequence([1, 2, 3, 4, 1, 2, 3]), make_sequence([1, 2, 3, 5, 1, 2, 3])
    for _ in range(2):
        assert lookup.propose(first, 1) == [4]
        assert lookup.propose(second, 1) == [5]
    fork = first.fork(1)
    fork.output_token_ids += [9, 1, 2, 3]
    assert lookup.propose(fork, 1) == [9]
    assert lookup.propose(first, 1) == [4]


@pytest.mark.parametrize("everything", [False, True])
def test_tokens_that_are_taken_back(everything: bool) -> None:
    lookup, sequence = PromptLookup(), make_sequence([1, 2, 3, 4], [8, 1, 2, 3, 5, 6, 1, 2, 3])
    assert lookup.propose(sequence, 2) == [5, 6]
    del sequence.output_token_ids[4:]
    if everything:
        lookup.clear()
    else:
        lookup.forget(sequence)
    assert lookup.propose(sequence, 2) == [4, 8]
    lookup.forget(make_sequence([1]))  # one that it was never asked about
