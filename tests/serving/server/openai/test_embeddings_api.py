"""/v1/embeddings, /v1/rerank and /v1/score: what they answer is what LLM.embed gives, in the forms of their clients."""

import base64
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from checkpoints import MAX_LEN, TOKENIZER_SIZE, make_tokenizer
from embedders import make_embedder, make_reranker, reference_scores, reference_scores_of_ids

from pagedattn_serve import LLM, PoolingParams
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import cosine

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
TEXTS = ["the cat", "the hat sat on the mat", "end", "the end"]


@pytest.fixture(scope="module")
def embedder_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a head, by the mean of all tokens, with a tokenizer."""
    directory = tmp_path_factory.mktemp("embedder")
    make_embedder(directory, "qwen3", "mean_tokens", has_head=False, vocab_size=TOKENIZER_SIZE)
    make_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def llm(embedder_path: str) -> LLM:
    return LLM(embedder_path, num_blocks=40)


@pytest.fixture(scope="module")
def embedder(embedder_path: str, serve: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with serve(LLMEngine(embedder_path, num_blocks=40)) as client:
        yield client


def vectors(llm: LLM, prompts: Any, **params: Any) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(prompts, PoolingParams(**params), use_tqdm=False)]


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_the_forms_of_an_input(embedder: Any, llm: LLM, form: str) -> None:
    token_ids = [llm.llm_engine.tokenize(text) for text in TEXTS]
    of_form: dict[str, Any] = {"text": TEXTS[1], "texts": TEXTS, "ids": token_ids[1], "lists of ids": token_ids}
    number = len(TEXTS) if "s of" in form or form == "texts" else 1
    answer = embedder.answer(EMBEDDINGS, input=of_form[form], user="me", encoding_format="float")
    expected = vectors(llm, of_form[form])
    assert answer["data"] == [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(expected)]
    assert len(expected) == number
    num_tokens = sum(map(len, token_ids)) if number > 1 else len(token_ids[1])
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["id"].startswith("embd-") and answer["created"] > 0


def test_base64_and_dimensions(embedder: Any, llm: LLM) -> None:
    answer = embedder.answer(EMBEDDINGS, input=TEXTS, encoding_format="base64", dimensions=5)
    found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in answer["data"]]
    assert found == vectors(llm, TEXTS, dimensions=5)


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (EMBEDDINGS, {}, "input", "input: expected a value, got none"),
        (EMBEDDINGS, {"input": 5}, "input", "input: expected a string, a list of strings, a list of token"),
        (EMBEDDINGS, {"input": []}, "input", "input: expected 1 to 2,048 inputs, got 0"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input", "input: expected 1 to 2,048 inputs, got 2,049"),
        (EMBEDDINGS, {"input": [[5], []]}, "input", "input: expected one token at least, got none"),
        (EMBEDDINGS, {"input": [5, 280]}, "input", r"input: expected token ids in \[0, 279\], got 280"),
        (EMBEDDINGS, {"input": [[-1]]}, "input", r"input: expected token ids in \[0, 279\], got -1"),
        (EMBEDDINGS, {"input": [5] * (MAX_LEN + 1)}, "input", r"maximum context length is 128 tokens\..* 129 tokens"),
        (EMBEDDINGS, {"input": "a" * 10_000}, "input", f"maximum context length is {MAX_LEN} tokens"),
        (EMBEDDINGS, {"input": "\ud800"}, "input", "input: expected text that UTF-8 can write"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions", "dimensions: expected a number >= 1, got 0"),
        (EMBEDDINGS, {"input": "a", "dimensions": 49}, "dimensions", r"expected an int in \[1, 48\], got 49"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format: expected 'float'"),
        (EMBEDDINGS, {"input": "a", "priority": 1}, "priority", "priority: expected 0, as the scheduling policy"),
        (EMBEDDINGS, {"input": "a" * 10_000, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1, or 1 and"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "at most 128, the"),
        (EMBEDDINGS, {"input": [5], "truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "at most 128, the"),
        (SCORE, {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "at most 128"),
        (EMBEDDINGS, {"input": "a", "model": "another"}, "model", "model: expected tiny, got another"),
        (EMBEDDINGS, {"input": "a", "stream": True}, "stream", "stream: expected none, as it is not supported"),
        (RERANK, {"query": "a", "documents": []}, "documents", "documents: expected 1 to 2,048 inputs, got 0"),
        (RERANK, {"query": "a", "documents": "b"}, "documents", "documents: expected a list of strings or of objects"),
        (RERANK, {"query": "a", "documents": ["b", ""]}, "documents", "documents: expected one token at least"),
        (RERANK, {"query": "", "documents": ["b"]}, "query", "query: expected one token at least"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n: expected a number >= 0, got -1"),
        (RERANK, {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, "max_tokens_per_doc", ">= 0, got -1"),
        (RERANK, {"query": "a", "documents": ["b"] * 2049, "max_tokens_per_doc": 1}, "documents", "1 to 2,048 inputs"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "text_1: expected one text, or 1 as in text_2, got 2"),
        (SCORE, {"text_1": [], "text_2": []}, "text_2", "text_2: expected 1 to 2,048 inputs, got 0"),
        (SCORE, {"text_1": "a", "text_2": 5}, "text_2", "text_2: expected a string or a list of strings, got 5"),
    ],
)  # fmt: skip
def test_what_is_refused(embedder: Any, path: str, fields: dict[str, Any], param: str, message: str) -> None:
    status, found, text = embedder.error(path, **fields)
    assert (status, found) == (404 if param == "model" else 400, param), text
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("path", "field", "fields"), [(EMBEDDINGS, "input", {}), (RERANK, "documents", {"query": "the cat"})]
)
def test_nothing_is_tokenized_after_a_text_that_is_too_long(
    embedder: Any, path: str, field: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized = embedder.watch_tokenizer(monkeypatch)
    long = "a" * 300
    status, param, message = embedder.error(path, **fields, **{field: ["end", long, "the end"]})
    assert (status, param) == (400, field) and "maximum context length" in message
    assert tokenized == [*fields.values(), "end", long]


def test_a_prompt_as_long_as_the_model_takes(embedder: Any, llm: LLM) -> None:
    prompt = [5] * MAX_LEN
    [found] = embedder.answer(EMBEDDINGS, input=prompt)["data"]
    assert [found["embedding"]] == vectors(llm, [prompt])


def test_a_model_without_a_head_generates_nothing(embedder: Any) -> None:
    status, param, message = embedder.error("/v1/completions", prompt="the cat")
    assert (status, param) == (400, "model")
    assert message.startswith("model: expected one with a head (lm_head), to generate")


def test_documents_in_the_order_of_their_scores(embedder: Any, llm: LLM) -> None:
    scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    best = sorted(range(3), key=lambda i: -scores[i])
    documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]
    answer = embedder.answer(RERANK, query=TEXTS[0], documents=documents)
    assert answer["results"] == [
        {"index": i, "relevance_score": scores[i], "document": {"text": TEXTS[1 + i]}} for i in best
    ]
    num_tokens = sum(len(llm.llm_engine.tokenize(text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert answer["id"].startswith("rerank-")
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    answer = embedder.answer(RERANK, query=TEXTS[0], documents=documents, top_n=2, return_documents=False)
    assert answer["results"] == [{"index": i, "relevance_score": scores[i]} for i in best[:2]]


def test_scores(embedder: Any, llm: LLM) -> None:
    for first, second in [(TEXTS[0], TEXTS), (TEXTS, TEXTS[::-1]), (TEXTS[0], TEXTS[1])]:
        answer = embedder.answer(SCORE, text_1=first, text_2=second)
        expected = [each.outputs.score for each in llm.score(first, second, use_tqdm=False)]
        assert answer["data"] == [{"index": i, "object": "score", "score": each} for i, each in enumerate(expected)]
        assert (answer["object"], answer["model"]) == ("list", "tiny")


@pytest.mark.parametrize("most", [3, -1])
def test_the_first_tokens_of_a_text(embedder: Any, llm: LLM, most: int) -> None:
    """Also of a text that could keep the tokenizer for long; the end token stays, if there is one, and no padding."""
    kept = 3 if most == 3 else MAX_LEN
    token_ids = [5 + i % 40 for i in range(MAX_LEN + 7)]
    ended = [*token_ids[: kept - 1], 0]
    for given, left in ((token_ids, token_ids[:kept]), ([*token_ids, 0], ended), ([*token_ids, *[0] * 9], ended)):
        answer = embedder.answer(EMBEDDINGS, input=given, truncate_prompt_tokens=most)
        assert answer["data"][0]["embedding"] == vectors(llm, [left])[0]
        assert answer["usage"]["prompt_tokens"] == kept
    [answer] = embedder.answer(EMBEDDINGS, input=token_ids, truncate_prompt_tokens=most, truncation_side="left")["data"]
    assert answer["embedding"] == vectors(llm, [token_ids[-kept:]])[0]
    text = "the cat " + "sat on the mat " * 10_000 + "the end"
    for side, tokens in (
        ("right", llm.llm_engine.tokenize(text[:1000])[:kept]),
        ("left", llm.llm_engine.tokenize(text[-1000:])[-kept:]),
    ):
        options = {"truncate_prompt_tokens": most, "truncation_side": side}
        [answer] = embedder.answer(EMBEDDINGS, input=text, **options)["data"]
        a, end, of_text = vectors(llm, ["a", "end", tokens])
        assert answer["embedding"] == of_text
        ranked = embedder.answer(RERANK, query=text, documents=["end", text], **options)["results"]
        assert [(each["index"], each["relevance_score"]) for each in ranked] == [
            (1, cosine(of_text, of_text)),
            (0, cosine(of_text, end)),
        ]
        [scored] = embedder.answer(SCORE, text_1="a", text_2=text, **options)["data"]
        assert scored["score"] == cosine(a, of_text)
    for path, fields in ((RERANK, {"query": text, "documents": ["end"]}), (SCORE, {"text_1": "a", "text_2": text})):
        assert embedder.error(path, **fields)[0] == 400


LONG = "the cat and the hat sat on the mat; "  # more than five tokens, the first of which are whole words


def cut(engine: LLMEngine, text: str, most: int) -> str:
    return engine.detokenize(engine.tokenize(text)[:most])


def test_the_first_tokens_of_queries_and_documents(embedder: Any, llm: LLM) -> None:
    """Each on its own; also of a text that could keep the tokenizer for long. A text that is as short stays as it is,
    and a character is left out whose last tokens are cut off."""
    engine, long = llm.llm_engine, LONG * 10_000
    short, emoji = cut(engine, LONG, 4), "cat \N{GRINNING FACE}"
    assert len(engine.tokenize(emoji)) - len(engine.tokenize("cat ")) == 4  # tokens of one character
    documents = [long, short, emoji]
    of_query = cut(engine, LONG, 5)
    for most, kept in (
        (4, [short, short, "cat "]),
        (len(engine.tokenize(emoji)), [cut(engine, LONG, 6), short, emoji]),
    ):
        limits = {"max_tokens_per_query": 5, "max_tokens_per_doc": most}
        answer = embedder.answer(RERANK, query=long, documents=documents, return_documents=False, **limits)
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        scores = [each.outputs.score for each in llm.score(of_query, kept, use_tqdm=False)]
        assert found == dict(enumerate(scores))
        answer = embedder.answer(SCORE, text_1=long, text_2=documents, **limits)
        assert [each["score"] for each in answer["data"]] == scores
    assert answer["usage"]["prompt_tokens"] == sum(len(engine.tokenize(each)) for each in (of_query, *kept))
    for most in (0, MAX_LEN + 1):  # as without it
        limits = {"max_tokens_per_query": most, "max_tokens_per_doc": most}
        assert embedder.answer(RERANK, query=LONG, documents=documents[1:], **limits) == {
            **embedder.answer(RERANK, query=LONG, documents=documents[1:]),
            "id": ANY,
        }
        assert embedder.error(RERANK, query=LONG, documents=documents, **limits)[:2] == (400, "documents")
    status, param, message = embedder.error(RERANK, query="the", documents=["end", emoji[-1]], max_tokens_per_doc=1)
    assert (status, param) == (400, "max_tokens_per_doc") and "the tokens of one character at least, got 1" in message


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_scores_by_other_names(embedder: Any, names: tuple[str, str]) -> None:
    """An error has the name that came, or that goes with the name that came."""
    first, second = names
    answer = embedder.answer("/score", **{first: TEXTS[0], second: TEXTS[1:]})
    assert answer["data"] == embedder.answer(SCORE, text_1=TEXTS[0], text_2=TEXTS[1:])["data"]
    no_texts = "expected a string or a list of strings, got 5"
    wrong: list[tuple[Any, Any, str, str]] = [
        (TEXTS[0], 5, second, no_texts),
        (5, TEXTS[0], first, no_texts),
        (TEXTS[0], None, second if second != "items" else "documents", "expected a value, got none"),
        (None, TEXTS[0], first, "expected a value, got none"),
        (TEXTS[0], [], second, "expected 1 to 2,048 inputs, got 0"),
        (TEXTS[:2], TEXTS[:3], first, f"expected one text, or 3 as in {second}, got 2"),
    ]
    for of_first, of_second, param, message in wrong:
        found = embedder.error("/score", **{first: of_first, second: of_second, "text_1": None})
        assert found == (400, param, f"{param}: {message}")
    assert embedder.error("/score", **{first: "the " * 200, second: "end"})[:2] == (400, first)
    assert embedder.error("/score", **{first: "end", second: "end", "text_1": "end"})[:2] == (400, first)


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
def test_other_paths_of_rerank(embedder: Any, path: str) -> None:
    fields = {"query": TEXTS[0], "documents": TEXTS[1:]}
    message = "documents: expected a list of strings or of objects with a text, got 5"
    assert embedder.error(path, query=TEXTS[0], documents=5) == (400, "documents", message)
    assert embedder.answer(path, top_n=0, **fields)["results"] == embedder.answer(RERANK, **fields)["results"]


def test_a_reranker(tmp_path: Path, serve: Callable[..., AbstractContextManager[Any]]) -> None:
    make_reranker(tmp_path, "qwen3")
    engine = LLMEngine(str(tmp_path), num_blocks=40)
    scores = reference_scores(tmp_path, [TEXTS[0]] * 4, TEXTS).sigmoid().tolist()
    with serve(engine) as client:
        answer = client.answer(SCORE, text_1=TEXTS[0], text_2=TEXTS)
        assert [each["score"] for each in answer["data"]] == pytest.approx(scores, abs=1e-5)
        answer = client.answer(RERANK, query=TEXTS[0], documents=TEXTS)
        best = sorted(range(4), key=lambda i: -scores[i])
        assert [(each["index"], each["relevance_score"]) for each in answer["results"]] == [
            (i, pytest.approx(scores[i], abs=1e-5)) for i in best
        ]
        assert client.error(EMBEDDINGS, input="a")[:2] == (400, "model")
        status, param, message = client.error(RERANK, query="a" * 90, documents=["b" * 90])
        assert (status, param) == (400, "documents") and "maximum context length" in message
        pair = engine.tokenize("a" * 90) + engine.tokenize("b" * 90)
        for side, kept in (("right", pair[:100]), ("left", pair[-100:])):
            options = {"truncate_prompt_tokens": 100, "truncation_side": side}
            [result] = client.answer(RERANK, query="a" * 90, documents=["b" * 90], **options)["results"]
            expected = reference_scores_of_ids(tmp_path, [kept]).sigmoid().item()
            assert result["relevance_score"] == pytest.approx(expected, abs=1e-5)
        limits = {"max_tokens_per_query": 5, "max_tokens_per_doc": 4}
        answer = client.answer(RERANK, query=LONG, documents=[LONG * 9, "end"], **limits)
        pairs = [cut(engine, LONG, 5)] * 2, [cut(engine, LONG, 4), "end"]
        expected = reference_scores(tmp_path, *pairs).sigmoid().tolist()
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert found == pytest.approx(dict(enumerate(expected)), abs=1e-5)
        assert {each["index"]: each["document"]["text"] for each in answer["results"]} == {0: LONG * 9, 1: "end"}


def test_embeddings_of_a_model_that_generates(demo: Any) -> None:
    """Beside a completion, whose answer they do not change."""
    before = demo.answer("/v1/completions", prompt="A class", max_tokens=8, temperature=0)["choices"]
    [found] = demo.answer(EMBEDDINGS, input="A class")["data"]
    assert len(found["embedding"]) == 256
    assert demo.answer("/v1/completions", prompt="A class", max_tokens=8, temperature=0)["choices"] == before
