"""Traces and lengths that a user brings, as files."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedattn_serve.config import parse_json, read_text
from pagedattn_serve.errors import ArgumentError
from pagedattn_simulate.workload import TraceEntry

COLUMNS = ("arrival", "prompt", "output")


def read_trace(path: str, has_priorities: bool) -> list[TraceEntry]:
    """A CSV file with a line for each request: `arrival` in seconds, tokens of `prompt` and `output`, and `priority` if
    the file has that column. Other columns are ignored. In order of arrival, whatever the order of the lines.

    has_priorities: whether the scheduler looks at priorities; if not, each has to be 0.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:  # Excel writes a mark first
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            if missing := [name for name in COLUMNS if name not in names]:
                expected = f"the columns {', '.join(COLUMNS)} in the first line of {path}"
                got = f"{', '.join(names) or 'an empty file'}: {', '.join(missing)} missing"
                raise ArgumentError("trace", expected, got)
            entries = [_entry(row, f"trace, line {reader.line_num} of {path}", has_priorities) for row in reader]
    except OSError as error:
        raise ArgumentError("trace", "a CSV file", f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ArgumentError("trace", f"UTF-8 in {path}", error) from None
    except csv.Error as error:
        raise ArgumentError("trace", f"CSV in {path}", error) from None
    if not entries:
        raise ArgumentError("trace", f"a line for each request in {path}", "none")
    return sorted(entries, key=lambda entry: entry.arrival)


def _entry(row: dict[str, str | None], place: str, has_priorities: bool) -> TraceEntry:
    def number(name: str, kind: type[int] | type[float], minimum: float) -> Any:
        text = row[name] or ""
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not minimum <= value < float("inf"):
            what = "a whole number" if kind is int else "a number"
            raise ArgumentError(name, f"{what} from {minimum:g} up", text or "nothing", place)
        return value

    priority = 0
    if row.get("priority"):
        try:
            priority = int(row["priority"] or 0)
        except ValueError:
            raise ArgumentError("priority", "a whole number", row["priority"], place) from None
        if priority and not has_priorities:
            raise ArgumentError("priority", "0 without --scheduling-policy priority", priority, place)
    return TraceEntry(number("arrival", float, 0), number("prompt", int, 1), number("output", int, 1), priority)


def read_pairs(path: str, count_tokens: Callable[[str], int]) -> list[tuple[int, int]]:
    """Lengths of prompts and outputs of a JSON file in the form of ShareGPT (the first turn of each conversation that
    begins with the user) or of Alpaca (instruction and input, output). Empty texts are left out."""
    text = read_text("lengths", path)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ArgumentError("lengths", f"JSON in {path}", error) from None
    if not isinstance(content, list):
        raise ArgumentError("lengths", f"a list of conversations in {path}", type(content).__name__)
    texts = [pair for entry in content if (pair := _texts(entry)) is not None]
    try:
        for pair in texts:
            "".join(pair).encode()
    except UnicodeEncodeError as error:
        raise ArgumentError("lengths", f"text that UTF-8 can write in {path}", error) from None
    lengths = [(count_tokens(prompt), count_tokens(output)) for prompt, output in texts]
    pairs = [pair for pair in lengths if min(pair) > 0]
    if not pairs:
        expected = f"ShareGPT's conversations (from, value) or Alpaca's instruction, input and output in {path}"
        raise ArgumentError("lengths", expected, f"{len(content)} entries, none of which has a prompt and an output")
    return pairs


def _texts(entry: Any) -> tuple[str, str] | None:
    """Prompt and output; None if the entry has none."""
    if not isinstance(entry, dict):
        return None
    turns = entry.get("conversations")
    if isinstance(turns, list):
        if len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
            return None
        if turns[0].get("from") not in ("human", "user"):
            return None
        prompt, output = turns[0].get("value"), turns[1].get("value")
    else:
        prompt, output = entry.get("instruction"), entry.get("output")
        if entry.get("input"):
            prompt = f"{prompt}\n{entry['input']}"
    return (prompt, output) if isinstance(prompt, str) and isinstance(output, str) else None
