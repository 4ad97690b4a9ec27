"""Lines of the log: each is one record, whatever it holds."""

import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from pagedattn_serve.server.http.logs import (
    JsonFormatter,
    RequestContext,
    TextFormatter,
    add_request_id,
    current_request,
)


def record(message: str, fields: dict[str, Any] | None = None, error: Exception | None = None) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("pagedattn_serve.server", logging.INFO, "file.py", 1, message, (), exc_info)
    if fields is not None:
        made.fields = fields
    add_request_id(made)
    return made


def test_text() -> None:
    line = TextFormatter().format(record("request", {"path": "/v1/models", "status": 200}))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO request path=/v1/models status=200", line)


@pytest.mark.parametrize("value", ["/a b", "/a\nINFO request status=200", '/a"b', "/a=b", "", "/\x1b[31m", "/\u2028"])
def test_a_value_that_could_be_taken_for_more_is_quoted(value: str) -> None:
    line = TextFormatter().format(record("request", {"path": value, "status": 404}))
    assert line.isprintable() and line.endswith(f" INFO request path={json.dumps(value)} status=404")


def test_json() -> None:
    shown = json.loads(JsonFormatter().format(record("request", {"path": "/a\nb", "status": 200})))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", shown.pop("time"))
    expected = {"level": "info", "logger": "pagedattn_serve.server", "message": "request"}
    assert shown == {**expected, "path": "/a\nb", "status": 200}


def test_text_of_several_lines_has_its_fields_in_the_first() -> None:
    line = TextFormatter().format(record("failed\n  at home", {"status": 500}))
    assert line.endswith(" INFO failed status=500\n  at home")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_trace(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("what went wrong")
    except ValueError as error:
        text = formatter.format(record("failed", error=error))
    if isinstance(formatter, JsonFormatter):
        assert "\n" not in text
        text = json.loads(text)["exception"]
    assert text.endswith("ValueError: what went wrong") and "Traceback" in text


def test_the_request_of_a_task() -> None:
    token = current_request.set(RequestContext("abc"))
    try:
        assert TextFormatter().format(record("hello")).endswith("hello request_id=abc")
        assert json.loads(JsonFormatter().format(record("hello")))["request_id"] == "abc"
    finally:
        current_request.reset(token)
    assert "request_id" not in TextFormatter().format(record("hello"))


PROGRAM = """
import logging, sys, warnings
import transformers.utils.logging
from pagedattn_serve.server.http.logs import set_up_logs
transformers.utils.logging.get_logger("transformers.models")
set_up_logs("json", sys.argv[1])
for name in ("pagedattn_serve.server.http.run", "uvicorn.error", "transformers.models", "somebody.else"):
    logging.getLogger(name).info("told by %s", name)
    logging.getLogger(name).warning("warned by %s", name)
warnings.warn("a warning")
"""


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_every_logger_writes_to_it(level: str) -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "")
    shown = [json.loads(line) for line in result.stderr.splitlines()]
    by_level: dict[str, list[str]] = {}
    for each in shown:
        by_level.setdefault(each["level"], []).append(each["logger"])
    everybody = ["pagedattn_serve.server.http.run", "uvicorn.error", "transformers.models", "somebody.else"]
    told = {"debug": everybody, "info": everybody[:1]}
    assert by_level.get("info", []) == told.get(level, [])
    assert by_level.get("warning", []) == ([] if level == "error" else [*everybody, "py.warnings"])
