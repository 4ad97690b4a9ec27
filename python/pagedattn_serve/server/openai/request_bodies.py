"""The bodies of requests. Types are strict ("5" is no number, true is not 1). A field that is None counts as left out.

This file says what values OpenAI's API allows; `SamplingParams` and the engine check the rest. It also limits how much
a field may hold, if that costs the event loop or the engine's steps, which all requests share.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from pagedattn_serve.sampling_params import MAX_LOGPROBS, MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from pagedattn_serve.structured_output import MAX_CHARACTERS

MAX_OUTPUTS = 128  # n and best_of, whose sequences take their places all at once; OpenAI's
MAX_TEXTS = 1000  # of stop and bad_words; OpenAI takes 4
MAX_STOP_CHARACTERS = 1000  # of each
MAX_BAD_WORD_CHARACTERS = 100  # of each: all of them are tokenized, twice
MAX_BIASES = 1024  # vLLM's, as is the next
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**18  # as many tokens as the largest vocabularies have; the engine knows the model's
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's

# One error for a list is enough, which may have a million wrong items.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
NumOutputs = Annotated[int, Field(ge=1, le=MAX_OUTPUTS)]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_TEXTS)]
BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]
MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]
# Fields of OpenAI's API for what is not done here. Clients send them empty; anything else is refused.
UNSUPPORTED = (
    *("audio", "function_call", "functions", "modalities", "moderation", "suffix"),
    *("tool_choice", "tools", "web_search_options"),
)
_NOTHING: tuple[Any, ...] = ([], {}, "", "none", "auto", ["text"])


class Body(BaseModel):
    """Any object of a request: unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v is not None and (k not in UNSUPPORTED or v not in _NOTHING)}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="without effect: no chunk is padded")


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Body):
    type: Literal["content"]
    content: str | list[dict[str, Any]]


class PromptCacheOptions(Body):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class SamplingBody(Body):
    """What completions and chat completions share. What it says of sampling is as in `SamplingParams`."""

    model: str | None = None
    n: NumOutputs | None = None
    best_of: NumOutputs | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # of OpenAI's, without effect
    user: str | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        None, description="without effect: the answer's is default"
    )
    prediction: Prediction | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="given to the chat template; without effect where the template does not name it"
    )
    # of vLLM's
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[BadWord], Field(fail_fast=True, max_length=MAX_TEXTS)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Texts, Field(max_length=MAX_CHARACTERS)] | None = None
    guided_grammar: str | None = None


class CompletionRequest(SamplingBody):
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="16 if not given; 0 with echo alone")
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


# What a message may be `render_chat` checks, and what it may hold besides is for its template to say.
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"type": "string", "minLength": 1},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            },
                        },
                        {"type": "null"},
                    ]
                },
            },
        }
    ),
]
Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


class ChatCompletionRequest(SamplingBody):
    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="what fits if not given")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None


class TokenizeRequest(Body):
    """A prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="true for a prompt, false for messages if not given")
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
