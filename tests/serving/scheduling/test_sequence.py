"""Sequence: counts, slices over prompt and output, status, forks; the group it belongs to; the batch that runs it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.requests.inputs import sequence_rules
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import SamplingParams, TokenRules
from pagedattn_serve.scheduling.sequence import (
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)


def make_sequence(prompt: list[int], output: list[int]) -> Sequence:
    return Sequence("a", prompt, output_token_ids=output)


def test_counts() -> None:
    sequence = make_sequence([1, 2, 3], [4])
    sequence.num_computed_tokens = 3
    assert (sequence.num_tokens, sequence.num_uncomputed_tokens) == (4, 1)


def test_equal_tokens_are_not_the_same_sequence() -> None:
    assert make_sequence([1], []) != make_sequence([1], [])


@given(prompt=st.lists(st.integers(), max_size=5), output=st.lists(st.integers(), max_size=5), data=st.data())
def test_tokens_is_a_slice_of_prompt_and_output(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(prompt) + len(output)))
    start = data.draw(st.integers(0, end))
    assert make_sequence(prompt, output).tokens(start, end) == (prompt + output)[start:end]


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (2, 1), (0, 4)])
def test_tokens_out_of_range(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="<= 3"):
        make_sequence([1, 2], [3]).tokens(start, end)


def test_status() -> None:
    reasons = {status.name: status.finish_reason for status in SequenceStatus}
    assert reasons == {
        "WAITING": None,
        "RUNNING": None,
        "SWAPPED": None,
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_ERROR": "error",
    }
    assert [status.is_finished for status in SequenceStatus] == [False] * 3 + [True] * 4


def test_a_fork_shares_the_prompt_and_nothing_else() -> None:
    parent = make_sequence([1, 2, 3], [4])
    parent.status, parent.num_computed_tokens, parent.cache_salt = SequenceStatus.RUNNING, 3, "a"
    parent.block_hashes.append(b"hash")
    child = parent.fork(2)
    assert (child.status, child.num_computed_tokens, child.cache_salt) == (SequenceStatus.RUNNING, 3, "a")
    assert child.block_hashes == [b"hash"] and child.sampling is None
    assert child.prompt_token_ids is parent.prompt_token_ids and child.rules is parent.rules
    for shared in (child.output_token_ids, child.block_hashes):
        shared.clear()
    assert (parent.output_token_ids, len(parent.block_hashes)) == ([4], 1)


def test_the_sampling_state_is_forked_along() -> None:
    """It tells the sampler of the tokens of its own sequence, without a copy of them."""
    parent = make_sequence([1, 2, 3], [4])
    rules = TokenRules(end_token_ids=(9,))
    parent.sampling = SamplingState(SamplingParams(), parent.prompt_token_ids, parent.output_token_ids, 0, rules, 5)
    child = parent.fork(2)
    assert (child.sampling.index, child.sampling.num_candidates) == (2, 5) and child.sampling.token_rules is rules
    assert child.sampling.output_token_ids is child.output_token_ids is not parent.output_token_ids
    assert child.sampling.prompt_token_ids is child.prompt_token_ids
    assert parent.sampling.output_token_ids is parent.output_token_ids and parent.sampling.index == 0


def make_group(**params: Any) -> SequenceGroup:
    return SequenceGroup("a", [1, 2, 3], sequence_rules(SamplingParams(**params)), 0.0)


def test_a_group_begins_with_one_sequence() -> None:
    group = make_group(n=2, best_of=4)
    [sequence] = group.sequences
    assert sequence.prompt_token_ids is group.prompt_token_ids and sequence.request_id == "a"
    assert (group.num_uncomputed_tokens, group.in_prefill, group.has_forked) == (3, True, False)
    assert group.max_num_sequences == 4


def test_a_group_after_its_fork_is_as_wide_as_it_is() -> None:
    group = make_group(n=3)
    group.sequences[0].output_token_ids.append(4)
    group.sequences.append(group.sequences[0].fork(1))  # the third is finished
    assert group.has_forked and group.max_num_sequences == 2
    for sequence in group.sequences:
        sequence.num_computed_tokens = 3
    assert (group.num_uncomputed_tokens, group.in_prefill) == (2, False)
    group.sequences[1].num_computed_tokens = 2
    assert (group.num_uncomputed_tokens, group.in_prefill) == (3, True)


def test_beams_may_become_as_many_as_the_width_again() -> None:
    group = make_group(n=3, use_beam_search=True, temperature=0.0)
    group.sequences[0].output_token_ids.append(4)
    assert group.has_forked and group.max_num_sequences == 3


def test_batch() -> None:
    assert not ScheduledBatch().has_copies and ScheduledBatch().num_tokens == 0
    sequence = make_sequence([1, 2, 3], [])
    batch = ScheduledBatch([ScheduledSequence(sequence, 2, 0), ScheduledSequence(sequence, 3, 1)])
    assert not batch.has_copies and batch.num_tokens == 5
    for name in ("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy"):
        assert ScheduledBatch(**{name: [(0, 1)]}).has_copies
