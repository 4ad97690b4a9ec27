"""Penalties, biases, masks and callables: against transformers' processors, and by their definitions in doubles."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedattn_serve.execution.logits_processors import process_logits
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import NO_RULES, SamplingParams, TokenRules

VOCAB_SIZE = 20
PROMPTS = [[3, 3, 7], [1], [0, 5, 6, 5, 19], [9, 9]]
OUTPUTS = [[7, 2, 2, 2], [], [5, 6], [18]]


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """Of both signs, with a 0 and an impossible token in each row."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, 5] = 0.0
    logits[:, 6] = -torch.inf
    return logits


def process(
    logits: Tensor, params: SamplingParams, rules: TokenRules = NO_RULES, outputs: list[list[int]] = OUTPUTS
) -> Tensor:
    """All rows under the same parameters, with PROMPTS before them."""
    rows = [SamplingState(params, *tokens, token_rules=rules) for tokens in zip(PROMPTS, outputs, strict=True)]
    processed = logits.clone()
    assert process_logits(processed, rows, list(range(len(rows)))) == {}
    return processed


def by_transformers(processor: Any, logits: Tensor, outputs: list[list[int]] = OUTPUTS) -> Tensor:
    """Row by row, as their prompts and outputs differ in length."""
    tokens = [torch.tensor([prompt + output]) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    return torch.cat([processor(ids, row[None].clone()) for ids, row in zip(tokens, logits, strict=True)])


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.3, 7.0])
def test_repetition_penalty(penalty: float) -> None:
    logits = random_logits(4)
    expected = by_transformers(transformers.RepetitionPenaltyLogitsProcessor(penalty), logits)
    assert not torch.equal(expected, logits)
    assert torch.equal(process(logits, SamplingParams(repetition_penalty=penalty)), expected)


def test_bad_words() -> None:
    logits = random_logits(4)
    words = [[4], [7, 9], [2, 2, 11], [3, 7, 7], [5, 6, 5, 6, 8], [18, 18], [9, 18, 0], [19, 5, 6, 13], [1, 12, 3]]
    expected = by_transformers(transformers.NoBadWordsLogitsProcessor(words), logits)
    processed = process(logits, SamplingParams(), TokenRules(bad_words=tuple(map(tuple, words))))
    assert torch.equal(processed, expected)
    banned = [set((row == -torch.inf).nonzero()[:, 0].tolist()) - {6} for row in processed]
    assert banned == [{4, 11}, {4}, {4, 13}, {4, 0, 18}]


def test_a_bad_word_that_begins_in_the_prompt() -> None:
    """With its last token the first or a later one of the output; a word as long as prompt and output, and a longer."""
    words = ((3, 3, 7, 1), (3, 3, 3, 7, 2), (3, 7, 9), (7, 9, 4))
    for output, expected in (([], {1, 9}), ([9], {4}), ([9, 4], set()), ([3, 7], {9})):
        row = SamplingState(SamplingParams(), [3, 3, 7], output, token_rules=TokenRules(bad_words=words))
        logits = torch.zeros(1, VOCAB_SIZE)
        process_logits(logits, [row], [0])
        assert set((logits[0] == -torch.inf).nonzero()[:, 0].tolist()) == expected


def test_suppressed_tokens_are_bad_words_of_one_token() -> None:
    logits = random_logits(4)
    expected = by_transformers(transformers.generation.SuppressTokensLogitsProcessor([0, 7, 19]), logits)
    assert torch.equal(process(logits, SamplingParams(), TokenRules(bad_words=((0,), (7,), (19,)))), expected)


@pytest.mark.parametrize("min_tokens", [1, 2, 4, 5])
def test_min_tokens(min_tokens: int) -> None:
    logits = random_logits(4)
    eos = [2, 13]
    processor = transformers.MinNewTokensLengthLogitsProcessor
    expected = torch.cat(
        [
            processor(len(prompt), min_tokens, eos)(torch.tensor([prompt + output]), row[None].clone())
            for prompt, output, row in zip(PROMPTS, OUTPUTS, logits, strict=True)
        ]
    )
    processed = process(logits, SamplingParams(min_tokens=min_tokens), TokenRules(end_token_ids=(2, 13)))
    assert torch.equal(processed, expected)
    assert (processed[:, 2] == -torch.inf).tolist() == [len(output) < min_tokens for output in OUTPUTS]


def test_logit_bias() -> None:
    logits = random_logits(4)
    bias = {0: 3.7, 5: -100.0, 6: 50.0, 19: 0.1}
    processor = transformers.SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()])
    assert torch.equal(process(logits, SamplingParams(logit_bias=bias)), by_transformers(processor, logits))


def test_allowed_token_ids() -> None:
    logits = random_logits(4)
    allowed = [0, 6, 5, 19, 5]  # in any order, and one twice
    mask = torch.full((VOCAB_SIZE,), -torch.inf).index_fill(0, torch.tensor(allowed), 0.0)
    assert torch.equal(process(logits, SamplingParams(allowed_token_ids=allowed)), logits + mask)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.7), (-2.0, 0.3), (1.1, -0.9)])
def test_presence_and_frequency_are_of_the_output(presence: float, frequency: float) -> None:
    logits = random_logits(4)
    processed = process(logits, SamplingParams(presence_penalty=presence, frequency_penalty=frequency))
    for row, before, output in zip(processed.tolist(), logits.tolist(), OUTPUTS, strict=True):
        for token_id in range(VOCAB_SIZE):
            count = output.count(token_id)
            expected = before[token_id] - count * frequency - (count > 0) * presence
            assert row[token_id] == pytest.approx(expected, rel=1e-6)
            assert count > 0 or row[token_id] == before[token_id]


def test_all_in_vllm_s_order() -> None:
    """Callables, masks, bias, repetition, then frequency and presence: each sees what those before it left."""
    logits = random_logits(4)
    seen = []

    def halve(output_token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append(logits.clone())
        return logits * 0.5

    params = SamplingParams(
        logits_processors=[halve],
        allowed_token_ids=[2, *range(3, VOCAB_SIZE)],
        logit_bias={2: 5.0, 3: -8.0, 7: 1.0, 0: 9.0},
        repetition_penalty=1.5,
        frequency_penalty=0.4,
        presence_penalty=-0.3,
    )
    processed = process(logits, params, TokenRules(bad_words=((4,),)))
    assert torch.equal(torch.stack(seen), logits)
    bias = dict(params.bias_of_token_ids)
    for row, before, prompt, output in zip(processed.tolist(), logits.tolist(), PROMPTS, OUTPUTS, strict=True):
        for token_id in range(VOCAB_SIZE):
            value = -math.inf if token_id in (0, 1, 4) else before[token_id] / 2
            value += bias.get(token_id, 0)
            if token_id in prompt + output:
                value = value * 1.5 if value < 0 else value / 1.5
            count = output.count(token_id)
            value -= count * 0.4 + (count > 0) * -0.3
            assert row[token_id] == pytest.approx(value, rel=1e-5, abs=1e-6)


ANY_PARAMS = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.1, 1.7]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.7]),
    min_tokens=st.sampled_from([0, 3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-9, 9, width=32), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1),
)
ANY_TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)
ANY_RULES = st.builds(
    TokenRules,
    end_token_ids=st.sampled_from([(), (3,), (3, 10**6)]),  # the last, as a tokenizer may have and the model not
    bad_words=st.sampled_from([(), ((1,), (2, 3)), ((4, 10**6), (10**6,))]),
)
ANY_ROWS = st.lists(
    st.builds(
        SamplingState,
        sampling_params=ANY_PARAMS | st.just(SamplingParams()),
        prompt_token_ids=ANY_TOKENS.filter(bool),
        output_token_ids=ANY_TOKENS,
        token_rules=ANY_RULES,
    ),
    min_size=1,
    max_size=6,
)


@given(rows=ANY_ROWS, asked=st.sets(st.integers(0, 5)))
def test_each_row_is_processed_by_itself(rows: list[SamplingState], asked: set[int]) -> None:
    """As alone, to the bit; and rows that are not asked for are left as they are."""
    logits = random_logits(len(rows))
    indices = [i for i in range(len(rows)) if i in asked]
    together = logits.clone()
    process_logits(together, rows, indices)
    for i, row in enumerate(rows):
        alone = logits[i : i + 1].clone()
        if i in indices:
            process_logits(alone, [row], [0])
        assert torch.equal(together[i], alone[0])


PENALTIES = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2)


class CountsReads(list[int]):
    """Counts how many of its tokens are looked at."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        for token_id in super().__iter__():
            self.num_read += 1
            yield token_id

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __add__(self, other: Any) -> Any:
        self.num_read += len(self)
        return super().__add__(other)


def test_penalties_look_at_each_token_once() -> None:
    """In all steps together, whatever the length of the context. Only the last token may be looked at again."""
    prompt, output = CountsReads(range(1000)), CountsReads(range(500))
    row = SamplingState(PENALTIES, prompt, output)
    for step in range(20):
        process_logits(torch.randn(1, 1000), [row], [0])
        assert prompt.num_read <= 1000 and output.num_read <= len(output) + step + 1
        output.append(step)


def expect_as_new(row: SamplingState) -> None:
    """Penalties as of a state that is asked for the first time."""
    new = SamplingState(row.sampling_params, list(row.prompt_token_ids), list(row.output_token_ids))
    processed = random_logits(2)
    processed[1] = processed[0]
    process_logits(processed, [row, new], [0, 1])
    assert torch.equal(*processed)


@given(data=st.data())
def test_penalties_of_outputs_that_grow(data: st.DataObject) -> None:
    """By several tokens at a time; with drafts, of which none or some are taken; and in forks, which go their own ways.
    Not in each step is a row asked."""
    rows = [SamplingState(PENALTIES, [3, 3, 7], [])]
    for _ in range(data.draw(st.integers(1, 8))):
        row = data.draw(st.sampled_from(rows))
        tokens = data.draw(ANY_TOKENS)
        kind = data.draw(st.sampled_from(["ask", "grow", "draft", "fork"]))
        if kind == "ask":
            expect_as_new(row)
        elif kind == "grow":
            row.output_token_ids += tokens
        elif kind == "draft":
            expect_as_new(row.with_output(row.output_token_ids + tokens))
        else:
            rows.append(row.fork(list(row.output_token_ids), len(rows)))
    for row in rows:
        expect_as_new(row)


def test_penalties_after_an_interrupt() -> None:
    """Amid the count of what is new: then all is counted anew."""

    class Interrupted(list[int]):
        def __getitem__(self, key: Any) -> Any:
            yield 4
            raise KeyboardInterrupt

    row = SamplingState(PENALTIES, [1], [4, 4])
    expect_as_new(row)
    row.output_token_ids += [4, 2]
    output, row.output_token_ids = row.output_token_ids, Interrupted(row.output_token_ids)
    with pytest.raises(KeyboardInterrupt):
        row.counts_in_output()
    row.output_token_ids = output
    expect_as_new(row)


def test_callables_of_both_forms() -> None:
    calls = []

    def of_output(output_token_ids: list[int], logits: Tensor) -> Tensor:
        calls.append(list(output_token_ids))
        output_token_ids.append(99)  # a list of its own
        logits[4] = 7.0  # and logits of its own, until they are returned
        return logits

    def of_both(prompt_token_ids: list[int], output_token_ids: list[int], logits: Tensor) -> Tensor:
        calls.append((list(prompt_token_ids), list(output_token_ids), logits[4].item()))
        prompt_token_ids.clear()
        return logits.double() + 1

    row = SamplingState(SamplingParams(logits_processors=[of_output, of_both]), [3, 4], [5])
    logits = random_logits(2)
    before = logits.clone()
    assert process_logits(logits, [row, row], [1]) == {}
    assert calls == [[5], ([3, 4], [5], 7.0)]
    assert (row.prompt_token_ids, row.output_token_ids) == ([3, 4], [5])
    before[1, 4] = 7.0
    before[1] += 1
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("processor", "got"),
    [
        (lambda ids, logits: None, "NoneType"),
        (lambda ids, logits: logits[:3], "shape [3]"),
        (lambda ids, logits: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda ids, logits: logits.index_fill(0, torch.tensor([3]), torch.nan), "NaN"),
    ],
)
def test_a_callable_that_fails_is_that_row_s_affair(processor: Any, got: str) -> None:
    bad = SamplingState(SamplingParams(logits_processors=[processor]), [1], [])
    good = SamplingState(SamplingParams(logit_bias={0: 1.0}), [1], [])
    logits = torch.zeros(3, VOCAB_SIZE)
    errors = process_logits(logits, [good, bad, good], [0, 1, 2])
    assert list(errors) == [1]
    expected = "numbers" if got == "NaN" else "logits of shape [20]"
    assert str(errors[1]) == f"logits_processors: expected callables that return {expected}, got {got}"
    assert logits[0::2, 0].tolist() == [1.0, 1.0]
