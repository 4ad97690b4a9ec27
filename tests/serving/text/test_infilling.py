"""Prompts that ask for what stands between two texts: their tokens, by family."""

from functools import partial

import pytest
from checkpoints import make_metaspace_tokenizer, make_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from pagedattn_serve.text.infilling import infilling_of

FAMILIES = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<｜end▁of▁sentence｜>"),
}


def ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)


def put_bos_first(tokenizer: PreTrainedTokenizerBase) -> int:
    """Let the tokenizer put <s> before every text, unless it is told to add no special tokens. Returns its id."""
    bos = tokenizer.convert_tokens_to_ids("<s>")
    processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.backend_tokenizer.post_processor = processor  # type: ignore[attr-defined]
    return bos


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_tokens(family: str, tmp_path: object) -> None:
    """What a tokenizer writes before each prompt, such as <s>, comes first, and once."""
    tokenizer = make_tokenizer(tmp_path, *FAMILIES[family])  # type: ignore[arg-type]
    bos = put_bos_first(tokenizer)
    infilling = infilling_of(tokenizer)
    assert infilling is not None

    def tokenize(text: str, add_special_tokens: bool) -> list[int]:
        return ids(tokenizer, text, add_special_tokens)

    prefix, suffix, middle, end = tokenizer.convert_tokens_to_ids(list(FAMILIES[family]))
    expected = [prefix, *ids(tokenizer, "a cat"), suffix, *ids(tokenizer, " hat"), middle]
    assert infilling.prompt(tokenize, "a cat", " hat", False) == expected
    assert infilling.prompt(tokenize, "a cat", " hat", True) == [bos, *expected]
    assert infilling.stop_token_ids == [end]


def test_code_llama() -> None:
    """Its tokenizer puts a space before each text. The suffix goes on from what is filled in, and has none."""
    tokenizer = make_metaspace_tokenizer()
    names = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    bos = put_bos_first(tokenizer)
    infilling = infilling_of(tokenizer)
    assert infilling is not None

    def prompt(add_special_tokens: bool) -> list[int]:
        return infilling.prompt(partial(ids, tokenizer), "the cat", "the hat", add_special_tokens)

    token_ids = prompt(False)
    assert prompt(True) == [bos, *token_ids]
    between = token_ids.index(tokenizer.convert_tokens_to_ids("▁<SUF>"))
    pieces = tokenizer.convert_ids_to_tokens(token_ids)
    assert "".join(pieces[1:between]) == "▁the▁cat"
    assert "".join(pieces[between + 1 : -1]) == "the▁hat"
    assert (pieces[0], pieces[-1]) == ("▁<PRE>", "▁<MID>")
    assert infilling.stop_token_ids == [tokenizer.convert_tokens_to_ids("▁<EOT>")]


def test_a_model_without_such_tokens(tmp_path: object) -> None:
    assert infilling_of(make_tokenizer(tmp_path, "<fim_prefix>", "<fim_suffix>")) is None  # type: ignore[arg-type]
