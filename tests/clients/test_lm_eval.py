"""lm-eval's `local-completions`, as a library: what it says of the demo model is what transformers say of it."""

from collections.abc import Callable
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from server_process import ServerProcess

TOLERANCE = 1e-3  # of a sum of log probabilities, in fp32
MAX_LENGTH = 512  # of the demo model
MAX_TOKENS = 48
STOP = ["\n\n", ". "]
CONTEXTS = [
    "The with statement",
    "A class",
    "If the iterable is empty, the function",
    "Python: é, 日本語, 🙂 and then",
    "Return the number of items in",
    "x",
    "Lists are mutable sequences, typically used to store collections of homogeneous items. " * 3,
    "The for statement is used to iterate over the elements of a sequence",
]
CONTINUATIONS = [" is", " can be used to wrap the execution of a block.", " zebra", " é🙂"]
ROLLING = ["The for statement is used to iterate over the elements of a sequence.", "é" * 300, "Raise an error. " * 200]
# Seven blocks for each of the eight prompts here, and three more for what follows: some are preempted.
SMALL_CACHE = ("--num-blocks", "40", "--no-prefix-caching")
LONG_CONTEXTS = [
    f"{i}. " + "The with statement is used to wrap the execution of a block with methods. " * 6 for i in range(8)
]


@pytest.fixture(scope="module")
def lm(server: ServerProcess, demo_model: str) -> Callable[..., LocalCompletionsAPI]:
    """lm(server, **options) is a client of it, with the tokenizer of the demo model."""

    def make(server: ServerProcess = server, **options: Any) -> LocalCompletionsAPI:
        return LocalCompletionsAPI(
            model=server.model,
            base_url=f"{server.url}/v1/completions",
            tokenizer=demo_model,
            max_length=MAX_LENGTH,
            max_retries=1,
            **options,
        )

    return make


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, idx) for idx, each in enumerate(arguments)]


PAIRS = [(context, continuation) for context in CONTEXTS for continuation in CONTINUATIONS]


@pytest.fixture(scope="module")
def expected_loglikelihoods(lm: Any, reference: Callable[..., Any]) -> list[tuple[float, bool]]:
    client = lm()
    return reference("loglikelihoods", [client._encode_pair(*pair) for pair in PAIRS])


@pytest.fixture(scope="module")
def expected_texts(reference: Callable[..., Any]) -> list[str]:
    return reference("greedy_texts", CONTEXTS, MAX_TOKENS, STOP)


WAYS = pytest.mark.parametrize(
    "options",
    [
        {"num_concurrent": 1, "batch_size": 1},
        {"num_concurrent": 1, "batch_size": 4},
        {"num_concurrent": 8, "batch_size": 1},
        {"num_concurrent": 8, "batch_size": 4},
        {"num_concurrent": 8, "batch_size": 1, "tokenized_requests": False},
    ],
    ids=str,
)


@WAYS
def test_loglikelihood(lm: Any, expected_loglikelihoods: list[tuple[float, bool]], options: dict[str, Any]) -> None:
    results = lm(**options).loglikelihood(instances("loglikelihood", PAIRS))
    assert_close(results, expected_loglikelihoods)


@WAYS
def test_generate_until(lm: Any, expected_texts: list[str], options: dict[str, Any]) -> None:
    assert generate(lm(**options), CONTEXTS, STOP) == expected_texts


def test_loglikelihood_rolling(lm: Any, reference: Callable[..., Any]) -> None:
    """Texts longer than the model's context, too, in windows that are disjoint."""
    client = lm(num_concurrent=8)
    assert len(client.tok_encode(ROLLING[-1])) > MAX_LENGTH
    results = client.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in ROLLING]))
    for text, result in zip(ROLLING, results, strict=True):
        windows = rolling_windows(client.tok_encode(text), client.prefix_token_id, MAX_LENGTH - 2)
        expected = sum(logprob for logprob, _ in reference("loglikelihoods", windows))
        assert result == pytest.approx(expected, abs=TOLERANCE)


def test_with_a_cache_that_is_too_small(
    lm: Any, get_server: Callable[..., ServerProcess], reference: Callable[..., Any]
) -> None:
    server = get_server(*SMALL_CACHE)
    client = lm(server, num_concurrent=8)
    assert generate(client, LONG_CONTEXTS, stop=[]) == reference("greedy_texts", LONG_CONTEXTS, MAX_TOKENS, [])
    metrics = server.metrics()
    assert metrics['num_preemptions_total{kind="recompute"}'] + metrics['num_preemptions_total{kind="swap"}'] > 0
    pairs = [(context, " is used to wrap") for context in LONG_CONTEXTS]
    results = client.loglikelihood(instances("loglikelihood", pairs))
    assert_close(results, reference("loglikelihoods", [client._encode_pair(*pair) for pair in pairs]))
    server.wait_until_idle()


def generate(client: LocalCompletionsAPI, contexts: list[str], stop: list[str]) -> list[str]:
    options = {"until": stop, "max_gen_toks": MAX_TOKENS, "do_sample": False, "temperature": 0}
    return client.generate_until(instances("generate_until", [(context, options) for context in contexts]))


def assert_close(results: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [is_greedy for _, is_greedy in results] == [is_greedy for _, is_greedy in expected]
    assert [logprob for logprob, _ in results] == pytest.approx([logprob for logprob, _ in expected], abs=TOLERANCE)


def rolling_windows(token_ids: list[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """(context, continuation) of each window of a text; the last one has what context fits before what is left."""
    windows = [([prefix], token_ids[:length])]
    for start in range(length, len(token_ids), length):
        new = token_ids[start : start + length]
        windows.append((token_ids[max(start + len(new) - length - 1, 0) : start], new))
    return windows
