"""The tokenizer of a model's directory."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_tokenizer(model: str, tokenizer: str | None) -> Any | None:
    """The tokenizer in directory `tokenizer`, or that of the model's own; None if the model's directory has none.

    Raises FileNotFoundError if `tokenizer` is given and has none.
    """
    directory = Path(model if tokenizer is None else tokenizer)
    if any((directory / name).is_file() for name in FILES):
        return AutoTokenizer.from_pretrained(directory)
    if tokenizer is not None:
        raise FileNotFoundError(f"tokenizer: expected a directory with one of {', '.join(FILES)}, got {tokenizer}")
    return None
