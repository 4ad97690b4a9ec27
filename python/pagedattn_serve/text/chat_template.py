"""A conversation as the text of a prompt, by the chat template of the tokenizer, in transformers' sandbox."""

from os import PathLike
from pathlib import Path
from typing import Any

from pagedattn_serve.config import check_bool
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError
from pagedattn_serve.text.messages import Fields, Message, first_left_out, readings


def render_chat(
    tokenizer: Any | None,
    messages: list[Message],
    chat_template: str | PathLike[str] | None = None,
    add_generation_prompt: bool = True,
    reasoning_effort: str | None = None,
) -> str:
    """The prompt that the messages make. It has the special tokens already, so it is tokenized without adding more.

    Args:
        tokenizer: from transformers; its template is the default, and its special tokens are what templates name.
        messages: in order. The template says which roles there are, and which fields count. The template gets the
            messages in the first form (see `messages.readings`) that it takes without leaving out what they say.
        chat_template: see `load_chat_template`.
        add_generation_prompt: whether the text goes on to where the assistant's answer begins.
        reasoning_effort: given to the template, where it changes something only if the template knows it.

    Raises ValueError or TypeError, which name the message, if a message does not have this form. Raises ValueError if
    there is no template, if the template refuses the messages (in the template's own words), and if it leaves out what
    a message says.
    """
    check_bool("add_generation_prompt", add_generation_prompt)
    if tokenizer is None:
        raise ArgumentError("messages", "none, as the model's directory has no tokenizer")
    template = None if chat_template is None else load_chat_template(chat_template)
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise ArgumentError("chat_template", "one (its text, or a file with it), as the model's tokenizer has none")

    def render(messages: list[Fields]) -> str:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
        )

    variables = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    refusals: list[Exception] = []
    left_out: list[tuple[int, str]] = []
    for read in readings(messages):
        try:
            text = render(read)
        except ImportError:  # jinja2 is not installed: that is no fault of the messages
            raise
        except Exception as error:  # a template can raise anything: it is a program
            refusals.append(error)
            continue
        if (thing := first_left_out(render, read)) is None:
            return text
        left_out.append(thing)
    if left_out:
        place, name = left_out[0]
        role = messages[place]["role"]
        raise ArgumentError(name, f"what the chat template writes for role {role!r}", "what it leaves out")
    kind = "" if type(refusals[0]).__name__ == "TemplateError" else f"{type(refusals[0]).__name__}: "
    raise ValueError(f"chat_template: cannot render the messages: {kind}{refusals[0]}") from None


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
