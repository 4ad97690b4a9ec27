"""How a model writes calls of functions: what each form has to say of itself."""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pagedattn_serve.errors import ArgumentError, ArgumentTypeError, shown
from pagedattn_serve.output_parsing.events import Content
from pagedattn_serve.output_parsing.source import Reader, Source

Format = dict[str, Any]  # of a structural tag; pagedattn_serve.sampling.structural_tag
NAME_PATTERN = r"[a-zA-Z0-9_.-]{1,128}"  # of functions; in every form, a name ends where no such character comes
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Function:
    """What the model may call.

    parameters: the JSON schema of the arguments, which are an object. is_strict: whether the schema is refused if the
    arguments cannot be held to all of it. Else keywords that are not known here count for nothing.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    is_strict: bool = False


def functions_of(tools: Any) -> tuple[Function, ...]:
    """The functions of tools in OpenAI's form: {"type": "function", "function": {"name": ..., "parameters": ...}}.
    Raises ValueError or TypeError, which name the tool, for what has another form and for a name that comes twice."""
    if not isinstance(tools, list | tuple):
        raise ArgumentTypeError("tools", "a list of tools", type(tools).__name__)
    functions: dict[str, Function] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise ArgumentTypeError(f"tools[{i}]", 'a dict {"type": "function", "function": {...}}', shown(tool)[:100])
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
            raise ArgumentError(
                f"tools[{i}].function.name", "letters, digits, _, . and -, 128 at most", shown(name)[:100]
            )
        if name in functions:
            raise ArgumentError(f"tools[{i}].function.name", "a name of its own", f"{name!r} again")
        if parameters is not None and not isinstance(parameters, Mapping):
            kind = type(parameters).__name__
            raise ArgumentTypeError(f"tools[{i}].function.parameters", "a JSON schema as a dict", kind)
        schema = NO_PARAMETERS if parameters is None else parameters
        functions[name] = Function(name, schema, bool(function.get("strict")))
    return tuple(functions.values())


@dataclass(frozen=True)
class ToolUse:
    """The calls that an output may have.

    functions: those that may be called; none forbids all calls. is_required: whether the output is calls. is_parallel:
    whether it may have several.
    """

    functions: tuple[Function, ...]
    is_required: bool = False
    is_parallel: bool = True

    def parameters(self, name: str) -> dict[str, Any]:
        """The schema of a function's arguments; that of any object for others."""
        return next((dict(each.parameters) for each in self.functions if each.name == name), {"type": "object"})


def tool_use(tools: Any, choice: Any = None, is_parallel: bool = True) -> ToolUse | None:
    """The calls that an output may have, of tools and a tool_choice in OpenAI's form; None without tools. Raises
    ValueError or TypeError, which name tools or tool_choice."""
    if not tools:
        if choice in (None, "auto", "none"):
            return None
        raise ArgumentError("tool_choice", "auto or none without tools")
    functions = functions_of(tools)
    match choice:
        case None | "auto" | "required":
            return ToolUse(functions, choice == "required", is_parallel)
        case "none":
            return ToolUse(())
        case {"type": "function", "function": {"name": str()}}:
            return ToolUse(_named([choice], functions), is_required=True, is_parallel=False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*named]}}:
            return ToolUse(_named(named, functions), mode == "required", is_parallel)
    expected = 'auto, none, required, {"type": "function", "function": {"name": ...}} or allowed_tools'
    raise ArgumentError("tool_choice", expected, shown(choice)[:100])


def _named(tools: list[Any], functions: tuple[Function, ...]) -> tuple[Function, ...]:
    """Those of the functions that the tools name."""
    names = set()
    known = {function.name for function in functions}
    for tool in tools:
        match tool:
            case {"function": {"name": str() as name}} if name in known:
                names.add(name)
            case _:
                raise ArgumentError("tool_choice", "names of tools", shown(tool)[:100])
    return tuple(function for function in functions if function.name in names)


class ToolFormat(ABC):
    """One form of calls. Stateless.

    marks: tokens that the parser has to see, even if they are special tokens. separator: what stands between two calls.
    block: what stands before the first call and after the last.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()
    separator: ClassVar[str] = "\n"
    block: ClassVar[tuple[str, str] | None] = None

    @abstractmethod
    def is_of(self, template: str) -> bool:
        """Whether a chat template is written for this form."""

    @abstractmethod
    def call(self, function: Function) -> Format:
        """A call of a function: a format of type `tag`."""

    def calls(self, use: ToolUse) -> Format:
        """One call at least, and nothing else."""
        calls = {
            "type": "tags_with_separator",
            "tags": [self.call(function) for function in use.functions],
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not use.is_parallel,
        }
        return calls if self.block is None else tag(self.block[0], calls, self.block[1])

    @abstractmethod
    def text_or_calls(self, use: ToolUse) -> Format:
        """Text, or calls, or text before calls."""

    def text(self) -> Format:
        """Text without a call."""
        return {"type": "any_text"}

    @abstractmethod
    def read(self, source: Source, use: ToolUse) -> Reader[None]:
        """The events of a text."""

    def new_call_id(self) -> str:
        return new_call_id()


class TaggedFormat(ToolFormat):
    """A form whose calls may come anywhere in a text, as they begin with what no other text has.

    opening: what the first call begins with, and each other unless there is a block.
    """

    opening: ClassVar[str]

    def text_or_calls(self, use: ToolUse) -> Format:
        tags = [self.calls(use)] if self.block else [self.call(function) for function in use.functions]
        return {
            "type": "triggered_tags",
            "triggers": [self.opening],
            "tags": tags,
            "stop_after_first": self.block is not None or not use.is_parallel,
        }

    def text(self) -> Format:
        return {"type": "any_text", "excludes": [self.opening]}

    def calls_after_opening(self, use: ToolUse) -> Format:
        """As `calls`, where the opening of the first call has come already."""
        calls = self.calls(use)
        if self.block is not None:
            return self._without_opening(calls)
        tags = [self._without_opening(each) for each in calls["tags"]]
        return {**calls, "tags": tags, "separator": self.separator + self.opening}

    def _without_opening(self, tag: Format) -> Format:
        return {**tag, "begin": tag["begin"].removeprefix(self.opening)}

    def next_call(self, source: Source, index: int) -> Reader[bool]:
        """Read the text before a call, and the opening of the call. Returns False if there is no opening.

        index: of the call. Before the first, the beginning of an opening at the end of the output may be the model's
        text. Right after a call, such a beginning is a further call that is cut, and no text.
        """
        if index:
            space = yield from source.skip_space()
            if (yield from source.ends_within(self.opening)):
                return False
            source.put_back(space)
        return (yield from source.read_until((self.opening,), Content)) is not None


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def arguments(function: Function, style: str = "json") -> Format:
    """The arguments of a call, in a style of `json_schema`."""
    schema = {"type": "object", **function.parameters}
    return {"type": "json_schema", "json_schema": schema, "style": style, "lenient": not function.is_strict}


def new_call_id() -> str:
    """An id that nobody can guess."""
    return f"call_{secrets.token_hex(12)}"
