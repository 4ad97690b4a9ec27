"""The tokenizer of a model's directory, and the tokens that end an output."""

import json
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


def eos_token_ids(model: str) -> set[int]:
    """The token ids that end an output: those of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = Path(model) / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if eos is not None:
            return set(eos) if isinstance(eos, list) else {eos}
    return set()
