"""The tokenizer, chat template and end tokens of a GGUF file, against the tokenizer that the file was made of."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_metaspace_tokenizer, make_model, make_tokenizer
from engine_runs import run
from gguf_files import tokenizer_fields, write_gguf
from transformers import PreTrainedTokenizerBase

from pagedattn_serve.cli import main
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.llm import LLM
from pagedattn_serve.loading.generation_config import eos_token_ids, generation_defaults
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.text.tokenizer import load_tokenizer

TEXTS = [
    "the cat and the hat",
    " the  end\n\n of 2026, isn't it?",
    "naïve 🙂\t x",
    "<s>the</s>mat",
    "",
    " ",
    "a<|im_end|>b",
]
TEMPLATE = "{% for message in messages %}{{ message.content }}</s>{% endfor %}"


def write(file: Path, tokenizer: PreTrainedTokenizerBase, kind: str = "gpt2", **more: Any) -> PreTrainedTokenizerBase:
    """A model with this tokenizer, and its tokenizer as it is read."""
    fields = tokenizer_fields(tokenizer, kind) | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    model = make_model("llama-gqa", vocab_size=len(tokenizer))
    write_gguf(file, model, tokenizer=fields, **{"tokenizer.chat_template": TEMPLATE})
    loaded: PreTrainedTokenizerBase = load_tokenizer(file, None)
    return loaded


def test_byte_level(tmp_path: Path) -> None:
    expected = make_tokenizer(tmp_path / "tokenizer", "<|im_end|>")
    actual = write(tmp_path / "m.gguf", expected)
    for text in TEXTS:
        token_ids = expected(text).input_ids
        assert actual(text).input_ids == token_ids, text
        for skip in (False, True):
            assert actual.decode(token_ids, skip_special_tokens=skip) == expected.decode(
                token_ids, skip_special_tokens=skip
            )
    assert (actual.bos_token, actual.eos_token) == ("<s>", "</s>")
    assert actual.chat_template == TEMPLATE


def test_sentencepiece(tmp_path: Path) -> None:
    """Merges come from the scores, bytes stand for what has no token, and each text begins with <s>."""
    expected = make_metaspace_tokenizer()
    actual = write(tmp_path / "m.gguf", expected, "llama")
    for text in ["the cat sat on the mat", "the  cat é🙂", " sat", "x", "cat\nthe"]:
        token_ids = expected(text).input_ids
        assert actual(text).input_ids == [1, *token_ids], text
        assert actual(text, add_special_tokens=False).input_ids == token_ids
        assert actual.decode(token_ids) == expected.decode(token_ids)


def test_a_file_that_says_more_of_its_texts(tmp_path: Path) -> None:
    """No space before a text, none of its ends or both; a token that is taken whole, as Gemma's runs of spaces."""
    tokenizer = make_metaspace_tokenizer()
    types = tokenizer_fields(tokenizer, "llama")["tokenizer.ggml.token_type"]
    types[tokenizer.get_vocab()["▁the"]] = 4
    file = tmp_path / "m.gguf"
    actual = write(file, tokenizer, "llama", add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    assert actual.convert_ids_to_tokens(actual("the cat").input_ids) == ["t", "h", "e", "▁cat", "</s>"]
    assert actual.decode(actual("cat the").input_ids, skip_special_tokens=True) == "cat the"
    actual = write(file, tokenizer, "llama", token_type=types, add_space_prefix=False)
    assert actual.convert_ids_to_tokens(actual("a▁the").input_ids) == ["<s>", "a", "▁the"]
    assert actual.convert_ids_to_tokens(actual("a the").input_ids)[1:] != ["a", "▁the"]


def test_scores_say_which_pair_is_merged_first(tmp_path: Path) -> None:
    """Not the ids. Of a text that is there twice, the first token counts."""
    tokenizer = make_metaspace_tokenizer()
    fields = tokenizer_fields(tokenizer, "llama")
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    tokens[-3:], scores[-3:] = ["na", "at", "▁the"], [-9000.0, -5.0, 0.0]
    actual = write(tmp_path / "m.gguf", tokenizer, "llama", tokens=tokens, scores=scores, add_space_prefix=False)
    assert actual.convert_ids_to_tokens(actual("nat").input_ids) == ["<s>", "n", "at"]
    assert actual.get_vocab()["▁the"] == tokens.index("▁the") < len(tokens) - 1


def test_user_defined_tokens_are_shown(tmp_path: Path) -> None:
    """<think> is none of the special tokens, which a text may leave out."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", "<think>")
    types = tokenizer_fields(tokenizer, "gpt2")["tokenizer.ggml.token_type"]
    types[tokenizer.get_vocab()["<think>"]] = 4
    actual = write(tmp_path / "m.gguf", tokenizer, token_type=types, padding_token_id=1)
    token_ids = actual("<think>cat</s>").input_ids
    assert actual.decode(token_ids, skip_special_tokens=True) == "<think>cat"
    assert token_ids[0] == tokenizer.get_vocab()["<think>"] and actual.pad_token == "</s>"


def test_what_tokenizers_do_by_their_words(tmp_path: Path) -> None:
    """Qwen2's composes characters. LLaMA 3's takes a word that is a token whole, whatever the merges."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    qwen2 = write(tmp_path / "m.gguf", tokenizer, pre="qwen2")
    assert qwen2("e\u0301").input_ids == qwen2("\u00e9").input_ids
    merges = tokenizer_fields(tokenizer, "gpt2")["tokenizer.ggml.merges"]
    merges = [merge for merge in merges if merge.replace(" ", "") != "the"]
    for words, is_whole in (("gpt-2", False), ("llama-bpe", True)):
        actual = write(tmp_path / "m.gguf", tokenizer, pre=words, merges=merges)
        tokens = actual.convert_ids_to_tokens(actual("the", add_special_tokens=False).input_ids)
        assert (tokens == ["the"]) == is_whole


@pytest.mark.parametrize(
    ("words", "text", "pieces"),
    [
        ("gpt-2", "in 1234's  x", ["in", " 1234", "'s", " ", " x"]),
        ("smollm", "in 12", ["in", " ", "1", "2"]),
        ("llama-bpe", "IN 1234'S", ["IN", " ", "123", "4", "'S"]),
        ("qwen2", "in 12\n\nx", ["in", " ", "1", "2", "\n\n", "x"]),
        ("tekken", "inNer 12/\nx", ["in", "Ner", " ", "1", "2", "/\n", "x"]),
    ],
)
def test_words(tmp_path: Path, words: str, text: str, pieces: list[str]) -> None:
    """As llama.cpp cuts texts by `tokenizer.ggml.pre`."""
    actual = write(tmp_path / "m.gguf", make_tokenizer(tmp_path / "tokenizer"), pre=words)
    cut = actual.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces


@pytest.mark.parametrize("words", ["llama3", "llama-v3", "llama-bpe", "falcon3", "tekken", "smaug-bpe", "qwen2"])
def test_words_that_begin_with_bos(tmp_path: Path, words: str) -> None:
    """Files that do not say whether a text begins with <s>: as llama.cpp has it by `tokenizer.ggml.pre`."""
    begins = words not in ("smaug-bpe", "qwen2")
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    actual = write(tmp_path / "m.gguf", tokenizer, pre=words)
    token_ids = actual("the cat", add_special_tokens=False).input_ids
    assert actual("the cat").input_ids == [0] * begins + token_ids
    assert write(tmp_path / "m.gguf", tokenizer, pre=words, add_bos_token=False)("the cat").input_ids == token_ids


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            dict(model="plamo2"),
            "tokenizer.ggml.model: expected gpt2 or llama in .*m.gguf, or a directory .*, got 'plamo2'",
        ),
        (dict(pre="poro-chat"), "tokenizer.ggml.pre: expected one of .*, or a directory .*, got 'poro-chat'"),
        (dict(pre=None), "tokenizer.ggml.pre: expected .*, got 'none'"),
        (dict(token_type=[1, 2]), "tokenizer.ggml.token_type: expected one for each of 280 tokens in .*m.gguf, got 2"),
        (dict(bos_token_id=280), "tokenizer.ggml.bos_token_id: expected one of the 280 tokens of .*m.gguf, got 280"),
        (dict(merges=None), "tokenizer.ggml.merges: expected "),
        (dict(merges=["zz qq"]), "tokenizer.ggml.merges: expected pairs of tokens that make tokens in .*m.gguf, got "),
    ],
)
def test_tokenizers_that_have_no_home_here(tmp_path: Path, fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        write(tmp_path / "m.gguf", make_tokenizer(tmp_path / "tokenizer"), **fields)


def test_a_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    """A directory for a file, a file for a directory; and a file without a tokenizer."""
    expected = make_tokenizer(tmp_path / "tokenizer")
    model = make_model("llama-gqa", vocab_size=280)
    write_gguf(tmp_path / "bare.gguf", model)
    assert load_tokenizer(tmp_path / "bare.gguf", None) is None
    assert load_tokenizer(tmp_path / "bare.gguf", tmp_path / "tokenizer").get_vocab() == expected.get_vocab()
    write(tmp_path / "m.gguf", expected)
    assert load_tokenizer(tmp_path / "tokenizer", tmp_path / "m.gguf").get_vocab() == expected.get_vocab()


def test_ends_and_defaults(tmp_path: Path) -> None:
    """What the file names as an end, what ends an output by its name as well, and how the file samples."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", "<|im_end|>", "<|other|>")
    file = tmp_path / "m.gguf"
    write(file, tokenizer)
    assert eos_token_ids(file) == {1, 2}
    write(file, tokenizer, eot_token_id=3, eom_token_id=5, eos_token_id=7)
    assert eos_token_ids(file) == {2, 3, 5, 7}
    names = ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_utterance>", "_<EOT>", "<｜end▁of▁sentence｜>"]
    write(file, make_tokenizer(tmp_path / "more", "<|other|>", *names), eot_token_id=4)
    assert eos_token_ids(file) == {1, *range(3, 9)}
    tokens = ["a", "b", "<|endoftext|>"]  # as GPT-2's, whose last token is the first of a text as well
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 2}
    write_gguf(file, make_model("llama-gqa"), tokenizer=fields)
    assert eos_token_ids(file) == {2}
    write_gguf(file, make_model("llama-gqa"), tokenizer=fields | {"tokenizer.ggml.eos_token_id": None})
    assert eos_token_ids(file) == {2}
    fields = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    write_gguf(file, make_model("llama-gqa"), **fields)
    assert generation_defaults(file).params == SamplingParams(temperature=0.7, top_k=20)


def test_texts_and_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the engine, `LLM.chat` and the command line, as the same model does in a directory."""
    tokenizer = make_tokenizer(tmp_path / "dir")
    file = tmp_path / "m.gguf"
    fields = tokenizer_fields(tokenizer, "gpt2") | {"tokenizer.chat_template": TEMPLATE}
    model = write_gguf(file, make_model("qwen3", vocab_size=280), tokenizer=fields)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(tmp_path / "dir")
    tokenizer.save_pretrained(tmp_path / "dir")
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    outputs = [run(LLMEngine(path, num_blocks=20), ["the cat"], params)[0] for path in (file, tmp_path / "dir")]
    assert outputs[0].outputs == outputs[1].outputs
    chats = [
        LLM(path, num_blocks=20).chat([{"role": "user", "content": "hat"}], params) for path in (file, tmp_path / "dir")
    ]
    assert chats[0][0].prompt == chats[1][0].prompt == "hat</s>"
    assert chats[0][0].outputs == chats[1][0].outputs
    assert main(["generate", str(file), "--prompt", "the cat", "--max-tokens", "12", "--kv-cache-memory", "1MiB"]) == 0
    assert main(["info", str(file)]) == 0
    printed = capsys.readouterr().out
    assert outputs[0].outputs[0].text in printed
    assert "Qwen3ForCausalLM" in printed and "float32" in printed
