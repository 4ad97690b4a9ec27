"""What the engine gives back. Lists are the caller's own, who may write to them. The rest is read-only."""

import struct
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagedattn_serve.errors import BadArgument


class Logprob(NamedTuple):
    """How likely the model found a token, before temperature and restrictions. rank: 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class PackedLogprobs(Mapping[int, Logprob]):
    """The logprobs of one place by token id, read-only, in a tenth of the memory of a dict.

    The numbers are packed, logprobs as fp32.

    texts: those of the tokens, perhaps among others; None: the tokens have no texts.
    """

    __slots__ = ("_numbers", "texts")

    def __init__(self, entries: Mapping[int, Logprob], texts: Mapping[int, str] | None = None) -> None:
        ranks = (entry.rank for entry in entries.values())
        logprobs = (entry.logprob for entry in entries.values())
        self._numbers = struct.pack(_format_of(len(entries)), *entries, *ranks, *logprobs)
        self.texts = texts

    def __getitem__(self, token_id: int) -> Logprob:
        for i, each_id in enumerate(self):
            if each_id == token_id:
                [rank] = struct.unpack_from("i", self._numbers, 4 * (len(self) + i))
                [logprob] = struct.unpack_from("f", self._numbers, 4 * (2 * len(self) + i))
                return Logprob(logprob, rank, None if self.texts is None else self.texts[token_id])
        raise KeyError(token_id)

    def __iter__(self) -> Iterator[int]:
        return iter(struct.unpack_from(f"{len(self)}i", self._numbers))

    def __len__(self) -> int:
        return len(self._numbers) // 12

    def items(self) -> ItemsView[int, Logprob]:
        return self._unpack().items()

    def values(self) -> ValuesView[Logprob]:
        return self._unpack().values()

    def __repr__(self) -> str:
        return repr(self._unpack())

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: with the texts of these tokens alone."""
        texts = None if self.texts is None else {token_id: self.texts[token_id] for token_id in self}
        return type(self), (self._unpack(), texts)

    def _unpack(self) -> dict[int, Logprob]:
        count = len(self)
        numbers = struct.unpack(_format_of(count), self._numbers)
        token_ids, ranks, logprobs = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        texts = [None] * count if self.texts is None else [self.texts[token_id] for token_id in token_ids]
        return dict(zip(token_ids, map(Logprob, logprobs, ranks, texts), strict=True))


def _format_of(num_entries: int) -> str:
    """Token ids, then ranks, then logprobs."""
    return f"{2 * num_entries}i{num_entries}f"


@dataclass(slots=True)  # not frozen, which would take twice as long to make: one output a token
class CompletionOutput:
    """One output of a request: so far, or with `RequestOutputKind.DELTA` what is new of it.

    index: its place among the outputs of the request.
    text: never taken back; while unfinished, the end that may be the start of a stop string is held back. It has
        neither the stop string nor the token that ended it.
    token_ids: with the token that ended it, if one did.
    cumulative_logprob: sum of the logprobs of all tokens so far.
    logprobs: for each token its own logprob and those of the most likely ones, by token id; None if not asked for.
    finish_reason: "stop" (end-of-sequence or stop token, stop string), "length", "abort", "error" (which
        `RequestOutput.error` tells); None while unfinished.
    stop_reason: the stop string or the id of the stop token that ended it; None for an end-of-sequence token, and where
        finish_reason is not "stop".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[Mapping[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None

    def add(self, delta: "CompletionOutput") -> None:
        """Make this what it and the delta after it say together."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.cumulative_logprob = delta.cumulative_logprob
        if self.logprobs is not None and delta.logprobs is not None:
            self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True, frozen=True)
class RequestMetrics:
    """When things happened to a request up to this output, in seconds of `time.monotonic`; None if not yet."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """One request and its outputs: so far, or with `RequestOutputKind.DELTA` what is new of them.

    prompt: None if it came as token ids alone.
    prompt_token_ids: one list for all outputs of the request.
    outputs: as many as SamplingParams.n. Where best_of is more, and with beam search, the best ones, by cumulative
        logprob or by the search's score. With `RequestOutputKind.DELTA` those that have something new.
    error: why the request could not go on, where finish_reason is "error": NaN or infinity among the logits, or text
        that the tokenizer failed to decode, or what its parameters say of the logits, or `LLMEngine.fail_batch`.
    argument_error: the error as it was raised, if an argument of the request is to blame.
    prompt_logprobs: for each token of the prompt its logprob and those of the most likely ones, None for the first, as
        far as it is computed; None if not asked for, and with `RequestOutputKind.DELTA` in all outputs but the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(compare=False)
    error: str | None = None
    argument_error: BadArgument | None = field(default=None, compare=False)
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None

    def add(self, delta: "RequestOutput") -> None:
        """Make this what it and the delta after it say together. The first delta has all outputs of the request."""
        so_far = {completion.index: completion for completion in self.outputs}
        for completion in delta.outputs:
            so_far[completion.index].add(completion)
        self.finished, self.metrics = delta.finished, delta.metrics
        self.error, self.argument_error = delta.error, delta.argument_error


@dataclass(slots=True, frozen=True)
class EngineStats:
    """The engine between two steps. Requests are counted, but for num_running_sequences.

    num_used_blocks: that sequences hold; one that several share counts once.
    num_blocks_without_sharing: as many as they would hold if none were shared.
    num_cached_blocks: that no sequence holds, but whose tokens a prompt can still find.
    num_used_host_blocks: of num_host_blocks, those of swapped-out requests.
    num_used_slots: tokens whose keys and values are in used blocks; their other slots are waste.
    num_recomputes, num_swaps: preemptions, by what became of the blocks.
    num_looked_up_tokens: of prompts, when they were let in; num_found_tokens: those of them that were in the cache.
    step_seconds: what the num_steps took in all; execute_seconds: of that, model and sampler with their inputs.
    num_proposed_tokens: guessed by speculation; num_accepted_tokens: those that saved a step.
    """

    num_waiting: int
    num_running: int
    num_swapped: int
    num_running_sequences: int
    num_blocks: int
    num_used_blocks: int
    num_blocks_without_sharing: int
    num_cached_blocks: int
    num_host_blocks: int
    num_used_host_blocks: int
    num_used_slots: int
    num_recomputes: int
    num_swaps: int
    num_looked_up_tokens: int
    num_found_tokens: int
    num_proposed_tokens: int
    num_accepted_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    step_seconds: float
    execute_seconds: float

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its blocks."""
        return self.num_recomputes + self.num_swaps


class RequestState(NamedTuple):
    """An unfinished request between two steps.

    state: "waiting" (for its turn, or its blocks), "running", or "swapped" out to host memory.
    num_output_tokens: of its unfinished sequences together.
    """

    request_id: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True, frozen=True)
class CacheMap:
    """Who holds which block, between two steps.

    blocks: of each block of the cache its state: "used" by one sequence, "shared" by several, "cached" (no sequence
        holds it, but a prompt can still find its tokens) or "free".
    owners: of each block the index in `requests` of one that holds it; -1 if none does.
    host_blocks, host_owners: the same of each block of the pool in host memory, "swapped" or "free".
    requests: those that run, then those that are swapped out, then those that wait, each in the order of their turns.
    """

    blocks: tuple[str, ...]
    owners: tuple[int, ...]
    host_blocks: tuple[str, ...]
    host_owners: tuple[int, ...]
    requests: tuple[RequestState, ...]
