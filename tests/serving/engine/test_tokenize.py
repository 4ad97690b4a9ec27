"""Text to token ids and back, by the engine, for whoever serves it from other threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import TOKENIZER_SIZE, Checkpoint, make_model, make_tokenizer, put_bos_first
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.generation_config import GenerationDefaults
from pagedattn_serve.pooling_params import Pooling
from pagedattn_serve.requests.inputs import InputProcessor, RequestArgs
from pagedattn_serve.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    """Of a tokenizer that puts <s> before a text."""
    directory = tmp_path_factory.mktemp("bos")
    make_tokenizer(directory)
    put_bos_first(directory)
    make_model("llama-gqa", vocab_size=TOKENIZER_SIZE + 3).save_pretrained(directory)
    return LLMEngine(directory, num_blocks=40)


@given(text=st.text(max_size=30))
def test_there_and_back(engine: LLMEngine, text: str) -> None:
    token_ids = engine.tokenize(text, add_special_tokens=False)
    assert engine.detokenize(token_ids) == text
    assert engine.tokenize(text) == [0, *token_ids]
    assert engine.detokenize([0, *token_ids]) == f"<s>{text}"


def test_tokens_are_those_of_a_prompt(engine: LLMEngine) -> None:
    engine.add_request("0", "the hat", SamplingParams(max_tokens=1))
    output = engine.abort_request("0")
    assert output is not None and output.prompt_token_ids == engine.tokenize("the hat")


def test_forms_of_token_ids(engine: LLMEngine) -> None:
    ids = engine.tokenize("the cat", add_special_tokens=False)
    for form in (tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids]):
        assert engine.detokenize(form) == "the cat"
    assert engine.tokenize("", add_special_tokens=False) == [] and engine.detokenize([]) == ""


def test_a_token_that_only_the_model_has(engine: LLMEngine) -> None:
    assert engine.detokenize([TOKENIZER_SIZE + 2]) == ""


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((5,), TypeError, "text: expected a string, got int"),
        ((None,), TypeError, "text: expected a string, got NoneType"),
        (("the", 1), TypeError, "add_special_tokens: expected a bool, got 1 of type int"),
        (
            ("a\udc80",),
            ValueError,
            "text: expected text that UTF-8 can write, got 'utf-8' codec can't encode character '\\udc80' in position "
            "1: surrogates not allowed",
        ),
    ],
)
def test_wrong_texts(engine: LLMEngine, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        engine.tokenize(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("token_ids", "error", "message"),
    [
        ([-1], ValueError, f"token_ids: expected an int in [0, {TOKENIZER_SIZE + 2}], got -1"),
        ([2**70], ValueError, f"token_ids: expected an int in [0, {TOKENIZER_SIZE + 2}], got {2**70}"),
        ("the", TypeError, "token_ids: expected a list of token ids, got str"),
        ([True], TypeError, "token_ids: expected an int, got True of type bool"),
    ],
)
def test_wrong_token_ids(engine: LLMEngine, token_ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        engine.detokenize(token_ids)
    assert str(caught.value) == message


def test_a_model_without_a_tokenizer(llama: Checkpoint) -> None:
    engine = LLMEngine(llama.path, num_blocks=40)
    with pytest.raises(ValueError, match=r"^text: expected none, as the model's directory has no tokenizer$"):
        engine.tokenize("the")
    with pytest.raises(ValueError, match=r"^token_ids: expected none, as the model's directory has no tokenizer$"):
        engine.detokenize([1])


class Encoding:
    input_ids = (1,)


class OneAtATime:
    """A tokenizer that notices two threads in it."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def __len__(self) -> int:
        return 2

    def __call__(self, text: str, **options: Any) -> Encoding:
        assert self._busy.acquire(blocking=False), "two threads in the tokenizer"
        time.sleep(1e-3)
        self._busy.release()
        return Encoding()

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self(str(token_ids))
        return "a"


def test_one_thread_at_a_time() -> None:
    inputs = InputProcessor(OneAtATime(), 2, 8, frozenset(), GenerationDefaults(SamplingParams()), Pooling(), 0)

    def use(i: int) -> None:
        assert inputs.texts.tokenize("a") == [1]
        assert inputs.texts.detokenize([1]) == "a"
        inputs.make_request(RequestArgs(str(i), "a", SamplingParams(bad_words=["a"])))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(16)))


def test_while_the_engine_decodes(engine: LLMEngine) -> None:
    """Text streams in one thread while others come and go in the tokenizer."""
    texts = [f"the cat {i} sat on the mat " * 20 for i in range(40)]
    engine.add_request("0", "the", SamplingParams(max_tokens=40, ignore_eos=True, temperature=0))
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda text: engine.detokenize(engine.tokenize(text, False)), texts)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert list(found) == texts
    assert len(outputs[0].outputs[0].token_ids) == 40 and outputs[0].error is None
