"""What the engine gives back: each output is the caller's own, who may write to all of it."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pagedattn_serve.errors import BadArgument


@dataclass(slots=True)
class Logprob:
    """How likely the model found a token, before temperature and restrictions. rank: 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class PackedLogprobs:
    """The entries of one place, whose logprobs are fp32, in a tenth of the memory that they take as objects.

    texts: those of the tokens, or of more; None: they have none.
    """

    __slots__ = ("_numbers", "texts")

    def __init__(self, entries: dict[int, Logprob]) -> None:
        ranks = (entry.rank for entry in entries.values())
        logprobs = (entry.logprob for entry in entries.values())
        self._numbers = struct.pack(_format_of(len(entries)), *entries, *ranks, *logprobs)
        self.texts: Mapping[int, str] | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return struct.unpack_from(f"{len(self._numbers) // 12}i", self._numbers)

    def unpack(self) -> dict[int, Logprob]:
        """The entries, which are the caller's own."""
        count = len(self._numbers) // 12
        numbers = struct.unpack(_format_of(count), self._numbers)
        texts = self.texts
        return {
            token_id: Logprob(logprob, rank, None if texts is None else texts[token_id])
            for token_id, rank, logprob in zip(
                numbers[:count], numbers[count : 2 * count], numbers[2 * count :], strict=True
            )
        }


def _format_of(num_entries: int) -> str:
    """Token ids, then ranks, then logprobs."""
    return f"{2 * num_entries}i{num_entries}f"


class _CopiedWhenRead:
    """Lists that the engine goes on with, copied when a caller first looks at them.

    Of a stream's outputs few are looked at for more than their text, and a copy for each would cost a step as much as
    its scheduling. The engine's lists only grow, so their first items are the same whenever they are copied.

    COPIED: the names of the attributes. The others are what `_copy` makes them from: slots instead of one with a tuple,
    as a step makes hundreds of outputs.
    """

    __slots__ = ("_logprobs", "_metrics", "_num_logprobs", "_num_tokens", "_token_ids")

    COPIED: ClassVar[tuple[str, ...]]
    _token_ids: Any
    _num_tokens: Any
    _logprobs: Any
    _num_logprobs: Any
    _metrics: Any

    def _copy(self, name: str) -> Any:
        raise NotImplementedError

    if not TYPE_CHECKING:  # to whom an unknown attribute is to stay one

        def __getattr__(self, name: str) -> Any:
            """Called where the attribute is not there yet."""
            if name not in self.COPIED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            value = self._copy(name)
            setattr(self, name, value)
            return value

    def __getstate__(self) -> Any:
        """For copies and pickles: the fields alone."""
        return None, {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


@dataclass(slots=True)  # frozen ones take twice as long to make, one a token
class CompletionOutput(_CopiedWhenRead):
    """One output of a request, so far.

    index: its place among the outputs of the request.
    text: never taken back; while unfinished, the end that may be the start of a stop string is held back. It has
        neither the stop string nor the token that ended it.
    token_ids: with the token that ended it, if one did.
    cumulative_logprob: sum of the logprobs of token_ids.
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
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None

    COPIED = ("token_ids", "logprobs")

    @property
    def num_tokens(self) -> int:
        """As `len(token_ids)`, without a copy of them."""
        return self._num_tokens if hasattr(self, "_num_tokens") else len(self.token_ids)

    def tail(self, start: int) -> tuple[list[int], list[dict[int, Logprob]] | None]:
        """token_ids and logprobs from token `start` on, without a copy of those before."""
        if not hasattr(self, "_num_tokens"):
            return self.token_ids[start:], None if self.logprobs is None else self.logprobs[start:]
        logprobs = self._logprobs and self._logprobs[start : self._num_tokens]
        return self._token_ids[start : self._num_tokens], logprobs and [packed.unpack() for packed in logprobs]

    def _copy(self, name: str) -> Any:
        if name == "token_ids":
            return self._token_ids[: self._num_tokens]
        if self._logprobs is None:
            return None
        return [packed.unpack() for packed in self._logprobs[: self._num_tokens]]


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request up to this output, in seconds of `time.monotonic`; None if not yet."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput(_CopiedWhenRead):
    """One request and its outputs so far.

    prompt: None if it came as token ids alone.
    outputs: as many as SamplingParams.n. Where best_of is more, or with beam search, these are the best so far, by
        cumulative logprob or by the search's score: until the request is finished, others may take their places.
    error: why the request could not go on, where finish_reason is "error": NaN or infinity among the logits, or text
        that the tokenizer failed to decode, or what its parameters say of the logits, or `LLMEngine.fail_batch`.
    argument_error: the error as it was raised, if an argument of the request is to blame.
    prompt_logprobs: for each token of the prompt its logprob and those of the most likely ones, None for the first, as
        far as it is computed; None if not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(compare=False)
    error: str | None = None
    argument_error: BadArgument | None = field(default=None, compare=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    COPIED = ("prompt_token_ids", "prompt_logprobs", "metrics")

    def _copy(self, name: str) -> Any:
        if name == "prompt_token_ids":
            return list(self._token_ids)
        if name == "metrics":
            return replace(self._metrics)
        if self._logprobs is None:
            return None
        logprobs = self._logprobs[: self._num_logprobs]
        return [None if packed is None else packed.unpack() for packed in logprobs]


# The engine's way to make outputs: the lists stay its own, and it may append to them. Functions that fill a bare object
# take three quarters of the time of a constructor.
_new: Any = object.__new__


def completion_output(
    index: int,
    text: str,
    token_ids: list[int],
    cumulative_logprob: float,
    logprobs: list[PackedLogprobs] | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
) -> CompletionOutput:
    output: CompletionOutput = _new(CompletionOutput)
    output.index = index
    output.text = text
    output.cumulative_logprob = cumulative_logprob
    output.finish_reason = finish_reason
    output.stop_reason = stop_reason
    output._token_ids = token_ids
    output._num_tokens = len(token_ids)
    output._logprobs = logprobs
    return output


def request_output(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int],
    outputs: list[CompletionOutput],
    finished: bool,
    metrics: RequestMetrics,
    error: str | BadArgument | None,
    prompt_logprobs: list[PackedLogprobs | None] | None,
) -> RequestOutput:
    """The metrics may not be written to from here on."""
    output: RequestOutput = _new(RequestOutput)
    output.request_id = request_id
    output.prompt = prompt
    output.outputs = outputs
    output.finished = finished
    output.error = None if error is None else str(error)
    output.argument_error = error if isinstance(error, BadArgument) else None
    output._token_ids = prompt_token_ids
    output._logprobs = prompt_logprobs
    output._num_logprobs = 0 if prompt_logprobs is None else len(prompt_logprobs)
    output._metrics = metrics
    return output


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
