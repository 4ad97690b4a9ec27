"""What the engine gives back."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class CompletionOutput:
    """The output of a request so far.

    text: never taken back; while unfinished, the end that may be the start of a stop string is held back.
    finish_reason: "stop" (end-of-sequence token or stop string), "length", "abort"; None while unfinished.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass(slots=True, frozen=True)
class RequestOutput:
    """One request and its output so far. prompt is None if it came as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


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
