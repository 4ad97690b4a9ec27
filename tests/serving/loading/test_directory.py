"""Where a model is looked for: a directory, a home, Hugging Face's cache; never the network."""

import shutil
import socket
from pathlib import Path

import pytest
from engine_runs import run, token_ids
from huggingface_hub import constants

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.loading.directory import find_directory, model_directory, read_json
from pagedattn_serve.sampling_params import SamplingParams

REPO = "someone/a-model"
COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_model: str) -> Path:
    """The text model as a snapshot of REPO, laid out as huggingface_hub does it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--someone--a-model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    shutil.copytree(text_model, repo / "snapshots" / COMMIT)
    return repo / "snapshots" / COMMIT


def test_a_snapshot_in_the_cache(cached: Path, text_model: str) -> None:
    """Config, weights, tokenizer and end tokens come from there."""
    assert find_directory("model", REPO) == model_directory(REPO) == cached
    params = SamplingParams(temperature=0, max_tokens=5)
    engine, expected = LLMEngine(REPO, num_blocks=8), LLMEngine(text_model, num_blocks=8)
    assert engine.tokenizer is not None
    assert token_ids(run(engine, [[1, 2, 3]], params)) == token_ids(run(expected, [[1, 2, 3]], params))
    assert LLMEngine(text_model, tokenizer=REPO, num_blocks=8).tokenizer is not None


def test_a_directory_wins_over_the_cache(cached: Path, text_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cached.parents[2])
    shutil.copytree(text_model, REPO)
    assert find_directory("model", REPO) == Path(REPO)


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(OSError, match=r"^model: expected a directory, got 'x+\.\.\. .*\(File name too long\)$"):
        find_directory("model", "x" * 1000)


def test_a_home_directory(text_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(text_model).parent))
    assert model_directory(f"~/{Path(text_model).name}") == Path(text_model)
    assert LLMEngine(f"~/{Path(text_model).name}", num_blocks=8).tokenizer is not None


@pytest.mark.parametrize("name", [REPO, "no/such/model", "./model", "~/model", "gpt2", "", "a" * 200, "x--y/z", "/no"])
def test_what_is_nowhere(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The name of a repository comes with the command that downloads it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    advice = (
        rf" \(a repository of Hugging Face is downloaded with `hf download {REPO}`, or with allow_download\)"
        if name == REPO
        else ".*"
    )
    with pytest.raises(
        FileNotFoundError, match=f"^model: expected a directory with a config.json, got {name}{advice}$"
    ):
        LLMEngine(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            ("{", "Expecting property name"),
            ("3", "int"),
            ("[1]", "list"),
            ("", "Expecting value"),
            ("\x80", ".*decode"),
        ),
        ("[" * 10**5, "lists or objects that are nested too deeply"),
    ],
)
def test_a_file_that_holds_no_object(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^{file}: expected a JSON object, got {message}"):
        read_json(file)
