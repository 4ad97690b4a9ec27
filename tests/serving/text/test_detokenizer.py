"""Text from tokens: all of it, in pieces that are never taken back, and no halves of characters."""

from typing import Any

import pytest
from checkpoints import TOKENIZER_SIZE, make_metaspace_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pagedattn_serve.text.detokenizer import (
    MAX_HELD_BACK,
    REPLACEMENT,
    IncrementalDetokenizer,
    TokenNames,
    num_tokens_within,
)
from pagedattn_serve.text.detokenizer import Tokenizer as DecodingTokenizer

TOKENS = st.integers(0, TOKENIZER_SIZE - 1)
TEXT = st.text(max_size=12) | st.text(alphabet="the cat, 🙂é한\u200d👩", max_size=12)


@pytest.fixture(scope="module")
def metaspace() -> PreTrainedTokenizerBase:
    return make_metaspace_tokenizer()


class Slow:
    """A tokenizer without a fast backend."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens and not clean_up_tokenization_spaces
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Watched(Slow):
    """Counts the tokens that it decodes."""

    num_tokens = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        self.num_tokens += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Shouting(PreTrainedTokenizerFast):
    """A fast tokenizer whose text is more than what its backend decodes, as some of transformers' are."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


def stream(tokenizer: DecodingTokenizer, prompt: list[int], output: list[int]) -> list[str]:
    """The text after each token, and after `finish`. It only grows, and never ends within a character before. A
    detokenizer that knows from another text what the tokens add says the same."""
    detokenizer = IncrementalDetokenizer(tokenizer, list(prompt))
    names = TokenNames(tokenizer)
    elsewhere, knowing = (names.detokenizer(list(prompt), skip_special_tokens=True) for _ in range(2))
    for token_id in reversed(output):
        elsewhere.add(token_id)
    texts = [""]
    for token_id in output:
        detokenizer.add(token_id)
        knowing.add(token_id)
        assert detokenizer.text.startswith(texts[-1]) and not detokenizer.text.endswith(REPLACEMENT)
        assert knowing.text == detokenizer.text
        texts.append(detokenizer.text)
    assert knowing.finish() == detokenizer.finish() and knowing.text == detokenizer.text
    assert detokenizer.text.startswith(texts[-1])
    return [*texts, detokenizer.text]


@given(prompt=TEXT, output=TEXT, num_tokens=st.integers(0, 60))
def test_any_text(tokenizer: PreTrainedTokenizerBase, prompt: str, output: str, num_tokens: int) -> None:
    prompt_ids, output_ids = tokenizer(prompt).input_ids, tokenizer(output).input_ids
    texts = stream(tokenizer, prompt_ids, output_ids)
    assert texts[-1] == output
    assert all(output.startswith(text) for text in texts)
    # Ended anywhere, maybe within a character: the whole characters, and a sign for the rest when it is finished.
    cut = stream(tokenizer, prompt_ids, output_ids[:num_tokens])
    assert cut[-1] == tokenizer.decode(output_ids[:num_tokens])
    assert output.startswith(cut[-2]) and output.startswith(cut[-1].removesuffix(REPLACEMENT))


@given(prompt=st.lists(TOKENS, max_size=12), output=st.lists(TOKENS, max_size=30))
def test_any_tokens(tokenizer: PreTrainedTokenizerBase, prompt: list[int], output: list[int]) -> None:
    """Broken bytes and special tokens anywhere, in the prompt as well."""
    text = stream(tokenizer, prompt, output)[-1]
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    full = tokenizer.decode([*prompt, *output], skip_special_tokens=True)
    if before.endswith(REPLACEMENT):  # the character that the output completes may be counted to either side
        assert full.endswith(text) and text.endswith(full[len(before) :])
    else:
        assert before + text == full


@given(prompt=TEXT, output=TEXT, eos=st.booleans())
def test_any_text_where_the_first_space_is_dropped(
    metaspace: PreTrainedTokenizerBase, prompt: str, output: str, eos: bool
) -> None:
    prompt_ids = [metaspace.bos_token_id, *metaspace(prompt).input_ids]
    output_ids = metaspace(output).input_ids + [metaspace.eos_token_id] * eos
    texts = stream(metaspace, prompt_ids, output_ids)
    before = metaspace.decode(prompt_ids, skip_special_tokens=True)
    assert before + texts[-1] == metaspace.decode([*prompt_ids, *output_ids], skip_special_tokens=True)
    if REPLACEMENT not in output:
        assert not any(REPLACEMENT in text for text in texts)


def test_space_after_a_prompt_and_none_at_the_beginning(metaspace: PreTrainedTokenizerBase) -> None:
    the = metaspace.convert_tokens_to_ids("▁the")
    assert stream(metaspace, metaspace("abc").input_ids, [the, the]) == ["", " the", " the the", " the the"]
    assert stream(metaspace, [metaspace.bos_token_id], [the, the]) == ["", "the", "the the", "the the"]


def test_an_emoji_of_four_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    emoji = tokenizer("🙂").input_ids
    assert len(emoji) == 4
    a, b = tokenizer("ab").input_ids
    assert stream(tokenizer, [a], [b, *emoji, a]) == ["", "b", "b", "b", "b", "b🙂", "b🙂a", "b🙂a"]
    assert stream(tokenizer, [a], [b, *emoji[:3]]) == ["", "b", "b", "b", "b", "b" + REPLACEMENT]
    assert stream(tokenizer, [a], [*emoji[:3], b]) == ["", "", "", "", REPLACEMENT + "b", REPLACEMENT + "b"]


def test_tokens_within_a_part_of_a_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Those of a whole character and those of a broken one, which the next token does not belong to."""
    emoji, [a] = tokenizer("🙂").input_ids, tokenizer("a").input_ids

    def count(places: list[tuple[int, int]], output: list[int]) -> int:
        return num_tokens_within(places, IncrementalDetokenizer(tokenizer, [a]), output)

    for places, output, expected in (
        ([], [a, a], 0),
        ([(0, 0), (1, 1)], [a, a], 0),
        ([(1, 2)], [a, *emoji, a], 4),
        ([(0, 1), (2, 3)], [a, *emoji, a], 2),
        ([(1, 3)], [a, *emoji[:2], a, a], 3),
        ([(1, 2)], [a, *emoji[:2], a, a], 2),
        ([(1, 2)], [a, *emoji[:3]], 3),  # the output ends there
    ):
        assert count(places, output) == expected, (places, output)


def test_a_prompt_that_ends_within_a_character(tokenizer: PreTrainedTokenizerBase) -> None:
    """The prompt's text has a replacement character there already; the text after it is complete."""
    emoji, (a, b) = tokenizer("🙂").input_ids, tokenizer("ab").input_ids
    assert stream(tokenizer, [a, *emoji[:2]], [*emoji[2:], a, b])[-1].endswith("ab")
    assert stream(tokenizer, [a, *emoji[:2]], [a, b])[-1] == "ab"
    assert stream(tokenizer, [a, *emoji[:3]], emoji[3:])[-1] == "🙂"


def test_a_prompt_that_ends_within_a_run_of_bytes(metaspace: PreTrainedTokenizerBase) -> None:
    """Three replacement characters in the prompt's text become one character; what follows must not get lost."""
    emoji, (a, b) = metaspace("🙂").input_ids[1:], metaspace("ab").input_ids[1:]
    assert len(emoji) == 4
    assert stream(metaspace, [a, *emoji[:3]], [emoji[3], a, b])[-1].endswith("ab")


def byte_fallback_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """What a stream makes of them: of each run of bytes, as many as are text, then a sign for each of the others.

    `decode` says the same, unless such a run begins as text: it gives a sign for each byte then, which a stream can no
    longer do.
    """
    text, run = "", b""
    for piece in [*tokenizer.convert_ids_to_tokens(token_ids), "</s>"]:
        if piece.startswith("<0x"):
            run += bytes([int(piece[3:5], 16)])
            continue
        lengths = [n for n in range(len(run) + 1) if is_text(run[:n])]
        text += run[: lengths[-1]].decode() + REPLACEMENT * (len(run) - lengths[-1])
        text, run = text + piece.replace("▁", " ").removesuffix("</s>"), b""
    return text


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


BYTES = [0x41, 0x20, 0x80, 0xA9, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0xFF]
PIECES = [*(f"<0x{byte:02X}>" for byte in BYTES), "▁", "a", "▁the"]


@given(pieces=st.lists(st.sampled_from(PIECES) | st.sampled_from(["<0xC3>", "<0xA9>", "<0xE2>"]), max_size=14))
def test_any_bytes(metaspace: PreTrainedTokenizerBase, pieces: list[str]) -> None:
    """After a prompt that ends with a whole word. Earlier bytes are not repeated when a later one is invalid."""
    prompt_ids, output_ids = metaspace("abc").input_ids, metaspace.convert_tokens_to_ids(pieces)
    texts = stream(metaspace, prompt_ids, output_ids)
    assert texts[-1] == byte_fallback_text(metaspace, output_ids)
    full = metaspace.decode([*prompt_ids, *output_ids])
    if all(full.startswith("abc" + text) for text in texts[:-1]):  # nothing given out is another text now
        assert "abc" + texts[-1] == full


def test_an_invalid_byte_after_a_character_of_bytes(metaspace: PreTrainedTokenizerBase) -> None:
    ids = metaspace.convert_tokens_to_ids
    e, broken, a = ids(["<0xC3>", "<0xA9>"]), ids("<0xE2>"), ids("a")
    assert stream(metaspace, [a], [*e, broken, a]) == ["", "", "é", "é", "é\ufffda", "é\ufffda"]
    assert stream(metaspace, [a], [*e, broken]) == ["", "", "é", "é", "é\ufffd"]
    assert stream(metaspace, [a, *e], [broken, a])[-1] == "\ufffda"  # in the prompt, too
    assert stream(metaspace, [a], [*e, broken, *ids(["<0x82>", "<0xAC>"])])[-1] == "é€"


def test_special_tokens_are_skipped(tokenizer: PreTrainedTokenizerBase) -> None:
    a, b = tokenizer("ab").input_ids
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert stream(tokenizer, [bos, a], [eos, a, bos, bos, b, eos])[-1] == "ab"
    assert stream(tokenizer, [], [eos]) == ["", "", ""]


@pytest.mark.parametrize("num_ends", [1, 7, 100])
def test_special_tokens_where_the_first_space_is_dropped(metaspace: PreTrainedTokenizerBase, num_ends: int) -> None:
    """The text after them has its space, and a text that begins with them has none."""
    bos, eos, space, the = metaspace.convert_tokens_to_ids(["<s>", "</s>", "▁", "▁the"])
    ends = [eos] * num_ends
    for prompt in ([], [bos]):
        for output in ([the, *ends, the], [*ends, the, the], [space, *ends, the], [*ends, space, the, *ends, the]):
            text = metaspace.decode([*prompt, *output], skip_special_tokens=True)
            assert text in ("the the", " the", " the the")
            assert stream(metaspace, prompt, output)[-1] == text


def test_bytes_that_become_no_character(tokenizer: PreTrainedTokenizerBase, metaspace: PreTrainedTokenizerBase) -> None:
    """They are given out, some at a time, and the text after them is whole."""
    broken = tokenizer("é").input_ids[0], metaspace.convert_tokens_to_ids("<0xC3>")
    for each, byte in zip((tokenizer, metaspace), broken, strict=True):
        a, *rest = each("a the é").input_ids
        detokenizer = IncrementalDetokenizer(each, [a])
        for num_bytes in range(1, 201):
            detokenizer.add(byte)
            assert num_bytes - MAX_HELD_BACK < len(detokenizer.text) <= num_bytes
        for token_id in rest:
            detokenizer.add(token_id)
        assert each.decode([a]) + detokenizer.text == each.decode([a, *[byte] * 200, *rest])


@given(output=st.lists(st.sampled_from(["é", "€", "🙂", "the"]) | TOKENS, min_size=40, max_size=120))
def test_characters_amid_broken_bytes(tokenizer: PreTrainedTokenizerBase, output: list[str | int]) -> None:
    """However long no character ends, each one is there afterwards."""
    token_ids = [i for each in output for i in ([each] if isinstance(each, int) else tokenizer(each).input_ids)]
    detokenizer = TokenNames(tokenizer).detokenizer([], skip_special_tokens=True)
    for token_id in token_ids:
        detokenizer.add(token_id)
    detokenizer.finish()
    full = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert detokenizer.text.replace(REPLACEMENT, "") == full.replace(REPLACEMENT, "")


class Quiet:
    """A tokenizer of bytes that decodes those that are no character to nothing, as ByT5's does."""

    all_special_ids = (256,)

    def decode(self, token_ids: list[int], **options: bool) -> str:
        return bytes(each for each in token_ids if each < 256).decode(errors="ignore")


def test_bytes_that_decode_to_nothing() -> None:
    """They are kept for the rest of their character, and special tokens amid them are not."""
    for text in ("héllo wörld", "日本", "a😀b"):
        detokenizer = TokenNames(Quiet()).detokenizer([97], skip_special_tokens=True)
        for byte in text.encode():
            detokenizer.add(byte)
            detokenizer.add(256)
        assert detokenizer.text == text


def test_no_output_learns_from_broken_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    """What the second byte of a character adds after a first byte that was given out."""
    names, [a], [first, second] = TokenNames(tokenizer), tokenizer("a").input_ids, tokenizer("é").input_ids
    broken, other = (names.detokenizer([a], skip_special_tokens=True) for _ in range(2))
    for token_id in [*[first] * MAX_HELD_BACK, second]:
        broken.add(token_id)
    assert broken.text.endswith(REPLACEMENT + "é")
    for token_id in (a, second, a):
        other.add(token_id)
    assert other.text == f"a{REPLACEMENT}a"


def test_tokens_without_text_cost_no_more_the_more_there_are(tokenizer: PreTrainedTokenizerBase) -> None:
    a, byte = tokenizer("a").input_ids[0], tokenizer("é").input_ids[0]
    for without_text in ([tokenizer.eos_token_id], [byte], [byte, tokenizer.eos_token_id]):
        watched = Watched(tokenizer)
        detokenizer = IncrementalDetokenizer(watched, [a])
        nums_tokens = []
        for _ in range(2):
            watched.num_tokens = 0
            for _ in range(10 * MAX_HELD_BACK):
                for token_id in without_text:
                    detokenizer.add(token_id)
            nums_tokens.append(watched.num_tokens)
        assert nums_tokens[1] < 1.1 * nums_tokens[0], without_text


@given(prompt=st.lists(TOKENS, max_size=12), output=st.lists(TOKENS, max_size=30))
def test_without_a_fast_backend(tokenizer: PreTrainedTokenizerBase, prompt: list[int], output: list[int]) -> None:
    assert stream(Slow(tokenizer), prompt, output) == stream(tokenizer, prompt, output)


def test_a_tokenizer_s_own_way_of_decoding(tokenizer: PreTrainedTokenizerBase) -> None:
    shouting = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    a, b = tokenizer("ab").input_ids
    assert stream(shouting, [a], [b, a]) == ["", "B", "BA", "BA"]


def test_text_that_was_cut_goes_on_from_there(tokenizer: PreTrainedTokenizerBase) -> None:
    a, b, c = tokenizer("abc").input_ids
    detokenizer = IncrementalDetokenizer(tokenizer, [a])
    detokenizer.add(b)
    detokenizer.text = ""
    detokenizer.add(c)
    detokenizer.finish()
    assert detokenizer.text == "c"


@pytest.mark.parametrize("slow", [False, True])
def test_special_tokens_if_asked_for(tokenizer: PreTrainedTokenizerBase, slow: bool) -> None:
    """Through the backend of a fast tokenizer and through `decode`."""

    class Shown(Slow):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            assert not skip_special_tokens
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    ids = tokenizer("the cat").input_ids
    detokenizer = IncrementalDetokenizer(Shown(tokenizer) if slow else tokenizer, ids, skip_special_tokens=False)
    texts = []
    for token_id in [0, *ids, 1, 0]:
        detokenizer.add(token_id)
        texts.append(detokenizer.text)
    assert texts[0] == "<s>" and texts[-1] == "<s>the cat</s><s>"


def test_special_tokens_that_one_of_two_outputs_shows(tokenizer: PreTrainedTokenizerBase) -> None:
    names, [a] = TokenNames(tokenizer), tokenizer("a").input_ids
    shown, hidden = (names.detokenizer([], skip_special_tokens=skips) for skips in (False, True))
    for token_id in (a, a, tokenizer.eos_token_id, a):
        shown.add(token_id)
        hidden.add(token_id)
    assert (shown.text, hidden.text) == ("aa</s>a", "aaa")
