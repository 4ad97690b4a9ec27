"""The tokenizer of a model's directory."""

from os import PathLike
from typing import Any

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.loading.directory import find_directory, read_json

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_tokenizer(model: str | PathLike[str], tokenizer: str | PathLike[str] | None) -> Any | None:
    """The tokenizer of the directory `tokenizer`, or of the model's directory; None if the model's directory has none.
    Raises FileNotFoundError if the directory `tokenizer` has none, ValueError if a tokenizer cannot be loaded."""
    from transformers import AutoTokenizer  # here, as importing transformers takes longer than all of this package

    directory = find_directory("model", model) if tokenizer is None else find_directory("tokenizer", tokenizer)
    if directory is None or not any((directory / name).is_file() for name in FILES):
        if tokenizer is None:
            return None
        raise FileNotFoundError(f"tokenizer: expected a directory with one of {', '.join(FILES)}, got {tokenizer}")
    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # of any type, mostly without the name of the file
        for file in sorted(directory.glob("*.json")):
            read_json(file)
        reason = " ".join(str(error).split())
        raise ValueError(f"tokenizer: cannot load that of {directory}: {type(error).__name__}: {reason}") from None


def bad_word_ids(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word where a text begins with it, and where it follows a space, as in vLLM. Most tokenizers
    give the two places different ids. Raises ValueError for a word without token ids."""
    found: dict[tuple[int, ...], None] = {}  # in order, each once
    for word in words:
        bare = word.lstrip() or word
        spellings = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in (bare, f" {bare}")]
        if not any(spellings):
            raise ArgumentError("bad_words", "words that the tokenizer has tokens for", repr(word))
        found.update(dict.fromkeys(filter(None, spellings)))
    return tuple(found)
