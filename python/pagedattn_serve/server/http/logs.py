"""The server's log on standard error: lines of text, or a JSON object a line. All loggers of the process write to it.

A record may bring fields beside its message, as `extra={"fields": {...}}`. Records of a task that serves a request also
have the id of the request: `current_request` is what the log says of the request.
"""

import json
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass(slots=True)
class RequestContext:
    """One HTTP request. It may make several requests to the engine, or none.

    request_id: as in the header X-Request-Id; the server makes it, and nobody can guess it.
    path: of its URL, without the path under which a proxy serves the server.
    is_read: whether its body was read to the end, so that the client sends no more of it.
    answer_id: the id in the answer's body, which ends with the request_id; "" if the answer has none.
    key_number: the request's key, as its place among the server's API keys, from 1; None without a key.
    key_id: a name of the key that does not reveal the key; "" without a key.
    num_prompt_tokens, num_output_tokens: tokens of its requests to the engine, of those that have ended.
    fail: makes of an ApiError the end of its stream; None before the first event.
    """

    request_id: str
    path: str = ""
    is_read: bool = False
    answer_id: str = ""
    key_number: int | None = None
    key_id: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    fail: Callable[[Any], bytes] | None = None


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)


def set_up_logs(log_format: str, level: str) -> None:
    """log_format, level: the server's options. Other packages log only warnings, unless the level is "debug"."""
    for name in list(logging.root.manager.loggerDict):  # transformers, for one, has its own handlers and level
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    logging.root.handlers = [make_handler(log_format)]
    logging.root.setLevel("WARNING" if level == "info" else level.upper())
    logging.getLogger("pagedattn_serve").setLevel(level.upper())
    logging.captureWarnings(True)


def make_handler(log_format: str) -> logging.Handler:
    """Writes to standard error, as text or as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(add_request_id)
    return handler


def add_request_id(record: logging.LogRecord) -> bool:
    """A filter of handlers, which lets everything pass."""
    context = current_request.get()
    record.request_id = None if context is None else context.request_id
    return True


class TextFormatter(logging.Formatter):
    """`2026-11-22 12:00:00.000 INFO request method=GET path=/v1/models status=200`; a trace follows on its own lines.

    A value that could be misread, because it has spaces or line ends in it, is quoted as in JSON.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        fields = "".join(f" {name}={plain(value)}" for name, value in all_fields(record).items())
        first, *rest = record.getMessage().splitlines() or [""]
        if record.exc_info:
            rest.append(self.formatException(record.exc_info))
        return "\n".join([f"{time} {record.levelname} {first}{fields}", *rest])


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "message"}, the fields, and the trace as "exception" where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **all_fields(record),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)


def all_fields(record: logging.LogRecord) -> dict[str, Any]:
    request_id = getattr(record, "request_id", None)
    fields = getattr(record, "fields", {})
    return fields if request_id is None else {"request_id": request_id, **fields}


def plain(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
