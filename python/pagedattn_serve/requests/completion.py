"""One output of a request: its sequence, its text, and what ends it."""

import math
from dataclasses import dataclass
from typing import Any, Self

from pagedattn_serve.outputs import CompletionOutput, Logprob, PackedLogprobs
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus
from pagedattn_serve.text.detokenizer import IncrementalDetokenizer, TokenTexts
from pagedattn_serve.text.stop_strings import StopState, StopStrings

# A token, its log probability, the most likely tokens at its place if asked for, and with beam search the candidates.
SampledToken = tuple[int, float, dict[int, Logprob] | None, list[tuple[int, float]] | None]


@dataclass(slots=True, frozen=True)
class OutputRules:
    """What is the same for all outputs of a request.

    tokenizer, token_texts: None if there is no tokenizer, or no text is asked for.
    eos_token_ids: the end-of-sequence tokens that end an output; none with ignore_eos.
    end_token_ids: these, and the stop tokens.
    """

    params: SamplingParams
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    max_tokens: int
    stop_strings: StopStrings | None
    token_texts: TokenTexts | None


class Completion:
    """The tokens of a sequence, as they come, and their text.

    is_told: whether a delta has told the end of this output.
    logprobs: for each output token, the logprobs of the token and of the most likely tokens, if asked for.
    """

    __slots__ = (
        "_detokenizer",
        "_num_searched",
        "_num_told_characters",
        "_num_told_tokens",
        "_rules",
        "_stop_reason",
        "_stop_state",
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
        if rules.tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                rules.tokenizer, sequence.prompt_token_ids, skip_special_tokens=rules.params.skip_special_tokens
            )
        self._num_searched = 0  # characters of the text, searched for stop strings
        self._stop_state: StopState | None = None  # after these characters; None at the start, or without stop strings

    def fork(self, sequence: Sequence) -> Self:
        """A completion with the same output so far, for a fork of the sequence."""
        other = type(self)(sequence, self._rules)
        other.cumulative_logprob, other.logprobs = self.cumulative_logprob, list(self.logprobs)
        if self._detokenizer is not None:
            other._detokenizer = self._detokenizer.fork()
            other._num_searched, other._stop_state = self._num_searched, self._stop_state
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
        if top_logprobs is not None:
            packed = PackedLogprobs(top_logprobs, rules.token_texts)
            self.logprobs.append(packed)
            decode_tokens(packed)
        status = None
        if token_id in rules.end_token_ids:
            status = SequenceStatus.FINISHED_STOPPED
            self._stop_reason = None if token_id in rules.eos_token_ids else token_id
        elif len(token_ids) == rules.max_tokens:
            status = SequenceStatus.FINISHED_LENGTH
        if self._detokenizer is None:
            return status
        with_stop = rules.params.include_stop_str_in_output
        if status is None:
            self._detokenizer.add(token_id)
        else:
            if status is SequenceStatus.FINISHED_LENGTH or with_stop:
                self._detokenizer.add(token_id)
            self._detokenizer.finish()
        stops = rules.stop_strings
        if stops is None:
            return status
        text = self._detokenizer.text
        stop, self._stop_state = stops.search(text, self._num_searched, self._stop_state or stops.start)
        self._num_searched = len(text)
        if stop is not None and len(token_ids) >= rules.params.min_tokens:
            stop_at, self._stop_reason = stop
            end = stop_at + len(self._stop_reason) if with_stop else stop_at
            self._detokenizer.text = text[:end]
            status = SequenceStatus.FINISHED_STOPPED
        return status

    def output(self, index: int, is_delta: bool) -> CompletionOutput:
        """The output so far, or what is new since the last delta. Text that may begin a stop string is held back until
        the output is done."""
        sequence, params = self.sequence, self._rules.params
        finish_reason = sequence.status.finish_reason
        text = "" if self._detokenizer is None else self._detokenizer.text
        end = len(text)
        if self._stop_state is not None and finish_reason is None and not params.include_stop_str_in_output:
            stops = self._rules.stop_strings
            assert stops is not None
            end -= stops.num_held_back(self._stop_state)
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


def decode_tokens(logprobs: PackedLogprobs) -> None:
    """Decode the text of each token now: the logprobs are read in another thread."""
    if logprobs.texts is not None:
        for token_id in logprobs:
            logprobs.texts[token_id]
