"""paged_attention, v1 and v2 against the reference, on caches whose unused slots and blocks are NaN, and what must not
change their results.
"""

from dataclasses import replace

import pytest
import reference
import torch
from attention_cases import (
    NO_BLOCK,
    OPS,
    Case,
    assert_as_alone,
    assert_attention,
    assert_v1,
    cases,
    make_arguments,
    make_v1_arguments,
    make_v2_arguments,
    run_v1,
    run_v2,
)
from checks import DTYPES, assert_row_gap_untouched, assert_same_bits
from hypothesis import example, given
from hypothesis import strategies as st
from op_table import num_simt_launches, runs_cuda_kernels

# ---- against the reference -----------------------------------------------------------------------------------------


# Of 224, as the bias grows with the distance.
LARGE_LOGITS = Case(((2, 1100),), group_size=4, head_size=4, layout="nhd", alibi=True, causal=False, seed=1)


@given(cases())
@example(LARGE_LOGITS)
def test_paged_attention(device, case):
    arguments = make_arguments(case, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))
    assert_row_gap_untouched(arguments["query"])


@given(cases(rows=st.just(1), options=False), st.sampled_from([0, 1, 8]))
def test_paged_attention_v1_and_v2(device, case, out_gap):
    arguments = make_v1_arguments(case, device, out_gap)
    assert_v1(arguments, run_v1(arguments))
    assert_row_gap_untouched(arguments["out"])
    v2_arguments = make_v2_arguments(case, device, out_gap)
    assert_same_bits(run_v2(v2_arguments), arguments["out"])
    assert_row_gap_untouched(v2_arguments["out"])


HEAD_SIZES = [64, 80, 96, 112, 120, 128, 192, 256, 512]
BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sweep
def test_every_named_head_size_and_block_size(device, dtype, head_size, block_size):
    """A decode row, and rows enough to be prefill."""
    case = Case(((1, 300), (9, 40)), dtype, num_kv_heads=1, head_size=head_size, block_size=block_size)
    arguments = make_arguments(case, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("group_size", range(1, 33))
@pytest.mark.sweep
def test_every_group_size(device, group_size):
    for dtype in DTYPES:
        case = Case(((1, 70), (9, 20)), dtype, group_size=group_size, head_size=16)
        arguments = make_arguments(case, device)
        assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_heads_in_8_bits(device, dtype):
    """Single bytes are loaded, at odd addresses too, which a sanitizer and a GPU would refuse for larger words."""
    case = Case(((1, 13), (9, 40)), dtype, ("fp8", torch.uint8), num_kv_heads=1, head_size=512)
    arguments = make_arguments(case, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("cache", [None, ("fp8", torch.uint8)], ids=["same", "fp8"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("group_size", [17, 32, 33, 71])
@pytest.mark.sweep
def test_large_groups(device, group_size, head_size, cache):
    """More rows than a multiplication of a tensor core has, over one partition and several; with few rows in the last
    tile, and with none."""
    lens = ((1, 1100), (1, 3), (1, 0), (12, 40))
    case = Case(lens, torch.bfloat16, cache, num_kv_heads=1, group_size=group_size, head_size=head_size, alibi=True)
    arguments = make_arguments(case, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))
    assert_as_alone(arguments, device)


def test_large_groups_of_many_sequences(device):
    """On a device of 4 multiprocessors, more than there are blocks."""
    case = Case(((1, 20),) * 70, torch.float16, num_kv_heads=1, group_size=20)
    arguments = make_arguments(case, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("num_tokens", [1, 7, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_reference_is_torch_sdpa(num_tokens, causal):
    """The reference itself, without paging: torch's own attention on contiguous K and V."""
    query, key, value = torch.randn(3, num_tokens, 4, 24, dtype=torch.float64).unbind()
    key, value = key[:, :2], value[:, :2]
    out, _ = reference.attention(query, key, value, scale=0.3, causal=causal)
    heads_first = [tensor.transpose(0, 1) for tensor in (query, key, value)]
    sdpa = torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=0.3, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, sdpa.transpose(0, 1))


# ---- what must not change the result, bit for bit ------------------------------------------------------------------


@given(cases(), st.randoms(use_true_random=False))
def test_order_of_physical_blocks_does_not_matter(device, case, random):
    arguments = make_arguments(case, device)
    num_blocks = len(arguments["key_cache"])
    moved_to = torch.tensor(random.sample(range(num_blocks), num_blocks), dtype=torch.int32, device=device)
    moved = dict(arguments)
    for cache in ("key_cache", "value_cache"):
        moved[cache] = arguments[cache].clone()
        moved[cache][moved_to.long()] = arguments[cache]
    tables = arguments["block_tables"]
    moved["block_tables"] = torch.where(tables == NO_BLOCK, tables, moved_to[tables.clamp(max=num_blocks - 1).long()])
    for result, expected in zip(OPS.paged_attention(**moved), OPS.paged_attention(**arguments), strict=True):
        assert_same_bits(result, expected)


@given(cases(rows=st.just(1), options=False), st.sampled_from([0, 1, 5]))
def test_v1_and_v2_are_paged_attention_of_one_row_each(device, case, spare_partitions):
    arguments = make_arguments(case, device)
    out, lse = OPS.paged_attention(**arguments)
    assert_same_bits(run_v1(make_v1_arguments(case, device)), out)
    assert_same_bits(run_v2(make_v2_arguments(case, device, spare_partitions=spare_partitions)), out)
    same_out, same_lse = OPS.paged_attention(**arguments | {"query_start_loc": None})
    assert_same_bits(same_out, out)
    assert_same_bits(same_lse, lse)


@pytest.mark.devices("simt")
def test_one_row_each_needs_no_prefill_kernel(device):
    """Without query_start_loc, as then the host knows it; or with as few rows as decode takes of one sequence."""
    arguments = make_arguments(Case(((1, 600),) * 9, torch.float16), device)
    few_rows = make_arguments(Case(((1, 600), (3, 600)), torch.float16), device)

    def num_launches(**arguments) -> int:
        before = num_simt_launches()
        OPS.paged_attention(**arguments)
        return num_simt_launches() - before

    decode_alone = num_launches(**arguments | {"query_start_loc": None})
    assert decode_alone < num_launches(**arguments)
    assert num_launches(**few_rows) == decode_alone


@pytest.mark.devices("simt")
@given(cases(rows=st.integers(0, 1)), st.sampled_from([64, 128, 256]), st.sampled_from([1, 4, 20]))
def test_slices_by_bulk_copies_are_those_by_single_ones(device, case, head_size, group_size):
    """From sm_90 on, two copies bring a slice to decode: also what no row sees of it, NaN here."""
    arguments = make_arguments(replace(case, head_size=head_size, block_size=16, group_size=group_size), device)
    results = OPS.paged_attention(**arguments)
    assert_attention(arguments, *results)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PAGEDATTN_SIMT_ARCH", "80")
        for result, expected in zip(results, OPS.paged_attention(**arguments), strict=True):
            assert_same_bits(result, expected)


@given(cases())
def test_a_batch_is_its_sequences_one_by_one(device, case):
    assert_as_alone(make_arguments(case, device), device)


@given(cases(rows=st.integers(1, 9)), st.data())
def test_chunked_prefill_is_whole_prefill(device, case, data):
    """Each sequence is cut into chunks; a chunk sees a cache that already holds the tokens after it.

    CUDA kernels tile the rows of a chunk, so that bits may differ.
    """
    lens = tuple((rows, max(rows, seq_len)) for rows, seq_len in case.lens)
    arguments = make_arguments(replace(case, lens=lens, causal=True, right_window=None), device)
    chunks = []  # (sequence, rows, seq_len)
    for s, (rows, seq_len) in enumerate(lens):
        cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1), max_size=3)) if rows > 1 else [])
        for begin, end in zip([0, *cuts], [*cuts, rows], strict=True):
            chunks.append((s, end - begin, seq_len - rows + end))
    chunked = arguments | {
        "block_tables": arguments["block_tables"][[s for s, _, _ in chunks]],
        "seq_lens": torch.tensor([seq_len for _, _, seq_len in chunks], dtype=torch.int32, device=device),
        "query_start_loc": torch.tensor([0, *(rows for _, rows, _ in chunks)], device=device).cumsum(0).int(),
    }
    in_chunks = OPS.paged_attention(**chunked)
    if runs_cuda_kernels(device):
        assert_attention(arguments, *in_chunks)
        return
    for result, expected in zip(in_chunks, OPS.paged_attention(**arguments), strict=True):
        assert_same_bits(result, expected)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("layout", ["chunked", "hnd"])
@pytest.mark.parametrize("group_size", [1, 2, 4, 8, 20])
@pytest.mark.parametrize(
    ("dtype", "head_size", "block_size", "cache", "window"),
    [
        (torch.bfloat16, 72, 16, None, None),
        (torch.bfloat16, 80, 16, None, 100),
        (torch.bfloat16, 128, 16, None, None),
        (torch.bfloat16, 80, 16, ("fp8", torch.uint8), None),
        (torch.bfloat16, 64, 64, None, None),
        (torch.float16, 72, 8, None, 100),
        (torch.float32, 80, 16, None, None),
        (torch.float32, 64, 64, None, 100),
    ],
    ids=str,
)
def test_a_row_of_a_prompt_is_a_decode_row(device, dtype, head_size, block_size, cache, window, group_size, layout):
    """A kernel may multiply many rows with other instructions than a few, and may add in other registers. All round
    alike, or the bits differ here: half of the blocks have the values of the other half, negated, so that what is left
    of a sum is the rounding of its steps. Over several partitions, or from amid a tile on."""
    rows, num_tokens, half = 40, 704, 320 // block_size
    case = Case(((rows, num_tokens),), dtype, cache, num_kv_heads=1, group_size=group_size, block_size=block_size)
    arguments = make_arguments(replace(case, layout=layout, head_size=head_size, sliding_window=window), device)
    blocks = arguments["block_tables"][0, : num_tokens // block_size].long()
    arguments["key_cache"][blocks[half : 2 * half]] = arguments["key_cache"][blocks[:half]]
    values = arguments["value_cache"][blocks[:half]]
    arguments["value_cache"][blocks[half : 2 * half]] = -values if cache is None else values ^ 0x80
    arguments["value_cache"][blocks[2 * half :]] = 0  # the blocks that not all rows see
    out, lse = OPS.paged_attention(**arguments)
    alone = arguments | {
        "block_tables": arguments["block_tables"].expand(rows, -1).contiguous(),
        "seq_lens": torch.arange(num_tokens - rows + 1, num_tokens + 1, dtype=torch.int32, device=device),
        "query_start_loc": torch.arange(rows + 1, dtype=torch.int32, device=device),
    }
    for i in 0, 17, rows - 1:
        of_row = {"block_tables": slice(i, i + 1), "seq_lens": slice(i, i + 1), "query": slice(i, i + 1)}
        one = alone | {name: alone[name][rows_of] for name, rows_of in of_row.items()}
        one["query_start_loc"] = alone["query_start_loc"][:2]
        for result, expected in zip(OPS.paged_attention(**one), (out, lse), strict=True):
            assert_same_bits(result, expected[i : i + 1])
    for result, expected in zip(OPS.paged_attention(**alone), (out, lse), strict=True):
        assert_same_bits(result, expected)


UNEQUAL = [(1300, 40, 2000), (30, 3000, 30, 30, 30), (5000,)]  # one of them 100 times longer than the others; one alone


@pytest.mark.devices("cpu", "cuda")  # kernels of the simt device run on one thread
@pytest.mark.parametrize("cache", [None, ("fp8", torch.uint8)], ids=["fp32", "fp8"])
@pytest.mark.parametrize("seq_lens", UNEQUAL, ids=str)
@pytest.mark.parametrize("rows", [1, 12])
def test_number_of_threads_does_not_matter(device, several_threads, rows, seq_lens, cache):
    """Large enough to run in parallel."""
    case = Case(tuple((rows, seq_len) for seq_len in seq_lens), cache=cache, head_size=128)
    arguments = make_arguments(case, device)
    parallel = OPS.paged_attention(**arguments)
    torch.set_num_threads(1)
    serial = OPS.paged_attention(**arguments)
    for result, expected in zip(parallel, serial, strict=True):
        assert_same_bits(result, expected)
    assert_attention(arguments, *parallel)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_heads_of_a_kv_head_than_rows_at_once(device, dtype):
    case = Case(((1, 150), (9, 40)), dtype, num_kv_heads=1, group_size=200, head_size=32, alibi=True)
    arguments = make_arguments(case, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))
