"""The fields of a request to `/v1/responses`, and the same request in the fields of a chat."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from pagedattn_serve.config import check_text
from pagedattn_serve.sampling_params import MAX_LOGPROBS
from pagedattn_serve.server.http.errors import ApiError
from pagedattn_serve.server.openai.fields import (
    MAX_BUDGET,
    MAX_METADATA,
    MAX_TOOLS,
    Body,
    ChatCompletionRequest,
    LogitBias,
    MetadataKey,
    MetadataValue,
    MinP,
    PromptCacheOptions,
    ReasoningEffort,
    RepetitionPenalty,
    ServiceTier,
    StopString,
    StopStrings,
    StopTokenIds,
    StreamOptions,
)
from pagedattn_serve.server.openai.responses.tools import (
    AllowedTools,
    JsonObject,
    NamedFunction,
    ResponseTool,
    chat_tool_choice,
    chat_tools,
)
from pagedattn_serve.server.openai.translation import chat_request

# What an item may be `listed_items` and `chat_messages` check.
InputItem = Annotated[
    JsonObject,
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "type": {"const": "message"},
                "role": {"enum": ["user", "assistant", "system", "developer"]},
                "content": {"type": "string"},
            },
        }
    ),
]
# The fields of a chat, by the names that they have here.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: JsonObject | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="without effect")


class ReasoningOptions(Body):
    effort: ReasoningEffort | None = Field(
        None, description="given to the chat template; without effect where the template does not name it"
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="without effect: thoughts come whole"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="without effect")


class ResponseRequest(Body):
    """What it says of sampling is as in chats."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]
    instructions: Annotated[str, AfterValidator(partial(check_text, "instructions"))] | None = Field(
        None, description="a system message before all others; not kept"
    )
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="true if not given")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="what fits if not given")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="whether the oldest turns are dropped from what is too long"
    )
    background: bool | None = Field(None, description="true is refused")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="the logprobs of texts; encrypted_content has no effect: thoughts come in the open"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="more than 0 include the logprobs of texts"
    )
    # of OpenAI's, without effect
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(None, description="without effect: of built-in tools")
    user: str | None = None
    client_metadata: dict[str, Any] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    service_tier: ServiceTier | None = Field(None, description="without effect: the answer's is default")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    # of vLLM's
    seed: int | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_BUDGET)] | None = None


# Fields that a chat has under the same name.
SAME = (
    *("model", "parallel_tool_calls", "temperature", "top_p", "presence_penalty", "frequency_penalty", "service_tier"),
    *("top_logprobs", "seed", "top_k", "min_p", "repetition_penalty", "logit_bias", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos"),
    *("priority", "cache_salt", "chat_template_kwargs", "thinking_token_budget"),
)


def as_chat(body: ResponseRequest, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
    """The request for the same output as a chat. messages: those of its items. Raises ApiError."""
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    form = body.text.format if body.text is not None else None
    fields = {name: getattr(body, name) for name in SAME} | {
        "messages": [*system, *messages],
        "max_tokens": body.max_output_tokens,
        "logprobs": bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ()),
        "tools": chat_tools(body.tools or []) or None,
        "tool_choice": chat_tool_choice(body.tool_choice),
        "response_format": None if form is None else _response_format(form),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    return chat_request(fields)


def _response_format(form: TextFormat) -> dict[str, Any]:
    if (form.type == "json_schema") != (form.json_schema is not None):
        got = "none" if form.json_schema is None else f"one with {form.type}"
        message = f"text.format: expected a schema with the type json_schema, and with no other, got {got}"
        raise ApiError(400, message, param="text.format")
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.json_schema}}
