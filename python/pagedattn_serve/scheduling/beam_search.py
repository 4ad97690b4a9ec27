"""Beam search: which continuations of a request's beams run on, which have ended, and when no better one can come.

The algorithm is that of `generate(num_beams=...)` in Hugging Face transformers 5, and so are its results: the same
tokens and, from the same log probabilities, the same scores to the last bit. A step looks at the best few of all
continuations of all running beams. Those that do not end run on, up to the beam width. Those that end enter a pool if
they are among the first `beam_width`, and the pool keeps as many, by score / length ** length_penalty. With the last
token that the request may have, every continuation ends.

Scores are fp32 there, so each result is rounded to fp32 here (fp64 arithmetic on fp32 numbers, rounded once, is that of
fp32). Which of two equal scores comes first is not specified there; here it is the older one in the pool, the
continuation of the lower beam, and of one beam's what the caller lists first.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from pagedattn_serve.errors import ArgumentError

T = TypeVar("T")

# Powers of a length stay this far within what a normal fp32 number holds, so that no score becomes infinite or 0 / 0.
MAX_EXPONENT = 100


@dataclass(frozen=True, slots=True)
class Continuation:
    """A running beam and one more token. score: the sum of its log probabilities, that of the token included."""

    beam: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What became of the beams, best first. Both are empty if every candidate was impossible.

    num_tokens: generated tokens of each continuation, its last one included.
    """

    running: tuple[Continuation, ...]
    ended: tuple[Continuation, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Hypothesis(Generic[T]):
    """An ended beam, whatever the caller keeps of it. score: its log probabilities' sum / length ** length_penalty."""

    score: float
    item: T


class BeamSearch(Generic[T]):
    """The beam search of one request, as far as it is more than the running beams: its pool of ended ones.

    Each step, until `done`: `select` says what becomes of the beams and changes nothing; the caller makes the new
    beams, and an item for each ended one, and `update` takes these. `pool` (immutable) and `done` are all the state:
    who saves both and puts them back undoes a step.

    beam_width: beams that run on, and hypotheses kept.
    max_tokens: tokens to generate at most.
    length_penalty: above 0 favours long hypotheses, below 0 short ones.
    early_stopping: with a full pool, stop at once (True), or when the best running beam, scored at its present length
        (False) or at the most favourable length it can get ("never"), beats no hypothesis of the pool.
    num_end_tokens: how many token ids end a beam.

    pool: the hypotheses, best first: the answer when done, all of it or its first n.
    Raises ValueError if an argument is out of range, or length_penalty too large for max_tokens.
    """

    def __init__(
        self,
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        num_end_tokens: int = 1,
    ) -> None:
        for name, value, least in (
            ("beam_width", beam_width, 1),
            ("max_tokens", max_tokens, 1),
            ("num_end_tokens", num_end_tokens, 0),
        ):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if not abs(length_penalty) * math.log2(max_tokens) <= MAX_EXPONENT:
            raise ArgumentError(
                "length_penalty",
                f"{max_tokens} (max_tokens) to its power between 2 ** -{MAX_EXPONENT} and 2 ** {MAX_EXPONENT}",
                length_penalty,
            )
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise ValueError(f'early_stopping: expected True, False or "never", got {early_stopping!r}')
        self.beam_width = beam_width
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.num_end_tokens = num_end_tokens
        self.pool: tuple[Hypothesis[T], ...] = ()
        self.done = False

    @property
    def num_candidates(self) -> int:
        """How many of its most likely next tokens `select` wants to see of each beam.

        The most that it looks at, so that beam_width are left if each beam may end in num_end_tokens ways.
        """
        return self.beam_width * max(2, 1 + self.num_end_tokens)

    def select(
        self,
        scores: Sequence[float],
        num_tokens: int,
        candidates: Sequence[Sequence[tuple[int, float]]],
        ends: Callable[[int, int], bool],
    ) -> BeamStep:
        """The best continuations of the running beams, sorted into those that run on and those that end.

        scores: of each running beam, as the last step gave them; [0.0] for the prompt in the first step.
        num_tokens: generated so far, the same for all beams; with the last of max_tokens every continuation ends.
        candidates: num_candidates (token id, log probability) of each beam, or all that the vocabulary has, most likely
            first. Tokens with log probability -inf are impossible and never taken.
        ends: whether a beam, given by its index in `scores`, ends with a token; called for as few as possible.
        Raises ValueError if candidates are not one list for each score, or num_tokens leaves no room for a token.
        """
        if len(candidates) != len(scores):
            raise ValueError(f"candidates: expected those of {len(scores)} beams, got {len(candidates)}")
        if not 0 <= num_tokens < self.max_tokens:
            raise ValueError(f"num_tokens: expected 0 to {self.max_tokens - 1}, got {num_tokens}")
        sources = [(beam, token_id) for beam, row in enumerate(candidates) for token_id, _ in row]
        sums = as_fp32([score + logprob for score, row in zip(scores, candidates, strict=True) for _, logprob in row])
        order = sorted(range(len(sums)), key=sums.__getitem__, reverse=True)[: self.num_candidates]  # stable
        is_last = num_tokens + 1 == self.max_tokens
        running: list[Continuation] = []
        ended: list[Continuation] = []
        for rank, index in enumerate(order):
            if len(running) == self.beam_width or sums[index] == -math.inf:
                break
            beam, token_id = sources[index]
            if not is_last and not ends(beam, token_id):
                running.append(Continuation(beam, token_id, sums[index]))
            elif rank < self.beam_width:
                ended.append(Continuation(beam, token_id, sums[index]))
        return BeamStep(tuple(running), tuple(ended), num_tokens + 1)

    def update(self, step: BeamStep, items: Sequence[T]) -> list[T]:
        """Put the items made of `step.ended` into the pool; return what it has no room for, new or old, best first.

        Raises ValueError if there is not one item for each.
        """
        if len(items) != len(step.ended):
            raise ValueError(f"items: expected {len(step.ended)}, one for each ended continuation, got {len(items)}")
        added = [
            Hypothesis(self._penalised(continuation.score, step.num_tokens), item)
            for continuation, item in zip(step.ended, items, strict=True)
        ]
        ranked = sorted((*self.pool, *added), key=lambda hypothesis: hypothesis.score, reverse=True)  # stable
        pool = tuple(ranked[: self.beam_width])
        self.pool, self.done = pool, self._is_done(pool, step)
        return [hypothesis.item for hypothesis in ranked[self.beam_width :]]

    def _is_done(self, pool: tuple[Hypothesis[T], ...], step: BeamStep) -> bool:
        """Whether nothing runs on, or what does is not expected to beat the worst of a full pool."""
        if not step.running:
            return True
        if len(pool) < self.beam_width:
            return False
        if self.early_stopping is True:
            return True
        reaches_end = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if reaches_end else step.num_tokens
        return self._penalised(step.running[0].score, length) <= pool[-1].score

    def _penalised(self, score: float, length: int) -> float:
        """score / length ** length_penalty, each operation in fp32."""
        (divisor,) = as_fp32([length**self.length_penalty])
        (penalised,) = as_fp32([score / divisor])
        return penalised


def as_fp32(values: list[float]) -> list[float]:
    """Each value rounded to the nearest fp32 number."""
    return array("f", values).tolist()
