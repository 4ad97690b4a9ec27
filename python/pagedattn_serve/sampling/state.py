"""What the sampler is told of a sequence, beside its logits."""

from dataclasses import dataclass, replace
from typing import Self

from pagedattn_serve.sampling.grammar import TokenMatcher
from pagedattn_serve.sampling_params import NO_RULES, SamplingParams, TokenRules


@dataclass(slots=True)
class SamplingState:
    """What decides the next token of one sequence. The scheduler carries the state with the sequence, and knows only
    `fork`.

    prompt_token_ids, output_token_ids: the sequence's own lists. The number of output tokens enters the random numbers
        of a seed.
    index: of the sequence within its request; the index enters the random numbers, too.
    token_rules: what the parameters say, as token ids.
    num_candidates: how many of the most likely tokens beam search wants to see; 0 chooses one token.
    matcher: of structured output. The matcher follows the output tokens when the next token is to be drawn.
    """

    sampling_params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    index: int = 0
    token_rules: TokenRules = NO_RULES
    num_candidates: int = 0
    matcher: TokenMatcher | None = None

    def fork(self, output_token_ids: list[int], index: int) -> Self:
        """The state of another sequence, whose output so far is equal."""
        matcher = None if self.matcher is None else self.matcher.fork()
        return replace(self, output_token_ids=output_token_ids, index=index, matcher=matcher)
