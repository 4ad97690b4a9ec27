"""Text from tokens: the text of an output as its tokens come, and what each token adds to a text, which is its name
beside logprobs.
"""

import copy
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial
from os.path import commonprefix
from typing import Any, Protocol, Self

# Enough of the prompt for a tokenizer to decide whether the first new token starts with a space.
NUM_CONTEXT_TOKENS = 6
# More tokens than a character has. Many more, as U+FFFD is a character itself, which a text may have several times.
MAX_HELD_BACK = 128
REPLACEMENT = "\ufffd"
BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
# Decoders for which a token adds the same amid any text. Strip takes spaces from the beginning of a text.
_SAME_AMID_TEXT = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip", "WordPiece"}


class Tokenizer(Protocol):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class IncrementalDetokenizer:
    """The text of one output.

    The text of a token can depend on the tokens before it (spaces), and can be incomplete without the tokens after it
    (several tokens with the bytes of one character). So text is decoded from a few tokens back. It is held back while
    it ends in a replacement character, but not for more tokens than a character can have.

    additions: what tokens add amid any text, as far as it is known, which saves the decoding. More is written there as
        it gets known. None if what a token adds depends on the tokens before it.
    left_out: tokens that are no part of a character. Where such a token adds nothing, nothing is held back.
    """

    __slots__ = (
        *("_additions", "_decode", "_follows_text", "_given_out", "_left_out", "_token_ids"),
        *("skips_special_tokens", "text"),
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        *,
        skip_special_tokens: bool = True,
        additions: dict[int, str] | None = None,
        left_out: Collection[int] = (),
    ) -> None:
        self.text = ""
        self._additions = additions
        self._left_out = left_out
        self.skips_special_tokens = skip_special_tokens
        self._decode = _decoder(tokenizer, skip_special_tokens)
        self._token_ids = prompt_token_ids[-NUM_CONTEXT_TOKENS:]  # the last ones, from which on text is decoded
        self._given_out = len(self._token_ids)  # tokens whose text is in `text`, or in the prompt
        self._follows_text = False  # whether these tokens are known to end with text

    def fork(self) -> Self:
        """One with the same text so far, which goes on by itself."""
        other = copy.copy(self)
        other._token_ids = list(self._token_ids)
        return other

    def add(self, token_id: int) -> None:
        """Append a token's text to `text`, unless it ends within a character."""
        token_ids, given_out = self._token_ids, self._given_out
        # As `is_amid_text`, which looks into the prompt besides.
        additions = self._additions if self._follows_text and given_out == len(token_ids) else None
        token_ids.append(token_id)
        addition = None if additions is None else additions.get(token_id)
        follows_text = True
        if addition is None:
            addition = self._pending_text()
            if not addition and token_id in self._left_out:
                token_ids.pop()
                return
            if not addition or addition.endswith(REPLACEMENT):
                if len(token_ids) - given_out < MAX_HELD_BACK:
                    return
                follows_text = False
            elif additions is not None:
                additions[token_id] = addition
        self.text += addition
        del token_ids[:given_out]
        self._given_out, self._follows_text = len(token_ids), follows_text

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
        if self._follows_text:
            return True
        before = self._decode(self._token_ids)
        return bool(before) and not before.endswith(REPLACEMENT)

    def addition(self, token_id: int) -> str:
        """What `add` would append to `text` for this token."""
        trial = self.fork()  # an interrupt leaves this detokenizer, which many outputs may share, as it is
        trial.text = ""
        trial.add(token_id)
        return trial.text

    def _pending_text(self) -> str:
        before = self._decode(self._token_ids[: self._given_out])
        after = self._decode(self._token_ids)
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


def num_tokens_within(
    places: Iterable[tuple[int, int]], detokenizer: IncrementalDetokenizer, token_ids: Iterable[int]
) -> int:
    """How many tokens of an output have text within the places.

    places: where each begins and ends in the text, in characters. detokenizer: of the output, before its first token.
    The tokens of one character count alike.
    """
    places = list(places)
    end_of_all = max((end for _, end in places), default=0)
    num_within = num_held_back = begin = 0
    for token_id in token_ids:
        if begin >= end_of_all:
            break
        detokenizer.add(token_id)
        if (end := len(detokenizer.text)) == begin:
            num_held_back += 1
            continue
        # A broken character is not of the token after it.
        num_within += num_held_back * _overlap(places, begin, begin + 1)
        num_within += _overlap(places, end - 1 if num_held_back else begin, end)
        begin, num_held_back = end, 0
    return num_within + num_held_back * _overlap(places, begin, begin + 1)


def _overlap(places: list[tuple[int, int]], begin: int, end: int) -> bool:
    return any(first < end and begin < last for first, last in places)


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


class TokenNames:
    """The names and bytes of the tokens of one tokenizer. A name is what the token adds to the text where it stands.

    So the names of a text's tokens, joined, are the text. At the beginning of a text, a token may lose its space. A
    token that ends within a character adds nothing, and the token that completes the character adds all of it. A
    special token that the text leaves out has its own text as a name.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._amid_text: dict[int, str] = {}
        self._additions: tuple[dict[int, str], dict[int, str]] = ({}, {})  # with special tokens, and without

    def detokenizer(self, prompt_token_ids: list[int], skip_special_tokens: bool) -> IncrementalDetokenizer:
        """For an output. What tokens add is known from the outputs before."""
        additions = self._additions[skip_special_tokens] if self._is_same_amid_text else None
        return IncrementalDetokenizer(
            self.tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            additions=additions,
            left_out=self.special_texts if skip_special_tokens else (),
        )

    @cached_property
    def special_texts(self) -> Mapping[int, str]:
        """The texts of the special tokens, which `skip_special_tokens` leaves out."""
        added: dict[int, Any] = getattr(self.tokenizer, "added_tokens_decoder", {})
        token_ids = {token_id for token_id, token in added.items() if token.special}
        token_ids.update(getattr(self.tokenizer, "all_special_ids", ()))
        return {
            token_id: self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False) for token_id in token_ids
        }

    @property
    def added_texts(self) -> set[str] | None:
        """The texts of the added tokens; None if the tokenizer does not know them."""
        added: dict[int, Any] | None = getattr(self.tokenizer, "added_tokens_decoder", None)
        return None if added is None else {token.content for token in added.values()}

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
