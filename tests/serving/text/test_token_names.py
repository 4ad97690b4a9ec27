"""Names of tokens: what each adds to the text where it stands, so that joined they are the text. And their bytes."""

import pytest
from checkpoints import TOKENIZER_SIZE, make_metaspace_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pagedattn_serve.text.detokenizer import IncrementalDetokenizer, TokenNames, names_in_prompt

TEXT = st.text(max_size=12) | st.text(alphabet="the cat, 🙂é日\u200d👩", max_size=12)
WORDS = ["the", "cat", " sat", "##s", "mat</w>", "on</w>"]


@pytest.fixture(scope="module")
def metaspace() -> PreTrainedTokenizerBase:
    return make_metaspace_tokenizer()


def names_of(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], text: str | None) -> list[str]:
    found = names_in_prompt(TokenNames(tokenizer), token_ids, text, [[each] for each in token_ids])
    return [names[each] for names, each in zip(found, token_ids, strict=True)]


def test_a_tokenizer_that_strips_the_first_space(metaspace: PreTrainedTokenizerBase) -> None:
    text = "the cat sat on the mat"
    words = ["the", " cat", " sat", " on", " the", " mat"]
    token_ids = metaspace(text).input_ids
    assert names_of(metaspace, token_ids, text) == words
    assert names_of(metaspace, [1, *token_ids], text) == ["<s>", *words]  # the text lacks <s>
    assert names_of(metaspace, [1, *token_ids], None) == ["<s>", " the", *words[1:]]  # as `detokenize` writes them


@given(text=TEXT)
def test_joined_names_are_the_text(
    tokenizer: PreTrainedTokenizerBase, metaspace: PreTrainedTokenizerBase, text: str
) -> None:
    for each in (tokenizer, metaspace):
        token_ids = each(text).input_ids
        names = names_of(each, token_ids, text)
        assert "".join(names) == text
        told = TokenNames(each)
        data = b"".join(told.bytes_of(i, name) for i, name in zip(token_ids, names, strict=True))
        assert data == text.encode()


@given(token_ids=st.lists(st.integers(0, TOKENIZER_SIZE - 1), max_size=20))
def test_any_token_ids(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> None:
    """Broken bytes and special tokens anywhere."""
    assert "".join(names_of(tokenizer, token_ids, None)) == tokenizer.decode(token_ids)


def test_special_tokens_in_the_text_of_a_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "the</s> cat"
    token_ids = [0, *tokenizer(text).input_ids]
    assert names_of(tokenizer, token_ids, text) == ["<s>", "the", "</s>", " cat"]


def test_alternatives_are_named_as_they_would_be_in_their_place(metaspace: PreTrainedTokenizerBase) -> None:
    names = TokenNames(metaspace)
    the, byte, e, eos = metaspace.convert_tokens_to_ids(["▁the", "<0xC3>", "<0xA9>", "</s>"])
    begin = IncrementalDetokenizer(metaspace, [])
    assert dict(names.at(begin, [the, byte, eos])) == {the: "the", byte: "", eos: "</s>"}
    begin.add(the)
    amid = names.at(begin, [the, byte, eos])
    assert (amid[the], amid[byte], amid[eos]) == (" the", "", "</s>")
    begin.add(byte)
    assert dict(names.at(begin, [e, the])) == {e: "é", the: "\ufffd the"}
    assert names.bytes_of(byte, "") == b"\xc3" and names.bytes_of(e, "é") == b"\xa9"
    assert names.bytes_of(the, "the") == b"the" and names.bytes_of(the, " the") == b" the"


def test_an_interrupt_changes_no_name(metaspace: PreTrainedTokenizerBase) -> None:
    names = TokenNames(metaspace)
    the, e = metaspace.convert_tokens_to_ids(["▁the", "<0xC3>"])
    decode = names._after_text._decode

    def interrupted(token_ids: list[int]) -> str:
        raise KeyboardInterrupt

    names._after_text._decode = interrupted
    with pytest.raises(KeyboardInterrupt):
        names.bytes_of(e, "")
    names._after_text._decode = decode
    assert names.bytes_of(the, " the") == b" the"
    begin = IncrementalDetokenizer(metaspace, [])
    begin.add(the)
    assert names.at(begin, [the])[the] == " the"


def test_bytes_of_parts_of_characters(tokenizer: PreTrainedTokenizerBase) -> None:
    names = TokenNames(tokenizer)
    assert [names.bytes_of(i, "") for i in tokenizer("🙂").input_ids] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert names.bytes_of(TOKENIZER_SIZE + 5, "") == b""  # a model may have more tokens than its tokenizer


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder(), decoders.Metaspace()])
def test_other_decoders(decoder: decoders.Decoder | None) -> None:
    """Some write the space before a word, some behind it; then a token's name depends on the token before it."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["a", *WORDS])}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    names = TokenNames(tokenizer)
    for token_ids in ([1, 2, 5, 2, 6, 4], [5, 5, 1, 3, 1]):
        detokenizer = IncrementalDetokenizer(tokenizer, [])
        knowing = names.detokenizer([], skip_special_tokens=True)
        for token_id in token_ids:
            name, before = names.at(detokenizer, [token_id])[token_id], detokenizer.text
            detokenizer.add(token_id)
            knowing.add(token_id)
            assert detokenizer.text == knowing.text == before + name
