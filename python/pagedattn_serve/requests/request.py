"""A request as the engine holds it: its group of sequences, their outputs, and what its user is told."""

from collections.abc import Mapping

from pagedattn_serve.errors import BadArgument
from pagedattn_serve.outputs import CompletionOutput, Logprob, PackedLogprobs, RequestMetrics, RequestOutput
from pagedattn_serve.requests.completion import Completion, OutputRules, SampledToken
from pagedattn_serve.sampling_params import RequestOutputKind
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import SequenceStatus
from pagedattn_serve.scheduling.sequence_group import SequenceGroup
from pagedattn_serve.text.token_names import names_in_prompt

# A module looks up a name faster than an enum looks up a member.
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Request:
    """One prompt and its outputs. output_kind: the user's choice, but FINAL_ONLY if the outputs are chosen at the
    end."""

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
    )

    def __init__(self, prompt: str | None, group: SequenceGroup, rules: OutputRules) -> None:
        self.group = group
        self.metrics = RequestMetrics(group.arrival_time)
        self.error: str | BadArgument | None = None
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
        Returns how many tokens were appended. Raises what `Completion.add_token` raises."""
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
            if not completion.is_told:
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
        for packed, found in zip(logprobs, names, strict=False):
            if packed is not None:
                packed.texts = found
