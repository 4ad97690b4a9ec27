"""The prompts that are verified, and what of their outputs is compared."""

import random
from dataclasses import dataclass
from typing import NamedTuple

from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams

MAX_TOKENS = 24  # of an output
NUM_TOP = 5  # logprobs beside the token's own
NUM_RECURRING = 3  # tokens of a sequence that says the same again and again
# Prompts that end before, at and behind the borders of blocks and of the kernels' tiles.
LENGTHS = (1, 7, 15, 16, 17, 31, 33, 48, 64, 90, 129, 200)


class Token(NamedTuple):
    """A token of an output with the logprobs of its place, by token id."""

    token_id: int
    logprobs: dict[int, float]


Answer = list[list[Token]]  # of a request, by sequence


@dataclass(frozen=True)
class Case:
    """A request that is run again and again."""

    name: str
    prompt_token_ids: list[int]
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        """Of its prompt and of an output."""
        return len(self.prompt_token_ids) + (self.params.max_tokens or 0)


class Difference(NamedTuple):
    """The first place where two answers differ."""

    case: Case
    sequence: int
    place: int
    reason: str

    def __str__(self) -> str:
        of_sequence = f" of sequence {self.sequence}" if self.case.params.n > 1 else ""
        return f"{self.case.name}, output token {self.place}{of_sequence}: {self.reason}"


def make_cases(vocab_size: int, max_model_len: int, max_num_sequences: int) -> list[Case]:
    """Prompts of random tokens. Every other prompt and its output have few different tokens, so that guesses at what
    comes next are made and come true. Half of the outputs are greedy, half are drawn by a seed. Two prompts fork into
    several sequences on shared blocks, if a request may have several.

    max_model_len: at least 2. max_num_sequences: of a request, at least 1.
    """
    random_numbers = random.Random(0)
    longest = max(max_model_len - MAX_TOKENS, 1)
    lengths = list(dict.fromkeys(min(length, longest) for length in LENGTHS))
    cases = []
    for i, length in enumerate(lengths):
        few = [random_numbers.randrange(vocab_size) for _ in range(NUM_RECURRING)] if i % 2 else None
        token_ids = [random_numbers.choice(few or range(vocab_size)) for _ in range(length)]
        params = SamplingParams(
            temperature=0.0 if i % 4 < 2 else 0.9,
            top_p=1.0 if i % 4 < 2 else 0.95,
            top_k=20 if i % 8 == 2 else -1,
            seed=i,
            n=min(3, max_num_sequences) if i % 6 == 3 else 1,
            max_tokens=min(MAX_TOKENS, max_model_len - length),
            ignore_eos=True,
            allowed_token_ids=few,
            logprobs=NUM_TOP,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        cases.append(Case(f"prompt {i} of {length} tokens", token_ids, params))
    return cases


def answer_of(output: RequestOutput) -> Answer:
    """Raises ValueError for a request that could not go on."""
    if output.error is not None:
        raise ValueError(f"a request could not go on: {output.error}")
    return [
        [
            Token(token_id, {other: entry.logprob for other, entry in entries.items()})
            for token_id, entries in zip(completion.token_ids, completion.logprobs or (), strict=True)
        ]
        for completion in output.outputs
    ]


def first_difference(case: Case, expected: Answer, answer: Answer) -> Difference | None:
    for sequence, (tokens, others) in enumerate(zip(expected, answer, strict=True)):
        for place, (one, other) in enumerate(zip(tokens, others, strict=True)):
            if one != other:
                return Difference(case, sequence, place, _reason(one, other))
    return None


def _reason(one: Token, other: Token) -> str:
    for token_id, logprob in one.logprobs.items():
        if other.logprobs.get(token_id) not in (None, logprob):
            return f"the logprob of token {token_id} is {logprob:.9g} alone, {other.logprobs[token_id]:.9g} here"
    if one.token_id != other.token_id:
        return f"token {one.token_id} alone, {other.token_id} here"
    return f"the likeliest tokens are {sorted(one.logprobs)} alone, {sorted(other.logprobs)} here"
