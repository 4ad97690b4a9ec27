"""Environment variables that turn something on: PAGEDATTN_CHECK, PAGEDATTN_SANITIZE, PAGEDATTN_VLLM."""

import os


def is_on(variable: str) -> bool:
    """Whether the variable is 1. Unset, empty and 0 are no. Raises ValueError for anything else, as a check that is
    asked for by another word must not be left out without a word."""
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1, got {text!r}")
    return text == "1"
