"""The tools of a request to `/v1/responses`, and the same tools as functions of a chat."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field

from pagedattn_serve.server.openai.fields import MAX_TOOLS, Body, FunctionName
from pagedattn_serve.server.openai.translation import checked_json

JsonObject = Annotated[dict[str, Any], AfterValidator(checked_json)]


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(None, description="without effect: the arguments of every function follow its schema")
    output_schema: JsonObject | None = Field(None, description="without effect")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class NamespaceTool(Body):
    """Functions whose calls come back with the namespace beside the name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = Field(None, description="without effect: the model sees those of the functions")
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


class WebSearchTool(Body):
    """Left out: the model is not told of it. Coding agents name it in every request."""

    model_config = ConfigDict(extra="allow")

    type: Literal["web_search"]


ResponseTool = Annotated[FunctionTool | NamespaceTool | WebSearchTool, Field(discriminator="type")]


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class FunctionId(NamedTuple):
    namespace: str | None
    name: str

    @property
    def in_chat(self) -> str:
        """The name that the model has for the function."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


def functions_of(tools: Iterable[ResponseTool]) -> Iterator[tuple[FunctionId, FunctionTool]]:
    """All functions, those of namespaces too."""
    for tool in tools:
        match tool:
            case FunctionTool():
                yield FunctionId(None, tool.name), tool
            case NamespaceTool():
                for function in tool.tools:
                    yield FunctionId(tool.name, function.name), function


def chat_tools(tools: Iterable[ResponseTool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": id.in_chat, "description": tool.description, "parameters": tool.parameters},
        }
        for id, tool in functions_of(tools)
    ]


def chat_tool_choice(choice: str | NamedFunction | AllowedTools | None) -> Any:
    if isinstance(choice, NamedFunction):
        return _named(choice)
    if isinstance(choice, AllowedTools):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(tool: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}
