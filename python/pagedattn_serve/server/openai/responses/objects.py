"""The bodies of the answers of `/v1/responses`."""

from typing import Any, Literal

from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.server.openai.blocks import Fields
from pagedattn_serve.server.openai.fields import Body
from pagedattn_serve.server.openai.jobs import Job
from pagedattn_serve.server.openai.responses.fields import ResponseRequest
from pagedattn_serve.server.openai.responses.tools import FunctionTool, NamespaceTool, WebSearchTool


class CachedTokens(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseObject(TypedDict):
    """Beside these fields, it repeats those of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    store: bool
    usage: ResponseUsage | None


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def response_head(body: ResponseRequest, job: Job) -> Fields:
    """The response before it has an output: with what the request asks for, or what holds without it."""
    params = job.params
    text = {"type": "text"} if body.text is None or body.text.format is None else _given(body.text.format)
    tool_choice = body.tool_choice or "auto"
    return {
        "id": job.request_id,
        "object": "response",
        "created_at": job.created,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "model": job.model,
        "previous_response_id": body.previous_response_id,
        "background": False,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "store": body.store is not False,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": text, "verbosity": (body.text and body.text.verbosity) or "medium"},
        "tool_choice": tool_choice if isinstance(tool_choice, str) else _given(tool_choice),
        "tools": [_tool(tool) for tool in body.tools or [] if not isinstance(tool, WebSearchTool)],
        "truncation": body.truncation or "disabled",
        "metadata": body.metadata or {},
        "service_tier": "default",
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "usage": None,
    }


def _tool(tool: FunctionTool | NamespaceTool) -> Fields:
    if isinstance(tool, NamespaceTool):
        return {"description": None, **_given(tool), "tools": [_tool(each) for each in tool.tools]}
    return {"description": None, "parameters": None, "strict": None, **_given(tool)}


def _given(fields: Body) -> Fields:
    return fields.model_dump(by_alias=True, exclude_none=True)
