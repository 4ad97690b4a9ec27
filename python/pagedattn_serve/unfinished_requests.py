"""The unfinished requests of an engine, and what becomes of them as its steps sample tokens."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

from pagedattn_serve.errors import BadArgument
from pagedattn_serve.execution.sampler import SamplerOutput
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.requests.pooling import PoolingRequest
from pagedattn_serve.requests.request import OutputError, Request, SampledToken
from pagedattn_serve.sampling_params import RequestOutputKind
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import ScheduledBatch, ScheduledSequence

logger = logging.getLogger(__name__)

FINAL_ONLY = RequestOutputKind.FINAL_ONLY


class UnfinishedRequests:
    """The requests whose groups the scheduler has. A request that ends leaves both.

    by_id: the requests, in order of arrival.
    num_output_tokens: that all requests got so far, finished ones among them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.by_id: dict[str, Request] = {}
        self.num_output_tokens = 0
        self._scheduler = scheduler

    def append_tokens(self, batch: ScheduledBatch, sampled: SamplerOutput) -> list[RequestOutput]:
        """Add what a batch has sampled to its requests. Returns what `LLMEngine.step` returns.

        If a request fails, it ends, and all other requests go on. After an exception, requests may be half changed.
        """
        for i, (begin, entries) in sampled.prompt_logprobs.items():
            self.by_id[batch.sequences[i].sequence.request_id].add_prompt_logprobs(begin, entries)
        now = time.monotonic()
        num_plain = 0 if sampled.errors else batch.num_plain  # each has one row
        outputs = self._add_to_plain(batch.sequences[:num_plain], sampled, now)
        outputs += self._add_to_others(batch.sequences[num_plain:], num_plain, sampled, now)
        outputs += self._add_pooled(batch, sampled, now)
        manager = self._scheduler.block_manager
        for group in batch.outgrown:
            error = f"its sequences need more than all {manager.num_blocks} blocks of the cache"
            if manager.num_pinned_blocks:
                error += f", {manager.num_pinned_blocks} of which are for registered prefixes"
            outputs.append(self._fail(self.by_id[group.request_id], error, now))
        self._forget_finished(outputs)
        return outputs

    def fail(self, requests: list[Request], error: str) -> list[RequestOutput]:
        """End requests with an error. Returns their last outputs."""
        now = time.monotonic()
        outputs = [self._fail(request, error, now) for request in requests]
        self._forget_finished(outputs)
        return outputs

    def abort(self, request: Request) -> RequestOutput:
        """End a request. Returns its last output."""
        request_id = request.group.request_id
        del self.by_id[request_id]
        self._scheduler.abort(request_id)
        return self._tell(request, time.monotonic())

    def _add_to_plain(
        self, decodes: list[ScheduledSequence], sampled: SamplerOutput, now: float
    ) -> list[RequestOutput]:
        """Add a token to each of the plain decodes. Returns what `step` returns of them."""
        outputs = []
        self.num_output_tokens += len(decodes)
        requests, scheduler = self.by_id, self._scheduler
        for scheduled, token in zip(decodes, _tokens_of(sampled), strict=False):
            request = requests[scheduled.sequence.request_id]
            try:
                is_finished = request.add_token(token, scheduler)
            except OutputError as error:
                self.num_output_tokens -= 1
                self._end(request, error.__cause__)
                is_finished = True
            if is_finished or request.output_kind is not FINAL_ONLY:
                outputs.append(self._tell(request, now))
        return outputs

    def _add_to_others(
        self,
        others: list[ScheduledSequence],
        first: int,
        sampled: SamplerOutput,
        now: float,
    ) -> list[RequestOutput]:
        """Add tokens to the groups of these sequences, whose rows begin with `first`. Returns what `step` returns of
        the groups."""
        if not others:
            return []
        requests: list[Request] = []
        ends: list[int] = []  # where the rows of each request end
        drafts_of: dict[Request, tuple[int, ...]] = {}
        num_rows = first
        last = None
        for scheduled in others:
            if scheduled.num_samples:
                request = self.by_id[scheduled.sequence.request_id]
                num_rows += scheduled.num_samples
                if scheduled.draft_token_ids:
                    drafts_of[request] = scheduled.draft_token_ids
                    num_rows += len(scheduled.draft_token_ids)
                if request is last:
                    ends[-1] = num_rows
                else:
                    requests.append(request)
                    ends.append(num_rows)
                    last = request
        outputs = []
        tokens = list(_tokens_of(sampled))
        for request, end in zip(requests, ends, strict=True):
            drafts = drafts_of.get(request)
            stop = end if drafts is None else first + _num_verified(drafts, range(first, end), sampled)
            if sampled.errors and (errors := [sampled.errors[i] for i in range(first, stop) if i in sampled.errors]):
                request.fail(errors[0], self._scheduler)
            else:
                self.num_output_tokens += self._add_tokens(request, tokens[first:stop], drafts is not None)
                if request.metrics.first_token_time is None:
                    num_cached = request.group.num_cached_tokens
                    request.metrics = replace(request.metrics, first_token_time=now, num_cached_tokens=num_cached)
            if not request.group.sequences or request.output_kind is not FINAL_ONLY:
                outputs.append(self._tell(request, now))
            first = end
        return outputs

    def _add_pooled(self, batch: ScheduledBatch, sampled: SamplerOutput, now: float) -> list[RequestOutput]:
        """Returns the outputs of the pooled requests whose prompts have ended."""
        outputs = []
        for i, pooled in sampled.pooled.items():
            request = self.by_id[batch.sequences[i].sequence.request_id]
            assert isinstance(request, PoolingRequest)
            try:
                request.add_pooled(pooled, self._scheduler)
            except FloatingPointError as error:
                self._end(request, error)
            if not request.group.sequences:
                outputs.append(self._tell(request, now))
        return outputs

    def _tell(self, request: Request, now: float) -> RequestOutput:
        """The output of a request that got tokens or has ended."""
        if not request.group.sequences:
            request.metrics = replace(request.metrics, finished_time=now)
        return request.output()

    def _fail(self, request: Request, error: str, now: float) -> RequestOutput:
        request.fail(error, self._scheduler)
        return self._tell(request, now)

    def _forget_finished(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                del self.by_id[output.request_id]

    def _add_tokens(self, request: Request, tokens: list[SampledToken], has_drafts: bool) -> int:
        """Returns how many tokens were added. If the request fails, it ends, and all other requests go on."""
        try:
            if has_drafts:
                return request.add_verified(tokens, self._scheduler)
            return request.add_tokens(tokens, self._scheduler)
        except OutputError as error:
            self._end(request, error.__cause__)
            return 0

    def _end(self, request: Request, error: BaseException | None) -> None:
        """End a request with what its logits or its tokenizer have raised."""
        text = error if isinstance(error, BadArgument) else f"{type(error).__name__}: {error}"
        has_trace = not isinstance(error, FloatingPointError | BadArgument)  # their traces show nothing
        logger.error("request %r ends: %s", request.group.request_id, text, exc_info=error if has_trace else None)
        request.fail(text, self._scheduler)


def _tokens_of(sampled: SamplerOutput) -> Iterator[SampledToken]:
    """The tokens, one after the other: as many tuples at once would call the garbage collector."""
    return zip(sampled.token_ids, sampled.logprobs, sampled.top_logprobs, sampled.candidates, strict=True)


def _num_verified(drafts: tuple[int, ...], rows: range, sampled: SamplerOutput) -> int:
    """How many rows of a sequence count: the first row, and the next row for as long as the drafts are what was drawn.

    The tokens of these rows are drawn after true tokens, as if there were no drafts; each row has its own random
    numbers, so that a seed gives the same tokens. A row with an error is left for the next step.
    """
    for i, row in enumerate(rows):
        if row in sampled.errors:
            return max(i, 1)
        if i == len(drafts) or sampled.token_ids[row] != drafts[i]:
            return i + 1
    raise AssertionError(f"{len(drafts)} drafts, but {len(rows)} rows")
