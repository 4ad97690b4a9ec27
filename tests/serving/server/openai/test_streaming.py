"""Streams: that their chunks add up to the answer without one, whatever is asked for."""

from collections import defaultdict
from itertools import chain
from typing import Any

import pytest
from checkpoints import BEGINNING, SPEECH

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": BEGINNING}]
GREEDY = {"temperature": 0, "max_tokens": 100}


def by_choice(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The chunks of each choice; checks that each ends with the one chunk that says why."""
    chunks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        for choice in event["choices"]:
            chunks[choice["index"]].append(choice)
    for each in chunks.values():
        assert [chunk["finish_reason"] is None for chunk in each] == [True] * (len(each) - 1) + [False]
    return dict(chunks)


def test_chunks_of_a_completion(client: Any) -> None:
    events = client.events(COMPLETIONS, prompt=BEGINNING, **GREEDY)
    assert {(event["object"], event["model"]) for event in events} == {("text_completion", "tiny")}
    assert len({(event["id"], event["created"]) for event in events}) == 1
    assert all("usage" not in event for event in events)
    [chunks] = by_choice(events).values()
    assert "".join(chunk["text"] for chunk in chunks) == SPEECH
    assert "\ufffd" not in "".join(chunk["text"] for chunk in chunks)  # an emoji comes whole
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", None)


def test_chunks_of_a_chat(client: Any) -> None:
    events = client.events(CHAT, messages=MESSAGES, n=2, **GREEDY)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for chunks in by_choice(events).values():
        first, *rest = [chunk["delta"] for chunk in chunks]
        assert first == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in rest)
        assert "".join(delta.get("content", "") for delta in rest) == SPEECH


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"n": 3, "prompt": ["A class", "The for statement", "Lists"]},
        {"echo": True, "n": 2},
        {"echo": True, "max_tokens": 0, "logprobs": 1, "n": 2},
        {"logprobs": 2},
        {"logprobs": 0, "echo": True, "prompt": ["A class", "Lists"]},
        {"stop": [" be", "e i"], "n": 4},
        {"use_beam_search": True, "n": 2, "best_of": 3, "temperature": 0},
    ],
    ids=str,
)
def test_the_chunks_add_up_to_the_answer(demo: Any, fields: dict[str, Any]) -> None:
    body = {"prompt": "A class", "seed": 11, "max_tokens": 12, **fields}
    answer = demo.answer(COMPLETIONS, **body)
    events = demo.events(COMPLETIONS, **body, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == answer["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    chunks = by_choice(events)
    assert sorted(chunks) == [choice["index"] for choice in answer["choices"]]
    for choice in answer["choices"]:
        parts = chunks[choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert (parts[-1]["finish_reason"], parts[-1].get("stop_reason")) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        told = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        if choice["logprobs"] is None:
            assert not told
            continue
        for name in ("tokens", "text_offset"):
            assert list(chain(*(part[name] for part in told))) == choice["logprobs"][name]
        logprobs = list(chain(*(part["token_logprobs"] for part in told)))
        expected = choice["logprobs"]["token_logprobs"]
        assert [each is None for each in logprobs] == [each is None for each in expected]
        assert list(filter(None, logprobs)) == pytest.approx(list(filter(None, expected)), abs=1e-4)


def test_chat_logprobs_add_up_to_the_answer(demo: Any) -> None:
    body = {"messages": MESSAGES, "seed": 1, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    [choice] = demo.answer(CHAT, **body)["choices"]
    [chunks] = by_choice(demo.events(CHAT, **body)).values()
    tokens = [token["token"] for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
    assert tokens == [token["token"] for token in choice["logprobs"]["content"]]


def test_usage_that_goes_on(client: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.events(COMPLETIONS, prompt=BEGINNING, stream_options=options, **GREEDY)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert events[-1]["usage"] == client.answer(COMPLETIONS, prompt=BEGINNING, **GREEDY)["usage"]
    without = client.events(COMPLETIONS, prompt=BEGINNING, stream_options={"continuous_usage_stats": True}, **GREEDY)
    assert without[-1]["usage"] == events[-1]["usage"]
    assert without[-1]["choices"]


def test_text_is_never_taken_back(client: Any) -> None:
    """What may become a stop string is held back."""
    events = client.events(COMPLETIONS, prompt=BEGINNING, stop=["mat 🙂🙂 on the mat", "hat é!"], **GREEDY)
    [chunks] = by_choice(events).values()
    assert "".join(chunk["text"] for chunk in chunks) == SPEECH


def test_beams_come_at_the_end(demo: Any) -> None:
    events = demo.events(COMPLETIONS, prompt="A class", use_beam_search=True, n=2, max_tokens=8)
    assert [[choice["index"] for choice in event["choices"]] for event in events] == [[0], [1]]


def test_text_beyond_ascii_is_utf_8(client: Any) -> None:
    response = client.post(COMPLETIONS, prompt=BEGINNING, stream=True, **GREEDY)
    assert "🙂".encode() in response.content


def test_a_refused_stream_has_its_status(client: Any) -> None:
    assert client.error(COMPLETIONS, prompt="x" * 1000, stream=True)[:2] == (400, "prompt")
    assert client.error(COMPLETIONS, prompt=BEGINNING, stream=True, n=9)[:2] == (400, "n")  # the engine says so
    assert client.error(COMPLETIONS, prompt=[BEGINNING, [10**6]], stream=True)[:2] == (400, "prompt")
