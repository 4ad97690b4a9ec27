"""Sequence: counts, slices over prompt and output, status; and what a batch keeps of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.batch import ScheduledBatch, ScheduledSequence
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus


def make_sequence(prompt: list[int], output: list[int]) -> Sequence:
    return Sequence("a", prompt, SamplingParams(), 0.0, output)


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
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_ERROR": "error",
    }
    assert [status.is_finished for status in SequenceStatus] == [False, False, True, True, True, True]


def test_samples_is_fixed_when_scheduled() -> None:
    sequence = make_sequence([1, 2, 3], [])
    chunk, whole = ScheduledSequence(sequence, 2, [0]), ScheduledSequence(sequence, 3, [0])
    sequence.num_computed_tokens = 3
    sequence.output_token_ids.append(4)
    assert not chunk.samples and whole.samples


def test_batch() -> None:
    assert ScheduledBatch().is_empty and ScheduledBatch().num_tokens == 0
    sequence = make_sequence([1, 2, 3], [])
    batch = ScheduledBatch([ScheduledSequence(sequence, 2, [0]), ScheduledSequence(sequence, 3, [1])])
    assert not batch.is_empty and batch.num_tokens == 5
