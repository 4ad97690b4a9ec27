"""The messages of a conversation: checked, in each form that chat templates are written for, and with marks that show
what a template leaves out."""

import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from pagedattn_serve.config import check_bool, parse_json
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError, shown

# A dict with a role, a content (a text or a list of {"type": "text", "text": ...}), and whatever else the template
# knows, such as the tool_calls of an assistant.
Message = Any
Fields = dict[str, Any]

# Fields of a message that say something beside its content. What names and numbers things ("name", "tool_call_id"), and
# what an assistant thought, a template may leave out.
_SAYING = ("refusal", "function_call", "audio")
_SYSTEM = ("system", "developer")


def readings(messages: Any) -> Iterator[list[Fields]]:
    """The messages as they are, then in the other forms that templates are written for.

    In each form, fields that are None are left out, a refusal is the content of a message that has no other, and a list
    without calls or parts is as if left out. The forms differ in these:

    - arguments of calls are objects, or else JSON texts;
    - the role developer is itself, or else system;
    - contents are as they are, or texts (parts are lines of it), or parts.

    Raises ValueError or TypeError, which name the message, for what is no message.
    """
    if not isinstance(messages, list | tuple):
        raise ArgumentTypeError("messages", "a list of messages", type(messages).__name__)
    if not messages:
        raise ArgumentError("messages", "one at least", "none")
    names = [f"messages[{i}]" for i in range(len(messages))]
    before: list[list[Fields]] = []
    for as_object, developer, form in itertools.product(
        (True, False), ("developer", "system"), (_as_it_is, _as_text, _as_parts)
    ):
        read = [_read(*each, as_object, developer, form) for each in zip(names, messages, strict=True)]
        if read not in before:
            before.append(read)
            yield read


class LeftOut(NamedTuple):
    """Something that a message says. place: of the message. may_be: whether a template may leave it out."""

    place: int
    name: str
    may_be: bool = False


def left_out(render: Callable[[list[Fields]], str], messages: list[Fields]) -> list[LeftOut]:
    """What the messages say, but not the text that `render` makes of them. Parts or arguments that stand in the text as
    Python writes them count as left out, too.

    A template may leave out text beside calls, as many do. It may leave out what a system message says before the last
    message of a user, if it writes it where the conversation ends with that message: so Mistral's templates do.
    """
    missing = _missing(render, messages) or []
    last_of_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    of_system = [thing for thing in missing if thing.place < last_of_user and messages[thing.place]["role"] in _SYSTEM]
    if not of_system or last_of_user == len(messages) - 1:
        return missing
    before = _missing(render, messages[: last_of_user + 1])
    if before is None:
        return missing
    late = [thing for thing in of_system if thing not in before]
    return [thing._replace(may_be=True) if thing in late else thing for thing in missing]


def _missing(render: Callable[[list[Fields]], str], messages: list[Fields]) -> list[LeftOut] | None:
    """What the text does not have; None if the template takes no marks.

    Each thing gets a mark, at its end and then at its beginning, as a template may cut a content short.
    """
    things: list[LeftOut] = []
    for at_end in (True, False):
        marks = _Marks(at_end)
        marked = [marks.put(i, message) for i, message in enumerate(messages)]
        try:
            text = render(marked).lower()
        except Exception:  # the template takes the messages without marks: so it looks at what the marks have changed
            return None
        missing = marks.missing(text)
        things = missing if at_end else [thing for thing in things if thing in missing]
        if not things:
            break
    return things


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read(name: str, message: Message, as_object: bool, developer: str, form: Callable[[Any], Any]) -> Fields:
    if not isinstance(message, Mapping):
        raise ArgumentTypeError(name, "a dict with role and content", type(message).__name__)
    fields = _given(message)
    role = fields.get("role")
    if not isinstance(role, str):
        raise ArgumentTypeError(f"{name}.role", "a string", type(role).__name__)
    if not role:
        raise ArgumentError(f"{name}.role", "a role", "''")
    if role == "developer":
        fields["role"] = developer
    if "tool_calls" in fields:
        fields["tool_calls"] = _read_calls(f"{name}.tool_calls", fields["tool_calls"], as_object)
        if not fields["tool_calls"]:
            del fields["tool_calls"]
    if isinstance(fields.get("function_call"), Mapping):
        fields["function_call"] = _read_function(f"{name}.function_call", fields["function_call"], as_object)
    if role == "assistant" and isinstance(fields.get("content"), list | tuple):
        _take_thoughts(f"{name}.content", fields)
    if "reasoning" in fields:  # the name of today; templates know the other
        fields.setdefault("reasoning_content", fields["reasoning"])
    if isinstance(fields.get("refusal"), str) and not fields.get("content"):
        fields["content"] = fields.pop("refusal")
    if "content" in fields:
        fields["content"] = form(_read_content(f"{name}.content", fields["content"]))
    elif not _says_something(fields):
        raise ArgumentError(f"{name}.content", "a text", "none")
    return fields


def _given(fields: Mapping[str, Any]) -> Fields:
    return {key: value for key, value in fields.items() if value is not None}


def _read_content(name: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ArgumentTypeError(name, "a string or a list of parts", type(content).__name__)
    return [{"type": "text", "text": _part_text(f"{name}[{i}]", part)} for i, part in enumerate(content)] or ""


def _take_thoughts(name: str, fields: Fields) -> None:
    """Make of the parts that are thoughts a field of the message. As Mistral has it, they may have parts within."""
    parts, thoughts = [], []
    for i, part in enumerate(fields["content"]):
        if isinstance(part, Mapping) and part.get("type") == "thinking":
            thought = part.get("thinking")
            if not isinstance(thought, str):
                thought = _as_text(_read_content(f"{name}[{i}].thinking", thought))
            thoughts.append(thought)
        else:
            parts.append(part)
    if thoughts:
        fields.setdefault("reasoning_content", "\n".join(thoughts))
        fields["content"] = parts


def _part_text(name: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise ArgumentTypeError(name, "a dict with type and text", type(part).__name__)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise ArgumentError(f"{name}.type", '"text", the only kind of content here', shown(kind))
    if not isinstance(part.get(kind), str):
        raise ArgumentTypeError(f"{name}.{kind}", "a string", type(part.get(kind)).__name__)
    return part[kind]


def _as_it_is(content: Any) -> Any:
    return content


def _as_text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _as_parts(content: Any) -> list[Fields]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _read_calls(name: str, calls: Any, as_object: bool) -> list[Fields]:
    if not isinstance(calls, list | tuple):
        raise ArgumentTypeError(name, "a list of calls", type(calls).__name__)
    read = []
    for i, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise ArgumentTypeError(f"{name}[{i}]", "a dict with function", type(call).__name__)
        if "name" in call and "function" not in call:  # as some templates have it
            read.append(_read_function(f"{name}[{i}]", call, as_object))
        else:
            function = _read_function(f"{name}[{i}].function", call.get("function"), as_object)
            read.append({**_given(call), "function": function})
    return read


def _read_function(name: str, function: Any, as_object: bool) -> Fields:
    if not isinstance(function, Mapping):
        raise ArgumentTypeError(name, "a dict with name and arguments", type(function).__name__)
    fields = _given(function)
    if not isinstance(fields.get("name"), str):
        raise ArgumentTypeError(f"{name}.name", "a string", type(fields.get("name")).__name__)
    given = fields.get("arguments", "")
    arguments = _read_arguments(f"{name}.arguments", given)
    if as_object:
        return {**fields, "arguments": arguments}
    is_text = isinstance(given, str) and arguments
    return {**fields, "arguments": given if is_text else json.dumps(arguments, ensure_ascii=False)}


def _read_arguments(name: str, arguments: Any) -> Fields:
    """The object that a call's arguments are, which come as JSON; "" has no members, as with vLLM."""
    read = arguments
    if isinstance(arguments, str):
        try:
            read = parse_json(arguments, is_strict=True) if arguments.strip() else {}
        except ValueError as error:
            raise ArgumentError(name, "an object as JSON", f"what is no JSON ({error})") from None
        if not isinstance(read, dict):
            raise ArgumentError(name, "an object as JSON", f"JSON of {type(read).__name__}")
    if not isinstance(read, Mapping):
        raise ArgumentTypeError(name, "an object, or its JSON", type(read).__name__)
    return dict(read)


def _says_something(fields: Fields) -> bool:
    """Of a message without content."""
    return _Marks(at_end=True).put(0, fields) != fields


# ---- marks -----------------------------------------------------------------------------------------------------------


class _Marks:
    """Words that no message has, one for each thing that messages say."""

    def __init__(self, at_end: bool) -> None:
        self._at_end = at_end
        self._key, self._as_key = secrets.token_hex(8), secrets.token_hex(8)  # the second: behind a mark that is a key
        self._things: dict[str, LeftOut] = {}  # by the mark
        self._spoilt: dict[str, str] = {}  # by the mark: what the text has if the thing is not written as such

    def missing(self, text: str) -> list[LeftOut]:
        """All things that the text does not have. text: in small letters."""
        found = set()
        for match in re.finditer(rf"({self._key}x\d+x)(?:{self._as_key})?", text):
            found |= {match[1], match[0], text[max(match.start() - 1, 0) : match.end()]}
        missing = []
        for mark, thing in self._things.items():
            if self._spoilt.get(mark) in found:
                missing.append(thing._replace(may_be=False))
            elif mark not in found:
                missing.append(thing)
        return missing

    def put(self, place: int, message: Fields) -> Fields:
        """The message with its marks."""
        fields, name = dict(message), f"messages[{place}]"
        for key in _SAYING:
            if key in fields:
                fields[key] = self._in_all(fields[key], self._new(place, f"{name}.{key}"))
        if "tool_calls" in fields:
            calls = enumerate(fields["tool_calls"])
            fields["tool_calls"] = [self._in_call(place, f"{name}.tool_calls[{i}]", call) for i, call in calls]
        has_more, has_calls = fields != message, "tool_calls" in fields
        content = fields.get("content")
        if isinstance(content, str) and (content.strip() or not has_more):
            fields["content"] = self._in_text(content, self._new(place, f"{name}.content", has_calls))
        elif isinstance(content, list):
            has_more = has_more or any(part["text"].strip() for part in content)
            fields["content"] = [
                part
                if has_more and not part["text"].strip()
                else self._in_part(part, self._new(place, f"{name}.content[{i}]", has_calls))
                for i, part in enumerate(content)
            ]
        elif content is None and not has_more:  # such as {"role": "documents", "documents": [...]}
            mark = self._new(place, name)
            return {k: v if k == "role" else self._in_all(v, mark) for k, v in fields.items()}
        return fields

    def _new(self, place: int, name: str, may_be_left_out: bool = False) -> str:
        mark = f"{self._key}x{len(self._things)}x"
        self._things[mark] = LeftOut(place, name, may_be_left_out)
        return mark

    def _in_text(self, text: str, mark: str) -> str:
        return text + mark if self._at_end else mark + text

    def _in_part(self, part: Fields, mark: str) -> Fields:
        self._spoilt[mark] = as_key = mark + self._as_key  # the list as a whole, instead of the text of its parts
        return {**part, "text": self._in_text(part["text"], mark), as_key: 0}

    def _in_call(self, place: int, name: str, call: Fields) -> Fields:
        is_wrapped = "function" in call
        function = dict(call["function"] if is_wrapped else call)
        function["name"] = self._in_text(function["name"], self._new(place, name))
        arguments = function["arguments"]
        if arguments not in ({}, "{}"):
            mark = self._new(place, f"{name}.function.arguments" if is_wrapped else f"{name}.arguments")
            if isinstance(arguments, str):
                function["arguments"] = self._in_text(arguments, mark)
            else:
                as_key = mark + self._as_key
                self._spoilt[mark] = f"'{as_key}"  # Python's form of the object, which is no JSON
                function["arguments"] = {**arguments, as_key: mark}
        return {**call, "function": function} if is_wrapped else function

    def _in_all(self, value: Any, mark: str) -> Any:
        """The value with the mark in each of its texts."""
        if isinstance(value, str):
            return self._in_text(value, mark)
        if isinstance(value, Mapping):
            return {key: self._in_all(each, mark) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._in_all(each, mark) for each in value]
        return value


def render_chat(
    tokenizer: Any | None,
    messages: list[Message],
    chat_template: str | PathLike[str] | None = None,
    add_generation_prompt: bool = True,
    reasoning_effort: str | None = None,
    variables: Mapping[str, Any] | None = None,
    tools: list[Fields] | None = None,
    continue_final_message: bool = False,
) -> str:
    """The prompt that the messages make. It has the special tokens already, so it is tokenized without adding more.

    Args:
        tokenizer: from transformers; its template is the default, and its special tokens are what templates name.
        messages: in order. The template says which roles there are, and which fields count. The template gets the
            messages in the first form (see `readings`) that it takes without leaving out what they say; if there is
            none, in the first of which it leaves out what it may (see `left_out`).
        chat_template: see `load_chat_template`.
        add_generation_prompt: whether the text goes on to where the assistant's answer begins.
        reasoning_effort: given to the template, where it changes something only if the template knows it.
        variables: others for the template, by name.
        tools: functions that the assistant may call, as transformers gives them to templates: {"type": "function",
            "function": {"name": ..., "description": ..., "parameters": ...}}. None are no tools.
        continue_final_message: whether the text ends with the content of the last message, which the assistant goes on
            with. Not with add_generation_prompt.

    Raises ValueError or TypeError, which name the message, if a message does not have this form. Raises ValueError if
    there is no template, if the template refuses the messages (in the template's own words), and if it leaves out what
    a message says, or a tool.
    """
    check_bool("add_generation_prompt", add_generation_prompt)
    check_bool("continue_final_message", continue_final_message)
    if add_generation_prompt and continue_final_message:
        raise ArgumentError("continue_final_message", "False beside add_generation_prompt")
    if tokenizer is None:
        raise ArgumentError("messages", "none, as the model's directory has no tokenizer")
    template = None if chat_template is None else load_chat_template(chat_template)
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise ArgumentError("chat_template", "one (its text, or a file with it), as the model's tokenizer has none")

    def render(messages: list[Fields], tools: list[Fields] | None = tools) -> str:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **others,
            **({"tools": tools} if tools else {}),
        )

    others = _variables(variables)
    if tools and "tools" in others:
        raise ArgumentError("chat_template_kwargs", "no tools, which are an argument of their own")
    if reasoning_effort is not None:
        others["reasoning_effort"] = reasoning_effort
    refusals: list[Exception] = []
    needed: list[LeftOut] = []  # of what is left out, the first that may not be, in each form that has one
    taken: tuple[str, list[Fields]] | None = None
    for read in readings(messages):
        try:
            text = render(read)
        except ImportError:  # jinja2 is not installed: that is no fault of the messages
            raise
        except Exception as error:  # a template can raise anything: it is a program
            refusals.append(error)
            continue
        missing = left_out(render, read)
        if thing := next((thing for thing in missing if not thing.may_be), None):
            needed.append(thing)
        elif taken is None or not missing:
            taken = text, read
        if not missing:
            break
    if taken is not None:
        text, read = taken
        if tools and _leaves_out_tools(partial(render, read), tools):
            raise ArgumentError("tools", "none, as the model's chat template does not write them into the prompt")
        return text
    if needed:
        place, name, _ = needed[0]
        role = messages[place]["role"]
        raise ArgumentError(name, f"what the chat template writes for role {role!r}", "what it leaves out")
    kind = "" if type(refusals[0]).__name__ == "TemplateError" else f"{type(refusals[0]).__name__}: "
    raise ValueError(f"chat_template: cannot render the messages: {kind}{refusals[0]}") from None


def _leaves_out_tools(render: Callable[[list[Fields]], str], tools: list[Fields]) -> bool:
    """Whether the text has not the name of each tool."""
    mark = f"_{secrets.token_hex(8)}_"
    names = [f"{tool['function']['name']}{mark}{i}" for i, tool in enumerate(tools)]
    marked = [{**tool, "function": {**tool["function"], "name": name}} for tool, name in zip(tools, names, strict=True)]
    try:
        text = render(marked)
    except Exception:  # the template takes the tools without marks: so it looks at their names
        return False
    return not all(name in text for name in names)


def content_text(message: Message) -> str:
    """The text that a message's content is, in whatever form it has one."""
    return _as_text(message.get("content") or "")


def template_text(tokenizer: Any, chat_template: str | None) -> str:
    """The text of the template that chats are rendered by, or of all templates if the tokenizer has several."""
    template = chat_template or getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def _variables(variables: object) -> dict[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise ArgumentTypeError("chat_template_kwargs", "a dict with names", type(variables).__name__)
    own = {"chat_template", "messages", "conversation", "add_generation_prompt", "continue_final_message", "tokenize"}
    if taken := own.intersection(variables):
        raise ArgumentError("chat_template_kwargs", "variables of the template", ", ".join(sorted(taken)))
    return dict(variables)


def check_template(text: str) -> None:
    """Raise ValueError unless the text is a template, by the syntax that transformers reads templates with."""
    from jinja2 import Environment, TemplateSyntaxError  # here, as only chats need it
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser

    class Generation(Extension):
        """{% generation %} marks what an assistant says."""

        tags = {"generation"}  # noqa: RUF012, as jinja2 has it

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).from_string(text)
    except TemplateSyntaxError as error:
        raise ArgumentError("chat_template", "a template in Jinja", f"line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise ArgumentError("chat_template", "a template in Jinja", "one that is nested too deeply") from None


def load_chat_template(chat_template: str | PathLike[str]) -> str:
    """The text of a template. The argument is the text itself or the path of a file; a string without "{" is a path.

    Raises ValueError if there is no such file, or if its content is no text; TypeError for other types of arguments.
    """
    if isinstance(chat_template, str) and "{" in chat_template:
        return chat_template
    if not isinstance(chat_template, str | PathLike):
        raise ArgumentTypeError("chat_template", "a text or a path", type(chat_template).__name__)
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError("chat_template", "Jinja, or a file of it", f"{chat_template}: {reason}") from None
