"""What the sampler is told of a sequence, beside its logits."""

from array import array
from dataclasses import dataclass, replace
from typing import Self

from pagedattn_serve.sampling.grammar import TokenMatcher
from pagedattn_serve.sampling.token_counts import TokenCounts
from pagedattn_serve.sampling_params import NO_RULES, SamplingParams, TokenRules


@dataclass(slots=True)
class SamplingState:
    """What decides the next token of one sequence. The scheduler carries the state with the sequence, and knows only
    `fork`.

    prompt_token_ids, output_token_ids: the sequence's own lists. The prompt stays as it is, and the output only grows.
        The number of output tokens enters the random numbers of a seed.
    index: of the sequence within its request; the index enters the random numbers, too.
    token_rules: what the parameters say, as token ids.
    num_candidates: how many of the most likely tokens beam search wants to see; 0 chooses one token.
    matcher: of structured output. The matcher follows the output tokens when the next token is to be drawn.
    seen_in_prompt, seen_in_output: what `ids_in_prompt` and `counts_in_output` found when they were last asked.
    """

    sampling_params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    index: int = 0
    token_rules: TokenRules = NO_RULES
    num_candidates: int = 0
    matcher: TokenMatcher | None = None
    seen_in_prompt: "array[int] | None" = None
    seen_in_output: TokenCounts | None = None

    def ids_in_prompt(self) -> "array[int]":
        """Each token id of the prompt once; int64."""
        if self.seen_in_prompt is None:
            self.seen_in_prompt = array("q", set(self.prompt_token_ids))
        return self.seen_in_prompt

    def counts_in_output(self) -> TokenCounts:
        """Of the output so far. Only tokens that are new since the last call are looked at."""
        counts, self.seen_in_output = self.seen_in_output or TokenCounts(), None  # kept only if no interrupt comes amid
        counts.extend(self.output_token_ids)
        self.seen_in_output = counts
        return counts

    def fork(self, output_token_ids: list[int], index: int) -> Self:
        """The state of another sequence, whose output so far is equal."""
        matcher = None if self.matcher is None else self.matcher.fork()
        return replace(self.with_output(output_token_ids), index=index, matcher=matcher)

    def with_output(self, output_token_ids: list[int]) -> Self:
        """The state with another list as its output, which begins with the output so far. The matcher is the same."""
        seen = None if self.seen_in_output is None else self.seen_in_output.copy()
        return replace(self, output_token_ids=output_token_ids, seen_in_output=seen)
