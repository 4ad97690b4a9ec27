"""One sequence as the scheduler sees it: its tokens, its status, and how many of its tokens are in the cache."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from pagedattn_serve.grammar import TokenMatcher
from pagedattn_serve.outputs import PackedLogprobs
from pagedattn_serve.sampling_params import NO_RULES, SamplingParams, TokenRules


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


@dataclass(slots=True, eq=False)  # compared and hashed by identity: two requests may hold the same tokens
class Sequence:
    """A prompt, one output to it, and how far they are computed.

    prompt_token_ids: one list for all sequences of a request.
    index: which of them this is; with the seed of the request it determines the random numbers.
    cumulative_logprob: sum over the output tokens.
    logprobs: of each output token and the most likely ones in its place, if the request asks for them.
    num_computed_tokens: tokens whose keys and values are in the cache, counted from the first.
    block_hashes: of its first full blocks, as far as they were asked for (`BlockManager`).
    num_candidates: how many of the most likely next tokens beam search wants to see.
    token_rules: what its parameters say, as token ids.
    cache_salt: blocks are shared only with sequences of the same one.
    matcher: of structured output; follows the output tokens when the next is to be drawn.
    prompt_logprobs: of the prompt's tokens so far and the most likely ones in their place, None for the first; grows
        if the request asks for it, and never shrinks. One list for all sequences of a request.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    index: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    logprobs: list[PackedLogprobs] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_candidates: int = 0
    token_rules: TokenRules = NO_RULES
    cache_salt: str = ""
    matcher: TokenMatcher | None = None
    prompt_logprobs: list[PackedLogprobs | None] = field(default_factory=lambda: [None])

    def fork(self, index: int) -> Self:
        """Another sequence with the same tokens so far."""
        child = type(self)(self.request_id, self.prompt_token_ids, self.sampling_params, index)
        child.output_token_ids = list(self.output_token_ids)
        child.cumulative_logprob = self.cumulative_logprob
        child.logprobs = list(self.logprobs)
        child.status = self.status
        child.num_computed_tokens = self.num_computed_tokens
        child.block_hashes = list(self.block_hashes)
        child.num_candidates = self.num_candidates
        child.token_rules = self.token_rules
        child.cache_salt = self.cache_salt
        child.matcher = None if self.matcher is None else self.matcher.fork()
        child.prompt_logprobs = self.prompt_logprobs
        return child

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to run through the model: 1 while decoding, more while in prefill."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_computed_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether logprobs of prompt tokens are asked for and not there yet."""
        asked_for = self.sampling_params.prompt_logprobs is not None
        return asked_for and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output taken as one list, without building that list.

        Raises ValueError if the range does not lie within the sequence.
        """
        if not 0 <= start <= end <= self.num_tokens:
            raise ValueError(f"tokens: expected 0 <= start <= end <= {self.num_tokens}, got [{start}, {end})")
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]
