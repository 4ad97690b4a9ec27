"""A request as the engine holds it: its sequence, the text of its output, and what its user is told."""

import math
from typing import Any

from pagedattn_serve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedattn_serve.scheduling.sequence import Sequence, SequenceStatus
from pagedattn_serve.text.detokenizer import IncrementalDetokenizer
from pagedattn_serve.text.stop_strings import first_stop, longest_stop_prefix


class Request:
    """One prompt and its output.

    prompt: None if it came as token ids. tokenizer: None where there is none; the output has no text then.
    max_len: most tokens of the sequence, prompt and output together.
    """

    def __init__(
        self,
        prompt: str | None,
        sequence: Sequence,
        tokenizer: Any | None,
        eos_token_ids: set[int],
        max_len: int,
    ) -> None:
        self.sequence = sequence
        self.metrics = RequestMetrics(sequence.arrival_time)
        self.error: str | None = None
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._detokenizer = self._new_detokenizer()
        params = sequence.sampling_params
        self._stop_ids = set(params.stop_ids)
        self._eos_ids = set() if params.ignore_eos else eos_token_ids
        self._stop_reason: int | str | None = None
        room = max_len - len(sequence.prompt_token_ids)
        self._max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)

    def mark(self) -> tuple[int, float]:
        """What `rewind` needs to come back to here."""
        return len(self.sequence.output_token_ids), self.sequence.cumulative_logprob

    def rewind(self, mark: tuple[int, float]) -> None:
        """As it was, unfinished, at an earlier `mark`, whatever came since then and wherever that was interrupted."""
        num_tokens, self.sequence.cumulative_logprob = mark
        del self.sequence.output_token_ids[num_tokens:]
        del self.sequence.logprobs[num_tokens:]
        self.sequence.status = SequenceStatus.WAITING
        self.metrics.finished_time = self.error = self._stop_reason = None
        if num_tokens == 0:
            self.metrics.first_token_time = None
        self._detokenizer = self._new_detokenizer()
        if self._detokenizer is not None:
            for token_id in self.sequence.output_token_ids:
                self._detokenizer.add(token_id)

    def add_token(
        self, token_id: int, logprob: float, top_logprobs: dict[int, Logprob] | None
    ) -> SequenceStatus | None:
        """Append a token and its text; returns the status that the token ends the request with, if it does.

        Raises FloatingPointError if the logits were no numbers, which their log-softmax shows, and what the tokenizer
        raises.
        """
        if math.isnan(logprob):
            raise FloatingPointError(
                f"logits: expected numbers, got NaN or infinity for output token {len(self.sequence.output_token_ids)}"
                " (an overflow in half precision, or broken weights)"
            )
        token_ids = self.sequence.output_token_ids
        token_ids.append(token_id)
        self.sequence.cumulative_logprob += logprob
        if top_logprobs is not None:
            self.sequence.logprobs.append(top_logprobs)
            if self._tokenizer is not None:
                for each_id, each in top_logprobs.items():
                    each.decoded_token = self._tokenizer.decode([each_id], clean_up_tokenization_spaces=False)
        status = None
        if token_id in self._eos_ids or token_id in self._stop_ids:
            status = SequenceStatus.FINISHED_STOPPED
            self._stop_reason = None if token_id in self._eos_ids else token_id
        elif len(token_ids) == self._max_tokens:
            status = SequenceStatus.FINISHED_LENGTH
        if self._detokenizer is None:
            return status
        if status is not SequenceStatus.FINISHED_STOPPED:
            self._detokenizer.add(token_id)
        if status is not None:
            self._detokenizer.finish()
        stop = first_stop(self._detokenizer.text, self.sequence.sampling_params.stop_strings)
        if stop is not None:
            stop_at, self._stop_reason = stop
            self._detokenizer.text = self._detokenizer.text[:stop_at]
            status = SequenceStatus.FINISHED_STOPPED
        return status

    def output(self) -> RequestOutput:
        """The request as it stands. Text that may be the beginning of a stop string is held back until it is done."""
        sequence = self.sequence
        params, finish_reason = sequence.sampling_params, sequence.status.finish_reason
        text = "" if self._detokenizer is None else self._detokenizer.text
        if finish_reason is None:
            text = text[: len(text) - longest_stop_prefix(text, params.stop_strings)]
        logprobs = None if params.logprobs is None else sequence.logprobs
        completion = CompletionOutput.of(
            text, sequence.output_token_ids, sequence.cumulative_logprob, logprobs, finish_reason, self._stop_reason
        )
        return RequestOutput.of(
            sequence.request_id, self._prompt, sequence.prompt_token_ids, completion, self.metrics, self.error
        )

    def _new_detokenizer(self) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        return IncrementalDetokenizer(self._tokenizer, self.sequence.prompt_token_ids)
