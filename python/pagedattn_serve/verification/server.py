"""`pagedattn verify --url`: whether a server with OpenAI's API gives a prompt the same answer alone and beside others.

Only what every such server has is asked for: greedy completions with logprobs. How the server batches is its own
business; what is tried is one request at a time, and many at a time.
"""

import json
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from pagedattn_serve.errors import ArgumentError, ArgumentOSError, describe
from pagedattn_serve.verification.workload import MAX_TOKENS

KEY_VARIABLE = "OPENAI_API_KEY"  # as OpenAI's own client reads it
TIMEOUT = 600.0  # seconds for an answer
MAX_SHOWN = 200  # characters of an answer
NUM_AT_ONCE = 8
NUM_ROUNDS = 3
NUM_WORDS = (1, 2, 5, 9, 14, 20, 33, 47, 60, 75, 90, 120)  # of the prompts
WORDS = tuple(sorted(set(__doc__.split())))


class Sent(NamedTuple):
    """What the server said to a prompt. tokens: with the logprob of each; None if it told none."""

    text: str
    tokens: list[tuple[str, float]] | None
    fingerprint: str | None


class Compared(NamedTuple):
    """How one way of asking went. difference: the first, in words."""

    name: str
    num_requests: int
    num_different: int
    difference: str | None


class Server:
    """A server at a URL. Raises ArgumentOSError, in the name of `url`, where it does not answer as it should.

    model: None takes the first that the server lists.
    """

    def __init__(self, url: str, model: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            if not all("!" <= character <= "~" for character in key):
                raise ArgumentError(KEY_VARIABLE, "printable ASCII without spaces", "another character")
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = self._first_model() if model is None else model

    def _first_model(self) -> str:
        answer = self._ask("/v1/models")
        try:
            name = answer["data"][0]["id"]
        except (LookupError, TypeError):
            name = None
        if not isinstance(name, str):
            expected = f"a list of models from {self._url}/v1/models, or MODEL"
            raise ArgumentOSError("url", expected, json.dumps(answer)[:MAX_SHOWN])
        return name

    def complete(self, prompt: str) -> Sent:
        body = {"model": self.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 1}
        answer = self._ask("/v1/completions", body)
        try:
            choice = answer["choices"][0]
            text, tokens = choice["text"], _tokens_of(choice.get("logprobs"))
        except (AttributeError, LookupError, TypeError, ValueError):
            text, tokens = None, None
        if not isinstance(text, str):
            raise ArgumentOSError("url", "choices as OpenAI's API has them", json.dumps(answer)[:MAX_SHOWN])
        return Sent(text, tokens, answer.get("system_fingerprint"))

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = Request(self._url + path, None if body is None else json.dumps(body).encode(), self._headers)
        try:
            with urlopen(request, timeout=TIMEOUT) as response:
                return json.load(response)
        except HTTPError as error:
            said = b""
            with suppress(OSError, HTTPException):  # of an answer that is cut short
                said = error.read(300)
            got = f"{error.code}: {said.decode(errors='replace')}"
            raise ArgumentOSError("url", f"an answer from {request.full_url}", got) from None
        except (URLError, OSError, ValueError, HTTPException, RecursionError) as error:
            raise ArgumentOSError("url", f"an answer from {request.full_url}", describe(error)) from None


def _tokens_of(logprobs: Any) -> list[tuple[str, float]] | None:
    """In the form of completions, or in that of chats, which llama.cpp gives for both."""
    if not logprobs:
        return None
    if (content := logprobs.get("content")) is not None:
        return [(entry["token"], float(entry["logprob"])) for entry in content]
    return list(zip(logprobs["tokens"], map(float, logprobs["token_logprobs"]), strict=True))


def make_prompts() -> list[str]:
    """Of random words; every third begins like the one before."""
    random_numbers = random.Random(0)
    prompts: list[str] = []
    for i, count in enumerate(NUM_WORDS):
        words = prompts[-1].split() if i % 3 == 2 else []
        words += random_numbers.choices(WORDS, k=count - len(words))
        prompts.append(" ".join(words))
    return prompts


def verify_server(server: Server) -> Iterator[Compared]:
    """Each way of asking as it is done; the first is each prompt alone."""
    prompts = make_prompts()
    expected = [server.complete(prompt) for prompt in prompts]
    yield Compared("alone", len(prompts), 0, None)
    yield _compared("alone again", prompts, range(len(prompts)), expected, map(server.complete, prompts))
    order = [*range(len(prompts))] * NUM_ROUNDS
    random.Random(1).shuffle(order)
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        answers = pool.map(server.complete, [prompts[i] for i in order])
        yield _compared(f"{NUM_AT_ONCE} at once", prompts, order, expected, answers)


def _compared(
    name: str, prompts: Sequence[str], order: Sequence[int], expected: Sequence[Sent], answers: Iterator[Sent]
) -> Compared:
    reasons = [_difference(expected[i], answer) for i, answer in zip(order, answers, strict=True)]
    different = [(i, reason) for i, reason in zip(order, reasons, strict=True) if reason is not None]
    first = f"the prompt of {len(prompts[different[0][0]].split())} words: {different[0][1]}" if different else None
    return Compared(name, len(order), len(different), first)


def _difference(one: Sent, other: Sent) -> str | None:
    """Where two answers first differ, in words; None if they are the same."""
    if one.fingerprint != other.fingerprint:
        return f"system_fingerprint {one.fingerprint} alone, {other.fingerprint} here"
    for place, (token, another) in enumerate(zip(one.tokens or (), other.tokens or (), strict=False)):
        if token != another:
            return (
                f"output token {place} is {token[0]!r} of logprob {token[1]} alone, {another[0]!r} of {another[1]} here"
            )
    return None if one == other else f"the text is {one.text!r} alone, {other.text!r} here"
