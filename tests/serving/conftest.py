"""Checkpoints, made once for all tests of the serving layer. Nothing may write to their directories."""

from pathlib import Path

import pytest
from checkpoints import GPT2S, LLAMAS, Checkpoint, make_checkpoint, make_text_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase


@pytest.fixture(scope="session", params=[*LLAMAS, *GPT2S])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A random checkpoint without a tokenizer, of each architecture and shape in turn."""
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One of them, for what does not hang on the architecture."""
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random LLaMA and its tokenizer."""
    directory = tmp_path_factory.mktemp("text_model")
    make_text_model(directory)
    return str(directory)


@pytest.fixture(scope="session")
def tokenizer(text_model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of every checkpoint here that has one."""
    return AutoTokenizer.from_pretrained(Path(text_model))
