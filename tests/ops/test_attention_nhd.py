"""Attention over caches [num_blocks, block_size, num_kv_heads, head_size] of any strides and block sizes, against the
reference over the same tokens.
"""

import math
from dataclasses import replace

import pytest
import reference
import torch
from attention_cases import NO_BLOCK, UNUSED_BLOCKS, Case, cases, make_arguments
from checks import DTYPES, assert_close_to_reference, assert_same_bits, filled_with_nan
from hypothesis import given
from hypothesis import strategies as st
from op_table import OPS, simt_uses

BLOCK_SIZES = [1, 2, 3, 5, 8, 16, 24, 48, 256]


def as_stored(kind: str, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype, device):
    """A key and a value cache full of NaN, as frameworks keep them in memory."""

    def nan(*shape):
        return filled_with_nan(*shape, dtype=dtype, device=device)

    if kind == "nhd":
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        return nan(*shape), nan(*shape)
    if kind == "hnd":
        shape = (num_blocks, num_kv_heads, block_size, head_size)
        return nan(*shape).transpose(1, 2), nan(*shape).transpose(1, 2)
    if kind == "one tensor":  # keys and values of a block side by side
        both = nan(num_blocks, 2, block_size, num_kv_heads, head_size)
        return both[:, 0], both[:, 1]
    if kind == "side by side":  # keys and values of a head
        both = nan(num_blocks, num_kv_heads, block_size, 2 * head_size).transpose(1, 2)
        return both[..., :head_size], both[..., head_size:]
    assert kind == "unaligned"  # no row begins at 16 bytes, but by chance
    rows = nan(num_blocks, block_size, num_kv_heads, 2 * head_size + 3)
    return rows[..., 1 : 1 + head_size], rows[..., head_size + 2 : 2 * head_size + 2]


KINDS = ["nhd", "hnd", "one tensor", "side by side", "unaligned"]


def in_nhd(arguments: dict, block_size: int, kind: str = "nhd", seed: int = 0) -> dict:
    """A call over chunked caches, in the NHD layout: each sequence's tokens in other blocks, NaN everywhere else."""
    caches = arguments["key_cache"], arguments["value_cache"]
    device, seq_lens = caches[0].device, arguments["seq_lens"].tolist()
    num_blocks = [math.ceil(seq_len / block_size) for seq_len in seq_lens]
    ids = torch.randperm(sum(num_blocks) + UNUSED_BLOCKS, generator=torch.Generator().manual_seed(seed))
    tables = torch.full((len(seq_lens), max(num_blocks, default=0) + 1), NO_BLOCK, dtype=torch.int32)
    key_cache, value_cache = as_stored(
        kind, len(ids), block_size, caches[1].shape[1], caches[1].shape[2], caches[1].dtype, device
    )
    old_block_size = caches[1].shape[3]
    for table, old_table, seq_len, blocks in zip(
        tables, arguments["block_tables"], seq_lens, ids[:-UNUSED_BLOCKS].split(num_blocks), strict=True
    ):
        table[: len(blocks)] = blocks
        tokens = torch.arange(seq_len)
        place = (table[tokens // block_size].long().to(device), (tokens % block_size).to(device))
        old_slots = reference.slots_of(old_table, seq_len, old_block_size)
        key_cache[place], value_cache[place] = reference.gather(*caches, old_slots)
    return arguments | {"key_cache": key_cache, "value_cache": value_cache, "block_tables": tables.to(device)}


def assert_nhd(arguments: dict, nhd: dict) -> None:
    """The call in the NHD layout against the reference in the other."""
    out, lse = OPS.paged_attention(**nhd)
    expected_out, expected_lse = reference.paged_attention(**arguments)
    eager_out, _ = reference.paged_attention(**arguments, dtype=out.dtype)
    _, eager_lse = reference.paged_attention(**arguments, dtype=torch.float32)
    assert_close_to_reference(out, expected_out, eager_out)
    assert_close_to_reference(lse, expected_lse, eager_lse)


@given(cases(), st.sampled_from(BLOCK_SIZES) | st.integers(1, 70), st.sampled_from(KINDS))
def test_any_call(device, case, block_size, kind):
    arguments = make_arguments(replace(case, layout="chunked", block_size=16), device)
    assert_nhd(arguments, in_nhd(arguments, block_size, kind, case.seed))


CACHES = [None, ("fp8", torch.uint8), ("fp8_e5m2", torch.uint8)]


@pytest.mark.devices("simt", "cuda")
@pytest.mark.parametrize("cache", CACHES, ids=["same", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_each_kernel(device, monkeypatch, dtype, head_size, cache):
    """Decode in one partition and several, a wide group, prefill of several tiles, on each architecture."""
    for arch in ("80", "90"):
        monkeypatch.setenv("PAGEDATTN_SIMT_ARCH", arch)
        for group_size, lens in ((2, ((1, 600), (1, 40), (70, 150))), (20, ((1, 70), (1, 0)))):
            case = Case(lens, dtype, cache, num_kv_heads=1, group_size=group_size, head_size=head_size)
            arguments = make_arguments(case, device)
            assert_nhd(arguments, in_nhd(arguments, 3))


@pytest.mark.devices("simt", "cuda")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_are_those_of_the_other_layout(device, monkeypatch, dtype):
    """With 16 bits, in decode: operands are the same, and only the way to them differs."""
    monkeypatch.setenv("PAGEDATTN_CUDA_WITHOUT", "wgmma")
    case = Case(((1, 1300), (1, 17), (3, 90), (40, 50)), dtype, group_size=4, head_size=128, sliding_window=700)
    arguments = make_arguments(case, device)
    for block_size, kind in ((1, "nhd"), (7, "hnd"), (16, "unaligned")):
        nhd = in_nhd(arguments, block_size, kind)
        for actual, expected in zip(OPS.paged_attention(**nhd), OPS.paged_attention(**arguments), strict=True):
            assert_same_bits(actual, expected)


@pytest.mark.devices("simt")
def test_prefill_takes_wgmma(device):
    arguments = make_arguments(Case(((40, 300),), torch.bfloat16, head_size=128), device)
    before = simt_uses()["wgmma"]
    assert_nhd(arguments, in_nhd(arguments, 16))
    assert simt_uses()["wgmma"] > before
