"""A conversation as the text of a prompt, by the chat template of the tokenizer, in transformers' sandbox."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from pagedattn_serve.config import check_bool
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError

# A dict with a role, a content (a text or a list of {"type": "text", "text": ...}), and whatever else the template
# knows, such as the tool_calls of an assistant.
Message = Any


def render_chat(
    tokenizer: Any | None,
    messages: list[Message],
    chat_template: str | PathLike[str] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt that the messages make. It has the special tokens already, so it is tokenized without adding more.

    Args:
        tokenizer: from transformers; its template is the default, and its special tokens are what templates name.
        messages: in order. The parts of a content become one text, a line each; fields that are None are left out.
            The template says which roles there are, and which fields count.
        chat_template: see `load_chat_template`.
        add_generation_prompt: whether the text goes on to where the assistant's answer begins.

    Raises ValueError or TypeError, which name the message, if a message does not have this form. Raises ValueError if
    there is no template, and if the template refuses the messages, in the template's own words.
    """
    check_bool("add_generation_prompt", add_generation_prompt)
    if tokenizer is None:
        raise ArgumentError("messages", "none, as the model's directory has no tokenizer")
    template = None if chat_template is None else load_chat_template(chat_template)
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise ArgumentError("chat_template", "one (its text, or a file with it), as the model's tokenizer has none")
    if not isinstance(messages, list | tuple):
        raise ArgumentTypeError("messages", "a list of messages", type(messages).__name__)
    if not messages:
        raise ArgumentError("messages", "one at least", "none")
    plain = [_plain_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    try:
        return tokenizer.apply_chat_template(
            plain, chat_template=template, add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except ImportError:  # jinja2 is not installed: that is no fault of the messages
        raise
    except Exception as error:  # a template can raise anything: it is a program
        kind = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
        raise ValueError(f"chat_template: cannot render the messages: {kind}{error}") from None


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


def _plain_message(name: str, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ArgumentTypeError(name, "a dict with role and content", type(message).__name__)
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    if not isinstance(role, str):
        raise ArgumentTypeError(f"{name}.role", "a string", type(role).__name__)
    if not role:
        raise ArgumentError(f"{name}.role", "a role", "''")
    if "content" in fields:
        fields["content"] = _content_text(f"{name}.content", fields["content"])
    elif len(fields) == 1:
        raise ArgumentError(f"{name}.content", "a text", "none")
    return fields


def _content_text(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ArgumentTypeError(name, "a string or a list of parts", type(content).__name__)
    return "\n".join(_part_text(f"{name}[{i}]", part) for i, part in enumerate(content))


def _part_text(name: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise ArgumentTypeError(name, "a dict with type and text", type(part).__name__)
    if part.get("type") != "text":
        raise ArgumentError(f"{name}.type", '"text", the only kind of content here', repr(part.get("type")))
    if not isinstance(part.get("text"), str):
        raise ArgumentTypeError(f"{name}.text", "a string", type(part.get("text")).__name__)
    return part["text"]
