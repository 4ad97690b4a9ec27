"""Checkpoints, made once for all tests of the serving layer. Nothing may write to their directories."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import (
    BEGINNING,
    SPEECH,
    TOKENIZER_SIZE,
    VARIANTS,
    Checkpoint,
    make_checkpoint,
    make_model,
    make_speaking_model,
    make_text_model,
    make_tokenizer,
)
from slow_engine import slowed
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from warm_ranks import StartedRanks

from pagedattn_serve.distributed import launch
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.execution.model_runner import ModelRunner


@pytest.fixture(scope="session")
def get_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """get_checkpoint(name) is the checkpoint of this name in VARIANTS."""
    return functools.cache(lambda name: make_checkpoint(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def get_repeater(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """get_repeater(name) is the one of VARIANTS with 5 tokens: whatever it says, it has said something like that
    before."""
    return functools.cache(
        lambda name: make_checkpoint(name, tmp_path_factory.mktemp(f"{name}-repeater"), vocab_size=5)
    )


@pytest.fixture(scope="session")
def repeater(get_repeater: Callable[[str], Checkpoint]) -> Checkpoint:
    """One of them, for what does not hang on the architecture."""
    return get_repeater("llama-gqa")


@pytest.fixture(params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, get_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """A random checkpoint without a tokenizer, of each architecture and shape in turn."""
    return get_checkpoint(request.param)


@pytest.fixture(scope="session")
def llama(get_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """One of them, for what does not hang on the architecture."""
    return get_checkpoint("llama-gqa")


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random LLaMA and its tokenizer."""
    directory = tmp_path_factory.mktemp("text_model")
    make_text_model(directory)
    return str(directory)


@pytest.fixture(scope="session")
def ending_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random LLaMA with the tokenizer, two end-of-sequence tokens, and 21 tokens that the tokenizer does not have."""
    directory = tmp_path_factory.mktemp("ending_model")
    make_tokenizer(directory)
    model = make_model("llama-gqa", vocab_size=TOKENIZER_SIZE + 21, eos_token_id=[0, 1], max_position_embeddings=1024)
    model.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def tokenizer(text_model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of every checkpoint here that has one."""
    return AutoTokenizer.from_pretrained(Path(text_model))


@pytest.fixture(scope="session")
def speaker_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that says SPEECH and then EOS after BEGINNING."""
    directory = tmp_path_factory.mktemp("speaker")
    make_speaking_model(directory, BEGINNING + SPEECH)
    return str(directory)


@pytest.fixture(scope="session")
def speaker(speaker_path: str) -> LLMEngine:
    return LLMEngine(speaker_path)


@pytest.fixture
def engine(text_model: str) -> LLMEngine:
    return LLMEngine(text_model, num_blocks=40)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what happens amid steps."""
    monkeypatch.setattr(ModelRunner, "execute", slowed(ModelRunner.execute))


@pytest.fixture(scope="module")
def ranks() -> Iterator[StartedRanks]:
    """For tests of engines with several ranks: the processes of these engines start fast."""
    started = StartedRanks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start_process", started.start)
        yield started
