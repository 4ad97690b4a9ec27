"""Text from tokens as they come, without ever taking back what was given out."""

import copy
from collections.abc import Callable
from functools import partial
from os.path import commonprefix
from typing import Any, Protocol, Self

# Enough of the prompt for a tokenizer to decide whether the first new token starts with a space.
NUM_CONTEXT_TOKENS = 6
REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class IncrementalDetokenizer:
    """The text of one output.

    The text of a token can depend on the tokens before it (spaces), and can be incomplete without the tokens after it
    (several tokens with the bytes of one character). So text is always decoded from a few tokens back. It is held back
    while it ends in a replacement character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], *, skip_special_tokens: bool = True) -> None:
        self.text = ""
        self.skips_special_tokens = skip_special_tokens
        self._decode = _decoder(tokenizer, skip_special_tokens)
        self._token_ids = prompt_token_ids[-NUM_CONTEXT_TOKENS:]
        self._context_begin = 0  # text is decoded from here
        self._given_out = len(self._token_ids)  # tokens whose text is in `text`, or in the prompt

    def fork(self) -> Self:
        """One with the same text so far, which goes on by itself."""
        other = copy.copy(self)
        other._token_ids = list(self._token_ids)
        return other

    def add(self, token_id: int) -> None:
        """Append a token's text to `text`, unless it ends within a character."""
        self._token_ids.append(token_id)
        addition = self._pending_text()
        if addition and not addition.endswith(REPLACEMENT):
            self.text += addition
            self._context_begin = self._given_out
            self._given_out = len(self._token_ids)

    def finish(self) -> str:
        """Give out what was held back, and return it: no more tokens will complete it."""
        held_back = self._pending_text()
        self.text += held_back
        self._given_out = len(self._token_ids)
        return held_back

    @property
    def is_amid_text(self) -> bool:
        """Whether there is text before the next token, and no part of a character is held back."""
        if self._given_out < len(self._token_ids):
            return False
        if self._context_begin > 0:  # the tokens from there on have added text
            return True
        before = self._decode(self._token_ids)
        return bool(before) and not before.endswith(REPLACEMENT)

    def addition(self, token_id: int) -> str:
        """What `add` would append to `text` for this token."""
        self._token_ids.append(token_id)
        addition = self._pending_text()
        self._token_ids.pop()
        return "" if addition.endswith(REPLACEMENT) else addition

    def _pending_text(self) -> str:
        before = self._decode(self._token_ids[self._context_begin : self._given_out])
        after = self._decode(self._token_ids[self._context_begin :])
        if REPLACEMENT in after:
            # With one invalid byte token, every token of its run decodes to a replacement character, even the tokens
            # before it whose text was given out already. The text of the new tokens alone does not repeat that text.
            alone = self._decode(self._token_ids[self._given_out :])
            if alone.startswith(REPLACEMENT) and after.endswith(alone):
                return alone
        if after.startswith(before):
            return after[len(before) :]
        # If the prompt ends within a character, the output completes the character, and the prompt's text changes.
        return after[len(commonprefix((before, after))) :]  # noqa: RUF071 (of characters, not of paths)


def fast_backend(tokenizer: Any) -> Any | None:
    """The tokenizer of the package tokenizers that decodes for a tokenizer of transformers; None if none does so
    alone."""
    from transformers import PreTrainedTokenizerFast as Fast  # here, as the import takes long

    if isinstance(tokenizer, Fast) and (type(tokenizer).decode, type(tokenizer)._decode) == (Fast.decode, Fast._decode):
        return tokenizer.backend_tokenizer
    return None


def _decoder(tokenizer: Tokenizer, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`tokenizer.decode` with the options of a stream: to clean up spaces would change text given out already."""
    backend = fast_backend(tokenizer)
    if backend is not None:  # `decode` ends in this call. The call alone takes a sixth of the time.
        return partial(backend.decode, skip_special_tokens=skip_special_tokens)
    return partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
