"""The functions of a request: for the chat template, and as the calls that the output may have."""

from typing import Any

from pagedattn_serve.errors import BadArgument
from pagedattn_serve.output_parsing.tool_format import ToolUse, tool_use
from pagedattn_serve.server.http.errors import ApiError
from pagedattn_serve.server.openai.fields import Body, ChatCompletionRequest, Tool


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools as transformers gives them to templates."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools or []
    ] or None


def requested_calls(body: ChatCompletionRequest) -> ToolUse | None:
    """The calls that the output may have; None if the request has no tools. Raises ApiError."""
    tools = [{"type": tool.type, "function": dict(tool.function)} for tool in body.tools or []]
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, Body) else body.tool_choice
    try:
        return tool_use(tools, choice, body.parallel_tool_calls is not False)
    except BadArgument as error:
        raise ApiError(400, str(error), param=error.argument.partition("[")[0]) from None
