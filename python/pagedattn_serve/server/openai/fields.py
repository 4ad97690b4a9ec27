"""The fields of requests: what values a field may have, and what they are as `SamplingParams`.

Types are strict ("5" is no number, true is not 1). A field that is None counts as left out. The bodies say what values
OpenAI's API allows; `SamplingParams` and the engine check the rest. The bodies also limit how much a field may hold, if
that costs the event loop or the engine's steps, which all requests share.
"""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from pagedattn_serve.output_parsing.tool_format import NAME_PATTERN
from pagedattn_serve.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    RequestOutputKind,
    SamplingParams,
)
from pagedattn_serve.server.http.errors import ApiError
from pagedattn_serve.server.openai.errors import engine_error
from pagedattn_serve.structured_output import BOUNDED_SPACE, MAX_CHARACTERS, StructuredOutput

MAX_OUTPUTS = 128  # n and best_of, whose sequences take their places all at once; OpenAI's
MAX_TEXTS = 1000  # of stop and bad_words; OpenAI takes 4
MAX_STOP_CHARACTERS = 1000  # of each
MAX_BAD_WORD_CHARACTERS = 100  # of each: all of them are tokenized, twice
MAX_BIASES = 1024  # vLLM's, as is the next
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**18  # as many tokens as the largest vocabularies have; the engine knows the model's
MAX_TOOLS = 256
MAX_BUDGET = 2**20
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's


def _check_kept(number: int) -> int:
    if number == 0:
        raise ValueError("truncate_prompt_tokens: expected -1, or 1 and more, got 0")
    return number


# One error for a list is enough, which may have a million wrong items.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
NumOutputs = Annotated[int, Field(ge=1, le=MAX_OUTPUTS)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
FunctionName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_TEXTS)]
StopTokenIds = Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[str, float], Field(max_length=MAX_BIASES)]
MinP = Annotated[float, Field(ge=0, le=1)]
BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
TruncationSide = Literal["left", "right"]
NumKept = Annotated[int, Field(ge=-1), AfterValidator(_check_kept)]  # tokens of a prompt; -1: as many as fit
MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]
# Fields of OpenAI's API and of vLLM's for what is not done here. Clients send them empty; anything else is refused.
UNSUPPORTED = ("audio", "function_call", "functions", "modalities", "moderation", "web_search_options")
OF_CHATS = ("tools", "tool_choice")
OF_COMPLETIONS = ("echo", "suffix")
OF_VLLM = (
    *("documents", "kv_transfer_params", "logits_processors", "mm_processor_kwargs", "prompt_embeds"),
    *("repetition_detection", "return_weight_versions", "vllm_xargs"),
)
_NOTHING: tuple[Any, ...] = ([], {}, "", "none", "auto", ["text"])


def _is_nothing(value: Any) -> bool:
    return value is False or value in _NOTHING  # 0 == False, and is no bool


class Body(BaseModel):
    """Any object of a request: unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    unsupported: ClassVar[tuple[str, ...]] = (*UNSUPPORTED, *OF_COMPLETIONS)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v is not None and not (k in cls.unsupported and _is_nothing(v))}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="without effect: no chunk is padded")


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


OF_STRUCTURAL_TAGS = ("format", "structures", "triggers")
# The types that a field of a response_format goes with. `value` is TGI's; llama.cpp and Together call it `schema`.
TYPES_OF_FIELD = {"json_schema": ("json_schema",), "value": ("json_object", "json")}
TYPES_OF_FIELD |= dict.fromkeys(OF_STRUCTURAL_TAGS, ("structural_tag",))


class ResponseFormat(Body):
    type: Literal["text", "json", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    value: dict[str, Any] | bool | None = Field(
        None, validation_alias=AliasChoices("value", "schema"), description="a schema; also by the name schema"
    )
    format: dict[str, Any] | None = Field(None, description="of a structural tag, as in structured_outputs")
    structures: list[dict[str, Any]] | None = Field(None, description="with triggers, in place of format")
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        for name, types in TYPES_OF_FIELD.items():
            if getattr(self, name) is not None and self.type not in types:
                name = "value or schema" if name == "value" else name
                raise ValueError(
                    f"response_format: expected {name} beside the type {' or '.join(types)} alone, "
                    f"got it with {self.type}"
                )
        if self.format is not None and self.structures is not None:
            raise ValueError("response_format: expected format or structures, got both")
        return self


class StructuredOutputs(Body):
    """As in `StructuredOutput`, one of the forms."""

    json_schema: dict[str, Any] | str | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[Texts, Field(max_length=MAX_CHARACTERS)] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = Field(None, description="true is the whitespace_pattern of no white space")
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: bool | None = Field(None, description="without effect: one library compiles each form")


class Prediction(Body):
    type: Literal["content"]
    content: str | list[dict[str, Any]]


class PromptCacheOptions(Body):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class FunctionDefinition(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="the schema of the arguments; without it, there are none"
    )
    strict: bool | None = Field(None, description="whether a schema with keywords that are not known here is refused")


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedToolList(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


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
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # of OpenAI's, without effect
    user: str | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    store: bool | None = None
    service_tier: ServiceTier | None = Field(None, description="without effect: the answer's is default")
    prediction: Prediction | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="given to the chat template; without effect where the template does not name it"
    )
    # of vLLM's
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: StopTokenIds | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_token_ids: Annotated[TokenIds, Field(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = Field(
        None, description="the tokens whose logprobs are reported, beside the sampled one; with logprobs"
    )
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = Field(
        None, description="without effect; false is refused beside skip_special_tokens false"
    )
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[BadWord], Field(fail_fast=True, max_length=MAX_TEXTS)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = Field(None, description="without effect: the header X-Request-Id gives the answer's id")
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    truncate_prompt_tokens: NumKept | None = Field(
        None, description="the last tokens of a prompt, so many of them; -1: as many as fit before the output"
    )
    truncation_side: TruncationSide | None = Field(None, description="the side that is cut off; left if not given")
    return_token_ids: bool | None = Field(None, description="token ids beside texts")
    return_tokens_as_token_ids: bool | None = Field(None, description="ids as the names of tokens in logprobs")
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Texts, Field(max_length=MAX_CHARACTERS)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = Field(None, description="of guided_json and response_format")
    guided_decoding_backend: str | None = Field(None, description="without effect: one library compiles each form")


class CompletionRequest(SamplingBody):
    unsupported = (*UNSUPPORTED, *OF_VLLM, *OF_CHATS)

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="16 if not given; 0 with echo alone")
    suffix: str | None = Field(None, description="what follows the output; for models that fill in")
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
    unsupported = (*UNSUPPORTED, *OF_VLLM, *OF_COMPLETIONS)

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="what fits if not given")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="the answer goes on with the last message")
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_BUDGET)] | None = Field(
        None, description="tokens of a thought, at most"
    )
    include_reasoning: bool | None = Field(None, description="false leaves thoughts out of messages and deltas")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None


OPENAI_MAX_TOKENS = 16  # OpenAI's default for completions
# Fields of both endpoints that SamplingParams has under the same name.
SAME = tuple(SamplingBody.model_fields.keys() & {field.name for field in fields(SamplingParams)})
# Fields that come from the model's generation_config.json, if a request leaves them out.
FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def completion_params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """The parameters of a request to /v1/completions. defaults: the model's. Raises ApiError."""
    max_tokens = OPENAI_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.suffix and body.echo:
        raise ApiError(400, "suffix: expected none with echo", param="suffix")
    if max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: expected an int >= 1 without echo, got 0", param="max_tokens")
    if body.min_tokens is not None and body.max_tokens is None:
        max_tokens = max(max_tokens, body.min_tokens)
    chosen: dict[str, Any] = {"max_tokens": max(max_tokens, 1), "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        chosen["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return _params(body, defaults, chosen)


def chat_params(body: ChatCompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """The parameters of a request to /v1/chat/completions. defaults: the model's. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: expected none unless logprobs is true", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    return _params(body, defaults, {"max_tokens": max_tokens, "logprobs": logprobs})


def generates(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Whether a chat's prompt ends with the beginning of an answer: by default, unless it goes on with a message."""
    return bool(add_generation_prompt) if continue_final_message else add_generation_prompt is not False


def num_output_tokens(body: CompletionRequest | ChatCompletionRequest) -> int | None:
    """How many tokens of output have to fit behind the prompt. None: any number."""
    max_tokens = body.max_tokens
    if isinstance(body, ChatCompletionRequest) and body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    return max(max_tokens or 0, body.min_tokens or 0) or None


def _params(
    body: CompletionRequest | ChatCompletionRequest, defaults: SamplingParams, chosen: dict[str, Any]
) -> SamplingParams:
    """Parameters from the body, or else from the model's defaults. chosen: the fields that the endpoint decides."""
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs: expected none with stream", param="prompt_logprobs")
    if body.logprob_token_ids and (body.logprobs is None or body.logprobs is False):
        raise ApiError(400, "logprob_token_ids: expected none unless logprobs is given", param="logprob_token_ids")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: expected none without stream", param="stream_options")
    if body.spaces_between_special_tokens is False and body.skip_special_tokens is False:
        message = "spaces_between_special_tokens: expected true with skip_special_tokens false, got false"
        raise ApiError(400, message, param="spaces_between_special_tokens")
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if body.stream and given.get("best_of", 0) > given.get("n", 1) and not body.use_beam_search:
        raise ApiError(
            400, "best_of: expected at most n with stream, as the best are known at the end alone", param="best_of"
        )
    if body.use_beam_search:  # beam search draws nothing: no defaults for drawing
        base: dict[str, Any] = {"temperature": 0, "stop": defaults.stop}
    else:
        base = {name: getattr(defaults, name) for name in FROM_MODEL}
    structured_output = _structured_output(body)
    if structured_output is not None:
        chosen["structured_output"] = structured_output
    try:
        return SamplingParams(**base | given | chosen, output_kind=RequestOutputKind.DELTA)
    except (TypeError, ValueError) as error:
        raise engine_error(error, form_field(body)) from None


def form_field(body: SamplingBody) -> str | None:
    """The field that asks for a form of the output; None if none does. Raises ApiError if several do."""
    asked = [name for name in GUIDED if getattr(body, name) is not None]
    if body.structured_outputs is not None:
        # guidance asks twice for one form, in the words of vLLM now and before.
        same = body.structured_outputs.model_dump(by_alias=True)
        asked = [name for name in asked if getattr(body, name) != same[name.removeprefix("guided_")]]
        asked.append("structured_outputs")
    if body.response_format is not None and body.response_format.type != "text":
        asked.append("response_format")
    if len(asked) > 1:
        raise ApiError(400, f"{asked[0]}: expected one form of the output, got {', '.join(asked)}", param=asked[0])
    return asked[0] if asked else None


def _structured_output(body: SamplingBody) -> StructuredOutput | None:
    """The form that the field of `form_field` asks for."""
    name = form_field(body)
    if body.guided_whitespace_pattern is not None and name not in ("guided_json", "response_format"):
        expected = "none without guided_json or a response_format of JSON"
        message = f"guided_whitespace_pattern: expected {expected}, got {body.guided_whitespace_pattern!r}"
        raise ApiError(400, message, param="guided_whitespace_pattern")
    if name is None:
        return None
    space = BOUNDED_SPACE if body.guided_whitespace_pattern is None else body.guided_whitespace_pattern
    try:
        if name == "guided_json":
            return StructuredOutput(json=body.guided_json, whitespace_pattern=space)
        if body.structured_outputs is not None:
            given = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            if {"json", "structural_tag"} & given.keys() or given.get("json_object"):
                given.setdefault("whitespace_pattern", BOUNDED_SPACE)
            return StructuredOutput(**given)
        if name != "response_format":
            return StructuredOutput(**{name.removeprefix("guided_"): getattr(body, name)})
        form = body.response_format
        assert form is not None
        if form.type == "structural_tag":
            tag = form.model_dump(include={"type", *OF_STRUCTURAL_TAGS}, exclude_none=True)
            return StructuredOutput(structural_tag=tag, whitespace_pattern=space)
        if form.type == "json_object" and form.value is None:
            return StructuredOutput(json_object=True, whitespace_pattern=space)
        schema = form.value if form.json_schema is None else form.json_schema.json_schema
        if schema is None:
            expected = '{"value": ...}' if form.type == "json" else '{"json_schema": {"schema": ...}}'
            raise ValueError(f"expected {expected} beside the type {form.type}, got none")
        return StructuredOutput(json=schema, whitespace_pattern=space)
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"{name}: {error}", param=name) from None
