"""apply_token_bitmask: -inf where a token is not allowed, and every other bit of the logits as it was."""

import math

import pytest
import reference
import torch
from checks import (
    DTYPES,
    assert_raises_and_writes_nothing,
    assert_rejected,
    assert_row_gap_untouched,
    assert_same_bits,
    random_bits,
    with_row_gap,
)
from hypothesis import given
from hypothesis import strategies as st
from op_table import OPS

from pagedattn_ext import ops

ALL, NONE = -1, 0  # words that allow each of their tokens, and none


def random_masks(num_masks: int, num_words: int, generator: torch.Generator) -> torch.Tensor:
    """As grammars give them: words that allow all, none, and some of their tokens, a third each."""
    some = torch.randint(-(2**31), 2**31, (num_masks, num_words), dtype=torch.int32, generator=generator)
    kind = torch.randint(0, 3, (num_masks, num_words), generator=generator)
    return torch.where(kind == 0, ALL, torch.where(kind == 1, NONE, some)).int()


def make_arguments(
    device, dtype, num_rows=4, vocab_size=100, indices=None, gap=0, num_spare_words=0, bitmask_gap=0, seed=0
) -> dict:
    """Logits of any bits, NaN and infinities among them; `gap` follows their rows, `bitmask_gap` those of the masks."""
    generator = torch.Generator().manual_seed(seed)
    logits = random_bits(num_rows, vocab_size, dtype=dtype, generator=generator)
    num_masks = num_rows if indices is None else len(indices)
    num_words = math.ceil(vocab_size / 32) + num_spare_words
    masks = random_masks(num_masks, num_words + bitmask_gap, generator).to(device)
    return {
        "logits": with_row_gap(logits.to(device), gap),
        "bitmask": masks[:, :num_words],
        "indices": None if indices is None else torch.tensor(indices, dtype=torch.int64, device=device),
    }


def assert_apply_token_bitmask(arguments: dict) -> None:
    expected = reference.apply_token_bitmask(**arguments)
    OPS.apply_token_bitmask(**arguments)
    assert_same_bits(arguments["logits"], expected)
    if arguments["logits"].numel() > 0:
        assert_row_gap_untouched(arguments["logits"])


@given(st.data())
def test_apply_token_bitmask(device, data):
    draw = data.draw
    num_rows = draw(st.integers(0, 9))
    some_rows = st.lists(st.sampled_from(range(num_rows)), unique=True) if num_rows else st.just([])
    arguments = make_arguments(
        device,
        draw(st.sampled_from(DTYPES)),
        num_rows,
        vocab_size=draw(st.integers(0, 140) | st.sampled_from([511, 1024, 2049])),
        indices=draw(st.none() | some_rows),
        gap=draw(st.sampled_from([0, 1, 16])),
        num_spare_words=draw(st.integers(0, 2)),
        bitmask_gap=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 99)),
    )
    assert_apply_token_bitmask(arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout(device, dtype):
    """Which bit is which token, written out; this also checks the reference."""
    arguments = make_arguments(device, dtype, num_rows=3, vocab_size=70, indices=[2, 0])
    before, words = arguments["logits"].clone(), arguments["bitmask"].tolist()
    expected = reference.apply_token_bitmask(**arguments)
    OPS.apply_token_bitmask(**arguments)
    for mask, row in enumerate([2, 0]):
        for token in range(70):
            is_allowed = words[mask][token // 32] >> token % 32 & 1
            wanted = before[row, token] if is_allowed else torch.tensor(-math.inf, dtype=dtype, device=device)
            assert_same_bits(arguments["logits"][row, token], wanted)
    assert_same_bits(arguments["logits"][1], before[1])
    assert_same_bits(arguments["logits"], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("token", [0, 31, 32, 63, 64, 69])
def test_one_token(device, dtype, token):
    """The only one allowed, then the only one that is not."""
    for is_allowed in (True, False):
        logits = torch.arange(70, dtype=dtype, device=device)[None]
        words = torch.full((1, 3), NONE if is_allowed else ALL, dtype=torch.int64)
        words[0, token // 32] ^= 1 << token % 32
        bitmask = (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32).to(device)
        OPS.apply_token_bitmask(logits, bitmask)
        assert (logits[0] > -math.inf).nonzero().flatten().tolist() == (
            [token] if is_allowed else [other for other in range(70) if other != token]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("word", [ALL, NONE])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 500])
def test_all_and_none(device, dtype, word, vocab_size):
    logits = random_bits(3, vocab_size, dtype=dtype, generator=torch.Generator().manual_seed(0)).to(device)
    expected = logits.clone() if word == ALL else torch.full_like(logits, -math.inf)
    OPS.apply_token_bitmask(logits, torch.full((3, 16), word, dtype=torch.int32, device=device))
    assert_same_bits(logits, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, -0.0])
def test_special_logits(device, dtype, special):
    logits = torch.full((1, 64), special, dtype=dtype, device=device)
    before = logits.clone()
    OPS.apply_token_bitmask(logits, torch.tensor([[0x55555555, ALL]], dtype=torch.int32, device=device))
    assert (logits[0, 1:32:2] == -math.inf).all()
    assert_same_bits(logits[0, 0:32:2], before[0, 0:32:2])
    assert_same_bits(logits[0, 32:], before[0, 32:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_views(device, dtype):
    """Logits that begin anywhere, and one mask for every row."""
    generator = torch.Generator().manual_seed(0)
    buffer = random_bits(5, 300, dtype=dtype, generator=generator).to(device)
    bitmask = random_masks(1, 4, generator).to(device).expand(5, -1)
    for begin in range(9):
        logits, before = buffer[:, begin : begin + 101], buffer.clone()
        expected = reference.apply_token_bitmask(logits, bitmask)
        OPS.apply_token_bitmask(logits, bitmask)
        assert_same_bits(logits, expected)
        assert_same_bits(buffer[:, :begin], before[:, :begin])
        assert_same_bits(buffer[:, begin + 101 :], before[:, begin + 101 :])


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 0), (0, 70), (3, 0)])
@pytest.mark.parametrize("indices", [None, []])
def test_empty(device, num_rows, vocab_size, indices):
    assert_apply_token_bitmask(make_arguments(device, torch.float32, num_rows, vocab_size, indices))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(device, several_threads, dtype):
    """Large enough to run in parallel, rows in any order and not all of them."""
    indices = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:33].tolist()
    assert_apply_token_bitmask(make_arguments(device, dtype, 40, 10007, indices, gap=5))


@pytest.mark.parametrize("indices", [None, [1, 3]])
def test_wrapper(device, indices):
    arguments = make_arguments(device, torch.bfloat16, indices=indices)
    expected = reference.apply_token_bitmask(**arguments)
    assert ops.apply_token_bitmask(**arguments) is arguments["logits"]
    assert_same_bits(arguments["logits"], expected)


# what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)
ERRORS = {
    "logits dtype": ("logits", TypeError, lambda a: {"logits": a["logits"].double()}),
    "logits rank": ("logits", ValueError, lambda a: {"logits": a["logits"][0]}),
    "logits not dense in a row": ("logits", ValueError, lambda a: {"logits": a["logits"].T.contiguous().T}),
    "logits rows overlap": ("logits", ValueError, lambda a: {"logits": a["logits"][:1].expand(4, -1)}),
    "bitmask dtype": ("bitmask", TypeError, lambda a: {"bitmask": a["bitmask"].long()}),
    "bitmask rank": ("bitmask", ValueError, lambda a: {"bitmask": a["bitmask"][0]}),
    "bitmask rows": ("bitmask", ValueError, lambda a: {"bitmask": a["bitmask"][:1]}),
    "bitmask rows without indices": ("bitmask", ValueError, lambda a: {"indices": None}),
    "bitmask too narrow": ("bitmask", ValueError, lambda a: {"bitmask": a["bitmask"][:, :3]}),
    "bitmask not dense in a row": ("bitmask", ValueError, lambda a: {"bitmask": a["bitmask"].T.contiguous().T}),
    "indices dtype": ("indices", TypeError, lambda a: {"indices": a["indices"].int()}),
    "indices rank": ("indices", ValueError, lambda a: {"indices": a["indices"][None]}),
    "indices strided": ("indices", ValueError, lambda a: {"indices": torch.tensor([3, 0, 1, 0])[::2]}),
    "index too large": ("indices", ValueError, lambda a: {"indices": torch.tensor([3, 4])}),
    "index negative": ("indices", ValueError, lambda a: {"indices": torch.tensor([-1, 1])}),
    "index twice": ("indices", ValueError, lambda a: {"indices": torch.tensor([1, 1])}),
}


@pytest.mark.parametrize("what", ERRORS)
def test_apply_token_bitmask_rejects(device, what):
    argument, error, change = ERRORS[what]
    arguments = make_arguments(device, torch.float32, indices=[3, 1])
    assert_rejected("apply_token_bitmask", arguments | change(arguments), argument, error)


@pytest.mark.parametrize(
    ("indices", "message"),
    [([0, 2**40], "0 to 3, got 1099511627776 at mask 1"), ([0, 2, 1, 2], "every row once, got 2 again at mask 3")],
)
def test_a_bad_index_names_its_mask(device, indices, message):
    arguments = make_arguments(device, torch.float32, indices=indices)
    assert_raises_and_writes_nothing(OPS.apply_token_bitmask, arguments, RuntimeError, f"indices: expected .*{message}")


def test_a_narrow_bitmask_says_how_wide_it_must_be(device):
    arguments = make_arguments(device, torch.float32) | {"bitmask": torch.zeros(4, 3, dtype=torch.int32, device=device)}
    message = r"bitmask: expected rows of at least 4 words \(for 100 tokens\), got shape \[4, 3\]"
    assert_raises_and_writes_nothing(OPS.apply_token_bitmask, arguments, RuntimeError, message)
