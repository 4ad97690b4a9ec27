"""A request whose prompt becomes an embedding."""

import math
from dataclasses import replace

from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.requests.request import OutputRules, Request
from pagedattn_serve.sampling.pooling import Pooled
from pagedattn_serve.sampling_params import RequestOutputKind, SamplingParams
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import SequenceGroup, SequenceRules, SequenceStatus

SEQUENCE_RULES = SequenceRules(max_tokens=0, takes_drafts=False, generates=False)
_NO_OUTPUT = OutputRules(
    params=SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY),
    eos_token_ids=frozenset(),
    end_token_ids=frozenset(),
    max_tokens=0,
    stop_strings=None,
    special_stops=None,
    token_names=None,
)


class PoolingRequest(Request):
    """Its one completion has no tokens. Its sequence has a `PoolingState`."""

    __slots__ = ("_embedding",)

    def __init__(self, prompt: str | None, group: SequenceGroup) -> None:
        super().__init__(prompt, group, _NO_OUTPUT)
        self._embedding: list[float] | None = None

    def add_pooled(self, pooled: Pooled, scheduler: Scheduler) -> None:
        """Add what a step gives. Ends the request with the end of its prompt. Raises FloatingPointError for an
        embedding of what is no number."""
        [sequence] = self.group.sequences
        if pooled.embedding is None:
            sequence.pooling.total, sequence.prompt_logits_from = pooled.total, pooled.end
            return
        if not math.isfinite(sum(pooled.embedding)):
            raise FloatingPointError(
                "hidden states: expected numbers, got NaN or infinity"
                " (an overflow in half precision, or broken weights)"
            )
        self._embedding = pooled.embedding
        self.metrics = replace(self.metrics, num_cached_tokens=self.group.num_cached_tokens)
        scheduler.finish(self.group, sequence, SequenceStatus.FINISHED_STOPPED)

    def output(self) -> RequestOutput:
        output = super().output()
        output.embedding = self._embedding
        return output
