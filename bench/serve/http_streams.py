"""A client that costs little: many streams of /v1/completions at once, read by one loop over plain sockets.

On a small machine the client takes its time from the server. So it keeps what comes as it is, and parses it later.
"""

import json
import re
import selectors
import socket
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from serve.workloads import Request

TIMEOUT_SECONDS = 60  # without a byte on any stream
EVENT = re.compile(rb"data: (\{.*\})\n\n")  # lies whole in one chunk of the body


@dataclass(frozen=True)
class Stream:
    """text: of the one choice. times: of the events, by time.monotonic; events that came together have the same
    time."""

    text: str
    times: list[float]


def make_message(request: Request) -> bytes:
    """The bytes of a greedy request, after which the server closes the connection."""
    fields = {"prompt": request.prompt_token_ids, "max_tokens": request.max_tokens}
    body = json.dumps({**fields, "temperature": 0, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body


def exchange(address: tuple[str, int], messages: Sequence[bytes]) -> list[list[tuple[float, bytes]]]:
    """Send each message on a connection of its own; returns what came on each: pieces, with their times.

    Raises TimeoutError if nothing comes any more, OSError where a connection breaks.
    """
    answers: list[list[tuple[float, bytes]]] = [[] for _ in messages]
    with selectors.DefaultSelector() as selector:
        for message, pieces in zip(messages, answers, strict=True):
            connection = socket.create_connection(address, TIMEOUT_SECONDS)
            connection.sendall(message)
            selector.register(connection, selectors.EVENT_READ, pieces)
        while selector.get_map():
            ready = selector.select(TIMEOUT_SECONDS)
            if not ready:
                raise TimeoutError(f"no byte in {TIMEOUT_SECONDS} seconds, {len(selector.get_map())} streams are open")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 16)
                key.data.append((time.monotonic(), data))
                if not data:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    return answers


def read_stream(pieces: Sequence[tuple[float, bytes]]) -> Stream:
    """Raises RuntimeError for an answer that is no stream of text to its end."""
    answer = b"".join(data for _, data in pieces)
    if not answer.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]\n\n" not in answer:
        raise RuntimeError(
            f"stream: expected status 200 and [DONE] at the end, got {answer[:80]!r}...{answer[-200:]!r}"
        )
    ends = [*accumulate(len(data) for _, data in pieces)]
    text, times = [], []
    for match in EVENT.finditer(answer):
        event = json.loads(match[1])
        if "error" in event:
            raise RuntimeError(f"stream: expected text, got {event['error']}")
        text.append(event["choices"][0]["text"])
        times.append(pieces[bisect_left(ends, match.end())][0])
    return Stream("".join(text), times)
