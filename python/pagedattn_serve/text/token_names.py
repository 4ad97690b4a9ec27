"""What each token adds to a text: its name where logprobs are told, and its bytes."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from pagedattn_serve.text.detokenizer import REPLACEMENT, IncrementalDetokenizer, fast_backend

BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
# Decoders for which a token adds the same amid any text. Strip takes spaces from the beginning of a text.
_SAME_AMID_TEXT = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip", "WordPiece"}


class TokenNames:
    """The names and bytes of the tokens of one tokenizer. A name is what the token adds to the text where it stands.

    So the names of a text's tokens, joined, are the text. At the beginning of a text, a token may lose its space. A
    token that ends within a character adds nothing, and the token that completes the character adds all of it. A
    special token that the text leaves out has its own text as a name.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._amid_text: dict[int, str] = {}

    @cached_property
    def special_texts(self) -> Mapping[int, str]:
        """The texts of the special tokens, which `skip_special_tokens` leaves out."""
        added: dict[int, Any] = getattr(self.tokenizer, "added_tokens_decoder", {})
        token_ids = {token_id for token_id, token in added.items() if token.special}
        token_ids.update(getattr(self.tokenizer, "all_special_ids", ()))
        return {
            token_id: self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False) for token_id in token_ids
        }

    def at(self, detokenizer: IncrementalDetokenizer, token_ids: Iterable[int]) -> Mapping[int, str]:
        """The names of these tokens, and perhaps of more tokens, where the detokenizer's next token stands."""
        if self._is_same_amid_text and detokenizer.is_amid_text:
            for token_id in token_ids:
                self._name_amid_text(token_id)
            return self._amid_text
        return {token_id: self._name(detokenizer, token_id) for token_id in token_ids}

    def bytes_of(self, token_id: int, name: str) -> bytes:
        """The bytes that a token adds to a text where it has this name, also if they are a part of a character."""
        amid_text = self._name_amid_text(token_id)
        if amid_text and REPLACEMENT not in amid_text:
            return (amid_text if REPLACEMENT in name else name).encode()
        piece = self.tokenizer.convert_ids_to_tokens(token_id) or ""
        if (byte := BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        if piece and set(piece) <= BYTE_OF.keys():
            return bytes(BYTE_OF[character] for character in piece)
        return name.encode()

    def _name_amid_text(self, token_id: int) -> str:
        name = self._amid_text.get(token_id)
        if name is None:
            name = self._amid_text[token_id] = self._name(self._after_text, token_id)
        return name

    def _name(self, detokenizer: IncrementalDetokenizer, token_id: int) -> str:
        if detokenizer.skips_special_tokens and token_id in self.special_texts:
            return self.special_texts[token_id]
        return detokenizer.addition(token_id)

    @cached_property
    def _after_text(self) -> IncrementalDetokenizer:
        """Of a text that goes on."""
        token_ids = self.tokenizer("a", add_special_tokens=False).input_ids
        return IncrementalDetokenizer(self.tokenizer, token_ids[-1:], skip_special_tokens=False)

    @cached_property
    def _is_same_amid_text(self) -> bool:
        """Whether what a token adds amid a text does not depend on the tokens before it, but for parts of a
        character."""
        backend = fast_backend(self.tokenizer)
        if backend is None:
            return False
        if backend.decoder is None:
            return True
        decoders = list(_flat(json.loads(backend.decoder.__getstate__())))
        kinds = [each["type"] for each in decoders]
        of_joined = kinds[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []  # these see the text, not the tokens
        return set(kinds) <= _SAME_AMID_TEXT and set(of_joined) <= {"Strip"} and not any(map(_strips_end, decoders))


def names_in_prompt(
    names: TokenNames, token_ids: list[int], text: str | None, candidates: Iterable[Collection[int]]
) -> Iterator[Mapping[int, str]]:
    """For each token of a prompt, the names of its candidates, the token among them.

    text: the prompt's, which may lack special tokens that the tokenizer has put there; None has all of them.
    """
    detokenizer = IncrementalDetokenizer(names.tokenizer, [], skip_special_tokens=False)
    last = len(token_ids) - 1
    end = 0  # of the text that has its names
    for place, (token_id, wanted) in enumerate(zip(token_ids, candidates, strict=False)):
        found = names.at(detokenizer, wanted)
        if text is None or is_in_text(names, token_id, text, end):
            detokenizer.add(token_id)
            if place == last and (held_back := detokenizer.finish()):
                found = {**{each: found[each] for each in wanted}, token_id: held_back}
            name = found[token_id]
            if text is not None and not text.startswith(name, end) and text.startswith(name.removeprefix(" "), end):
                # Some tokenizers put a space before what follows a special token, too.
                found = {each: found[each].removeprefix(" ") for each in wanted}
            end += len(found[token_id])
        yield found


def is_in_text(names: TokenNames, token_id: int, text: str, begin: int) -> bool:
    """Whether a token of a prompt is in its text from `begin` on: not if it is a special token that was put there."""
    special = names.special_texts.get(token_id)
    return special is None or text.startswith(special, begin)


def _flat(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for each in decoder["decoders"]:
            yield from _flat(each)
    else:
        yield decoder


def _strips_end(decoder: dict[str, Any]) -> bool:
    return decoder["type"] == "Strip" and decoder["stop"] > 0


def _byte_of() -> dict[str, int]:
    """The byte of each character in the tokens of a byte-level tokenizer: GPT-2's table, where the characters of bytes
    that cannot be seen follow on the 256 characters of Latin-1."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + i): byte for i, byte in enumerate(unseen)}


BYTE_OF = _byte_of()
