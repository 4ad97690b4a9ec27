"""What the sampler and the logits processors are told of a row."""

from dataclasses import dataclass

from pagedattn_serve.grammar import TokenMatcher
from pagedattn_serve.sampling_params import NO_RULES, SamplingParams, TokenRules
from pagedattn_serve.scheduling.sequence import Sequence


@dataclass(slots=True)
class SamplingRow:
    """What decides the next token of one sequence, beside its logits: what a Sequence has by the same names.

    output_token_ids: those before the token that is to come; their number enters the random numbers of a seed.
    index: of the sequence within its request; enters them as well.
    num_candidates: of beam search, how many of the most likely tokens to return; 0 chooses one.
    matcher: of structured output; that of the sequence, whose rows follow each other.
    """

    sampling_params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    index: int = 0
    token_rules: TokenRules = NO_RULES
    num_candidates: int = 0
    matcher: TokenMatcher | None = None


Row = SamplingRow | Sequence
