"""Text to token ids and back, for any thread."""

import threading
from typing import Any

from pagedattn_serve.config import check_bool, check_int, check_text
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.requests.prompts import to_ids


class Texts:
    """A tokenizer for one caller at a time, because transformers does not promise that a tokenizer is thread-safe.

    tokenizer: from transformers; None if the model's directory has none. vocab_size: the model's. lock: for whoever
    calls the tokenizer beside `tokenize` and `detokenize`.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.lock = threading.Lock()
        self._num_token_ids = max(vocab_size, 0 if tokenizer is None else len(tokenizer))

    @property
    def is_busy(self) -> bool:
        """Whether a thread is in the tokenizer. Then `tokenize` and `detokenize` wait for that thread."""
        return self.lock.locked()

    def tokenize(self, text: str, add_special_tokens: bool = True, name: str = "text") -> list[int]:
        """`LLMEngine.tokenize`; errors call the text `name`."""
        check_text(name, text)
        check_bool("add_special_tokens", add_special_tokens)
        if self.tokenizer is None:
            expected = "prompt_token_ids" if name == "prompt" else "none"
            raise ArgumentError(name, f"{expected}, as the model's directory has no tokenizer")
        with self.lock:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    def detokenize(self, token_ids: Any) -> str:
        """`LLMEngine.detokenize`."""
        token_ids = to_ids(token_ids, name="token_ids")
        if self.tokenizer is None:
            raise ArgumentError("token_ids", "none, as the model's directory has no tokenizer")
        for token_id in token_ids:
            check_int("token_ids", token_id, 0, self._num_token_ids - 1)
        with self.lock:
            return self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
