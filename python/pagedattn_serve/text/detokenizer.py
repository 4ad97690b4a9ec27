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


class TokenTexts(dict[int, str]):
    """The text of each token alone, decoded when it is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        self[token_id] = text
        return text


class IncrementalDetokenizer:
    """The text of one output.

    The text of a token can depend on the tokens before it (spaces), and can be incomplete without the tokens after it
    (several tokens with the bytes of one character). So text is always decoded from a few tokens back. It is held back
    while it ends in a replacement character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], *, skip_special_tokens: bool = True) -> None:
        self.text = ""
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

    def finish(self) -> None:
        """Give out what was held back: no more tokens will complete it."""
        self.text += self._pending_text()
        self._given_out = len(self._token_ids)

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


def _decoder(tokenizer: Tokenizer, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`tokenizer.decode` with the options of a stream: to clean up spaces would change text given out already."""
    from transformers import PreTrainedTokenizerFast as Fast  # here, as the import takes long

    fast: Any = tokenizer if isinstance(tokenizer, Fast) else None
    if fast is not None and (type(fast).decode, type(fast)._decode) == (Fast.decode, Fast._decode):
        # The class does not override `decode`, which ends in this call. The call alone takes a sixth of the time.
        return partial(fast.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
