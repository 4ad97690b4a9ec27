"""What cannot be done is refused: the right status, OpenAI's shape, and the field that is to blame."""

import gzip
import json
import logging
import re
import threading
from typing import Any

import pytest
from checkpoints import BEGINNING
from starlette.types import Message, Send

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.requests.request import Completion
from pagedattn_serve.server.http.event_stream import EventStream

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": BEGINNING}]
SAMPLING: list[tuple[dict[str, Any], str | None]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": 5}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 10**9}, "best_of"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),  # more digits than Python reads
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"use_beam_search": True}, "best_of"),
    ({"use_beam_search": True, "n": 2, "temperature": 1}, "temperature"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"early_stopping": "never"}, "early_stopping"),
    ({"early_stopping": "soon"}, "early_stopping"),
    ({"priority": 1}, "priority"),
    ({"priority": 1.5}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
    ({"service_tier": "quick"}, "service_tier"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"verbosity": ""}, "verbosity"),
    ({"verbosity": "auto"}, "verbosity"),
    ({"reasoning_effort": "maximal"}, "reasoning_effort"),
    ({"reasoning_effort": ""}, "reasoning_effort"),
    ({"reasoning_effort": "auto"}, "reasoning_effort"),
    ({"prediction": "the rest"}, "prediction"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prompt_cache_options": {"mode": "always"}}, "prompt_cache_options"),
    ({"prompt_cache_options": {"size": 5}}, "prompt_cache_options.size"),
    ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
    ({"prompt_cache_key": 5}, "prompt_cache_key"),
    ({"safety_identifier": 5}, "safety_identifier"),
    ({"stream": True, "stream_options": {"include_obfuscation": "no"}}, "stream_options"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"spaces_between_special_tokens": False, "skip_special_tokens": False}, "spaces_between_special_tokens"),
    ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens"),
    ({"request_id": 5}, "request_id"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ({"logits_processors": ["a.b"]}, "logits_processors"),
    ({"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs"),
    ({"prompt_embeds": ["a"]}, "prompt_embeds"),
    ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
    ({"return_weight_versions": True}, "return_weight_versions"),
    ({"return_weight_versions": 0}, "return_weight_versions"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"foo": 0}, "foo"),
]


@pytest.mark.parametrize(("fields", "param"), SAMPLING, ids=str)
def test_sampling_fields(client: Any, fields: dict[str, Any], param: str | None) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": BEGINNING}), (CHAT, {"messages": MESSAGES})):
        status, blamed, message = client.error(path, **prompt, **fields)
        assert (status, blamed) == (400, param), message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": [5, True]}, "prompt"),
        ({"prompt": [[5], "a"]}, "prompt"),
        ({"prompt": [[[5]]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "a\ud800"}, "prompt"),
        ({"prompt": [[5]] * 1025}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "messages": MESSAGES}, "messages"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "backslashreplace").decode(),
)
def test_fields_of_completions(client: Any, fields: dict[str, Any], param: str) -> None:
    status, blamed, message = client.error(COMPLETIONS, **fields)
    assert (status, blamed) == (400, param) and message.startswith(f"{param}: "), message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": 5, "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({}, "messages"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": MESSAGES, "logprobs": 1}, "logprobs"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": MESSAGES, "echo": True}, "echo"),
    ],
    ids=str,
)
def test_fields_of_chats(client: Any, fields: dict[str, Any], param: str) -> None:
    status, blamed, message = client.error(CHAT, **fields)
    assert (status, blamed) == (400, param), message


@pytest.mark.parametrize(
    "fields",
    [
        *({"prompt": "x" * 2000}, {"prompt": BEGINNING, "max_tokens": 1000}, {"prompt": [5] * 128}),
        *({"prompt": BEGINNING, "min_tokens": 1000}, {"messages": MESSAGES, "min_tokens": 1000}),
        {"messages": MESSAGES, "max_completion_tokens": 1000, "max_tokens": 1},
    ],
    ids=str,
)
def test_more_than_the_model_has_positions_for(client: Any, fields: dict[str, Any]) -> None:
    response = client.post(COMPLETIONS if "prompt" in fields else CHAT, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "128 tokens" in error["message"]


TOO_MUCH: list[tuple[str, Any, str]] = [
    ("n", 129, "a number <= 128, got 129"),
    ("best_of", 129, "a number <= 128, got 129"),
    ("stop", ["a"] * 1001, "at most 1,000 items, got 1,001"),
    ("stop", "a" * 1001, "at most 1,000 characters in each, got 1,001"),
    ("stop", ["a", "a" * 1001], "at most 1,000 characters in each, got 1,001"),
    ("bad_words", ["a"] * 1001, "at most 1,000 items, got 1,001"),
    ("bad_words", ["a" * 101], "at most 100 characters in each, got 101"),
    ("logit_bias", {str(i): 0 for i in range(1025)}, "at most 1,024 items, got 1,025"),
    ("stop_token_ids", [5] * 129, "at most 128 items, got 129"),
    ("logprob_token_ids", [5] * 129, "at most 128 items, got 129"),
    ("allowed_token_ids", [5] * 2**19, "at most 262,144 items, got 524,288"),
    ("allowed_token_ids", [5] * 2**18, "at most {vocab_size} token ids, the vocabulary, got 262144"),
    ("metadata", {str(i): "" for i in range(17)}, "at most 16 items, got 17"),
    ("metadata", {"a" * 65: ""}, "at most 64 characters in each, got 65"),
    ("metadata", {"a": "b" * 513}, "at most 512 characters in each, got 513"),
    ("guided_choice", ["a"] * 100_001, "at most 100,000 items, got 100,001"),
    ("repetition_penalty", 1e39, "a number <= 1000, got 1e+39"),
]


@pytest.mark.parametrize(("name", "value", "expected"), TOO_MUCH, ids=lambda value: str(value)[:40])
def test_more_than_is_taken(client: Any, name: str, value: Any, expected: str) -> None:
    """What all of it would cost the event loop, or each step, others would wait for."""
    status, blamed, message = client.error(COMPLETIONS, prompt=BEGINNING, **{name: value})
    assert (status, blamed) == (400, name), message
    vocab_size = client.engine.facts.vocab_size
    assert message == f"{name}: expected {expected.format(vocab_size=vocab_size)}"


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_as_many_texts_as_are_looked_for(client: Any, name: str) -> None:
    assert client.post(COMPLETIONS, prompt=BEGINNING, **{name: ["Z"] * 1000}).status_code == 200


FAR_TOO_LONG = "x" * 100_000
FAR_TOO_LONG_CHAT = {"messages": [{"role": "user", "content": FAR_TOO_LONG}]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": ["a", FAR_TOO_LONG]}),
        (CHAT, FAR_TOO_LONG_CHAT),
        ("/tokenize", {"prompt": FAR_TOO_LONG}),
        ("/tokenize", FAR_TOO_LONG_CHAT),
    ],
    ids=["completions", "chats", "tokenize", "tokenize a chat"],
)
def test_far_more_than_the_model_has_positions_for(
    client: Any, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known by its characters, without the minute that its tokens would take."""
    monkeypatch.setattr(client.engine.texts, "tokenize", None)
    response = client.post(path, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == next(iter(fields))
    assert "128 tokens" in error["message"] and "100000 characters" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_many_times_too_long(client: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known by the beginning, unless some of its tokens are enough."""
    monkeypatch.setattr(client.http.app.state.service, "max_characters", 10**4)  # as if tokens were longer
    tokenized = client.watch_tokenizer(monkeypatch)
    long = "x" * 4000

    def ask(**fields: Any) -> Any:
        tokenized.clear()
        of_path = {"prompt": long} if path == COMPLETIONS else {"messages": [{"role": "user", "content": long}]}
        return client.post(path, max_tokens=1, **of_path, **fields)

    error = ask().json()["error"]
    assert error["code"] == "context_length_exceeded" and " you requested more than " in error["message"]
    assert [len(each) for each in tokenized] == [8 * 128]
    assert ask(truncate_prompt_tokens=5).status_code == 200
    assert [len(each) for each in tokenized] == [len(long)]


def test_nothing_is_tokenized_after_a_prompt_that_is_too_long(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized = client.watch_tokenizer(monkeypatch)
    response = client.post(COMPLETIONS, prompt=["a", "x" * 200, "b"])
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert tokenized == ["a", "x" * 200]
    monkeypatch.setattr(client.engine.texts, "detokenize", None)
    assert client.error(COMPLETIONS, prompt=[5] * 200, echo=True)[:2] == (400, "prompt")


def test_empty_fields_for_what_is_not_done_are_taken(client: Any) -> None:
    empty = {"tools": [], "functions": None, "tool_choice": "none", "modalities": ["text"], "audio": None}
    without_effect = {"user": "a", "metadata": {"b": "c"}, "store": True, "service_tier": "auto", "suffix": None}
    client.answer(CHAT, messages=MESSAGES, max_tokens=1, **empty)
    client.answer(COMPLETIONS, prompt=BEGINNING, max_tokens=1, **without_effect)


def test_fields_without_effect_change_nothing(client: Any) -> None:
    """Catches a field of OpenAI's API or vLLM's that is refused although it has no effect here, and a null that is no
    gap."""
    fields = {
        "service_tier": ["auto", "default", "flex", "scale", "priority", "fast", None],
        "verbosity": ["low", "medium", "high", None],
        "reasoning_effort": ["none", "minimal", "low", "medium", "high", "xhigh", "max", None],
        "prediction": [
            {"type": "content", "content": "the rest"},
            {"type": "content", "content": [{"type": "text", "text": "the rest"}]},
            None,
        ],
        "prompt_cache_options": [{}, {"mode": "implicit", "ttl": "30m"}, {"mode": "explicit"}, None],
        "prompt_cache_retention": ["in_memory", "in-memory", "24h"],
        "spaces_between_special_tokens": [True, False, None],
        "request_id": ["", "a b/ü", None],
        "documents": [[], None],
        "kv_transfer_params": [{}, None],
        "logits_processors": [[], None],
        "mm_processor_kwargs": [{}, None],
        "prompt_embeds": [[], None],
        "repetition_detection": [{}, None],
        "return_weight_versions": [False, None],
        "vllm_xargs": [{}, None],
        "echo": [False, None],
        "some_new_field": [None],
        "response_format": [{"type": "text", "some_new_field": None}],
    }
    for path, prompt in ((COMPLETIONS, {"prompt": BEGINNING}), (CHAT, {"messages": MESSAGES})):
        body = {**prompt, "max_tokens": 1, "temperature": 0}
        [plain] = client.answer(path, **body)["choices"]
        for i in range(8):
            several = {name: values[i % len(values)] for name, values in fields.items()}
            assert client.answer(path, **body, **several)["choices"] == [plain]
        for options in ({"include_obfuscation": True}, {"include_obfuscation": False, "some_new_field": None}):
            assert client.events(path, **body, stream_options=options)
    assert client.answer("/tokenize", prompt="a", some_new_field=None) == client.answer("/tokenize", prompt="a")


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": BEGINNING}), (CHAT, {"messages": MESSAGES})])
def test_an_answer_says_its_tier_if_it_was_asked_for_one(client: Any, path: str, prompt: dict[str, Any]) -> None:
    """Catches a tier that the server does not have, and a tier in an answer whose client knows none."""
    body = {**prompt, "max_tokens": 2}
    for tier in ("auto", "flex", "scale"):
        told = [client.answer(path, **body, service_tier=tier), *client.events(path, **body, service_tier=tier)]
        assert [each["service_tier"] for each in told] == ["default"] * len(told)
    for tiers in ({}, {"service_tier": None}):
        told = [client.answer(path, **body, **tiers), *client.events(path, **body, **tiers)]
        assert not any("service_tier" in each for each in told)


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": BEGINNING}), (CHAT, {"messages": MESSAGES})])
def test_an_answer_says_what_gave_it(client: Any, path: str, prompt: dict[str, Any]) -> None:
    """Whole, and each chunk of a stream."""
    told = [client.answer(path, **prompt, max_tokens=2), *client.events(path, **prompt, max_tokens=2)]
    assert {each["system_fingerprint"] for each in told} == {client.engine.facts.system_fingerprint}


def test_the_template_gets_the_effort(speaker_path: str, serve: Any) -> None:
    """Catches an effort that is taken and changes nothing, although the template has a use for it."""
    template = "{{ messages[0].content }}{{ reasoning_effort }}"
    with serve(LLMEngine(speaker_path), chat_template=template) as client:
        sizes = {
            effort: client.answer(CHAT, messages=MESSAGES, max_tokens=1, reasoning_effort=effort)["usage"][
                "prompt_tokens"
            ]
            for effort in (None, "low", "medium")
        }
        assert sizes[None] < sizes["low"] < sizes["medium"]
        client.answer(COMPLETIONS, prompt=BEGINNING, max_tokens=1, reasoning_effort="low")


def test_what_the_tokenizer_refuses_is_said_of_the_field(client: Any) -> None:
    status, param, message = client.error("/detokenize", tokens=[5, 10**6])
    assert (status, param) == (400, "tokens") and message.startswith("tokens: expected an int in [0, "), message
    status, param, message = client.error("/tokenize", prompt="a\ud800")
    assert (status, param) == (400, "prompt") and message.startswith("prompt: expected text that UTF-8"), message


@pytest.mark.parametrize(
    ("fields", "param", "expected"),
    [
        ({"a\ud800": 1}, None, "body: expected field names of text that UTF-8 can write, got 'a\\ud800'"),
        ({"stop": "a\ud800"}, "stop", "stop: expected text that UTF-8 can write, got 'a\\ud800'"),
        ({"stream_options": {"a\ud800": 1}}, "stream_options", "stream_options: expected text that UTF-8 can write"),
    ],
)
def test_text_that_utf8_cannot_write(client: Any, fields: dict[str, Any], param: str | None, expected: str) -> None:
    """Such a name of a field was told as a body that is no object."""
    status, blamed, message = client.error(COMPLETIONS, prompt="a", **fields)
    assert (status, blamed) == (400, param) and message.startswith(expected), message


def test_the_forms_of_a_field_are_those_of_the_route(client: Any) -> None:
    assert client.error("/tokenize", prompt=["a"]) == (400, "prompt", "prompt: expected a string, got ['a']")
    for fields, got in (({}, "none"), ({"prompt": "a", "messages": MESSAGES}, "both")):
        message = f"prompt: expected either prompt or messages, got {got}"
        assert client.error("/tokenize", **fields) == (400, "prompt", message)


def test_a_path_with_a_slash_more_is_none(client: Any) -> None:
    """Catches a redirect, which would leave out the path under which a proxy serves the server."""
    response = client.http.post(f"{COMPLETIONS}/", json={"prompt": BEGINNING}, follow_redirects=False)
    assert client.error_of(response) == (404, None, f"Not Found: POST {COMPLETIONS}/")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_an_unknown_model(client: Any, path: str) -> None:
    body = {CHAT: {"messages": MESSAGES}, "/detokenize": {"tokens": [5]}}.get(path, {"prompt": "a"})
    response = client.post(path, **{**body, "model": "gpt\ud800"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "logit_bias": {"' + b"9" * 5000 + b'": 1}}',
        b"[" * 100_000,
        b'{"prompt": ' * 5000 + b"1" + b"}" * 5000,
    ],
    ids=lambda content: content[:30].decode("latin-1"),
)
def test_bodies_that_are_no_request(client: Any, content: bytes) -> None:
    response = client.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    status, _, message = client.error_of(response)
    assert status == 400
    assert len(message) < 1100
    if content.startswith((b"[[", b'{"prompt": {"prompt"')):
        expected = "JSON in UTF-8 that is not nested too deeply and has no integer of more than 4,300 digits"
        assert message == f"body: expected {expected}"


@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}]
)
def test_a_body_that_is_not_announced_as_json(client: Any, headers: dict[str, str]) -> None:
    """Any page in a browser may send these to a server on the same machine, and nothing else."""
    content = json.dumps({"prompt": BEGINNING})
    assert client.http.post(COMPLETIONS, content=content, headers=headers).status_code == 415


def test_a_body_that_is_compressed(client: Any) -> None:
    """Catches an error that says that the body is no JSON, which its sender knows to be JSON."""
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = client.http.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert client.error_of(response) == (415, None, "Content-Encoding: expected none, got 'gzip'")


@pytest.mark.parametrize(("path", "fields"), [(COMPLETIONS, {"prompt": BEGINNING}), (CHAT, {"messages": MESSAGES})])
@pytest.mark.parametrize("stream", [False, True])
def test_the_id_of_an_answer_is_in_the_log(
    client: Any, caplog: pytest.LogCaptureFixture, path: str, fields: dict[str, Any], stream: bool
) -> None:
    """Beside that of the header, so whoever has either finds the request."""
    with caplog.at_level(logging.INFO, "pagedattn_serve"):
        response = client.post(path, **fields, max_tokens=2, stream=stream)
    body = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
    [line] = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert line["id"] == body["id"] and body["id"].endswith(f"cmpl-{response.headers['x-request-id']}")


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_engine_has_the_id_that_its_log_has(
    speaker_path: str, serve: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Before a stream begins, and in its last event. The engine waits for the first event of a stream: an error that
    overtakes this event gets a response of its own."""
    has_begun = threading.Event()
    real_add_token, real_respond = Completion._add_token, EventStream._respond

    def fail(completion: Completion, token: Any) -> None:
        if len(completion.sequence.output_token_ids) == (2 if stream else 0):
            assert not stream or has_begun.wait(timeout=60)
            raise FloatingPointError("planted")
        return real_add_token(completion, token)

    async def respond(self: EventStream, send: Send) -> None:
        async def send_and_note(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body":
                has_begun.set()

        await real_respond(self, send_and_note)

    monkeypatch.setattr(Completion, "_add_token", fail)
    monkeypatch.setattr(EventStream, "_respond", respond)
    with serve(LLMEngine(speaker_path)) as client:
        if stream:
            first, *_, last = client.events("/v1/completions", prompt=BEGINNING)
            answer_id, message = first["id"], last["error"]["message"]
        else:
            status, _, message = client.error("/v1/completions", prompt=BEGINNING)
            assert status == 500
            [answer_id] = re.findall("cmpl-[0-9a-f]{32}", message)
    assert message.endswith(f"FloatingPointError: planted (request {answer_id})")
    [of_engine] = [record.getMessage() for record in caplog.records if "planted" in record.getMessage()]
    assert answer_id in of_engine
