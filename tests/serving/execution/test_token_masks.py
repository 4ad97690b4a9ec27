"""Structured output in the sampler: the rows that ask for it, and no bit of the others."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pagedattn_serve import SamplingParams, StructuredOutput
from pagedattn_serve.execution.sampler import Sampler
from pagedattn_serve.sampling.grammar import GrammarCompiler
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import TokenRules

EOS = frozenset((0, 1))


@pytest.fixture(scope="module")
def tokenizer(text_model: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(Path(text_model))


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer) + 40, EOS)


def row(compiler: GrammarCompiler, regex: str | None, output: list[int], seed: int | None = None) -> SamplingState:
    form = None if regex is None else StructuredOutput(regex=regex)
    params = SamplingParams(temperature=0 if seed is None else 1, seed=seed, structured_output=form)
    return SamplingState(params, [1], output, matcher=None if form is None else compiler.matcher(form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_rows_keep_their_bits(compiler: GrammarCompiler, dtype: torch.dtype) -> None:
    rows = [row(compiler, regex, [], seed) for seed in (None, 1, 2) for regex in (None, "[a-z]+", "q", None)]
    logits = torch.randn(len(rows), 320, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = Sampler(0).sample(logits.clone(), rows)
    for i, each in enumerate(rows):
        alone = Sampler(0).sample(logits[i : i + 1].clone(), [each])
        assert (alone.token_ids, alone.logprobs) == ([together.token_ids[i]], [together.logprobs[i]])
    assert not together.errors


def test_rows_after_drafts(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    """One mask each, as far as the form allows the drafts; beside those of several sequences at one place."""
    a, b, c, q = (tokenizer(letter).input_ids[0] for letter in "abcq")
    drafting = row(compiler, "abca", [a])
    drafts = [b, c, q, a]
    rows = [drafting]
    for i in range(1, len(drafts) + 1):
        rows.append(SamplingState(drafting.sampling_params, [1], [a, *drafts[:i]], matcher=drafting.matcher))
    forking = row(compiler, "[bc]", [])
    rows += [SamplingState(forking.sampling_params, [1], [], index, matcher=forking.matcher) for index in range(3)]
    logits = torch.zeros(len(rows), 320)
    logits[:, c], logits[:, q] = 1, 2
    sampled = Sampler(0).sample(logits, rows)
    assert sampled.token_ids[:3] == [b, c, a]  # and of the next two, whose draft is not allowed, nothing is asked
    assert sampled.token_ids[5:] == [c, c, c]
    assert not sampled.errors


def test_no_end_before_min_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Whichever word of the mask has the bit of the end token."""
    end = 224
    matcher = GrammarCompiler(tokenizer, len(tokenizer), frozenset((end,))).matcher(StructuredOutput(regex="a*"))
    logits = torch.zeros(2, len(tokenizer))
    logits[:, end] = 1
    params = [SamplingParams(temperature=0, min_tokens=min_tokens) for min_tokens in (0, 1)]
    rows = [SamplingState(each, [1], [], token_rules=TokenRules((end,)), matcher=matcher) for each in params]
    first, second = Sampler(0).sample(logits, rows).token_ids
    assert first == end and tokenizer.decode([second])[0] == "a"


def test_an_output_that_does_not_follow_is_an_error(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    [q] = tokenizer("q").input_ids
    rows = [row(compiler, "[a-c]+", [q]), row(compiler, "[a-c]+", [])]
    sampled = Sampler(0).sample(torch.randn(2, 320, generator=torch.Generator().manual_seed(0)), rows)
    assert list(sampled.errors) == [0] and sampled.errors[0].argument == "structured_output"
    assert sampled.errors[0].got.startswith("Parser Error: token")
    assert tokenizer.decode([sampled.token_ids[1]])[0] in "abc"
