"""A request as the engine holds it: its group of sequences, their outputs, and what its user is told."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pagedattn_serve.errors import ArgumentError, BadArgument
from pagedattn_serve.outputs import CompletionOutput, Logprob, PackedLogprobs, RequestMetrics, RequestOutput
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.scheduling.beam_search import BeamSearch, Continuation
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import Sequence, SequenceGroup, SequenceStatus
from pagedattn_serve.text.detokenizer import IncrementalDetokenizer, TokenNames, names_in_prompt
from pagedattn_serve.text.stop_strings import SpecialStops, StopSearch, StopStrings

# A module looks up a name faster than an enum looks up a member.
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY

# A token, its log probability, the most likely tokens at its place if asked for, and with beam search the candidates.
SampledToken = tuple[int, float, dict[int, Logprob] | None, list[tuple[int, float]] | None]


class OutputError(Exception):
    """A request cannot go on: its logits or its tokenizer have raised the cause of this error. Nothing but the outputs
    of the request is half changed."""


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
    """One output of a request: the tokens of a sequence, as they come, their text, and what ends it.

    end_is_sent: whether a delta has said the end of this output.
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
        "end_is_sent",
        "logprobs",
        "sequence",
    )

    def __init__(self, sequence: Sequence, rules: OutputRules) -> None:
        self.sequence = sequence
        self.end_is_sent = False
        self._num_told_tokens = self._num_told_characters = 0  # by deltas
        self.cumulative_logprob = 0.0
        self.logprobs: list[PackedLogprobs] = []
        self._rules = rules
        self._stop_reason: int | str | None = None
        self._detokenizer: IncrementalDetokenizer | None = None
        if rules.token_names is not None:
            self._detokenizer = rules.token_names.detokenizer(
                sequence.prompt_token_ids, rules.params.skip_special_tokens
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
        """Append a token and its text. Returns the finished status if the token ends the output. Raises OutputError."""
        try:
            return self._add_token(token)
        except Exception as error:
            raise OutputError from error

    def _add_token(self, token: SampledToken) -> SequenceStatus | None:
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
        if status is None and self._stop_search is None:
            self._detokenizer.add(token_id)
            return None
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
            [*self.logprobs[num_told:]] if params.reports_logprobs else None,
            finish_reason,
            self._stop_reason,
        )
        if is_delta:
            self._num_told_tokens, self._num_told_characters = len(sequence.output_token_ids), end
            self.end_is_sent = finish_reason is not None
        return output


class Request:
    """One prompt and its outputs.

    output_kind: the user's choice, but FINAL_ONLY if the outputs are chosen at the end.
    stored: blocks of the prompt that were read from disk, for the engine to put into the cache; None if there are none.
    """

    __slots__ = (
        "_are_prompt_logprobs_told",
        "_params",
        "_prompt",
        "_prompt_logprobs",
        "_prompt_token_ids",
        "_token_names",
        "completions",
        "error",
        "group",
        "metrics",
        "output_kind",
        "stored",
    )

    def __init__(self, prompt: str | None, group: SequenceGroup, rules: OutputRules) -> None:
        self.group = group
        self.metrics = RequestMetrics(group.arrival_time)
        self.error: str | BadArgument | None = None
        self.stored: Any = None
        self.completions = [Completion(sequence, rules) for sequence in group.sequences]
        params = rules.params
        chooses_at_end = params.use_beam_search or params.num_sequences > params.n
        self.output_kind = FINAL_ONLY if chooses_at_end else params.output_kind
        self._prompt = prompt
        self._prompt_token_ids = [*group.prompt_token_ids]  # a list for the user, who may write to it
        self._are_prompt_logprobs_told = False  # by a delta
        self._params = params
        self._token_names = rules.token_names
        self._prompt_logprobs: list[PackedLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]  # of the first token

    def add_prompt_logprobs(self, begin: int, entries: list[dict[int, Logprob]]) -> None:
        """Add the logprobs of the prompt's next tokens, from position `begin` on."""
        assert self._prompt_logprobs is not None and len(self._prompt_logprobs) == begin
        self._prompt_logprobs += map(PackedLogprobs, entries)
        [sequence] = self.group.sequences
        num_known = len(self._prompt_logprobs)
        sequence.prompt_logits_from = num_known - 1 if num_known < len(sequence.prompt_token_ids) else None

    def add_tokens(self, tokens: list[SampledToken], scheduler: Scheduler) -> int:
        """Append a token to each unfinished sequence. If the first tokens are several, the sequence forks for them.
        Returns how many tokens were appended. Raises OutputError."""
        if self._prompt_logprobs is not None:
            self._name_prompt()
        if len(tokens) > len(self.completions):
            self._fork(len(tokens), scheduler)
        unfinished = self.completions
        if len(unfinished) > len(tokens):
            unfinished = [each for each in unfinished if not each.sequence.status.is_finished]
        for i, completion in enumerate(unfinished):
            status = completion.add_token(tokens[i])
            if status is not None:
                scheduler.finish(self.group, completion.sequence, status)
        return len(tokens)

    def add_token(self, token: SampledToken, scheduler: Scheduler) -> bool:
        """`add_tokens` for a plain decode (`ScheduledBatch.num_plain`). Returns whether the request is finished."""
        completion = self.completions[0]
        if len(self.completions) > 1:
            [completion] = [each for each in self.completions if not each.sequence.status.is_finished]
        status = completion.add_token(token)
        if status is None:
            return False
        scheduler.finish(self.group, completion.sequence, status)
        return True

    def _fork(self, num_sequences: int, scheduler: Scheduler) -> None:
        [parent] = self.completions
        children = [scheduler.fork(self.group, parent.sequence, index) for index in range(1, num_sequences)]
        self.completions = [parent, *map(parent.fork, children)]

    def add_verified(self, tokens: list[SampledToken], scheduler: Scheduler) -> int:
        """Append tokens to the one sequence. All tokens, or all but the last one, were its drafts. Returns how many
        tokens were appended: none after a token that ends the output. Raises as `add_tokens`."""
        [completion] = self.completions
        num_added = 0
        status = None
        while status is None and num_added < len(tokens):
            status = completion.add_token(tokens[num_added])
            num_added += 1
        scheduler.mark_verified(completion.sequence, num_added - 1)
        if status is not None:
            scheduler.finish(self.group, completion.sequence, status)
        return num_added

    def fail(self, error: str | BadArgument, scheduler: Scheduler) -> None:
        """End all unfinished sequences."""
        self.error = error
        for sequence in list(self.group.sequences):
            scheduler.finish(self.group, sequence, SequenceStatus.FINISHED_ERROR)

    def best(self) -> list[Completion]:
        """The completions to return: all in order of index, or, if n is fewer, the n likeliest, likeliest first."""
        if len(self.completions) <= self._params.n:
            return self.completions
        return sorted(self.completions, key=lambda each: -each.cumulative_logprob)[: self._params.n]

    def output(self) -> RequestOutput:
        """The request so far, or what is new since the last delta."""
        is_delta, error = self.output_kind is DELTA, self.error
        outputs: list[CompletionOutput] = []
        for index, completion in enumerate(self.best() if self.output_kind is FINAL_ONLY else self.completions):
            if not completion.end_is_sent:
                outputs.append(completion.output(index, is_delta))
        prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
        if self._prompt_logprobs is not None and not self._are_prompt_logprobs_told:
            prompt_logprobs = [*self._prompt_logprobs]
            self._are_prompt_logprobs_told = is_delta
        return RequestOutput(
            self.group.request_id,
            self._prompt,
            self._prompt_token_ids,
            outputs,
            not self.group.sequences,
            self.metrics,
            None if error is None else str(error),
            error if isinstance(error, BadArgument) else None,
            prompt_logprobs,
        )

    def _name_prompt(self) -> None:
        """Fill in the texts of prompt_logprobs, at the first token: the logprobs are read in another thread."""
        if self._token_names is None or self._prompt_logprobs is None or self.completions[0].sequence.output_token_ids:
            return
        token_ids, logprobs = self.group.prompt_token_ids, self._prompt_logprobs
        candidates = [packed or token_ids[:1] for packed in logprobs]
        names = names_in_prompt(self._token_names, token_ids, self._prompt, candidates)
        try:
            for packed, found in zip(logprobs, names, strict=False):
                if packed is not None:
                    packed.texts = found
        except Exception as error:
            raise OutputError from error


class BeamRequest(Request):
    """A request whose outputs beam search chooses. Its completions are the running beams, best first. Once the request
    is finished, they are what the search has chosen.

    Raises ValueError for a length_penalty that is too large for the length.
    """

    def __init__(self, prompt: str | None, group: SequenceGroup, rules: OutputRules) -> None:
        super().__init__(prompt, group, rules)
        params = rules.params
        self._rules = rules
        self._search = BeamSearch[Completion](
            params.beam_width,
            rules.max_tokens,
            params.length_penalty,
            params.early_stopping,
            num_end_tokens=len(rules.end_token_ids),
        )
        group.sequences[0].sampling.num_candidates = self._search.num_candidates

    def add_tokens(self, tokens: list[SampledToken], scheduler: Scheduler) -> int:
        """Take the candidates for each running beam. The search says which beams go on with which tokens.

        Returns the number of beams that ran. Raises OutputError, also if no token is left to choose.
        """
        self._name_prompt()
        beams = self.completions
        for beam, (_, logprob, _, _) in zip(beams, tokens, strict=True):
            try:
                beam.require_number(logprob)
            except FloatingPointError as error:
                raise OutputError from error
        step = self._search.select(
            [beam.cumulative_logprob for beam in beams],
            len(beams[0].sequence.output_token_ids),
            [candidates or [] for _, _, _, candidates in tokens],
            self._ends,
        )
        ended = [beams[each.beam].fork(beams[each.beam].sequence.fork(0)) for each in step.ended]
        for completion, continuation in zip(ended, step.ended, strict=True):
            status = self._extend(completion, continuation, tokens[continuation.beam])
            assert status is not None, f"{self.group.request_id}: a beam was ended by no token"
            completion.sequence.status = status
        self._search.update(step, ended)
        if self._search.done:
            if not self._search.pool:
                no_token = ArgumentError("sampling_params", "a token to choose", "masks that leave none")
                raise OutputError from no_token
            running: list[Completion] = []
        else:
            running = self._continue(step.running, scheduler)
        going_on = {completion.sequence for completion in running}
        for beam in beams:
            if beam.sequence not in going_on:
                scheduler.finish(self.group, beam.sequence, SequenceStatus.FINISHED_STOPPED)
        for completion, continuation in zip(running, step.running, strict=False):
            self._extend(completion, continuation, tokens[continuation.beam])
        self.group.sequences = [completion.sequence for completion in running]
        self.completions = running or [hypothesis.item for hypothesis in self._search.pool]
        return len(tokens)

    def best(self) -> list[Completion]:
        return self.completions[: self._rules.params.n]

    def _ends(self, beam: int, token_id: int) -> bool:
        if token_id in self._rules.end_token_ids:
            return True
        if not self._rules.params.stop:
            return False
        completion = self.completions[beam]
        trial = completion.fork(completion.sequence.fork(0))
        return trial.add_token((token_id, 0.0, None, None)) is SequenceStatus.FINISHED_STOPPED

    def _continue(self, continuations: tuple[Continuation, ...], scheduler: Scheduler) -> list[Completion]:
        """The beams that go on, without their new tokens. A beam's second continuation takes a fork of the beam."""
        running: list[Completion] = []
        taken: set[int] = set()
        for continuation in continuations:
            beam = self.completions[continuation.beam]
            if continuation.beam in taken:
                beam = beam.fork(scheduler.fork(self.group, beam.sequence, index=0))
            taken.add(continuation.beam)
            running.append(beam)
        return running

    def _extend(self, completion: Completion, continuation: Continuation, token: SampledToken) -> SequenceStatus | None:
        _, _, top_logprobs, _ = token
        logprobs = None
        if top_logprobs is not None:  # of all candidates and the most likely tokens, what was asked for
            own, num_top = continuation.token_id, self._rules.params.logprobs
            ranked = sorted(top_logprobs.items(), key=lambda item: item[1].rank)
            logprobs = {own: top_logprobs[own]} | dict(ranked[:num_top])
        status = completion.add_token((continuation.token_id, 0.0, logprobs, None))
        completion.cumulative_logprob = continuation.score
        return status
