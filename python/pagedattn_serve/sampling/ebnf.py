"""Grammars in EBNF, as XGrammar and llama.cpp (GBNF) have it, in llguidance's variant of Lark.

Both have the same operators. Of a rule that never comes to itself, a terminal of Lark is made, which is one regular
expression. So a grammar without recursion is exactly as it says; in others, a lexer cuts the text into terminals, the
longest first.
"""

import json
import re
from collections.abc import Iterator, Mapping

_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*\s*::=", re.MULTILINE | re.ASCII)
_TOKEN = re.compile(
    r"""\s+ | \#[^\n]*
    | (?P<rule>[A-Za-z_][\w-]*)\s*::=
    | (?P<name>[A-Za-z_][\w-]*)
    | "(?P<text>(?:[^"\\]|\\.)*)"
    | \[(?P<characters>(?:[^\]\\]|\\.)+)\]
    | \{\s*(?P<least>\d+)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\}
    | (?P<sign>[|()*+?.])""",
    re.VERBOSE | re.ASCII,
)
_CHARACTER = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_ROOT = "root"
_NOTHING = '""'


def as_lark(grammar: str) -> str:
    """The grammar in Lark: as it is, unless it has rules of EBNF, `name ::= ...`.

    Raises ValueError, which says where, if it is no EBNF, or its rules are not as they should be.
    """
    if not _RULE.search(grammar):
        return grammar
    rules: dict[str, list[str]] = {}  # in Lark, but for the names of rules, which have an @ before them
    names: dict[str, set[str]] = {}  # those that stand in each rule
    rule, expression = "", list[str]()
    for kind, text in _tokens(grammar):
        if kind == "rule":
            if text in rules:
                raise ValueError(f"rule {text}: expected one rule of this name, got two")
            rule, expression = text, rules.setdefault(text, [])
            names[rule] = set()
            continue
        if not rule:
            raise ValueError(f"expected a rule of EBNF first, as in {_ROOT} ::= ..., got {text}")
        if kind == "name":
            names[rule].add(text)
        if text in ("|", ")") and expression[-1:] in ([], ["|"], ["("]):
            expression.append(_NOTHING)
        expression.append(f"@{text}" if kind == "name" else text)
    if _ROOT not in rules:
        raise ValueError(f"expected a rule {_ROOT}, got {', '.join(rules)}")
    for name, others in names.items():
        if unknown := sorted(others - rules.keys()):
            raise ValueError(f"rule {name}: expected names of rules, got {unknown[0]}")
    terminals = _not_recursive(names)
    new_names = {f"@{name}": f"T{i}" if name in terminals else f"r{i}" for i, name in enumerate(rules)}
    lines = [f"start: {new_names[f'@{_ROOT}']}"]
    for name, parts in rules.items():
        if parts[-1:] in ([], ["|"]):
            parts.append(_NOTHING)
        lines.append(f"{new_names[f'@{name}']}: {' '.join(new_names.get(part, part) for part in parts)}")
    return "\n".join(lines)


def _tokens(grammar: str) -> Iterator[tuple[str, str]]:
    """Each part of the grammar but white space and comments: its kind, and what it is in Lark."""
    place = 0
    while place < len(grammar):
        match = _TOKEN.match(grammar, place)
        if match is None:
            line = grammar.count("\n", 0, place) + 1
            raise ValueError(f"line {line} of EBNF: expected a part of a rule, got {grammar[place : place + 20]!r}")
        place = match.end()
        kind = match.lastgroup
        if kind == "rule" or kind == "name":
            yield kind, match[kind]
        elif kind == "text":
            yield kind, json.dumps("".join(character for _, character in _characters(match["text"])))
        elif kind == "characters":
            yield kind, _set(match["characters"])
        elif match["least"] is not None:
            yield "times", f"{{{match['least']},{match['most'] if match['comma'] else match['least']}}}"
        elif kind == "sign":
            yield kind, "/(?s:.)/" if match["sign"] == "." else match["sign"]


def _characters(text: str) -> Iterator[tuple[str, str]]:
    """Each character as it is written, and as it is meant."""
    for match in _CHARACTER.finditer(text):
        digits, escaped = match[1] or match[2] or match[3], match[4]
        if digits:
            yield match[0], chr(int(digits, 16))
        else:
            yield match[0], match[5] if escaped is None else _CONTROLS.get(escaped, escaped)


def _set(text: str) -> str:
    """[text] as a regular expression of Rust."""
    negation = "^" if text.startswith("^") else ""
    characters = [*_characters(text[len(negation) :])]
    last = len(characters) - 1
    parts = (
        "-" if written == "-" and 0 < i < last else rf"\x{{{ord(meant):x}}}"
        for i, (written, meant) in enumerate(characters)
    )
    return f"/[{negation}{''.join(parts)}]/"


def _not_recursive(names: Mapping[str, set[str]]) -> set[str]:
    """The rules that never come to themselves, nor to a rule that does. names: those that stand in each rule."""
    num_open = {name: len(others) for name, others in names.items()}
    users: dict[str, list[str]] = {name: [] for name in names}
    for name, others in names.items():
        for other in others:
            users[other].append(name)
    done = [name for name, number in num_open.items() if not number]
    for name in done:
        for user in users[name]:
            num_open[user] -= 1
            if not num_open[user]:
                done.append(user)
    return set(done)
