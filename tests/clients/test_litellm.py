"""litellm: answers, streams, and errors as exceptions of its own."""

import asyncio
from collections.abc import Callable
from typing import Any

import litellm
import pytest
from server_process import ServerProcess

PROMPT = "The with statement"
MESSAGES = [{"role": "user", "content": PROMPT}]
KEY = "sk-of-this-test"
GREEDY = {"temperature": 0, "max_tokens": 12}

PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])


def options(server: ServerProcess, provider: str = "openai", key: str = KEY) -> dict[str, Any]:
    """How litellm finds the server."""
    model = f"{provider}/{server.model}"
    return {"model": model, "api_base": f"{server.url}/v1", "api_key": key, "num_retries": 0, "max_retries": 0}


@pytest.fixture(scope="module")
def expected_text(reference: Callable[..., Any]) -> str:
    [text] = reference("greedy_texts", [PROMPT], GREEDY["max_tokens"], [])
    return text


@pytest.fixture(scope="module")
def expected_answer(reference: Callable[..., Any]) -> str:
    """The demo model's template writes paragraphs."""
    [text] = reference("greedy_texts", [f"{PROMPT}\n\n"], GREEDY["max_tokens"], [])
    return text


@PROVIDERS
def test_chat(server: ServerProcess, expected_answer: str, provider: str) -> None:
    response = litellm.completion(messages=MESSAGES, **options(server, provider), **GREEDY)
    [choice] = response.choices
    assert choice.message.content == expected_answer
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert response.usage.completion_tokens == 12
    assert response.usage.total_tokens == response.usage.prompt_tokens + 12


@PROVIDERS
def test_stream_of_a_chat(server: ServerProcess, expected_answer: str, provider: str) -> None:
    stream = litellm.completion(
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **options(server, provider),
        **GREEDY,
    )
    chunks = list(stream)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == expected_answer
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == expected_answer
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12


@PROVIDERS
def test_chats_at_once(server: ServerProcess, expected_answer: str, provider: str) -> None:
    async def answer() -> str:
        response = await litellm.acompletion(messages=MESSAGES, **options(server, provider), **GREEDY)
        return response.choices[0].message.content

    async def stream() -> str:
        response = await litellm.acompletion(messages=MESSAGES, stream=True, **options(server, provider), **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in response])

    async def several() -> list[str]:
        return await asyncio.gather(*(answer() for _ in range(8)), *(stream() for _ in range(8)))

    assert asyncio.run(several()) == [expected_answer] * 16


def test_completion(server: ServerProcess, expected_text: str) -> None:
    response = litellm.text_completion(
        prompt=[PROMPT, PROMPT], logprobs=2, **options(server, "text-completion-openai"), **GREEDY
    )
    assert [choice.text for choice in response.choices] == [expected_text] * 2
    assert [choice.finish_reason for choice in response.choices] == ["length"] * 2
    assert response.usage.completion_tokens == 24


def test_stream_of_a_completion(server: ServerProcess, expected_text: str) -> None:
    stream = litellm.text_completion(prompt=PROMPT, stream=True, **options(server, "text-completion-openai"), **GREEDY)
    assert "".join(chunk.choices[0].text or "" for chunk in stream) == expected_text


def test_fields_of_sampling(server: ServerProcess) -> None:
    """OpenAI's by name, vLLM's in extra_body."""

    def texts(**fields: Any) -> list[str]:
        response = litellm.completion(messages=MESSAGES, max_tokens=12, **options(server), **fields)
        return [choice.message.content for choice in response.choices]

    drawn = texts(n=3, temperature=1.5, seed=7, presence_penalty=0.5, logit_bias={"5": -100})
    assert len(set(drawn)) == 3
    assert texts(n=3, temperature=1.5, seed=7, presence_penalty=0.5, logit_bias={"5": -100}) == drawn
    [greedy] = texts(temperature=0)
    assert texts(temperature=2, seed=1, extra_body={"top_k": 1}) == [greedy]
    word = greedy.split()[2]
    assert texts(temperature=0, stop=[word]) == [greedy[: greedy.index(word)]]


def test_logprobs(server: ServerProcess) -> None:
    response = litellm.completion(messages=MESSAGES, logprobs=True, top_logprobs=3, **options(server), **GREEDY)
    content = response.choices[0].logprobs.content
    assert len(content) == 12
    for token in content:
        assert token.token == token.top_logprobs[0].token
        assert len(token.top_logprobs) == 3


@pytest.fixture(scope="module")
def busy_server(get_server: Callable[..., ServerProcess]) -> ServerProcess:
    """It asks for a key, and lets one request run and one wait."""
    return get_server("--api-key", KEY, "--max-num-seqs", "1", "--max-waiting", "1")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "openai/none"}, litellm.NotFoundError),
        ({"temperature": 5}, litellm.BadRequestError),
        ({"max_tokens": -1}, litellm.BadRequestError),
        ({"messages": [{"role": "wizard", "content": "a"}]}, litellm.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, litellm.ContextWindowExceededError),
        ({"api_key": "sk-another"}, litellm.AuthenticationError),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(busy_server: ServerProcess, changes: dict[str, Any], error: type[Exception], stream: bool) -> None:
    with pytest.raises(error) as raised:
        litellm.completion(**{"messages": MESSAGES, "stream": stream, **options(busy_server), **changes})
    assert "expected" in str(raised.value) or "maximum context length" in str(raised.value)


def test_a_full_queue(busy_server: ServerProcess) -> None:
    """Of ten at once some are refused, as RateLimitError; the others are answered."""

    async def several() -> list[Any]:
        fields = {"messages": MESSAGES, "max_tokens": 400, "extra_body": {"ignore_eos": True}, **options(busy_server)}
        return await asyncio.gather(*(litellm.acompletion(**fields) for _ in range(10)), return_exceptions=True)

    results = asyncio.run(several())
    refused = [result for result in results if isinstance(result, Exception)]
    assert {type(error) for error in refused} == {litellm.RateLimitError}
    assert 1 <= len(refused) < 10
    assert all(result.usage.completion_tokens == 400 for result in results if result not in refused)
    busy_server.wait_until_idle()
