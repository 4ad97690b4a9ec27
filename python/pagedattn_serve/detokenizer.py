"""Text from tokens as they come, without ever taking back what was given out."""

from os.path import commonprefix
from typing import Protocol

# Enough of the prompt for a tokenizer to decide whether the first new token starts with a space.
NUM_CONTEXT_TOKENS = 6
REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class IncrementalDetokenizer:
    """The text of one output.

    A token's text can depend on the tokens before it (spaces) and be incomplete without those after it (the bytes of
    one character over several tokens). So text is always decoded from a few tokens back, and held back while it ends
    in a replacement character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._token_ids = prompt_token_ids[-NUM_CONTEXT_TOKENS:]
        self._context_begin = 0  # text is decoded from here
        self._given_out = len(self._token_ids)  # tokens whose text is in `text`, or in the prompt

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
        # `before` is not a prefix of `after` where a prompt ends within a character that the output completes.
        return after[len(commonprefix((before, after))) :]  # noqa: RUF071 (of characters, not of paths)

    def _decode(self, token_ids: list[int]) -> str:
        # Cleaning up spaces would change text that was given out already.
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
