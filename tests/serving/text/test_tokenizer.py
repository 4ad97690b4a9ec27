"""Where the tokenizer comes from."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import Checkpoint, change_config, make_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pagedattn_serve.loading.directory import FIELDS, read_plain_config
from pagedattn_serve.text.tokenizer import bad_word_ids, load_tokenizer, turn_end_token_ids

TEXT = "the cat sat 🙂 é"


def test_the_model_s_own(text_model: str, llama: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> None:
    loaded = load_tokenizer(text_model, None)
    assert loaded is not None
    assert loaded(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert load_tokenizer(llama.path, None) is None
    assert load_tokenizer("no/such/model", None) is None  # the loader of the weights tells


def test_of_another_directory(text_model: str, llama: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> None:
    """The model's is not looked at, so it need not be there."""
    for model in (llama.path, "no/such/model", text_model):
        loaded = load_tokenizer(model, text_model)
        assert loaded is not None and loaded(TEXT).input_ids == tokenizer(TEXT).input_ids
    for model in (llama.path, text_model):
        with pytest.raises(FileNotFoundError, match=f"tokenizer: .*tokenizer.json.*, got {llama.path}$"):
            load_tokenizer(model, llama.path)


def test_tokenizer_json_alone(text_model: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    shutil.copy(Path(text_model) / "tokenizer.json", tmp_path)
    loaded = load_tokenizer("no/such/model", str(tmp_path))
    assert loaded is not None and loaded(TEXT).input_ids == tokenizer(TEXT).input_ids


def test_vocab_and_merges(text_model: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """As the checkpoints of GPT-2 and OPT have them."""
    bpe = json.loads((Path(text_model) / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(bpe["vocab"]))
    (tmp_path / "merges.txt").write_text("".join(f"{' '.join(pair)}\n" for pair in bpe["merges"]))
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="</s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **special}))
    loaded = load_tokenizer("no/such/model", str(tmp_path))
    assert loaded is not None
    assert loaded(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert loaded.decode(loaded(TEXT).input_ids) == TEXT


@pytest.mark.parametrize("model_type", [*FIELDS, "phi3", None])
def test_of_every_class_it_is_what_transformers_makes(text_model: str, tmp_path: Path, model_type: str | None) -> None:
    """Whatever a tokenizer_config.json says of the class: the right one, that of another family, or none."""
    shutil.copytree(text_model, tmp_path, dirs_exist_ok=True)
    bpe = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(bpe["vocab"]))
    (tmp_path / "merges.txt").write_text("".join(f"{' '.join(pair)}\n" for pair in bpe["merges"]))
    if model_type is None:
        (tmp_path / "config.json").unlink()
    else:
        of_others = dict(activation_function="relu", layer_norm_epsilon=1e-5, ffn_dim=9, word_embed_proj_dim=9)
        change_config(tmp_path, model_type=model_type, sliding_window=9, **of_others)
        plain = read_plain_config(json.loads((tmp_path / "config.json").read_text()))
        assert (plain is not None) == (model_type in FIELDS)
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for name in (
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
        "LlamaTokenizer",
        "GPT2Tokenizer",
        "Qwen2Tokenizer",
        None,
    ):
        said["tokenizer_class"] = name
        said["chat_template"] = "{{ messages[0].content }}"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
        loaded, expected = load_tokenizer(tmp_path, None), AutoTokenizer.from_pretrained(tmp_path)
        assert loaded is not None and type(loaded) is type(expected), name
        assert loaded(TEXT).input_ids == expected(TEXT).input_ids
        assert loaded.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
        assert repr(loaded) == repr(expected)
        assert loaded.chat_template == expected.chat_template


@pytest.mark.parametrize("model_type", ["gpt2", "own"])
def test_code_beside_a_tokenizer_is_not_run(
    text_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """Nor is anybody asked whether to run it, whether or not transformers has a tokenizer for the model_type."""
    shutil.copytree(text_model, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, model_type=model_type, activation_function="relu", layer_norm_epsilon=1e-5)
    said = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'it_ran')!r}, 'w')\nclass OwnTokenizer: pass\n")
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    if model_type == "own":
        with pytest.raises(ValueError, match=r"tokenizer: expected .* that transformers has, got code of its own"):
            load_tokenizer(tmp_path, None)
    else:
        expected = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
        assert type(load_tokenizer(tmp_path, None)) is type(expected)
    assert not asked and not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}', '{"tokenizer_class": 3}'])
def test_a_tokenizer_that_cannot_be_loaded(text_model: str, tmp_path: Path, name: str, content: str) -> None:
    """The file is named if it is no JSON object, the directory otherwise; what loads all the same is no error."""
    directory = tmp_path / "tokenizer"
    shutil.copytree(text_model, directory)
    (directory / name).write_text(content)
    is_object = content.startswith("{") and content != "{"
    where = directory if is_object else directory / name
    if name == "tokenizer_config.json" and content == '{"model": 3}':
        assert load_tokenizer(str(directory), None) is not None
        return
    with pytest.raises(ValueError, match=f"{where}(: |, got )"):
        load_tokenizer(str(directory), None)


def test_bad_words_begin_a_text_or_follow_a_space(tokenizer: PreTrainedTokenizerBase) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text).input_ids)

    assert ids(" cat") != ids("cat")
    assert bad_word_ids(tokenizer, ("cat", " the")) == (ids("cat"), ids(" cat"), ids("the"), ids(" the"))
    assert bad_word_ids(tokenizer, ("the cat", " cat", "cat")) == (
        ids("the cat"),
        ids(" the cat"),
        ids("cat"),
        ids(" cat"),
    )
    assert bad_word_ids(tokenizer, ("\n",)) == (ids("\n"), ids(" \n"))
    assert bad_word_ids(tokenizer, ()) == ()


def test_bad_words_are_tokens_of_the_word_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    """Without those that a tokenizer puts around a text; one spelling is enough, none is an error."""

    def with_bos(text: str, add_special_tokens: bool = True) -> Any:
        bare = [] if text.strip() != "cat" else tokenizer(text.strip()).input_ids
        return SimpleNamespace(input_ids=[0, *bare] if add_special_tokens else bare)

    assert bad_word_ids(with_bos, ("cat",)) == (tuple(tokenizer("cat").input_ids),)
    with pytest.raises(ValueError, match=r"^bad_words: expected words that the tokenizer has tokens for, got 'dog'"):
        bad_word_ids(with_bos, ("cat", "dog"))


def test_the_end_of_a_turn_is_that_of_chats(tmp_path: Path) -> None:
    """A model without a chat template has no turns."""
    tokenizer = make_tokenizer(tmp_path)
    assert turn_end_token_ids(tokenizer) == set()
    tokenizer.chat_template = "{{ messages }}"
    assert turn_end_token_ids(tokenizer) == {tokenizer.eos_token_id}
