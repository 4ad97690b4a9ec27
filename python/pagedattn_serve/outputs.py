"""What the engine gives back."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """How likely the model found a token, before temperature and restrictions. rank: 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)  # frozen ones take twice as long to make, one a token
class CompletionOutput:
    """The output of a request so far.

    text: never taken back; while unfinished, the end that may be the start of a stop string is held back. It has
        neither the stop string nor the token that ended it.
    token_ids: with the token that ended it, if one did.
    cumulative_logprob: sum of the logprobs of token_ids.
    logprobs: for each token its own logprob and those of the most likely ones, by token id; None if not asked for.
    finish_reason: "stop" (end-of-sequence or stop token, stop string), "length", "abort"; None while unfinished.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic`; None until they do."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """One request and its output so far.

    prompt is None if it came as token ids. prompt_token_ids and metrics are the same objects in all outputs of a
    request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(compare=False)


@dataclass(slots=True, frozen=True)
class EngineStats:
    """The engine between two steps.

    num_used_slots: tokens whose keys and values are in the cache; the other slots of the used blocks are waste.
    """

    num_waiting: int
    num_running: int
    num_blocks: int
    num_used_blocks: int
    num_used_slots: int
    num_preemptions: int
    num_prompt_tokens: int
    num_output_tokens: int
