"""rotary_embedding_neox against the reference, in place on strided rows; what is not rotated keeps its bits."""

import pytest
import reference
import torch
from checks import (
    DTYPES,
    assert_close_to_reference,
    assert_raises_and_writes_nothing,
    assert_rejected,
    assert_row_gap_untouched,
    assert_same_bits,
    with_row_gap,
)
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_ext import ops

OPS = torch.ops.pagedattn_ext


def make_arguments(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    positions: tuple[int, ...] = (0, 5, 5, 49),
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 64,
    rot_dim: int = 64,
    gaps: tuple[int, int] = (0, 0),
    flat: bool = False,
    seed: int = 0,
) -> dict:
    """`flat` gives query and key as [num_tokens, num_heads * head_size]; `gaps` follow their rows."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(len(positions), num_heads, head_size, generator=generator).to(dtype)
    key = torch.randn(len(positions), num_kv_heads, head_size, generator=generator).to(dtype)
    frequency = 100.0 ** -(torch.arange(0, rot_dim, 2) / max(rot_dim, 1))
    angle = torch.arange(50)[:, None] * frequency
    query, key = (with_row_gap(x.flatten(1) if flat else x, gap) for x, gap in zip((query, key), gaps, strict=True))
    return {
        "positions": torch.tensor(positions, dtype=torch.int64, device=device),
        "query": query.to(device),
        "key": key.to(device),
        "head_size": head_size,
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], dim=1).to(dtype).to(device),
    }


def assert_rotary(arguments: dict) -> None:
    head_size, rot_dim = arguments["head_size"], arguments["cos_sin_cache"].shape[1]
    query, key = arguments["query"], arguments["key"]
    expected = reference.rotary_embedding_neox(**arguments)
    eager = reference.rotary_embedding_neox(**arguments, dtype=query.dtype)
    before = query.clone(), key.clone()
    OPS.rotary_embedding_neox(**arguments)
    for i, rotated in enumerate((query, key)):
        assert_close_to_reference(rotated, expected[i], eager[i])
        assert_close_to_reference(rotated, expected[i])  # rounded once, which eager is not
        kept, same = (x.flatten(1).unflatten(1, (-1, head_size)) for x in (rotated, before[i]))
        assert_same_bits(kept[:, :, rot_dim:], same[:, :, rot_dim:])
        assert_row_gap_untouched(rotated)


@given(st.data())
def test_rotary_embedding_neox(device, data):
    draw = data.draw
    head_size = draw(st.sampled_from([64, 80, 96, 128, 256]) | st.integers(1, 40).map(lambda half: 2 * half))
    arguments = make_arguments(
        device,
        draw(st.sampled_from(DTYPES)),
        tuple(draw(st.lists(st.integers(0, 49), max_size=7))),
        num_heads=draw(st.integers(1, 5)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_size=head_size,
        rot_dim=draw(st.just(head_size) | st.integers(1, head_size // 2).map(lambda half: 2 * half)),
        gaps=draw(st.sampled_from([(0, 0), (1, 8), (64, 33)])),
        flat=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    assert_rotary(arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rot_dim", [2, 6, 14, 32, 62, 64])
def test_partial_rotary(device, dtype, rot_dim):
    assert_rotary(make_arguments(device, dtype, rot_dim=rot_dim, gaps=(8, 1)))


def test_slices_of_a_fused_qkv(device):
    """query and key are neighbours in one buffer; rotating them leaves value alone."""
    qkv = torch.randn(4, (4 + 2 + 2) * 64, generator=torch.Generator().manual_seed(0)).to(device)
    before = qkv.clone()
    arguments = make_arguments(device) | {"query": qkv[:, :256], "key": qkv[:, 256:384]}
    expected = reference.rotary_embedding_neox(**arguments)
    OPS.rotary_embedding_neox(**arguments)
    assert_close_to_reference(qkv[:, :384], torch.cat(expected, dim=1))
    assert_same_bits(qkv[:, 384:], before[:, 384:])


def test_no_tokens(device):
    assert_rotary(make_arguments(device, positions=()))


def test_position_zero_changes_nothing(device):
    arguments = make_arguments(device, positions=(0, 0))
    before = arguments["query"].clone()
    OPS.rotary_embedding_neox(**arguments)
    assert_same_bits(arguments["query"], before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens(device, several_threads, dtype):
    """Large enough to run in parallel."""
    assert_rotary(make_arguments(device, dtype, tuple(token % 50 for token in range(400)), num_heads=16, head_size=128))


def test_wrapper(device):
    arguments = make_arguments(device)
    expected = reference.rotary_embedding_neox(**arguments)
    query, key = ops.rotary_embedding_neox(**arguments)
    assert query is arguments["query"] and key is arguments["key"]
    assert_close_to_reference(query, expected[0])
    assert_close_to_reference(key, expected[1])


# what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)
ERRORS = {
    "positions dtype": ("positions", TypeError, lambda a: {"positions": a["positions"].int()}),
    "positions rank": ("positions", ValueError, lambda a: {"positions": a["positions"][None, None]}),
    "position too large": ("positions", ValueError, lambda a: {"positions": torch.tensor([0, 1, 2, 50])}),
    "position negative": ("positions", ValueError, lambda a: {"positions": torch.tensor([0, 1, 2, -1])}),
    "query rank": ("query", ValueError, lambda a: {"query": a["query"][None]}),
    "query rows": ("(query|positions)", ValueError, lambda a: {"query": a["query"][:3]}),
    "query head size": ("query", ValueError, lambda a: {"query": a["query"][:, :, :60].contiguous()}),
    "query not heads of head_size": ("query", ValueError, lambda a: {"query": a["query"].flatten(1)[:, :100]}),
    "query dtype": ("query", TypeError, lambda a: {"query": a["query"].double()}),
    "query not dense in a row": ("query", ValueError, lambda a: {"query": a["query"].mT.contiguous().mT}),
    "key rows": ("key", ValueError, lambda a: {"key": a["key"][:3]}),
    "key dtype": ("key", TypeError, lambda a: {"key": a["key"].half()}),
    "key not dense in a row": ("key", ValueError, lambda a: {"key": a["key"].mT.contiguous().mT}),
    "head_size": ("(head_size|query|cos_sin_cache)", ValueError, lambda a: {"head_size": 0}),
    "cos_sin_cache rank": ("cos_sin_cache", ValueError, lambda a: {"cos_sin_cache": a["cos_sin_cache"][0]}),
    "cos_sin_cache odd": ("cos_sin_cache", ValueError, lambda a: {"cos_sin_cache": torch.ones(50, 31)}),
    "cos_sin_cache wider than a head": ("cos_sin_cache", ValueError, lambda a: {"cos_sin_cache": torch.ones(50, 66)}),
    "cos_sin_cache dtype": ("cos_sin_cache", TypeError, lambda a: {"cos_sin_cache": a["cos_sin_cache"].long()}),
    "cos_sin_cache strided": ("cos_sin_cache", ValueError, lambda a: {"cos_sin_cache": torch.ones(50, 128)[:, ::2]}),
}


@pytest.mark.parametrize("what", ERRORS)
def test_rotary_embedding_neox_rejects(device, what):
    argument, error, change = ERRORS[what]
    arguments = make_arguments(device)
    assert_rejected("rotary_embedding_neox", arguments | change(arguments), argument, error)


@pytest.mark.parametrize("position", [-1, 50, 2**40])
def test_bad_position_names_its_token(device, position):
    arguments = make_arguments(device, positions=(0, 1, position, 2))
    match = f"positions: expected .*, got {position} at token 2"
    assert_raises_and_writes_nothing(OPS.rotary_embedding_neox, arguments, RuntimeError, match)
