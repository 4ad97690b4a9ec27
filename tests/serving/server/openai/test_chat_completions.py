"""/v1/chat/completions: messages in, OpenAI's form of the answer out."""

from typing import Any

import pytest
from checkpoints import BEGINNING, EOS, SPEECH
from pydantic import TypeAdapter

from pagedattn_serve.server.openai.chat import ChatCompletionResponse

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": BEGINNING}]


def test_the_next_message(client: Any) -> None:
    answer = client.answer(PATH, messages=MESSAGES, temperature=0)
    TypeAdapter(ChatCompletionResponse).validate_python(answer, strict=True)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    said = {key: value for key, value in choice["message"].items() if value is not None}
    assert said == {"role": "assistant", "content": SPEECH}
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("stop", 0, None)


def test_content_in_parts(client: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": BEGINNING}]}]
    assert client.answer(PATH, messages=messages, temperature=0)["choices"][0]["message"]["content"] == SPEECH


@pytest.mark.parametrize("arguments", ['{"a": 1}', "[1]", "{"], ids=["left out", "no object", "no JSON"])
def test_a_call_that_cannot_stand_in_the_prompt(client: Any, arguments: str) -> None:
    """The template writes contents alone, so that a call would vanish."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
    status, param, message = client.error(PATH, messages=messages)
    assert (status, param) == (400, "messages")
    place = "messages[1].tool_calls[0]" + (".function.arguments" if arguments != '{"a": 1}' else "")
    assert message.startswith(f"{place}: expected ")


def test_what_a_client_sends_back_is_taken(client: Any) -> None:
    """An assistant's message as openai's client dumps it, with all the fields that it has."""
    empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": " cat", **empty}]
    assert client.answer(PATH, messages=messages, temperature=0)["choices"][0]["message"]["content"] == SPEECH


def test_the_default_is_what_fits(client: Any) -> None:
    answer = client.answer(PATH, messages=MESSAGES, temperature=0, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == client.engine.facts.max_model_len


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 9, "max_completion_tokens": 3}]
)
def test_both_names_of_max_tokens(client: Any, fields: dict[str, int]) -> None:
    assert client.answer(PATH, messages=MESSAGES, **fields)["usage"]["completion_tokens"] == 3


def test_n(demo: Any) -> None:
    choices = demo.answer(PATH, messages=MESSAGES, n=3, seed=1, max_tokens=8)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in choices}) == 3


def test_logprobs(client: Any) -> None:
    [choice] = client.answer(PATH, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    for token in content:
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0] == {name: token[name] for name in ("token", "logprob", "bytes")}
    assert b"".join(bytes(token["bytes"]) for token in content) == SPEECH.encode()
    assert content[0]["bytes"] == list(content[0]["token"].encode())


@pytest.mark.parametrize("fields", [{}, {"skip_special_tokens": False}, {"stream": True}])
def test_bytes_of_the_tokens_are_those_of_the_answer(client: Any, fields: dict[str, Any]) -> None:
    """Also of tokens that are parts of characters. The end-of-sequence token is no part of the answer."""
    answer = "né🙂日本"
    body = {"messages": MESSAGES, "guided_choice": [answer], "logprobs": True, "top_logprobs": 3, **fields}
    if body.pop("stream", False):
        choices = [event["choices"][0] for event in client.events(PATH, **body)]
    else:
        choices = client.answer(PATH, **body)["choices"]
    content = [token for choice in choices for token in (choice["logprobs"] or {"content": []})["content"]]
    assert b"".join(bytes(token["bytes"]) for token in content) == answer.encode()
    assert "".join(token["token"] for token in content) == answer + EOS
    assert all(each["bytes"] is not None for token in content for each in token["top_logprobs"])


def test_logprobs_of_named_tokens(client: Any) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "logprobs": True, "return_tokens_as_token_ids": True}
    [choice] = client.answer(PATH, logprob_token_ids=[5, 6], max_tokens=3, **body)["choices"]
    for token in choice["logprobs"]["content"]:
        assert {each["token"] for each in token["top_logprobs"]} == {"token_id:5", "token_id:6", token["token"]}
        assert token["top_logprobs"] == sorted(token["top_logprobs"], key=lambda each: -each["logprob"])


def test_no_top_logprobs_where_none_are_asked_for(client: Any) -> None:
    [choice] = client.answer(PATH, messages=MESSAGES, temperature=0, logprobs=True, max_tokens=2)["choices"]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[], []]


def test_ids_as_the_names_of_tokens(client: Any) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = client.answer(PATH, messages=MESSAGES, temperature=0, max_tokens=4, **asked)["choices"]
    content = choice["logprobs"]["content"]
    assert [token["token"] for token in content] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(each["token"].startswith("token_id:") for token in content for each in token["top_logprobs"])
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == choice["message"]["content"]


def test_prompt_logprobs(client: Any) -> None:
    answer = client.answer(PATH, messages=MESSAGES, max_tokens=1, prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert all(len(each) == 1 for each in answer["prompt_logprobs"][1:])


def test_special_tokens_are_the_templates_alone(client: Any) -> None:
    by_chat = client.answer("/tokenize", messages=MESSAGES)["tokens"]
    assert by_chat == client.answer("/tokenize", prompt=BEGINNING, add_special_tokens=False)["tokens"]


def test_the_tokens_of_a_message_that_goes_on(tools: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure,"}]
    fields = {"messages": messages, "continue_final_message": True}
    answer = tools.answer(PATH, **fields, return_token_ids=True, max_tokens=1)
    assert tools.answer("/tokenize", **fields)["tokens"] == answer["prompt_token_ids"]
    assert tools.error("/tokenize", **fields, add_generation_prompt=True)[:2] == (400, "continue_final_message")
