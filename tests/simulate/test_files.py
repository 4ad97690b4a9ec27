"""Traces and lengths from files."""

import json
from pathlib import Path

import pytest

from pagedattn_serve.errors import ArgumentError
from pagedattn_simulate.files import read_pairs, read_trace
from pagedattn_simulate.workload import TraceEntry


def write(tmp_path: Path, content: str) -> str:
    path = tmp_path / "file"
    path.write_text(content)
    return str(path)


def count_words(text: str) -> int:
    return len(text.split())


def test_a_trace(tmp_path: Path) -> None:
    """Columns in any order, others beside them, lines in any order."""
    path = write(tmp_path, "output,prompt,user,arrival\n5,3,a,1.5\n6,4,b,0\n")
    assert read_trace(path, False) == [TraceEntry(0.0, 4, 6), TraceEntry(1.5, 3, 5)]


def test_a_trace_as_a_spreadsheet_writes_it(tmp_path: Path) -> None:
    """With a mark before its first column, and zeros in the column of priorities."""
    path = write(tmp_path, "\ufeffarrival,prompt,output,priority\r\n0,3,5,0\r\n")
    assert read_trace(path, False) == [TraceEntry(0.0, 3, 5)]


def test_a_trace_with_priorities(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival,prompt,output,priority\n0,3,5,-2\n1,4,6,\n")
    assert read_trace(path, True) == [TraceEntry(0.0, 3, 5, -2), TraceEntry(1.0, 4, 6)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("arrival,prompt\n0,3\n", "trace: expected the columns arrival, prompt, output in the first line of "),
        ("", "trace: expected the columns "),
        ("arrival,prompt,output\n", "trace: expected a line for each request in "),
        ("arrival,prompt,output\n0,3,5\nx,3,5\n", "trace, line 3 of "),
        ("arrival,prompt,output\n-1,3,5\n", "trace, line 2 of "),
        ("arrival,prompt,output\ninf,3,5\n", "trace, line 2 of "),
        ("arrival,prompt,output\n0,0,5\n", "trace, line 2 of "),
        ("arrival,prompt,output\n0,3,5.5\n", "trace, line 2 of "),
        ("arrival,prompt,output\n0,3\n", "trace, line 2 of "),
        ("arrival,prompt,output,priority\n0,3,5,high\n", "trace, line 2 of "),
        ("arrival,prompt,output,priority\n0,3,5,0\n0,3,5,1\n", "trace, line 3 of "),
        ("arrival,prompt,output\n0,3," + "5" * (1 << 17) + "1\n", "trace: expected CSV in "),
    ],
)
def test_a_wrong_trace(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        read_trace(write(tmp_path, content), False)
    assert str(raised.value).startswith(message)


def test_the_value_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival,prompt,output\n0,none,5\n")
    with pytest.raises(ArgumentError) as raised:
        read_trace(path, False)
    assert str(raised.value) == f"trace, line 2 of {path}: prompt: expected a whole number from 1 up, got none"


def test_lengths_of_sharegpt(tmp_path: Path) -> None:
    """The first question and its answer. Conversations that begin with the answer, or have one turn, are left out."""
    turn = lambda who, value: {"from": who, "value": value}  # noqa: E731
    conversations = [
        [turn("human", "a b c"), turn("gpt", "d e"), turn("human", "f")],
        [turn("gpt", "a b"), turn("human", "c")],
        [turn("human", "a")],
        [turn("human", ""), turn("gpt", "d")],
        [],
    ]
    content = [{"id": str(i), "conversations": each} for i, each in enumerate(conversations)]
    assert read_pairs(write(tmp_path, json.dumps(content)), count_words) == [(3, 2)]


def test_lengths_of_alpaca(tmp_path: Path) -> None:
    content = [
        {"instruction": "a b", "input": "", "output": "c d e"},
        {"instruction": "a b", "input": "c d", "output": "e"},
    ]
    assert read_pairs(write(tmp_path, json.dumps(content)), count_words) == [(2, 3), (4, 1)]


@pytest.mark.parametrize(
    "content",
    [
        *("{", "{}", "[]", '[{"text": "a"}, 3, null]', '[{"conversations": [1, 2]}]', "[" * 10**5),
        '[{"instruction": "a \\ud800", "output": "b"}]',
    ],
)
def test_wrong_lengths(tmp_path: Path, content: str) -> None:
    with pytest.raises(ArgumentError, match="lengths: expected "):
        read_pairs(write(tmp_path, content), count_words)
