"""Prompts that ask for what stands between two texts, for models that were trained to fill it in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Tokenize = Callable[[str, bool], list[int]]  # a text, and whether special tokens are added


@dataclass(frozen=True)
class _Tokens:
    """The tokens of one family: before the prefix, before the suffix, and before what is filled in; and what ends it.

    has_spaces: whether the tokenizer puts a space before each text, which the suffix must not have.
    """

    prefix: str
    suffix: str
    middle: str
    end: str
    has_spaces: bool = False


_FAMILIES = (
    _Tokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),  # Qwen 2.5 Coder
    _Tokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"),  # StarCoder
    _Tokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<｜end▁of▁sentence｜>"),  # DeepSeek Coder
    _Tokens("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", has_spaces=True),  # Code Llama
)
_ANCHOR = "☺"  # a text that joins with nothing


class Infilling:
    """How one tokenizer writes such a prompt. stop_token_ids: beside those of the model."""

    def __init__(self, tokens: _Tokens, vocabulary: dict[str, int]) -> None:
        self._ids = [vocabulary[text] for text in (tokens.prefix, tokens.suffix, tokens.middle)]
        self._has_spaces = tokens.has_spaces
        self.stop_token_ids = [vocabulary[tokens.end]] if tokens.end in vocabulary else []

    def prompt(self, tokenize: Tokenize, prefix: str, suffix: str, add_special_tokens: bool) -> list[int]:
        """Token ids that the middle follows. Raises as `tokenize`."""
        before, between, after = self._ids
        plain = tokenize("", False)
        special = tokenize("", True) if add_special_tokens else plain
        first = special[: len(special) - len(plain)]  # such as <s>
        if self._has_spaces:
            suffix_ids = tokenize(_ANCHOR + suffix, False)[len(tokenize(_ANCHOR, False)) :]
        else:
            suffix_ids = tokenize(suffix, False)
        return [*first, before, *tokenize(prefix, False), between, *suffix_ids, after]


def infilling_of(tokenizer: Any) -> Infilling | None:
    """None if the model has no such tokens."""
    vocabulary = tokenizer.get_vocab()
    for tokens in _FAMILIES:
        if {tokens.prefix, tokens.suffix, tokens.middle} <= vocabulary.keys():
            return Infilling(tokens, vocabulary)
    return None
