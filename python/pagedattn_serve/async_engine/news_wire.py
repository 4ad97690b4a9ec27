"""What passes between a `ProcessCore` and its process: messages as bytes, and news as they stand in a message.

Messages are pickles of plain tuples over a socket. Each side sends one message for all that it has to say at once. A
message is its length in eight bytes, then the pickle.
"""

import pickle
import struct
from operator import attrgetter
from typing import Any

from pagedattn_serve.async_engine.core import News
from pagedattn_serve.errors import describe, portable
from pagedattn_serve.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput

HEADER = struct.Struct("=Q")
CHUNK = 1 << 18  # bytes of a socket to read at once
numbers_of = attrgetter(*EngineStats.__slots__)


def framed(message: object) -> bytes:
    """A message as bytes. Raises what pickle does, of many types."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


class Frames:
    """Messages out of the bytes of a socket, which come in pieces of any size."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are whole now."""
        received = self._received
        received += data
        messages: list[Any] = []
        begin = 0
        while len(received) - begin >= HEADER.size:
            [length] = HEADER.unpack_from(received, begin)
            end = begin + HEADER.size + length
            if end > len(received):
                break
            messages.append(pickle.loads(received[begin + HEADER.size : end]))
            begin = end
        del received[:begin]
        return messages


# ---- news: what never changes, and what has not changed, is not sent again ------------------------------------------


class NewsPacker:
    """The engine's side."""

    def __init__(self) -> None:
        self._stats: EngineStats | None = None  # that were sent last
        self._metrics: dict[int, RequestMetrics] = {}  # that were sent last, of each unfinished request with outputs

    def pack(self, news: News) -> tuple[Any, ...]:
        stats = None if news.stats is self._stats else numbers_of(news.stats)
        self._stats = news.stats
        refused = [(key, portable(error)) for key, error in news.refused]
        results = [(key, _pack_result(result, error)) for key, result, error in news.results]
        outputs = [self._pack_output(key, output) for key, output in news.outputs]
        return stats, news.num_waiting, news.queued, refused, outputs, results

    def _pack_output(self, key: int, output: RequestOutput) -> tuple[Any, ...]:
        last = self._metrics.get(key)
        metrics = output.metrics
        about = None
        if last is None or output.error is not None:
            request = (output.request_id, output.prompt, output.prompt_token_ids)
            about = (*request, output.error, output.argument_error, output.prompt_logprobs, output.embedding)
        times = None
        if metrics is not last:
            times = (metrics.arrival_time, metrics.first_token_time, metrics.finished_time, metrics.num_cached_tokens)
        if output.finished:
            self._metrics.pop(key, None)
        else:
            self._metrics[key] = metrics
        completions = [
            (
                *(each.index, each.text, each.token_ids, each.cumulative_logprob, each.logprobs),
                *(each.finish_reason, each.stop_reason),
            )
            for each in output.outputs
        ]
        return key, completions, output.finished, times, about


class NewsUnpacker:
    """The callers' side. stats: the engine's before the first news."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        # The first output of each unfinished request, with the latest metrics.
        self._last: dict[int, tuple[tuple[str, str | None, list[int]], RequestMetrics]] = {}

    def unpack(self, packed: tuple[Any, ...]) -> News:
        stats, num_waiting, queued, refused, outputs, results = packed
        if stats is not None:
            self._stats = EngineStats(*stats)
        return News(
            self._stats,
            num_waiting,
            queued,
            refused,
            [(output[0], self._unpack_output(*output)) for output in outputs],
            [(key, *_unpack_result(data)) for key, data in results],
        )

    def _unpack_output(
        self, key: int, completions: list[Any], finished: bool, times: Any | None, about: Any | None
    ) -> RequestOutput:
        error = argument_error = prompt_logprobs = embedding = None
        if about is None:
            request, metrics = self._last[key]
        else:
            *request, error, argument_error, prompt_logprobs, embedding = about
        if times is not None:
            metrics = RequestMetrics(*times)
        if finished:
            self._last.pop(key, None)
        elif times is not None:
            self._last[key] = request, metrics
        outputs = [CompletionOutput(*each) for each in completions]
        about_all = (error, argument_error, prompt_logprobs, embedding)
        return RequestOutput(*request, outputs, finished, metrics, *about_all)


# ---- results, which may be of any type ------------------------------------------------------------------------------


def _pack_result(result: object, error: BaseException | None) -> bytes:
    try:
        return pickle.dumps((result, None if error is None else portable(error)))
    except Exception as reason:
        error = TypeError(f"call: expected a result that can be pickled, got {type(result).__name__}: {reason}")
        return pickle.dumps((None, error))


def _unpack_result(data: bytes) -> tuple[Any, Any]:
    try:
        return pickle.loads(data)
    except Exception as reason:
        return None, TypeError(f"call: expected a result that this process can load, got {describe(reason)}")
