"""A request whose outputs beam search chooses, as the engine holds it."""

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.requests.completion import Completion, OutputRules, SampledToken
from pagedattn_serve.requests.request import Request
from pagedattn_serve.scheduling.beam_search import BeamSearch, Continuation
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import SequenceStatus
from pagedattn_serve.scheduling.sequence_group import SequenceGroup


class BeamRequest(Request):
    """Its completions are the running beams, best first. Once it is finished, they are what the search has chosen.
    Raises ValueError for a length_penalty that is too large for the length."""

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

        Returns the number of beams that ran. Raises FloatingPointError for logits that are no numbers, ValueError if
        no token is left to choose.
        """
        self._name_prompt()
        beams = self.completions
        for beam, (_, logprob, _, _) in zip(beams, tokens, strict=True):
            beam.require_number(logprob)
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
                raise ArgumentError("sampling_params", "a token to choose", "masks that leave none")
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
        if top_logprobs is not None:  # the most likely tokens, as many as were asked for, then all candidates
            num_top = self._rules.params.logprobs
            logprobs = dict(list(top_logprobs.items())[:num_top])
            logprobs.setdefault(continuation.token_id, top_logprobs[continuation.token_id])
        status = completion.add_token((continuation.token_id, 0.0, logprobs, None))
        completion.cumulative_logprob = continuation.score
        return status
