"""The form that a request's output must have, in the words of its caller."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedattn_serve.config import check_bool, check_text
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError
from pagedattn_serve.vllm_arguments import form_arguments, takes_arguments_of_vllm

# Of a schema, a regex, a grammar, or all choices together. Bounds the time to compile and the depth of recursion.
MAX_CHARACTERS = 100_000
# Between two parts of JSON: enough for indentation. Without a bound, a weak model may write nothing else.
BOUNDED_SPACE = r"[ \t\r\n]{0,20}"
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@takes_arguments_of_vllm(form_arguments)
@dataclass(slots=True, frozen=True, kw_only=True)
class StructuredOutput:
    """A form that the output must have; exactly one of the first six is given.

    A wrong type raises TypeError, a wrong value ValueError. `add_request` reads schema, regex or grammar, and raises
    ValueError if the text is wrong or llguidance cannot hold an output to it.

    json: a JSON schema, as a dict, a bool or a string; kept as a string. Properties come in the order of the schema.
        True and {} are any JSON.
    json_object: any JSON object.
    regex: a regular expression (Rust's, without look-around) that the whole output matches.
    choice: the output is one of these texts; kept as a tuple of non-empty strings.
    grammar: a context-free grammar in llguidance's variant of Lark, or in EBNF: rules `name ::= ...`, one of them
        `root`.
    structural_tag: text with parts that are held to a form, from where a part begins. In XGrammar's words, as a dict or
        its JSON; kept as a string. docs/serving.md has the types of formats.
    whitespace_pattern: for JSON, a regular expression for the space between two parts; "" allows none. Default: any
        white space. A weak model may then write white space without end.

    vLLM's disable_any_whitespace=True is whitespace_pattern "". Another argument of vLLM's class may be given if its
    value means what happens here anyway.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        check_bool("json_object", self.json_object)
        if self.json is not None:  # first, as the schema false is given, too
            object.__setattr__(self, "json", _as_json("json", self.json))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _as_json("structural_tag", self.structural_tag))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ArgumentError("structured_output", f"one of {', '.join(KINDS)}", got)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            if (text := getattr(self, name)) is not None:
                _check_text(name, text)
        if self.whitespace_pattern is not None and self.kind not in ("json", "json_object", "structural_tag"):
            raise ArgumentError("whitespace_pattern", f"None beside {self.kind}", repr(self.whitespace_pattern))

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def schema(self) -> str:
        """`json` with the type it has after construction, or that of any object; for json and json_object."""
        assert self.json is None or isinstance(self.json, str)
        return self.json or '{"type": "object"}'

    @property
    def choices(self) -> tuple[str, ...]:
        """`choice` with the type it has after construction; empty if there is none."""
        return tuple(self.choice or ())


# By vLLM's names, of now and of before.
StructuredOutputsParams = StructuredOutput
GuidedDecodingParams = StructuredOutput


def _as_json(name: str, value: object) -> str:
    """A schema or a structural tag as text; a text stays as it is. What it says is read later."""
    words = {"json": "a JSON schema as a dict, a bool or a string"}.get(name, "a dict, or its JSON")
    if not isinstance(value, str | Mapping) and not (name == "json" and isinstance(value, bool)):
        raise ArgumentTypeError(name, words, type(value).__name__)
    if isinstance(value, str):
        _check_text(name, value)  # before it is read
    try:
        if not isinstance(value, str):
            return json.dumps(value if isinstance(value, bool) else dict(value), allow_nan=False)
        json.loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(name, words.partition(" as ")[0], f"what is no JSON ({error})") from None
    return value


def _choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, list | tuple):
        raise ArgumentTypeError("choice", "a list of strings", type(choices).__name__)
    if len(choices) > MAX_CHARACTERS:
        raise ArgumentError("choice", f"at most {MAX_CHARACTERS:,} characters together", f"{len(choices):,} texts")
    if not choices or "" in choices:
        raise ArgumentError("choice", "one string at least, and no empty one", list(choices))
    for each in choices:
        _check_text("choice", each)
    if (length := sum(map(len, choices))) > MAX_CHARACTERS:
        raise ArgumentError("choice", f"at most {MAX_CHARACTERS:,} characters together", f"{length:,}")
    return tuple(choices)


def _check_text(name: str, text: object) -> None:
    length = len(check_text(name, text))
    if length > MAX_CHARACTERS:
        raise ArgumentError(name, f"at most {MAX_CHARACTERS:,} characters", f"{length:,}")
