"""The bodies of responses: for whoever makes them, who is checked by mypy, and for /openapi.json."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # which pydantic wants before Python 3.12


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    error: ErrorBody


class Usage(TypedDict):
    """Tokens, over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(TypedDict):
    """A list entry for each token. top_logprobs: the likeliest tokens by name; None where none were asked for."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None  # stop or length, where an output is whole
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: NotRequired[Literal["default"]]  # where the request names a tier


class TopLogprob(TypedDict):
    """bytes: what the token adds to the UTF-8 of the answer, also if it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None  # stop or length, where an output is whole
    stop_reason: int | str | None


class ChatCompletionResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: NotRequired[Literal["default"]]  # where the request names a tier
    prompt_logprobs: NotRequired[PromptLogprobs]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    prompt: str


# Beside the JSON of a route.
EVENT_STREAM: dict[str, Any] = {
    "description": "the whole response, or with stream its chunks as they come, then [DONE]",
    "content": {"text/event-stream": {}},  # a schema here would be read as that of each event
}
