"""What an engine's process and its parent tell each other arrives as it was."""

import dataclasses
import pickle
from typing import Any

import pytest

from pagedattn_serve.async_engine.core import News
from pagedattn_serve.async_engine.news_wire import Frames, NewsPacker, NewsUnpacker, framed
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_come_in_pieces_of_any_size(size: int) -> None:
    messages = [("a", 1), ("b", "x" * 300), ()]
    data = b"".join(map(framed, messages))
    frames = Frames()
    found = [each for begin in range(0, len(data), size) for each in frames.feed(data[begin : begin + size])]
    assert found == messages


def test_news_arrive_as_they_were() -> None:
    """Of requests side by side: all that the first output says, deltas, the error of a request that had outputs, and of
    one that had none. Nothing of a request is kept after its last output."""

    def output(token: int, reason: str | None, times: RequestMetrics, **fields: Any) -> RequestOutput:
        completion = CompletionOutput(0, f"{token}", [token], -1.0, [{token: Logprob(-1.0, 1, "x")}], reason)
        return RequestOutput("a", "the", [5], [completion], reason is not None, times, **fields)

    waits, begun, ended = RequestMetrics(1.0), RequestMetrics(1.0, 2.0), RequestMetrics(1.0, 2.0, 3.0)
    refusal = ArgumentError("logits_processors", "logits", "a text")
    outputs = [
        (3, output(1, None, begun, prompt_logprobs=[None, {5: Logprob(-2.0, 1, "y")}])),
        (4, output(2, None, begun)),
        (3, output(3, None, begun)),
        (5, output(4, "error", ended, error="MemoryError: none")),
        (4, output(5, "error", ended, error=str(refusal), argument_error=refusal)),
        (3, output(6, "length", ended)),
        (6, output(7, None, waits)),  # without a token yet
        (6, output(10, None, begun)),
        (6, output(11, None, begun)),
        (6, output(8, "error", ended, error="ValueError: no text")),
        (7, output(9, "stop", ended, embedding=[0.5, -1.0])),
    ]
    stats = EngineStats(**dict.fromkeys(EngineStats.__slots__, 0))
    packer, unpacker = NewsPacker(), NewsUnpacker(stats)
    for i, (key, expected) in enumerate(outputs):
        news = News(dataclasses.replace(stats, num_steps=i), i, [i], [(9, refusal)], [(key, expected)], [(8, i, None)])
        told = unpacker.unpack(pickle.loads(pickle.dumps(packer.pack(news))))
        [(told_key, found)] = told.outputs
        assert (told_key, found, found.metrics) == (key, expected, expected.metrics)
        assert str(found.argument_error) == str(expected.argument_error)
        assert type(found.argument_error) is type(expected.argument_error)
        assert (told.stats.num_steps, told.num_waiting, told.queued, told.results) == (i, i, [i], [(8, i, None)])
        assert [(key, str(error)) for key, error in told.refused] == [(9, str(refusal))]
    assert packer._metrics == {} and unpacker._last == {}


def test_an_error_that_the_other_process_cannot_load() -> None:
    """It comes as one of the nearest builtin type."""

    class OfACaller(ValueError):
        pass

    stats = EngineStats(**dict.fromkeys(EngineStats.__slots__, 0))
    packed = pickle.dumps(NewsPacker().pack(News(stats, refused=[(1, OfACaller("no number"))])))
    [(key, error)] = NewsUnpacker(stats).unpack(pickle.loads(packed)).refused
    assert (key, type(error), str(error)) == (1, ValueError, "no number")
