"""The attention ops at the edges: nothing to see, long contexts, windows, huge logits; and their wrappers."""

from dataclasses import replace
from itertools import pairwise

import pytest
import reference
import torch
from attention_cases import (
    FP8_CACHES,
    FP8_IDS,
    NO_BLOCK,
    OPS,
    V1_INPUTS,
    Case,
    assert_attention,
    assert_v1,
    make_arguments,
    make_v1_arguments,
    make_v2_arguments,
    run_v1,
    run_v2,
)
from checks import DTYPES, assert_close_to_reference, assert_row_gap_untouched, assert_same_bits
from op_table import rounds_probabilities

from pagedattn_ext import ops

V1_AND_V2 = [pytest.param(make_v1_arguments, run_v1, id="v1"), pytest.param(make_v2_arguments, run_v2, id="v2")]


@pytest.mark.parametrize("lens", [(), ((0, 5),), ((0, 0), (0, 0))], ids=str)
def test_no_tokens(device, lens):
    arguments = make_arguments(Case(lens), device)
    out, lse = OPS.paged_attention(**arguments)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_v1_and_v2_no_sequences(device):
    assert run_v1(make_v1_arguments(Case(()), device)).shape == (0, 4, 64)
    assert run_v2(make_v2_arguments(Case(()), device)).shape == (0, 4, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_no_token_is_zero(device, dtype):
    """seq_len 0, and rows before the start of their sequence; their neighbours are as ever."""
    arguments = make_arguments(Case(((1, 0), (5, 2), (1, 20), (2, 0)), dtype), device)
    out, lse = OPS.paged_attention(**arguments)
    masked = [0, 1, 2, 3, 7, 8]
    assert_same_bits(out[masked], torch.zeros_like(out[masked]))
    assert lse[masked].isneginf().all()
    assert_attention(arguments, out, lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_of_minus_infinity_is_none(device, dtype):
    """Alone it gives the zeros of an empty row, as for the second head; the first head's sink is finite."""
    case = Case(((1, 0), (5, 2), (1, 20), (10, 3)), dtype, num_kv_heads=1, sinks=True)
    arguments = make_arguments(case, device)
    arguments["sinks"][1] = -torch.inf
    out, lse = OPS.paged_attention(**arguments)
    empty = [0, 1, 2, 3, *range(7, 14)]
    assert_same_bits(out[empty], torch.zeros_like(out[empty]))
    assert_same_bits(lse[empty, 0], arguments["sinks"][0].expand(len(empty)).contiguous())
    assert lse[empty, 1].isneginf().all()
    assert_attention(arguments, out, lse)
    without, _ = OPS.paged_attention(**arguments | {"sinks": None})
    assert_same_bits(out[:, 1], without[:, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_far_above_all_logits(device, dtype):
    """It takes all weight. e^sink, relative to the greatest logit, is infinite."""
    arguments = make_arguments(Case(((1, 20), (10, 30)), dtype, num_kv_heads=1, sinks=True), device)
    arguments["sinks"].fill_(200.0)
    out, lse = OPS.paged_attention(**arguments)
    assert_same_bits(lse, torch.full_like(lse, 200.0))
    assert_attention(arguments, out, lse)


def test_a_sink_that_is_nan(device):
    """A row that sees nothing is zero all the same."""
    arguments = make_arguments(Case(((1, 0), (1, 5)), sinks=True), device)
    arguments["sinks"].fill_(torch.nan)
    out, lse = OPS.paged_attention(**arguments)
    assert not out[0].any()
    assert out[1].isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_len", [20, 700])
def test_nan_in_what_a_row_sees_comes_out(device, dtype, seq_len):
    """A query of NaN, or one visible key or value: NaN in that row's out (and lse), not the zeros of an empty row."""
    for name in ("query", "key_cache", "value_cache"):
        arguments = make_arguments(Case(((1, seq_len), (1, 9)), dtype, num_kv_heads=1, group_size=1), device)
        if name == "query":
            arguments["query"][0] = torch.nan
        else:
            block = arguments["block_tables"][0, 0].long()
            arguments[name][block] = torch.nan
        out, lse = OPS.paged_attention(**arguments)
        assert out[0].isnan().all() and out[1].isfinite().all()
        assert lse[0].isnan().all() == (name != "value_cache") and lse[1].isfinite().all()


@pytest.mark.parametrize(("make", "run"), V1_AND_V2)
def test_sequence_without_tokens_is_zero(device, make, run):
    arguments = make(Case(((1, 0), (1, 20), (1, 0))), device)
    out = run(arguments)
    assert_same_bits(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert_v1(arguments, out)


@pytest.mark.parametrize(("make", "run"), V1_AND_V2)
def test_no_column_in_block_tables(device, make, run):
    """A batch of empty sequences may come with block_tables of shape [num_seqs, 0], and without a partition."""
    arguments = make(Case(((1, 0), (1, 0))), device)
    out = run(arguments | {"block_tables": arguments["block_tables"][:, :0].contiguous()})
    assert_same_bits(out, torch.zeros_like(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", [None, ("fp8", torch.uint8)], ids=["same", "fp8"])
def test_context_of_65536_tokens(device, dtype, cache):
    """More than the shared memory of any GPU holds logits for."""
    case = Case(((1, 65536),), dtype, cache, num_kv_heads=1, head_size=32, block_size=32)
    v2_arguments = make_v2_arguments(case, device)
    out = run_v2(v2_arguments)
    assert_v1(v2_arguments, out)
    assert_same_bits(run_v1(make_v1_arguments(case, device)), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 511, 512, 513, 1024, 1300])
@pytest.mark.sweep
def test_context_at_the_edge_of_blocks_and_partitions(device, dtype, seq_len):
    arguments = make_arguments(Case(((1, seq_len), (3, seq_len)), dtype), device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("dtype", "head_size"),
    [(torch.float32, n) for n in (4, 20, 36, 100, 256)]
    + [(dtype, n) for dtype in (torch.float16, torch.bfloat16) for n in (8, 24, 40, 120, 256)],
)
@pytest.mark.sweep
def test_head_sizes_with_tails(device, dtype, head_size, block_size):
    case = Case(((1, 33), (4, 70)), dtype, group_size=3, head_size=head_size, block_size=block_size)
    arguments = make_arguments(case, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("head_size", [32, 112, 256])
@pytest.mark.parametrize(
    ("dtype", "cache"), [(torch.float32, None), (torch.float16, None), (torch.bfloat16, ("fp8", torch.uint8))], ids=str
)
def test_rows_of_out_at_any_address(device, dtype, cache, head_size):
    """An element apart, most begin at no multiple of 4, 8 or 16 bytes."""
    case = Case(((1, 1300), (1, 0), (1, 7), (1, 70)), dtype, cache, group_size=3, head_size=head_size)
    arguments = make_v1_arguments(case, device, out_gap=1)
    out = run_v1(arguments)
    assert_same_bits(out, run_v1(make_v1_arguments(case, device)))
    assert_row_gap_untouched(out)
    assert_v1(arguments, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", ["alibi", "sliding_window", "softcap", "sinks"])
def test_each_option_alone_over_several_partitions(device, dtype, option):
    value = {"alibi": True, "sliding_window": 600, "softcap": 2.0, "sinks": True}[option]
    arguments = make_arguments(replace(Case(((1, 1300), (5, 900)), dtype), **{option: value}), device)
    out, lse = OPS.paged_attention(**arguments)
    assert_attention(arguments, out, lse)
    without = OPS.paged_attention(**make_arguments(Case(((1, 1300), (5, 900)), dtype), device))
    assert not torch.equal(out, without[0])


@pytest.mark.parametrize("layout", ["chunked", "hnd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [1, 3])
def test_alibi_on_both_sides_of_a_row(device, dtype, layout, group_size):
    """The distance of a token behind the row counts as that of a token before it. Of two rows, of a few and of many: on
    AMX as many columns, or three times as many, take other instructions."""
    lens = ((2, 4), (3, 9), (7, 7), (40, 150))
    arguments = make_arguments(
        Case(lens, dtype, num_kv_heads=1, group_size=group_size, layout=layout, alibi=True, causal=False), device
    )
    arguments["alibi_slopes"] = torch.tensor([0.7, -0.3, 0.2], device=device)[:group_size]
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["chunked", "nhd"])
def test_alibi_slopes_of_each_sequence(device, dtype, layout):
    """The rows of a sequence have the bits that they have in the same batch if its slopes are those of all: of one row,
    of a few and of many, over one partition and over several."""
    lens = ((1, 1300), (3, 9), (40, 150), (1, 7))
    arguments = make_arguments(Case(lens, dtype, group_size=3, layout=layout), device)
    slopes = torch.linspace(-0.3, 0.7, len(lens) * arguments["query"].shape[1], device=device).view(len(lens), -1)
    by_sequence = OPS.paged_attention(**arguments | {"alibi_slopes": slopes})
    for s, (begin, end) in enumerate(pairwise(arguments["query_start_loc"].tolist())):
        for_all = OPS.paged_attention(**arguments | {"alibi_slopes": slopes[s]})
        for actual, expected in zip(by_sequence, for_all, strict=True):
            assert_same_bits(actual[begin:end], expected[begin:end])


@pytest.mark.parametrize(("make_arguments", "run"), V1_AND_V2)
def test_alibi_slopes_of_each_sequence_in_v1_and_v2(device, make_arguments, run):
    arguments = make_arguments(Case(((1, 700), (1, 9), (1, 33))), device)
    slopes = torch.linspace(-0.3, 0.7, 12, device=device).view(3, 4)
    by_sequence = run(arguments | {"alibi_slopes": slopes})
    for s, out in enumerate(by_sequence):
        assert_same_bits(
            out, run(make_arguments(Case(((1, 700), (1, 9), (1, 33))), device) | {"alibi_slopes": slopes[s]})[s]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0])
def test_softcap_far_above_and_below_the_logits(device, dtype, softcap):
    """Small logits and few tokens, so that the error of one logit shows in lse."""
    arguments = make_arguments(Case(((1, 1), (1, 1), (1, 2)), dtype, group_size=5, softcap=softcap), device)
    for scale in (0.02, 0.2, 2.0):
        arguments["scale"] = scale
        assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("rows", [1, 10])
@pytest.mark.sweep
def test_sliding_window_may_begin_anywhere(pytestconfig, device, dtype, block_size, rows):
    """Every offset of the first token in a block, a vector and a tile; blocks before the window may have any id.

    Every fifth window, on the simt device every seventh: blocks, vectors and tiles have powers of two as sizes, so
    these windows meet every offset, too. Each case begins with another window."""
    case = Case(((rows, 150),), dtype, num_kv_heads=1, head_size=8, block_size=block_size)
    every = 7 if OPS.namespace == "pagedattn_simt" else 5
    if pytestconfig.getoption("long"):
        every = 1
    first = 1 + (DTYPES.index(dtype) + block_size // 8 + rows) % every
    for window in range(first, 150, every):
        arguments = make_arguments(replace(case, sliding_window=window), device)
        out, lse = OPS.paged_attention(**arguments)
        assert_attention(arguments, out, lse)
        first_token = max(0, 150 - rows - window + 1)
        freed = arguments["block_tables"].clone()
        freed[:, : first_token // block_size] = -1
        out_freed, lse_freed = OPS.paged_attention(**arguments | {"block_tables": freed})
        assert_same_bits(out_freed, out)
        assert_same_bits(lse_freed, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 10])
def test_right_window_may_end_anywhere(device, dtype, rows):
    """At every token from a row's own one on: it is the last one that the row sees."""
    case = Case(((rows, 150),), dtype, num_kv_heads=1, head_size=8, causal=False)
    for window in range(rows):
        arguments = make_arguments(replace(case, right_window=window), device)
        assert_attention(arguments, *OPS.paged_attention(**arguments))


def test_windows_of_rows_that_begin_in_two_partitions(device):
    """Of decode and of prefill: the window of their middle row begins at token 512, so what the first row sees begins
    in the partition before."""
    lens = ((8, 1100), (40, 1116))
    arguments = make_arguments(Case(lens, num_kv_heads=1, sliding_window=1096 - 511), device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": False, "sliding_window": 70}], ids=str)
def test_blocks_of_earlier_chunks_are_not_read(device, dtype, options):
    """Rows of decode and of prefill, in one chunk and in several; a chunk begins within a block, a vector and a tile,
    and within and between partitions. Blocks before the first row's chunk may have any id."""
    lens = ((1, 150), (8, 1100), (40, 1030), (3, 512), (2, 1))
    for chunk in (1, 7, 100, 512, 1000):
        case = Case(lens, dtype, num_kv_heads=1, head_size=16, attention_chunk=chunk, **options)
        arguments = make_arguments(case, device)
        out, lse = OPS.paged_attention(**arguments)
        assert_attention(arguments, out, lse)
        freed = arguments["block_tables"].clone()
        for table, (rows, seq_len) in zip(freed, lens, strict=True):
            table[: max(0, seq_len - rows) // chunk * chunk // case.block_size] = -1
        out_freed, lse_freed = OPS.paged_attention(**arguments | {"block_tables": freed})
        assert_same_bits(out_freed, out)
        assert_same_bits(lse_freed, lse)


def test_tables_of_sequences_without_rows_hold_anything(device):
    arguments = make_arguments(Case(((0, 40), (1, 20), (0, 0), (0, 7))), device)
    expected = OPS.paged_attention(**arguments)
    arguments["block_tables"][[0, 2]] = NO_BLOCK
    arguments["block_tables"][3] = -1
    for result, of_tables in zip(OPS.paged_attention(**arguments), expected, strict=True):
        assert_same_bits(result, of_tables)


@pytest.mark.parametrize("block_size", [2, 4])
def test_small_blocks_before_a_window_are_not_read(device, block_size):
    """Their ids may be anything, also those of tokens that a kernel copies along with visible ones."""
    window, lens = 17, ((1, 45), (3, 70))
    arguments = make_arguments(Case(lens, head_size=16, block_size=block_size, sliding_window=window), device)
    expected = OPS.paged_attention(**arguments)
    for table, (rows, seq_len) in zip(arguments["block_tables"], lens, strict=True):
        table[: (seq_len - rows + 1 - window) // block_size] = NO_BLOCK
    for result, of_all_blocks in zip(OPS.paged_attention(**arguments), expected, strict=True):
        assert_same_bits(result, of_all_blocks)


PREFILLS = {
    "plain": {},
    "window": {"sliding_window": 203},
    "chunks": {"attention_chunk": 90},
    "small blocks": {"block_size": 8},
    "unaligned": {"block_gap": 1},
    "all options": {"group_size": 3, "alibi": True, "softcap": 20.0, "sinks": True},
}


@pytest.mark.devices("simt", "cuda")
@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("head_size", [40, 64, 112])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.sweep
def test_prefill_of_many_tiles_on_every_architecture(device, monkeypatch, dtype, head_size, prefill, arch):
    """More tiles of rows and of tokens than shared memory holds at a time. A GPU has an architecture of its own."""
    monkeypatch.setenv("PAGEDATTN_SIMT_ARCH", arch)
    lens = ((100, 700), (1, 30), (200, 150))
    case = Case(lens, dtype, num_kv_heads=1, head_size=head_size, **PREFILLS[prefill])
    arguments = make_arguments(case, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


def test_sequences_share_blocks(device):
    """A shared prefix is read from the same physical blocks by both sequences."""
    arguments = make_arguments(Case(((1, 40), (1, 40))), device)
    copied = {cache: arguments[cache].clone() for cache in ("key_cache", "value_cache")}
    first, second = arguments["block_tables"]
    for cache in copied.values():
        cache[second[0]] = cache[first[0]]
    shared_tables = arguments["block_tables"].clone()
    shared_tables[1, 0] = first[0]
    shared = OPS.paged_attention(**arguments | {"block_tables": shared_tables})
    separate = OPS.paged_attention(**arguments | copied)
    assert_same_bits(shared[0], separate[0])


def make_logits_arguments(keys: list[list[float]], query: list[float], dtype: torch.dtype, device: torch.device):
    """One query row over len(keys) tokens of which query and keys give the first elements, the others being 0.

    So scale 1 makes chosen logits. Returns the arguments and the values [seq_len, num_kv_heads, head_size].
    """
    arguments = make_arguments(Case(((1, len(keys)),), dtype), device) | {"scale": 1.0}
    arguments["query"][:] = 0
    arguments["query"][:, :, : len(query)] = torch.tensor(query, dtype=dtype)
    key = torch.zeros(len(keys), 2, 64, dtype=dtype, device=device)
    key[:, :, : len(query)] = torch.tensor(keys, dtype=dtype, device=device)[:, None]
    caches = arguments["key_cache"], arguments["value_cache"]
    slots = reference.slots_of(arguments["block_tables"][0], len(keys), 16)
    _, value = reference.gather(*caches, slots)
    arguments["key_cache"], _ = reference.reshape_and_cache(key, value, *caches, slots)
    return arguments, value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [100.0, 29952.0])  # logits of +-1e4 and +-9e8
@pytest.mark.parametrize("seq_len", [37, 1300])
def test_one_huge_logit_selects_its_value_exactly(device, dtype, factor, seq_len):
    chosen = seq_len // 3
    keys = [[factor if token == chosen else -factor] for token in range(seq_len)]
    arguments, value = make_logits_arguments(keys, [factor], dtype, device)
    out, lse = OPS.paged_attention(**arguments)
    assert_same_bits(out[0], value[chosen].repeat_interleave(2, dim=0))
    assert_same_bits(lse, torch.full_like(lse, factor**2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("seq_len", [37, 1300])
@pytest.mark.parametrize(("factor", "tokens_of_logit"), [(64.0, 1), (8192.0, 16)])
def test_large_logits_keep_their_differences(device, dtype, sign, seq_len, factor, tokens_of_logit):
    """Logits of +-8192 + {0..7}, exact in fp32: eager PyTorch is no yardstick. Only the store may round, and where
    pairs are multiplied the probabilities. And of +-2^20, the same for all tokens of a slice: warps with maxima of
    their own."""
    keys = [[sign * factor, token // tokens_of_logit % 8] for token in range(seq_len)]
    arguments, _ = make_logits_arguments(keys, [128.0, 1.0], dtype, device)
    out, lse = OPS.paged_attention(**arguments)
    expected_out, expected_lse = reference.paged_attention(**arguments)
    rounded_out, _ = reference.paged_attention(**arguments, probs_dtype=dtype)
    assert_close_to_reference(out, expected_out, rounded_out if rounds_probabilities(device, dtype) else None)
    assert_close_to_reference(lse, expected_lse)


@pytest.mark.parametrize("cache", [None, ("fp8", torch.uint8)], ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 3.0, 1e-30, 1e-42])
def test_scales_of_any_size_and_sign(device, scale, cache):
    """Over a row of zeros, too, which the kernels for an 8-bit cache divide by the smallest power of two. Rows of a
    prompt: in each but the last some of the tokens are masked."""
    for dtype in (torch.float16, torch.bfloat16):
        arguments = make_arguments(Case(((20, 40), (1, 30)), dtype, cache), device) | {"scale": scale}
        arguments["query"][3] = 0
        assert_attention(arguments, *OPS.paged_attention(**arguments))


# ---- the wrappers --------------------------------------------------------------------------------------------------


def test_wrapper_of_paged_attention(device):
    arguments = make_arguments(Case(((1, 20), (3, 9))), device)
    expected = OPS.paged_attention(**arguments)
    for scale in (None, arguments["scale"]):
        for result, same in zip(ops.paged_attention(**arguments | {"scale": scale}), expected, strict=True):
            assert_same_bits(result, same)


def test_wrapper_of_paged_attention_with_equally_many_rows(device):
    """Of a query of four dimensions, whose shape says how many rows each sequence has."""
    arguments = make_arguments(Case(((3, 20), (3, 9))), device)
    expected, expected_lse = ops.paged_attention(**arguments)
    arguments |= {"query": arguments["query"].unflatten(0, (2, 3)), "query_start_loc": None}
    out, lse = ops.paged_attention(**arguments)
    assert_same_bits(out.flatten(0, 1), expected)
    assert_same_bits(lse.flatten(0, 1), expected_lse)
    arguments["query"] = arguments["query"].transpose(0, 1).contiguous()
    with pytest.raises(ValueError, match=r"^paged_attention: query: expected the rows of 2 sequences, .* \[3, 2, "):
        ops.paged_attention(**arguments)


@pytest.mark.parametrize("cache", [None, *FP8_CACHES], ids=["same", *FP8_IDS])
@pytest.mark.parametrize("wrapper", [ops.paged_attention_v1, ops.paged_attention_v2])
def test_wrapper_of_paged_attention_v1_and_v2(device, wrapper, cache):
    scales = None if cache is None else (0.3, 2.6)
    arguments = make_v1_arguments(Case(((1, 20), (1, 9)), cache=cache, scales=scales, row_gap=8), device)
    inputs = {name: arguments[name] for name in V1_INPUTS}
    expected = run_v1(arguments)
    assert_same_bits(wrapper(**inputs), expected)
    assert_same_bits(wrapper(**inputs | {"scale": None}, max_seq_len=20), expected)
    out = torch.empty_like(expected)
    assert wrapper(**inputs, out=out) is out
    assert_same_bits(out, expected)
