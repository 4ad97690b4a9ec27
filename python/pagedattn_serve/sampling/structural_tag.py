"""Structural tags as a grammar: text with parts that are held to a form, from where a part begins.

A structural tag is JSON, in XGrammar's words: a tree of formats, each an object with a `type`; or in its older words,
triggers and structures. An added token of the tokenizer, such as `<tool_call>`, may come as the token or as its text,
wherever a format has its text.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from pagedattn_serve.errors import shown
from pagedattn_serve.sampling.json_schema import TextKind, text_kind

Grammar = dict[str, Any]  # one of llguidance's grammars


class PartKind(Enum):
    """What a part of a structural tag is held to. Of a lenient schema, unknown keywords count for nothing."""

    SCHEMA = "json_schema"
    LENIENT_SCHEMA = "json_schema, lenient"
    REGEX = "regex"
    GRAMMAR = "grammar"

    @property
    def is_schema(self) -> bool:
        return self in (PartKind.SCHEMA, PartKind.LENIENT_SCHEMA)


GrammarOf = Callable[[PartKind, Any], Grammar]  # of a schema, a regular expression, or a grammar

_ANY = "(?s:.*)"
# The fields that a format of each type must have, and their types.
_FIELDS: dict[str, dict[str, type]] = {
    "const_string": {"value": str},
    "json_schema": {"json_schema": object},
    "regex": {"pattern": str},
    "grammar": {"grammar": str},
    "any_text": {},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "tag": {"begin": str, "content": dict, "end": str},
    "triggered_tags": {"triggers": list, "tags": list},
    "tags_with_separator": {"tags": list, "separator": str},
    "defined": {"index": int},  # one of the tag's `definitions`; ours, not XGrammar's
}
_WORDS = {str: "a string", list: "a list of one at least", dict: "a format", int: "an int", object: "a value"}


@dataclass(frozen=True)
class _Style:
    """How the arguments of a call are written one by one, in place of one JSON object.

    begin: before a value, with {} for the name of the argument. end: after it. is_raw: whether a text has no quotes.
    """

    begin: str
    end: str
    separator: str
    is_raw: bool


_STYLES = {
    "qwen_xml": _Style("\n<parameter={}>\n", "\n</parameter>", "", True),
    "python": _Style("{}=", "", ", ", False),
}
_NAMES = {"qwen_xml": "/[^>\\n]+/", "python": "/[a-zA-Z_][a-zA-Z_0-9]*/"}  # where the schema names no argument


class Part(NamedTuple):
    """A part of a structural tag that has a grammar of its own. place: where in the tag it stands."""

    place: str
    kind: PartKind
    grammar: Grammar


def grammars(
    text: str, added_tokens: Mapping[str, int], in_text: Iterable[int], grammar_of: GrammarOf
) -> tuple[Grammar, list[Part]]:
    """The grammar of a structural tag, and the parts that the grammar refers to.

    added_tokens: the ids of the tokens that are no ordinary text, by their text. in_text: the ids of those that free
    text may have nevertheless.

    Raises ValueError, which names the part, if the tag is not as it should be.
    """
    root = json.loads(text)
    if not isinstance(root, dict) or root.get("type") != "structural_tag":
        raise ValueError(f'expected {{"type": "structural_tag", "format": ...}}, got {shown(root)}')
    form = _in_newer_words(root) if "structures" in root and "format" not in root else root.get("format")
    definitions = root.get("definitions") or []
    if not isinstance(definitions, list):
        raise ValueError(f"definitions: expected a list of formats, got {type(definitions).__name__}")
    compiler = _Compiler(definitions, added_tokens, in_text, grammar_of)
    compiler.lines.append(f"start: {compiler.format('format', form)}")
    return {"name": "start", "lark_grammar": "\n".join(compiler.lines)}, compiler.parts


def _in_newer_words(root: dict[str, Any]) -> dict[str, Any]:
    """The format that a structural tag of triggers and structures means."""
    structures, tags = root["structures"], []
    if not isinstance(structures, list):
        raise ValueError(f"structures: expected a list, got {type(structures).__name__}")
    for i, structure in enumerate(structures):
        if not isinstance(structure, dict) or "schema" not in structure:
            raise ValueError(
                f'structures[{i}]: expected {{"begin": ..., "schema": ..., "end": ...}}, got {structure!r}'
            )
        content = {"type": "json_schema", "json_schema": structure["schema"]}
        tags.append({"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": root.get("triggers"), "tags": tags}


class _Compiler:
    """Makes rules of formats. A method of a type returns the expression of its format."""

    def __init__(
        self, definitions: list[Any], added_tokens: Mapping[str, int], in_text: Iterable[int], grammar_of: GrammarOf
    ) -> None:
        self.lines = [f"TEXT: /{_ANY}/"]
        self.parts: list[Part] = []
        self._definitions = definitions
        self._expressions: dict[int, str | None] = {}  # of definitions, by index; None while it is made
        self._added_tokens = added_tokens
        self._in_text = set(in_text)
        self._grammar_of = grammar_of
        longest_first = sorted(added_tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def format(self, place: str, form: Any, trigger: str = "") -> str:
        """trigger: the beginning of a tag, which has come already."""
        kind = _checked_type(place, form)
        if kind == "tag":
            return self._tag(place, form, trigger)
        expression: str = getattr(self, f"_{kind}")(place, form)
        return expression

    # ---- the types ---------------------------------------------------------------------------------------------------

    def _const_string(self, place: str, form: Any) -> str:
        return self._literal(form["value"])

    def _json_schema(self, place: str, form: Any) -> str:
        schema, style = form["json_schema"], form.get("style", "json")
        kind = PartKind.LENIENT_SCHEMA if form.get("lenient") else PartKind.SCHEMA
        if style == "json":
            return self._part(place, kind, schema)
        if not isinstance(style, str) or style not in _STYLES or not isinstance(schema, dict):
            names = ", ".join(("json", *_STYLES))
            raise ValueError(f"{place}.style: expected one of {names} (of an object's schema), got {style!r}")
        return self._arguments(place, schema, kind, style)

    def _regex(self, place: str, form: Any) -> str:
        return self._part(place, PartKind.REGEX, form["pattern"])

    def _grammar(self, place: str, form: Any) -> str:
        return self._part(place, PartKind.GRAMMAR, form["grammar"])

    def _any_text(self, place: str, form: Any) -> str:
        return self._text(form.get("excludes") or [])

    def _sequence(self, place: str, form: Any) -> str:
        return self._rule(" ".join(self._elements(place, form)))

    def _or(self, place: str, form: Any) -> str:
        return self._rule(" | ".join(self._elements(place, form)))

    def _tag(self, place: str, form: Any, trigger: str) -> str:
        begin = self._literal(form["begin"].removeprefix(trigger))
        inner, end = form["content"], form["end"]
        inner_place = f"{place}.content (after {form['begin']!r})"
        if _checked_type(inner_place, inner) != "any_text" or not end:
            return self._rule(f"{begin} {self.format(inner_place, inner)} {self._literal(end)}")
        excludes = inner.get("excludes") or []
        if (max_tokens := inner.get("max_tokens")) is not None:
            return self._rule(f"{begin} {self._tokens_until(place, end, max_tokens, excludes)}")
        return self._rule(f"{begin} {self._text_until(end, excludes)}")

    def _triggered_tags(self, place: str, form: Any) -> str:
        """Text, but from each trigger on one of the tags that begin with the trigger."""
        heads = []
        for trigger in form["triggers"]:
            tags = self._tags(place, form, trigger)
            if not tags:
                raise ValueError(f"{place}.triggers: expected the beginnings of tags, got {trigger!r}")
            heads.append(f"{self._text_until(trigger)} ({' | '.join(tags)})")
        head, text = self._rule(" | ".join(heads)), self._text(form["triggers"])
        if form.get("stop_after_first"):
            return head if form.get("at_least_one") else self._rule(f"{text} | {head}")
        return self._rule(f"{head}{'+' if form.get('at_least_one') else '*'} {text}")

    def _tags_with_separator(self, place: str, form: Any) -> str:
        tag = self._rule(" | ".join(self._tags(place, form, "")))
        others = "" if form.get("stop_after_first") else f"({self._literal(form['separator'])} {tag})*"
        return self._rule(f"({tag} {others}){'' if form.get('at_least_one') else '?'}")

    def _defined(self, place: str, form: Any) -> str:
        index = form["index"]
        if not 0 <= index < len(self._definitions):
            raise ValueError(f"{place}.index: expected that of a definition, got {index}")
        if index not in self._expressions:
            self._expressions[index] = None
            self._expressions[index] = self.format(place, self._definitions[index])
        expression = self._expressions[index]
        if expression is None:
            raise ValueError(f"{place}.index: expected that of a definition without itself in it, got {index}")
        return expression

    # ---- parts of them -----------------------------------------------------------------------------------------------

    def _elements(self, place: str, form: Any) -> list[str]:
        return [self.format(f"{place}.elements[{i}]", element) for i, element in enumerate(form["elements"])]

    def _tags(self, place: str, form: Any, trigger: str) -> list[str]:
        """Those of a format's tags that begin with the trigger."""
        tags = []
        for i, tag in enumerate(form["tags"]):
            if (kind := _type_of(tag)) != "tag":
                raise ValueError(f"{place}.tags[{i}].type: expected tag, got {kind!r}")
            if str(tag.get("begin")).startswith(trigger):
                tags.append(self.format(f"{place}.tags[{i}]", tag, trigger))
        return tags

    def _literal(self, text: str) -> str:
        """The text, with its added tokens as tokens or as texts."""
        parts = [part for part in self._split.split(text) if part]
        return " ".join(self._token(part) if part in self._added_tokens else _quoted(part) for part in parts) or '""'

    def _token(self, text: str) -> str:
        return f"(<[{self._added_tokens[text]}]> | {_quoted(text)})"

    def _text(self, excludes: list[str]) -> str:
        """Any text without those excluded."""
        terminal = self._text_terminal(excludes)
        return f"{self._runs(terminal, excludes)} {terminal}"

    def _text_until(self, end: str, excludes: Sequence[str] = ()) -> str:
        """Any text up to the first place where the end stands, with the end. None of those excluded comes before."""
        text = self._text_terminal(excludes)
        lazy = self._rule(f"{text} {_quoted(end)}", "[lazy]")
        ends = f"({text} {self._literal(end)} | {lazy})" if self._split.match(end) else lazy
        return f"{self._runs(text, [end, *excludes])} {ends}"

    def _tokens_until(self, place: str, end: str, max_tokens: Any, excludes: list[str]) -> str:
        """At most so many tokens, none of those excluded, and then the end. The end and those excluded are tokens."""
        if type(max_tokens) is not int or max_tokens < 0:
            raise ValueError(f"{place}.content.max_tokens: expected an int >= 0, got {max_tokens!r}")
        for text in (end, *excludes):
            if text not in self._added_tokens:
                raise ValueError(f"{place}.content.max_tokens: expected none, as {text!r} is not one token")
        others = {*self._added_tokens.values()} - self._in_text
        others |= {self._added_tokens[text] for text in (end, *excludes)}
        tokens = f"<[^{','.join(map(str, sorted(others)))}]>{{0,{max_tokens}}}" if max_tokens else ""
        return f"{tokens} <[{self._added_tokens[end]}]>"

    def _runs(self, terminal: str, excludes: list[str]) -> str:
        """Text that ends with an added token of the kind that text may have, any number of times."""
        ends = {self._added_tokens[match[0]] for text in excludes if (match := self._split.match(text))}
        ids = ",".join(map(str, sorted(self._in_text - ends)))
        return f"({terminal} <[{ids}]>)*" if ids else ""

    def _arguments(self, place: str, schema: dict[str, Any], kind: PartKind, style_name: str) -> str:
        """The members of an object one by one, in the schema's order."""
        style = _STYLES[style_name]
        separator = self._literal(style.separator)
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            if schema.get("additionalProperties") is False:
                return '""'
            before, after = style.begin.split("{}")
            begin = f"{self._literal(before)} {_NAMES[style_name]} {self._literal(after)}"
            one = self._rule(f"{begin} {self._value(place, True, {}, kind, style)}")
            return self._rule(f"({one} ({separator} {one})*)?")
        required = schema.get("required") or []
        first = rest = '""'  # the arguments from one on, where none came before it, and where one did
        for name, value in reversed(properties.items()):
            value_of = self._value(f"{place}.{name}", value, schema, kind, style)
            one = self._rule(f"{self._literal(style.begin.format(name))} {value_of}")
            first_with, rest_with = f"{one} {rest}", f"{separator} {one} {rest}"
            first = self._rule(first_with if name in required else f"{first_with} | {first}")
            rest = self._rule(rest_with if name in required else f"{rest_with} | {rest}")
        return first

    def _value(self, place: str, schema: Any, root: dict[str, Any], kind: PartKind, style: _Style) -> str:
        """A value, and what ends it."""
        texts, choices = text_kind(schema, root)
        end = self._literal(style.end)
        if style.is_raw and choices:
            return f"({' | '.join(map(self._literal, choices))}) {end}"
        if style.is_raw and texts is not TextKind.NEVER:
            return self._text_until(style.end)
        if not style.is_raw and isinstance(schema, dict) and schema.get("type") == "boolean":
            return f'("True" | "False") {end}'
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        held_to = {**schema, **definitions} if isinstance(schema, dict) else schema
        return f"{self._part(place, kind, held_to)} {end}"

    # ---- what is written ---------------------------------------------------------------------------------------------

    def _rule(self, expression: str, options: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {expression}")
        return name

    def _text_terminal(self, excludes: Sequence[str]) -> str:
        """The terminal of texts without those excluded, and without added tokens."""
        if not excludes:
            return "TEXT"
        name, words = f"T{len(self.lines)}", "|".join(map(_pattern, excludes))
        self.lines.append(f"{name}: /{_ANY}/ & ~/{_ANY}({words}){_ANY}/")
        return name

    def _part(self, place: str, kind: PartKind, value: Any) -> str:
        name = f"part{len(self.parts)}"
        try:
            grammar = self._grammar_of(kind, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: {error}") from None
        self.parts.append(Part(place, kind, {**grammar, "name": name}))
        return f"@{name}"


def _checked_type(place: str, form: Any) -> str:
    """The type of a format, whose fields are as they should be. Raises ValueError, which names the field."""
    kind = _type_of(form)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"{place}.type: expected one of {', '.join(_FIELDS)}, got {kind!r}")
    for name, expected in _FIELDS[kind].items():
        value = form.get(name)
        if value is None or not isinstance(value, expected) or value == []:
            got = type(value).__name__ if value else repr(value)
            raise ValueError(f"{place}.{name}: expected {_WORDS[expected]}, got {got}")
    for name in ("triggers", "excludes"):
        texts = form.get(name) or []
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"{place}.{name}: expected a list of texts, none of them empty, got {shown(texts)}")
    return kind


def _type_of(form: Any) -> Any:
    """What a format says of its type, which may be nothing."""
    return form.get("type") if isinstance(form, dict) else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regular expression for the text, between slashes."""
    return re.escape(text).replace("/", r"\/")
