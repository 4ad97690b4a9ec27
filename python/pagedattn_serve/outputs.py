"""What the engine gives back. The lists belong to the caller, who may write to them. All else is read-only."""

import math
import operator
import struct
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagedattn_serve.errors import BadArgument


class Logprob(NamedTuple):
    """How likely the model found a token, before temperature and restrictions. rank: 1 is the most likely.

    decoded_token: what the token adds to the text where it stands; so those of a text's tokens, joined, are the text. A
        token that ends within a character adds "". A special token that the text leaves out has its own text here. None
        without a tokenizer, or without detokenize.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class PackedLogprobs(Mapping[int, Logprob]):
    """The logprobs of one place by token id, read-only: packed, logprobs as fp32, in a tenth of the memory of a dict.

    texts: the texts of these tokens, and perhaps of more tokens; None if tokens have no texts.
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

    def extend_text(self, token_id: int, text: str) -> None:
        """Add to the text of one token."""
        assert self.texts is not None
        texts = {each_id: self.texts[each_id] for each_id in self}
        self.texts = {**texts, token_id: texts[token_id] + text}

    def items(self) -> ItemsView[int, Logprob]:
        return self._unpack().items()

    def values(self) -> ValuesView[Logprob]:
        return self._unpack().values()

    def __repr__(self) -> str:
        return repr(self._unpack())

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle takes the texts of its own tokens alone."""
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


@dataclass(slots=True)  # a frozen one takes twice as long to make, and each token makes one
class CompletionOutput:
    """One output of a request: so far, or with `RequestOutputKind.DELTA` what is new of it.

    index: the place of this output among the outputs of the request.
    text: without the stop string or the token that ended the output. No text is ever taken back: while the output is
        unfinished, an end of the text that may begin a stop string is held back.
    token_ids: the token that ended the output is among them.
    cumulative_logprob: sum of the logprobs of all tokens so far.
    logprobs: for each token, the logprobs of that token and of the most likely ones by token id; None if not asked for.
    finish_reason: "stop" (an end-of-sequence token, a stop token or a stop string), "length", "abort", or "error"
        (`RequestOutput.error` says why); None while unfinished.
    stop_reason: the stop string, or the id of the stop token, that ended the output; None for an end-of-sequence token
        and for every other finish_reason.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[Mapping[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None

    def add(self, delta: "CompletionOutput") -> None:
        """Add the next delta to what this output says."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.cumulative_logprob = delta.cumulative_logprob
        if self.logprobs is not None and delta.logprobs is not None:
            self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True, frozen=True)
class RequestMetrics:
    """What happened to a request up to this output. The times are seconds of `time.monotonic`; None if not yet.

    num_cached_tokens: of the prompt, tokens whose keys and values were in the cache; None until the first output token.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class RequestOutput:
    """One request and its outputs: so far, or with `RequestOutputKind.DELTA` what is new of them.

    prompt: the text; None if the prompt came as token ids alone.
    prompt_token_ids: one list for all outputs of the request.
    outputs: as many as `SamplingParams.n`: with a higher best_of, the ones of highest cumulative logprob; with beam
        search, the ones of best score. With `RequestOutputKind.DELTA`, only the outputs that have something new.
    error: why the request could not go on, if finish_reason is "error": NaN or infinity among the logits, a text that
        the tokenizer failed to decode, parameters that failed on the logits, or `LLMEngine.fail_batch`.
    argument_error: the error as it was raised, if an argument of the request is to blame.
    prompt_logprobs: for each token of the prompt that is computed, the logprobs of that token and of the most likely
        tokens; None for the first token. Not a list but None if not asked for, or if an earlier delta had the list.
    embedding: of the prompt, for a request with `PoolingParams`, whose one output has no tokens; else None.
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
    embedding: list[float] | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """That of `metrics`."""
        return self.metrics.num_cached_tokens

    def add(self, delta: "RequestOutput") -> None:
        """Add the next delta to what this output says. The first delta has all outputs of the request."""
        so_far = {completion.index: completion for completion in self.outputs}
        for completion in delta.outputs:
            so_far[completion.index].add(completion)
        self.finished, self.metrics = delta.finished, delta.metrics
        self.error, self.argument_error = delta.error, delta.argument_error


class EmbeddingOutput(NamedTuple):
    """The embedding of a prompt, in fp32."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many elements the embedding has."""
        return len(self.embedding)


class ScoringOutput(NamedTuple):
    """How well two texts fit each other: the cosine of their embeddings, or what a reranker says."""

    score: float


class EmbeddingRequestOutput(NamedTuple):
    """A prompt and its embedding. num_cached_tokens: of the prompt, tokens that were in the cache."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool


def embedding_output(output: RequestOutput) -> EmbeddingRequestOutput:
    """What the caller of a request with `PoolingParams` gets, if the request has not failed."""
    assert output.embedding is not None
    embedding = EmbeddingOutput(output.embedding)
    num_cached = output.num_cached_tokens or 0
    return EmbeddingRequestOutput(output.request_id, embedding, output.prompt_token_ids, num_cached, output.finished)


def cosine(first: list[float], second: list[float]) -> float:
    """Of the angle between two embeddings of one size; 0 if one of them is 0."""
    lengths = math.hypot(*first) * math.hypot(*second)
    if not lengths:
        return 0.0
    return max(-1.0, min(1.0, math.fsum(map(operator.mul, first, second)) / lengths))  # rounding may go beyond


class ScoringRequestOutput(NamedTuple):
    """Two texts and their score. prompt_token_ids: those of the first, then those of the second."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool


class BeamSearchSequence(NamedTuple):
    """One output of beam search. tokens and text begin with the prompt; text is None without a tokenizer."""

    tokens: list[int]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None


class BeamSearchOutput(NamedTuple):
    """The outputs of beam search for one prompt, likeliest first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True, frozen=True)
class EngineStats:
    """The engine between two steps. num_waiting, num_running and num_swapped count requests.

    num_used_blocks: blocks that sequences hold; a shared block counts once.
    num_blocks_without_sharing: how many blocks the sequences would hold if they shared none.
    num_cached_blocks: blocks that no sequence holds, but whose tokens a prompt can still find.
    num_used_host_blocks: how many of the num_host_blocks belong to swapped-out requests.
    num_used_state_slots: how many of the num_state_slots belong to sequences. A model without states has no slots.
    num_used_slots: tokens whose keys and values are in used blocks, once for each group of layers; the other slots of
        these blocks are waste.
    num_recomputes, num_swaps: preemptions that dropped the blocks, and that swapped the blocks out.
    num_looked_up_tokens: tokens of the prompts that were let in; num_found_tokens: how many of these the cache had.
    step_seconds: the time of all steps; execute_seconds: the part of it that model and sampler took, inputs included.
    num_read_blocks, num_written_blocks: blocks that were read from prefix_cache_dir, and written there.
    num_proposed_tokens: tokens that speculation guessed; num_accepted_tokens: guesses that saved a step.
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
    num_state_slots: int
    num_used_state_slots: int
    num_used_slots: int
    num_recomputes: int
    num_swaps: int
    num_looked_up_tokens: int
    num_found_tokens: int
    num_read_blocks: int
    num_written_blocks: int
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


class ReplicaStatus(NamedTuple):
    """One of the cores of an `AsyncLLMEngine`, which mostly has one.

    pid: of the process that the core has to itself, if it has one. is_running: whether it takes requests. error: why
    the core does not run. num_restarts: how often it was started anew. stats: after its last step. hang: what hangs,
    and how; None if nothing does.
    """

    pid: int | None
    is_running: bool
    error: str | None
    num_restarts: int
    stats: EngineStats
    hang: str | None = None

    @property
    def is_well(self) -> bool:
        """Whether the core runs and does not hang."""
        return self.is_running and self.hang is None


class RequestState(NamedTuple):
    """An unfinished request between two steps.

    state: "waiting" (for its turn or its blocks), "running", or "swapped" (its blocks are in host memory).
    num_output_tokens: the output tokens of all unfinished sequences.
    """

    request_id: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True, frozen=True)
class CacheMap:
    """Who holds which block, between two steps.

    blocks: the state of each block of the cache: "used" by one sequence, "shared" by several, "cached" (no sequence
        holds the block, but a prompt can still find its tokens) or "free".
    owners: for each block the index in `requests` of a request that holds the block; -1 if none does.
    host_blocks, host_owners: the same for the blocks in host memory, which are "swapped" or "free".
    requests: the running requests, then the swapped-out ones, then the waiting ones, each in the order of their turns.
    """

    blocks: tuple[str, ...]
    owners: tuple[int, ...]
    host_blocks: tuple[str, ...]
    host_owners: tuple[int, ...]
    requests: tuple[RequestState, ...]
