"""One output of a request: its sequence, its text, and what ends it."""

import math
from dataclasses import dataclass
from typing import Self

from pagedattn_serve.outputs import CompletionOutput, Logprob, PackedLogprobs
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus
from pagedattn_serve.text.detokenizer import IncrementalDetokenizer
from pagedattn_serve.text.stop_strings import SpecialStops, StopSearch, StopStrings
from pagedattn_serve.text.token_names import TokenNames

# A token, its log probability, the most likely tokens at its place if asked for, and with beam search the candidates.
SampledToken = tuple[int, float, dict[int, Logprob] | None, list[tuple[int, float]] | None]


@dataclass(slots=True, frozen=True)
class OutputRules:
    """What is the same for all outputs of a request.

    token_names: None if there is no tokenizer, or no text is asked for.
    eos_token_ids: the end-of-sequence tokens that end an output; none with ignore_eos.
    end_token_ids: these, and the stop tokens.
    special_stops: the stop strings that name special tokens; None if there are none.
    """

    params: SamplingParams
    eos_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    max_tokens: int
    stop_strings: StopStrings | None
    special_stops: SpecialStops | None
    token_names: TokenNames | None


class Completion:
    """The tokens of a sequence, as they come, and their text.

    is_told: whether a delta has told the end of this output.
    logprobs: for each output token, the logprobs of the token and of the most likely tokens, if asked for.
    """

    __slots__ = (
        "_detokenizer",
        "_num_told_characters",
        "_num_told_tokens",
        "_rules",
        "_stop_reason",
        "_stop_search",
        "cumulative_logprob",
        "is_told",
        "logprobs",
        "sequence",
    )

    def __init__(self, sequence: Sequence, rules: OutputRules) -> None:
        self.sequence = sequence
        self.is_told = False
        self._num_told_tokens = self._num_told_characters = 0  # by deltas
        self.cumulative_logprob = 0.0
        self.logprobs: list[PackedLogprobs] = []
        self._rules = rules
        self._stop_reason: int | str | None = None
        self._detokenizer: IncrementalDetokenizer | None = None
        if rules.token_names is not None:
            self._detokenizer = IncrementalDetokenizer(
                rules.token_names.tokenizer,
                sequence.prompt_token_ids,
                skip_special_tokens=rules.params.skip_special_tokens,
            )
        self._stop_search: StopSearch | None = None
        if rules.stop_strings is not None:
            self._stop_search = StopSearch(rules.stop_strings, rules.special_stops)

    def fork(self, sequence: Sequence) -> Self:
        """A completion with the same output so far, for a fork of the sequence."""
        other = type(self)(sequence, self._rules)
        other.cumulative_logprob, other.logprobs = self.cumulative_logprob, list(self.logprobs)
        if self._detokenizer is not None:
            other._detokenizer = self._detokenizer.fork()
        if self._stop_search is not None:
            other._stop_search = self._stop_search.fork()
        return other

    def require_number(self, logprob: float) -> None:
        """Raises FloatingPointError for a log-softmax of NaN: then the logits were no numbers."""
        if math.isnan(logprob):
            raise FloatingPointError(
                f"logits: expected numbers, got NaN or infinity for output token {len(self.sequence.output_token_ids)}"
                " (an overflow in half precision, or broken weights)"
            )

    def add_token(self, token: SampledToken) -> SequenceStatus | None:
        """Append a token and its text. Returns the finished status if the token ends the output. Raises what
        `require_number` and the tokenizer raise."""
        token_id, logprob, top_logprobs, _ = token
        if logprob != logprob:  # NaN; the comparison saves a call
            self.require_number(logprob)
        rules, token_ids = self._rules, self.sequence.output_token_ids
        token_ids.append(token_id)
        self.cumulative_logprob += logprob
        packed = None
        if top_logprobs is not None:
            packed = PackedLogprobs(top_logprobs)
            if self._detokenizer is not None and rules.token_names is not None:
                packed.texts = rules.token_names.at(self._detokenizer, top_logprobs)
            self.logprobs.append(packed)
        status = None
        if token_id in rules.end_token_ids:
            status = SequenceStatus.FINISHED_STOPPED
            self._stop_reason = None if token_id in rules.eos_token_ids else token_id
        elif len(token_ids) == rules.max_tokens:
            status = SequenceStatus.FINISHED_LENGTH
        if self._detokenizer is None:
            return status
        with_stop = rules.params.include_stop_str_in_output
        is_shown = status is not SequenceStatus.FINISHED_STOPPED or with_stop
        if is_shown:
            self._detokenizer.add(token_id)
        if status is not None:
            held_back = self._detokenizer.finish()
            if packed is not None and held_back and status is SequenceStatus.FINISHED_LENGTH:
                packed.extend_text(token_id, held_back)
        if self._stop_search is None:
            return status
        leaves_out_specials = rules.params.skip_special_tokens or not is_shown
        stop = self._stop_search.find(self._detokenizer.text, token_id if leaves_out_specials else None)
        if stop is not None and len(token_ids) >= rules.params.min_tokens:
            stop_at, self._stop_reason = stop
            self._detokenizer.text = self._detokenizer.text[:stop_at] + (self._stop_reason if with_stop else "")
            status = SequenceStatus.FINISHED_STOPPED
        return status

    def output(self, index: int, is_delta: bool) -> CompletionOutput:
        """The output so far, or what is new since the last delta. Text that may begin a stop string is held back until
        the output is done."""
        sequence, params = self.sequence, self._rules.params
        finish_reason = sequence.status.finish_reason
        text = "" if self._detokenizer is None else self._detokenizer.text
        end = len(text)
        if self._stop_search is not None and finish_reason is None:
            end = self._stop_search.num_final(text, params.include_stop_str_in_output)
        num_told = self._num_told_tokens
        output = CompletionOutput(
            index,
            text[self._num_told_characters : end],
            sequence.output_token_ids[num_told:],
            self.cumulative_logprob,
            None if params.logprobs is None else [*self.logprobs[num_told:]],
            finish_reason,
            self._stop_reason,
        )
        if is_delta:
            self._num_told_tokens, self._num_told_characters = len(sequence.output_token_ids), end
            self.is_told = finish_reason is not None
        return output
