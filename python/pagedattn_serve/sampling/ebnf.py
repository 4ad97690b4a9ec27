"""Grammars in EBNF, as XGrammar and llama.cpp (GBNF) have it, in llguidance's variant of Lark.

Both have the same operators. Of a rule that never comes to itself, a terminal of Lark is made, which is one regular
expression. So a grammar without recursion is exactly as it says; in others, a lexer cuts the text into terminals, the
longest first.
"""

import json
import re
import sys
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
# Letters and digits behind a backslash that XGrammar knows; llama.cpp knows some of them.
_CONTROLS = {"0": "\0", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
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
            raise ValueError(f"{_line(grammar, place)}: expected a part of a rule, got {grammar[place : place + 20]!r}")
        kind = match.lastgroup
        if kind == "rule" or kind == "name":
            yield kind, match[kind]
        elif kind == "text" or kind == "characters":
            try:
                yield kind, _text(match[kind]) if kind == "text" else _set(match[kind])
            except ValueError as error:
                raise ValueError(f"{_line(grammar, place)}: {error}") from None
        elif match["least"] is not None:
            yield "times", f"{{{match['least']},{match['most'] if match['comma'] else match['least']}}}"
        elif kind == "sign":
            yield kind, "/(?s:.)/" if match["sign"] == "." else match["sign"]
        place = match.end()


def _line(grammar: str, place: int) -> str:
    return f"line {grammar.count(chr(10), 0, place) + 1} of EBNF"


def _characters(text: str) -> Iterator[tuple[str, str]]:
    """Each character as it is written, and as it is meant. Raises ValueError for an escape that means none: a \\d of
    regular expressions must not become a d."""
    for match in _CHARACTER.finditer(text):
        digits, escaped = match[1] or match[2] or match[3], match[4]
        if digits and int(digits, 16) <= sys.maxunicode:
            yield match[0], chr(int(digits, 16))
        elif digits or (escaped is not None and escaped.isalnum() and escaped not in _CONTROLS):
            raise ValueError(rf"expected an escape of a character, as \n, \x41, \u0041 or \U00000041, got {match[0]}")
        else:
            yield match[0], match[5] if escaped is None else _CONTROLS.get(escaped, escaped)


def _text(text: str) -> str:
    """ "text" as a string of Lark."""
    return json.dumps("".join(meant for _, meant in _characters(text)))


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
