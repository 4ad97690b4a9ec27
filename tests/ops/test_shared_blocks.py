"""Sequences whose tables hold the same blocks: every row is, bit for bit, what it is when its sequence runs alone."""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import (
    FP8_CACHES,
    FP8_IDS,
    NO_BLOCK,
    OPS,
    V1_INPUTS,
    Case,
    assert_as_alone,
    assert_attention,
    cases,
    make_arguments,
)
from checks import DTYPES, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st


def share_blocks(arguments: dict, case: Case, parents: list[tuple[int, int]]) -> dict:
    """Sequence s begins with the blocks of sequence `parents[s][0]` < s, at most `parents[s][1]` of them; (0, 0): none.

    A block that the parent has filled in part is shared only if the sequence sees no more of it.
    """
    tables = arguments["block_tables"].clone()
    for s, (parent, num_blocks) in enumerate(parents):
        seq_len, parent_len = case.lens[s][1], case.lens[parent][1]
        covered = math.ceil(seq_len / case.block_size) if seq_len <= parent_len else parent_len // case.block_size
        n = min(num_blocks, covered)
        tables[s, :n] = tables[parent, :n]
    return arguments | {"block_tables": tables}


@st.composite
def trees(draw: st.DrawFn) -> tuple[Case, list[tuple[int, int]]]:
    """A call, and for each sequence whose blocks it begins with and with how many."""
    case = draw(cases(rows=st.integers(1, 4) | st.integers(0, 9)))
    root_len = draw(st.integers(1, 1100))
    length = st.just(root_len) | st.integers(root_len, root_len + 40) | st.integers(0, root_len + 200)
    lens = draw(st.lists(st.tuples(st.just(1) | st.integers(0, 9), length), min_size=2, max_size=7))
    parents = [(0, 0)]
    for s in range(1, len(lens)):
        parents.append((draw(st.integers(0, s - 1)), draw(st.just(999) | st.integers(0, 80))))
    return replace(case, lens=tuple(lens)), parents


@given(trees(), st.integers(1, 2))
def test_any_tree(device, tree, num_threads):
    case, parents = tree
    torch.set_num_threads(num_threads)
    try:
        assert_as_alone(share_blocks(make_arguments(case, device), case, parents), device)
    finally:
        torch.set_num_threads(1)


# Two that differ in their own tokens only; a beam that forked later; a prefix of two blocks; one that shares nothing;
# one within the shared part; all of another's blocks and less of its last one; several rows; rows enough to be prefill.
LENS = ((1, 1300), (1, 1316), (1, 1400), (1, 600), (1, 900), (1, 700), (1, 1290), (3, 1310), (12, 1250))
PARENTS = [(0, 0), (0, 64), (1, 80), (0, 2), (0, 0), (0, 999), (0, 999), (0, 70), (0, 75)]
OPTIONS = {
    "none": {},
    "alibi": {"alibi": True},
    "sliding_window": {"sliding_window": 450},
    "attention_chunk": {"attention_chunk": 450},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "not causal": {"alibi": True, "sliding_window": 450, "causal": False, "right_window": 7},
    "all": {"alibi": True, "sliding_window": 900, "softcap": 3.0, "sinks": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sweep
def test_each_option(device, dtype, option):
    case = Case(LENS, dtype, **OPTIONS[option])
    arguments = share_blocks(make_arguments(case, device), case, PARENTS)
    assert_as_alone(arguments, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("cache", FP8_CACHES[:2], ids=FP8_IDS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sweep
def test_fp8_caches(device, dtype, cache):
    case = Case(LENS, dtype, cache=cache, scales=(0.3, 2.6), group_size=4)
    assert_as_alone(share_blocks(make_arguments(case, device), case, PARENTS), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 3, 5, 12, 22])
@pytest.mark.sweep
def test_any_number_of_rows_over_whole_tiles(device, dtype, rows):
    """Enough for a tile to be rewritten for them, with and without rows left over; 16 rows are one item, 22 are two."""
    case = Case(tuple((1, 600 + s) for s in range(rows)), dtype, group_size=4, head_size=96)
    assert_as_alone(share_blocks(make_arguments(case, device), case, [(0, 0)] + [(0, 37)] * (rows - 1)), device)


@pytest.mark.parametrize("block_size", [2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 64])
@pytest.mark.sweep
def test_group_and_block_sizes(device, group_size, block_size):
    lens = ((1, 700), (1, 701), (1, 900), (1, 700), (2, 1100))
    case = Case(lens, num_kv_heads=2, group_size=group_size, head_size=32, block_size=block_size)
    parents = [(0, 0), (0, 999), (0, 512 // block_size), (1, 999), (2, 999)]
    assert_as_alone(share_blocks(make_arguments(case, device), case, parents), device)


def test_more_rows_than_an_item_has(device):
    """40 sequences of a prefix of 341 tokens, and of their own."""
    case = Case(tuple((1, 400 + 7 * s) for s in range(40)), group_size=4, head_size=32)
    parents = [(0, 0)] + [(0, 21)] * 39
    assert_as_alone(share_blocks(make_arguments(case, device), case, parents), device)


@pytest.mark.devices("cpu", "cuda")  # kernels of the simt device run on one thread
@pytest.mark.parametrize("rows", [1, 5])
def test_number_of_threads_does_not_matter(device, several_threads, rows):
    """Large enough to run in parallel."""
    case = Case(tuple((rows, 2100 + s) for s in range(8)), group_size=4, head_size=128)
    arguments = share_blocks(make_arguments(case, device), case, [(0, 0)] + [(0, 128)] * 7)
    parallel = OPS.paged_attention(**arguments)
    torch.set_num_threads(1)
    assert_as_alone(arguments, device)
    for result, expected in zip(parallel, OPS.paged_attention(**arguments), strict=True):
        assert_same_bits(result, expected)


def test_v1_and_v2(device):
    lens = tuple((1, 1100 + 9 * s) for s in range(6))
    case = Case(lens, group_size=4)
    arguments = share_blocks(make_arguments(case, device), case, [(0, 0)] + [(0, 65)] * 5)
    expected, _ = OPS.paged_attention(**arguments)
    v1 = {name: arguments[name] for name in V1_INPUTS} | {
        "num_kv_heads": case.num_kv_heads,
        "block_size": case.block_size,
        "max_seq_len": 1200,
    }
    out = torch.empty_like(expected)
    OPS.paged_attention_v1(**v1, out=out)
    assert_same_bits(out, expected)
    num_seqs, num_heads, head_size = out.shape
    exp_sums, max_logits = torch.empty(2, num_seqs, num_heads, 3, device=device)
    tmp_out = torch.empty(num_seqs, num_heads, 3, head_size, device=device)
    out = torch.empty_like(expected)
    OPS.paged_attention_v2(**v1, out=out, exp_sums=exp_sums, max_logits=max_logits, tmp_out=tmp_out)
    assert_same_bits(out, expected)


def test_what_a_sequence_does_not_see_of_a_shared_block(device):
    """NaN in the tokens that only one of two sequences sees, in blocks of both tables."""
    case = Case(((1, 700), (1, 600), (1, 650)), head_size=32)
    arguments = share_blocks(make_arguments(case, device), case, [(0, 0), (0, 999), (0, 999)])
    arguments["block_tables"][1:] = arguments["block_tables"][0]  # with all of the entries behind theirs
    expected = OPS.paged_attention(**arguments)
    block, slot = arguments["block_tables"][0, 680 // 16].item(), 680 % 16
    arguments["key_cache"][block, :, :, slot] = math.nan
    arguments["value_cache"][block, :, :, slot] = math.nan
    results = OPS.paged_attention(**arguments)
    for result, of_before in zip(results, expected, strict=True):
        assert result[0].isnan().all()
        assert_same_bits(result[1:], of_before[1:])
    assert_as_alone(arguments, device)


def test_blocks_several_times_in_a_table(device):
    """And sequences that have the same blocks in another order, or elsewhere."""
    case = Case(((1, 1200), (1, 1200), (1, 1200), (1, 1184)), head_size=32)
    arguments = make_arguments(case, device)
    tables = arguments["block_tables"]
    tables[0, 1:70] = tables[0, 0].clone()
    tables[1] = tables[0]
    tables[1, 40:60] = tables[2, 40:60]
    tables[2, :75] = tables[0, :75].flip(0)
    tables[3, :74] = tables[0, 1:75]
    assert_as_alone(arguments, device)


def test_before_a_window_tables_hold_anything(device):
    case = Case(((1, 1300), (1, 1305), (1, 1300), (2, 1300)), sliding_window=300)
    arguments = share_blocks(make_arguments(case, device), case, [(0, 0), (0, 80), (0, 80), (0, 80)])
    expected = OPS.paged_attention(**arguments)
    tables = arguments["block_tables"]
    tables[0, : 1000 // 16] = NO_BLOCK
    tables[1, : 1000 // 16] = -1
    tables[2, : 500 // 16] = NO_BLOCK
    for result, of_before in zip(OPS.paged_attention(**arguments), expected, strict=True):
        assert_same_bits(result, of_before)
    assert_as_alone(arguments, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_less_behind_rows_that_see_more(device, dtype):
    """A tile of shared blocks ends behind its last visible token, whichever row that is."""
    case = Case(((8, 148),) * 3, dtype, group_size=2, head_size=32)
    assert_as_alone(share_blocks(make_arguments(case, device), case, [(0, 0), (0, 999), (0, 999)]), device)


def test_other_neighbours_in_the_next_partition(device):
    """Sequence 0 shares its first partition with a short sequence and its second with a long one. The short one has no
    second partition: results of it would lie in those of sequence 2, which are there already."""
    case = Case(((1, 1040), (1, 300), (1, 40), (1, 40), (1, 1040)), num_kv_heads=1, head_size=32)
    arguments = make_arguments(case, device)
    tables = arguments["block_tables"]
    for seqs, block in (([2, 0], 0), ([0, 1], 1), ([0, 4], 33)):  # blocks are taken in the order of their ids
        tables[seqs, block] = tables[seqs, block].sort().values
    tables[1, 0], tables[3, 0], tables[4, 32] = tables[0, 0], tables[2, 0], tables[0, 32]
    assert_as_alone(arguments, device)
