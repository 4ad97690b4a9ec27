"""Streams: that their chunks add up to the answer without one, whatever is asked for."""

import asyncio
from collections import defaultdict
from itertools import chain
from typing import Any

import pytest
from checkpoints import BEGINNING, SPEECH

from pagedattn_serve.server.http.errors import encode_json
from pagedattn_serve.server.openai import answers, completions

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
    alone = {"continuous_usage_stats": True}  # changes nothing, as with vLLM
    assert not any("usage" in event for event in client.events(COMPLETIONS, prompt=BEGINNING, stream_options=alone))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "n": 3}),
        (COMPLETIONS, {"prompt": [[5, 6, 7], [8]], "n": 2}),
        (COMPLETIONS, {"prompt": "A class", "echo": True}),
    ],
    ids=["chat", "several choices", "several prompts", "echo"],
)
def test_usage_counts_no_token_before_its_chunk(demo: Any, path: str, fields: dict[str, Any]) -> None:
    """So the chunk that says who speaks counts none, and a choice does not count the tokens of the next."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"return_token_ids": True, "max_tokens": 5, "ignore_eos": True, "stream_options": options, **fields}
    *events, last = demo.events(path, **body)
    num_tokens = 0
    for event in events:
        [choice] = event["choices"]
        num_tokens += len(choice.get("token_ids", []))
        assert event["usage"]["completion_tokens"] == num_tokens
    assert last["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("fields", [{"stop": "mat 🙂🙂 on the mat"}, {"n": 2}, {"echo": True}, {"logprobs": 1}])
def test_token_ids_of_completions(demo: Any, client: Any, fields: dict[str, Any]) -> None:
    """Each chunk has those of its tokens, also of text that is held back; the first has the prompt's."""
    for server, prompt in ((client, BEGINNING), (demo, [[5, 6, 7], [8]])):
        body = {"prompt": prompt, "return_token_ids": True, "seed": 1, "max_tokens": 12, **fields}
        choices = server.answer(COMPLETIONS, **body)["choices"]
        by_index = by_choice(server.events(COMPLETIONS, **body))
        for choice in choices:
            first, *others = by_index[choice["index"]]
            assert first["prompt_token_ids"] == choice["prompt_token_ids"]
            assert not any("prompt_token_ids" in chunk for chunk in others)
            assert [i for chunk in (first, *others) for i in chunk["token_ids"]] == choice["token_ids"]


def test_token_ids_of_an_echo_alone(demo: Any) -> None:
    body = {"prompt": "A class", "return_token_ids": True, "max_tokens": 0, "echo": True}
    [choice] = demo.answer(COMPLETIONS, **body)["choices"]
    [[chunk]] = by_choice(demo.events(COMPLETIONS, **body)).values()
    assert chunk["prompt_token_ids"] == choice["prompt_token_ids"] and chunk["token_ids"] == choice["token_ids"] == []


@pytest.mark.parametrize(
    "fields", [{"prompt": [[5, 6, 7, 8], [9] * 5]}, {"messages": MESSAGES}], ids=["completions", "chat"]
)
def test_token_ids_of_a_prompt_are_written_once(
    demo: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """For all choices of a stream; a whole answer is written beside the event loop."""
    path = COMPLETIONS if "prompt" in fields else CHAT
    body = {"return_token_ids": True, "n": 4, "seed": 1, "max_tokens": 3, **fields}
    prompts = fields.get("prompt") or [demo.answer(path, **body)["prompt_token_ids"]]
    written: list[Any] = []
    in_loop: list[bool] = []

    def watched(value: Any) -> str:
        written.append(value)
        in_loop.append(asyncio._get_running_loop() is not None)
        return encode_json(value)

    for module in (answers, completions):
        monkeypatch.setattr(module, "encode_json", watched)
    demo.events(path, **body)
    assert [written.count(token_ids) for token_ids in prompts] == [1] * len(prompts)
    in_loop.clear()
    demo.answer(path, **body)
    assert in_loop and not any(in_loop)


@pytest.mark.parametrize("template", [None, "{% for message in messages %}{{ message.content }}{% endfor %}<think>"])
def test_token_ids_of_chats(demo_engine: Any, serve: Any, template: str | None) -> None:
    """With and without a parser of thoughts."""
    parser = "none" if template is None else "qwen3"
    with serve(demo_engine, chat_template=template, reasoning_parser=parser) as server:
        body = {"messages": MESSAGES, "return_token_ids": True, "seed": 1, "max_tokens": 12, "n": 2}
        answer, events = server.answer(CHAT, **body), server.events(CHAT, **body)
    assert [event["prompt_token_ids"] for event in events[:2]] == [answer["prompt_token_ids"]] * 2
    assert not any("prompt_token_ids" in event for event in events[2:])
    by_index = by_choice(events)
    for choice in answer["choices"]:
        token_ids = [i for chunk in by_index[choice["index"]] for i in chunk.get("token_ids", [])]
        assert token_ids == choice["token_ids"]


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
