"""One sequence as the scheduler sees it: its tokens, its status, and how many of its tokens are in the cache."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self


class SequenceStatus(Enum):
    """Where a sequence is in its life.

    is_finished: whether no more tokens will come.
    finish_reason: in a word, "stop", "length", "abort" or "error"; None while not finished.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, word: str) -> None:
        self.is_finished = self.name.startswith("FINISHED")
        self.finish_reason = word if self.is_finished else None


@dataclass(slots=True, frozen=True)
class SequenceRules:
    """What the parameters of a request mean for the scheduler.

    num_sequences: the most sequences that run at once, beams or samples.
    uses_beams: whether each sequence is a beam, which draws one token even at the end of the prompt.
    width_argument: what the user calls num_sequences.
    max_tokens: the most output tokens of a sequence; None is no limit beside max_model_len.
    takes_drafts: whether a step may run guesses at the next tokens.
    """

    num_sequences: int = 1
    uses_beams: bool = False
    width_argument: str = "n"
    max_tokens: int | None = None
    takes_drafts: bool = True


@dataclass(slots=True, eq=False)  # compared and hashed by identity: two requests may hold the same tokens
class Sequence:
    """A prompt, one output to it, and how far they are computed.

    prompt_token_ids: one list for all sequences of a request.
    rules: one object for all sequences of a request.
    num_computed_tokens: tokens whose keys and values are in the cache, counted from the first.
    block_hashes: of its first full blocks, as far as they were asked for (`BlockManager`).
    cache_salt: blocks are shared only with sequences of the same salt.
    prompt_logits_from: the first position of the prompt whose logits are asked for and were not looked at yet; None if
        there is no such position.
    sampling: what the sampler is told of the sequence (`SamplingState`). The scheduler only forks it.
    """

    request_id: str
    prompt_token_ids: list[int]
    rules: SequenceRules = SequenceRules()
    output_token_ids: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: str = ""
    prompt_logits_from: int | None = None
    sampling: Any = None

    def fork(self, index: int) -> Self:
        """Another sequence with the same tokens so far. index: of the fork within its request."""
        tokens = list(self.output_token_ids)
        sampling = self.sampling and self.sampling.fork(tokens, index)
        return replace(self, output_token_ids=tokens, block_hashes=list(self.block_hashes), sampling=sampling)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to run through the model: 1 while decoding, more while in prefill."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_computed_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output taken as one list, without building that list. Raises ValueError if
        the range does not lie within the sequence."""
        if not 0 <= start <= end <= self.num_tokens:
            raise ValueError(f"tokens: expected 0 <= start <= end <= {self.num_tokens}, got [{start}, {end})")
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]


@dataclass(slots=True, eq=False)  # compared and hashed by identity
class ScheduledSequence:
    """The next `num_new_tokens` uncomputed tokens of a sequence.

    num_samples: how many tokens to draw from its last row: 0 amid a prompt, more than 1 if a group of several sequences
        is about to fork. The number is fixed when the sequence is scheduled, because the sequence moves on afterwards.
    draft_token_ids: guesses at the tokens after its last one. They run behind it, and a token is drawn from the row of
        each guess, too.
    """

    sequence: Sequence
    num_new_tokens: int
    num_samples: int
    draft_token_ids: tuple[int, ...] = ()
