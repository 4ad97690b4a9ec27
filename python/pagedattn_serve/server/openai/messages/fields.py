"""The fields of a request to `/v1/messages`, and the same request in the fields of a chat."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from pagedattn_serve.config import check_text
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError
from pagedattn_serve.server.openai.fields import (
    MAX_BUDGET,
    MAX_TEXTS,
    MAX_TOOLS,
    Body,
    ChatCompletionRequest,
    FunctionName,
    StopString,
)
from pagedattn_serve.server.openai.translation import chat_request, content_of

# The fields of a chat, by the names that they have here.
NAMES = {
    "continue_final_message": "messages",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
# Claude Code puts such a line before its system prompt, with a hash that differs from session to session. No prompt
# behind the line would find a cached prefix.
BILLING = "x-anthropic-billing-header"
# What a message may be `chat_messages` checks.
InputMessage = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": {"type": "string"}},
        }
    ),
]


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(None, description="without effect: every prefix is kept")
    citations: None = None


class Tool(Body):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="without effect: the input of every tool follows its schema")
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = Field(None, description="without effect: every input is streamed")
    input_examples: list[dict[str, Any]] | None = Field(None, description="without effect")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="with the type tool")
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET)] | None = Field(
        None, description="without effect where the model's form of thoughts is not known"
    )
    display: Literal["summarized", "omitted"] | None = Field(None, description="without effect: thoughts come whole")


class JsonFormat(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="given to the chat template; without effect where the template does not name it"
    )
    format: JsonFormat | None = None


class CountTokensRequest(Body):
    """A prompt, and what it depends on."""

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="given to the chat template, as enable_thinking")
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="the older name of output_config.format")
    # without effect
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = Field(None, description="without effect: no message is left out")
    speed: Literal["standard"] | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    # of vLLM's
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="count before thinking")


class MessageRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_TEXTS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    # without effect
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    thread: dict[str, Any] | None = Field(None, description="refused: no conversation is kept")
    # of vLLM's
    seed: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None


# Fields that a chat has under the same name.
SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "cache_salt")


def as_chat(body: CountTokensRequest, takes_budget: bool) -> tuple[ChatCompletionRequest, list[str]]:
    """The request for the same output as a chat, and the name of each of its messages. Raises ApiError, ValueError or
    TypeError, which name the field.

    takes_budget: whether the tokens of a thought can be bounded. Clients send a bound to every model.
    """
    named = chat_messages(body)
    messages = [message for _, message in named]
    continues = messages[-1]["role"] == "assistant"  # the answer goes on with it
    form = body.output_config.format if body.output_config is not None else None
    form = form or body.output_format
    fields = {name: getattr(body, name, None) for name in SAME} | {
        "messages": messages,
        "continue_final_message": continues or None,
        "tools": [_tool(tool) for tool in body.tools or []] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": None if body.tool_choice is None else not body.tool_choice.disable_parallel_tool_use,
        "stop": getattr(body, "stop_sequences", None) or None,
        "response_format": form and {"type": "json_schema", "json_schema": {"schema": form.json_schema}},
        "reasoning_effort": body.output_config and body.output_config.effort,
        "chat_template_kwargs": _variables(body),
        "thinking_token_budget": body.thinking.budget_tokens if body.thinking and takes_budget else None,
    }
    return chat_request(fields), [name for name, _ in named]


def _tool(tool: Tool) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": fields}


def _tool_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        raise ArgumentError("tool_choice.name", "a name with the type tool, and with no other")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _variables(body: CountTokensRequest) -> dict[str, Any]:
    """Those of the chat template. Templates have two names for whether the model thinks."""
    thinks = body.thinking and body.thinking.type != "disabled"
    of_thinking = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    return of_thinking | (body.chat_template_kwargs or {})


# ---- messages --------------------------------------------------------------------------------------------------------


def chat_messages(body: CountTokensRequest) -> list[tuple[str, dict[str, Any]]]:
    """Messages for the chat template, with their names. Raises ValueError or TypeError, which name the block.

    All that is said as the system is one message before the others, as many templates refuse a later one.
    """
    named: list[tuple[str, dict[str, Any]]] = []
    given = body.system or []
    blocks = given if isinstance(given, str) else [{"type": "text", "text": block.text} for block in given]
    system = _texts_of_system("system", blocks)
    for i, message in enumerate(body.messages):
        name = f"messages[{i}]"
        if unknown := message.keys() - {"role", "content"}:
            raise ArgumentError(f"{name}.{min(unknown)}", "none, as it is not supported")
        match message.get("role"):
            case "user":
                named += [(name, each) for each in _of_user(f"{name}.content", message.get("content"))]
            case "assistant":
                named.append((name, _of_assistant(f"{name}.content", message.get("content"))))
            case "system":
                system += _texts_of_system(f"{name}.content", message.get("content"))
            case role:
                raise ArgumentError(f"{name}.role", '"user", "assistant" or "system"', repr(role))
    if system:
        named.insert(0, ("system", {"role": "system", "content": content_of(system)}))
    return named


def _texts_of_system(name: str, content: Any) -> list[dict[str, str]]:
    """Those that say anything, without the line of BILLING. What UTF-8 cannot write is refused here, as the message
    that all of them become has one name."""
    parts = _text_parts(name, content)
    for part in parts:
        check_text(name, part["text"])
        if part["text"].startswith(BILLING):
            part["text"] = part["text"].partition("\n")[2]
    return [part for part in parts if part["text"]]


def _of_user(name: str, content: Any) -> list[dict[str, Any]]:
    """The results of tools, which chats have as messages of their own, and what the user says."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, str]] = []
    for at, kind, block in _blocks(name, content):
        if kind == "tool_result":
            call_id, result = _text(at, block, "tool_use_id"), _result(f"{at}.content", block.get("content"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        elif kind == "text":
            parts.append({"type": "text", "text": _text(at, block, "text")})
        else:
            raise ArgumentError(f"{at}.type", "text or tool_result", repr(kind))
    return messages if messages and not parts else [*messages, {"role": "user", "content": content_of(parts)}]


def _result(name: str, content: Any) -> Any:
    return "" if content is None else content_of(_text_parts(name, content))


def _text_parts(name: str, content: Any) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for at, kind, block in _blocks(name, content):
        if kind != "text":
            raise ArgumentError(f"{at}.type", '"text", the only kind of content here', repr(kind))
        parts.append({"type": "text", "text": _text(at, block, "text")})
    return parts


def _of_assistant(name: str, content: Any) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    thoughts, parts, calls = [], [], []
    for at, kind, block in _blocks(name, content):
        match kind:
            case "thinking":
                thoughts.append(_text(at, block, "thinking"))
            case "redacted_thinking":  # of another server, which alone can read it
                pass
            case "text":
                parts.append({"type": "text", "text": _text(at, block, "text")})
            case "tool_use":
                if not isinstance(block.get("input"), dict):
                    raise ArgumentTypeError(f"{at}.input", "an object", type(block.get("input")).__name__)
                function = {"name": _text(at, block, "name"), "arguments": block["input"]}
                calls.append({"id": _text(at, block, "id"), "type": "function", "function": function})
            case _:
                raise ArgumentError(f"{at}.type", "text, tool_use or thinking", repr(kind))
    message: dict[str, Any] = {"role": "assistant", "content": content_of(parts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(name: str, content: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    """Each block with its name and its type."""
    if not isinstance(content, list):
        raise ArgumentTypeError(name, "a string or a list of blocks", type(content).__name__)
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise ArgumentTypeError(f"{name}[{i}]", "an object with a type", type(block).__name__)
    return [(f"{name}[{i}]", block.get("type"), block) for i, block in enumerate(content)]


def _text(name: str, block: dict[str, Any], field: str) -> str:
    if not isinstance(block.get(field), str):
        raise ArgumentTypeError(f"{name}.{field}", "a string", type(block.get(field)).__name__)
    text: str = block[field]
    return text
