"""paged_attention and paged_attention_v1 against the reference, on caches whose unused slots and blocks are NaN."""

import math
from dataclasses import dataclass, replace

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
NO_BLOCK = 2**31 - 1  # what block_tables holds past the last block of a sequence: never looked at
UNUSED_BLOCKS = 3


@dataclass(frozen=True)
class Case:
    """One call in small numbers; `make_arguments` turns it into tensors."""

    lens: tuple[tuple[int, int], ...]  # (query rows, seq_len) of each sequence
    dtype: torch.dtype = torch.float32
    num_kv_heads: int = 2
    group_size: int = 2
    head_size: int = 64
    block_size: int = 16
    row_gap: int = 0  # elements between two rows of query
    block_gap: int = 0  # elements between two blocks of a cache
    alibi: bool = False
    sliding_window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    seed: int = 0


def make_arguments(case: Case, device: torch.device) -> dict:
    """The arguments of paged_attention: normal data in blocks scattered over the caches, NaN everywhere else."""
    generator = torch.Generator().manual_seed(case.seed)
    num_heads = case.num_kv_heads * case.group_size
    rows, seq_lens = [row for row, _ in case.lens], [seq_len for _, seq_len in case.lens]

    num_blocks = [math.ceil(seq_len / case.block_size) for seq_len in seq_lens]
    block_ids = torch.randperm(sum(num_blocks) + UNUSED_BLOCKS, generator=generator, dtype=torch.int32)
    block_tables = torch.full((len(seq_lens), max(num_blocks, default=0) + 1), NO_BLOCK, dtype=torch.int32)
    for block_table, n, ids in zip(block_tables, num_blocks, block_ids[:-UNUSED_BLOCKS].split(num_blocks), strict=True):
        block_table[:n] = ids
    slots = [reference.slots_of(t, n, case.block_size) for t, n in zip(block_tables, seq_lens, strict=True)]

    key, value = torch.randn(2, sum(seq_lens), case.num_kv_heads, case.head_size, generator=generator).to(case.dtype)
    caches = reference.make_caches(len(block_ids), case.num_kv_heads, case.head_size, case.block_size, case.dtype)
    all_slots = torch.cat([torch.empty(0, dtype=torch.int64), *slots])
    key_cache, value_cache = reference.reshape_and_cache(key, value, *caches, all_slots)
    query = torch.randn(sum(rows), num_heads, case.head_size, generator=generator).to(case.dtype)
    slopes, sinks = torch.rand(num_heads, generator=generator) / 4, torch.randn(num_heads, generator=generator)
    arguments = {
        "query": with_row_gap(query, case.row_gap),
        "key_cache": with_row_gap(key_cache, case.block_gap),
        "value_cache": with_row_gap(value_cache, case.block_gap),
        "block_tables": block_tables,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *rows]).cumsum(0).int(),
        "scale": case.head_size**-0.5,
        "alibi_slopes": slopes if case.alibi else None,
        "sliding_window": case.sliding_window,
        "softcap": case.softcap,
        "sinks": sinks if case.sinks else None,
    }
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in arguments.items()}


V1_INPUTS = ["query", "key_cache", "value_cache", "block_tables", "seq_lens", "scale", "alibi_slopes"]


def make_v1_arguments(case: Case, device: torch.device, out_gap: int = 0) -> dict:
    """The arguments of paged_attention_v1 with an `out` full of NaN."""
    arguments = make_arguments(case, device)
    out = torch.full_like(arguments["query"], math.nan, memory_format=torch.contiguous_format)
    return {name: arguments[name] for name in V1_INPUTS} | {
        "out": with_row_gap(out, out_gap),
        "num_kv_heads": case.num_kv_heads,
        "block_size": case.block_size,
        "max_seq_len": max((seq_len for _, seq_len in case.lens), default=0),
    }


def run_v1(arguments: dict) -> torch.Tensor:
    OPS.paged_attention_v1(**arguments)
    return arguments["out"]


def assert_attention(arguments: dict, out: torch.Tensor, lse: torch.Tensor) -> None:
    """out against eager PyTorch in its own dtype; lse is fp32, so its yardstick is eager PyTorch in fp32."""
    expected_out, expected_lse = reference.paged_attention(**arguments)
    eager_out, _ = reference.paged_attention(**arguments, dtype=out.dtype)
    _, eager_lse = reference.paged_attention(**arguments, dtype=torch.float32)
    assert out.dtype == arguments["query"].dtype and out.is_contiguous()
    assert lse.dtype == torch.float32
    assert_close_to_reference(out, expected_out, eager_out)
    assert_close_to_reference(lse, expected_lse, eager_lse)


def assert_v1(arguments: dict, out: torch.Tensor) -> None:
    inputs = {name: arguments[name] for name in V1_INPUTS}
    expected, eager = (reference.paged_attention_v1(**inputs, dtype=dtype) for dtype in (torch.float64, out.dtype))
    assert_close_to_reference(out, expected, eager)


@st.composite
def cases(draw: st.DrawFn, rows: st.SearchStrategy[int] | None = None, options: bool = True) -> Case:
    """Any call; `rows` draws the query rows per sequence, which may be more than its tokens."""
    rows = st.integers(0, 9) if rows is None else rows
    seq_len = st.integers(0, 70) | st.integers(0, 1100)
    dtype = draw(st.sampled_from(DTYPES))
    x = 16 // dtype.itemsize
    any_head_size = st.integers(1, 256 // x).map(lambda chunks: chunks * x)
    return Case(
        lens=tuple(draw(st.lists(st.tuples(rows, seq_len), max_size=4))),
        dtype=dtype,
        num_kv_heads=draw(st.integers(1, 3)),
        group_size=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16])),
        head_size=draw(st.sampled_from([64, 80, 96, 112, 120, 128, 192, 256]) | any_head_size),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128, 256])),
        row_gap=draw(st.sampled_from([0, 1, 8, 37])),
        block_gap=draw(st.sampled_from([0, 3, 512])),
        alibi=draw(st.booleans()),
        sliding_window=draw(st.none() | st.integers(1, 40) | st.integers(1, 1000)) if options else None,
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])) if options else 0.0,
        sinks=draw(st.booleans()) if options else False,
        seed=draw(st.integers(0, 99)),
    )


# ---- against the reference -----------------------------------------------------------------------------------------


@given(cases())
def test_paged_attention(device, case):
    arguments = make_arguments(case, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))
    assert_row_gap_untouched(arguments["query"])


@given(cases(rows=st.just(1), options=False), st.sampled_from([0, 1, 8]))
def test_paged_attention_v1(device, case, out_gap):
    arguments = make_v1_arguments(case, device, out_gap)
    assert_v1(arguments, run_v1(arguments))
    assert_row_gap_untouched(arguments["out"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 7, 200])
def test_reference_is_torch_sdpa(dtype, num_tokens):
    """The reference itself, without paging: torch's own attention on contiguous K and V."""
    query, key, value = torch.randn(3, num_tokens, 4, 24, dtype=torch.float64).unbind()
    key, value = key[:, :2], value[:, :2]
    out, _ = reference.attention(query, key, value, scale=0.3)
    heads_first = [tensor.transpose(0, 1) for tensor in (query, key, value)]
    sdpa = torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=0.3, is_causal=True, enable_gqa=True)
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


@given(cases(rows=st.just(1), options=False))
def test_v1_is_paged_attention_of_one_row_each(device, case):
    v1_arguments, arguments = make_v1_arguments(case, device), make_arguments(case, device)
    out, lse = OPS.paged_attention(**arguments)
    assert_same_bits(run_v1(v1_arguments), out)
    same_out, same_lse = OPS.paged_attention(**arguments | {"query_start_loc": None})
    assert_same_bits(same_out, out)
    assert_same_bits(same_lse, lse)


@given(cases())
def test_a_batch_is_its_sequences_one_by_one(device, case):
    arguments = make_arguments(case, device)
    out, lse = OPS.paged_attention(**arguments)
    starts = arguments["query_start_loc"].tolist()
    for s in range(len(case.lens)):
        rows = slice(starts[s], starts[s + 1])
        alone = arguments | {
            "query": arguments["query"][rows],
            "block_tables": arguments["block_tables"][s : s + 1],
            "seq_lens": arguments["seq_lens"][s : s + 1],
            "query_start_loc": torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=device),
        }
        out_alone, lse_alone = OPS.paged_attention(**alone)
        assert_same_bits(out_alone, out[rows])
        assert_same_bits(lse_alone, lse[rows])


@given(cases(rows=st.integers(1, 9)), st.data())
def test_chunked_prefill_is_whole_prefill(device, case, data):
    """Each sequence is cut into chunks; a chunk sees a cache that already holds the tokens after it."""
    case = replace(case, lens=tuple((rows, max(rows, seq_len)) for rows, seq_len in case.lens))
    arguments = make_arguments(case, device)
    chunks = []  # (sequence, rows, seq_len)
    for s, (rows, seq_len) in enumerate(case.lens):
        cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1), max_size=3)) if rows > 1 else [])
        for begin, end in zip([0, *cuts], [*cuts, rows], strict=True):
            chunks.append((s, end - begin, seq_len - rows + end))
    chunked = arguments | {
        "block_tables": arguments["block_tables"][[s for s, _, _ in chunks]],
        "seq_lens": torch.tensor([seq_len for _, _, seq_len in chunks], dtype=torch.int32, device=device),
        "query_start_loc": torch.tensor([0, *(rows for _, rows, _ in chunks)], device=device).cumsum(0).int(),
    }
    for result, expected in zip(OPS.paged_attention(**chunked), OPS.paged_attention(**arguments), strict=True):
        assert_same_bits(result, expected)


@pytest.mark.parametrize("rows", [1, 12])
def test_number_of_threads_does_not_matter(device, several_threads, rows):
    """Large enough to run in parallel."""
    arguments = make_arguments(Case(((rows, 1300), (rows, 40), (rows, 2000)), head_size=128), device)
    parallel = OPS.paged_attention(**arguments)
    torch.set_num_threads(1)
    serial = OPS.paged_attention(**arguments)
    for result, expected in zip(parallel, serial, strict=True):
        assert_same_bits(result, expected)


# ---- edges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lens", [(), ((0, 5),), ((0, 0), (0, 0))], ids=str)
def test_no_tokens(device, lens):
    arguments = make_arguments(Case(lens), device)
    out, lse = OPS.paged_attention(**arguments)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_v1_no_sequences(device):
    assert run_v1(make_v1_arguments(Case(()), device)).shape == (0, 4, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_no_token_is_zero(device, dtype):
    """seq_len 0, and rows before the start of their sequence; their neighbours are as ever."""
    arguments = make_arguments(Case(((1, 0), (5, 2), (1, 20), (2, 0)), dtype), device)
    out, lse = OPS.paged_attention(**arguments)
    masked = [0, 1, 2, 3, 7, 8]
    assert_same_bits(out[masked], torch.zeros_like(out[masked]))
    assert (lse[masked] == -math.inf).all()
    assert_attention(arguments, out, lse)


def test_v1_sequence_without_tokens_is_zero(device):
    arguments = make_v1_arguments(Case(((1, 0), (1, 20), (1, 0))), device)
    out = run_v1(arguments)
    assert_same_bits(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert_v1(arguments, out)


def test_no_column_in_block_tables(device):
    """A batch of empty sequences may come with block_tables of shape [num_seqs, 0]."""
    arguments = make_v1_arguments(Case(((1, 0), (1, 0))), device)
    out = run_v1(arguments | {"block_tables": arguments["block_tables"][:, :0].contiguous()})
    assert_same_bits(out, torch.zeros_like(out))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 511, 512, 513, 1024, 1300])
def test_context_at_the_edge_of_blocks_and_partitions(device, dtype, seq_len):
    arguments = make_arguments(Case(((1, seq_len), (3, seq_len)), dtype), device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("dtype", "head_size"),
    [(torch.float32, n) for n in (4, 20, 36, 100, 256)]
    + [(dtype, n) for dtype in (torch.float16, torch.bfloat16) for n in (8, 24, 40, 120, 256)],
)
def test_head_sizes_with_tails(device, dtype, head_size, block_size):
    case = Case(((1, 33), (4, 70)), dtype, group_size=3, head_size=head_size, block_size=block_size)
    arguments = make_arguments(case, device)
    assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", ["alibi", "sliding_window", "softcap", "sinks"])
def test_each_option_alone_over_several_partitions(device, dtype, option):
    value = {"alibi": True, "sliding_window": 600, "softcap": 2.0, "sinks": True}[option]
    arguments = make_arguments(replace(Case(((1, 1300), (5, 900)), dtype), **{option: value}), device)
    out, lse = OPS.paged_attention(**arguments)
    assert_attention(arguments, out, lse)
    without = OPS.paged_attention(**make_arguments(Case(((1, 1300), (5, 900)), dtype), device))
    assert not torch.equal(out, without[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0])
def test_softcap_far_above_and_below_the_logits(device, dtype, softcap):
    """Small logits and few tokens, so that the error of one logit shows in lse."""
    arguments = make_arguments(Case(((1, 1), (1, 1), (1, 2)), dtype, group_size=5, softcap=softcap), device)
    for scale in (0.02, 0.2, 2.0):
        arguments["scale"] = scale
        assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("rows", [1, 10])
def test_sliding_window_may_begin_anywhere(device, dtype, block_size, rows):
    """Every offset of the first token in a block, a vector and a tile; blocks before the window may have any id."""
    case = Case(((rows, 150),), dtype, num_kv_heads=1, head_size=8, block_size=block_size)
    for window in range(1, 150):
        arguments = make_arguments(replace(case, sliding_window=window), device)
        out, lse = OPS.paged_attention(**arguments)
        assert_attention(arguments, out, lse)
        first_token = max(0, 150 - rows - window + 1)
        freed = arguments["block_tables"].clone()
        freed[:, : first_token // block_size] = NO_BLOCK
        out_freed, lse_freed = OPS.paged_attention(**arguments | {"block_tables": freed})
        assert_same_bits(out_freed, out)
        assert_same_bits(lse_freed, lse)


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
def test_large_logits_keep_their_differences(device, dtype, sign, seq_len):
    """Logits of +-8192 + {0..7}, exact in fp32: only the store may round, so eager PyTorch is no yardstick."""
    keys = [[sign * 64.0, token % 8] for token in range(seq_len)]
    arguments, _ = make_logits_arguments(keys, [128.0, 1.0], dtype, device)
    out, lse = OPS.paged_attention(**arguments)
    expected_out, expected_lse = reference.paged_attention(**arguments)
    assert_close_to_reference(out, expected_out)
    assert_close_to_reference(lse, expected_lse)


# ---- the wrappers --------------------------------------------------------------------------------------------------


def test_wrapper_of_paged_attention(device):
    arguments = make_arguments(Case(((1, 20), (3, 9))), device)
    expected = OPS.paged_attention(**arguments)
    for scale in (None, arguments["scale"]):
        for result, same in zip(ops.paged_attention(**arguments | {"scale": scale}), expected, strict=True):
            assert_same_bits(result, same)


def test_wrapper_of_paged_attention_v1(device):
    arguments = make_v1_arguments(Case(((1, 20), (1, 9)), row_gap=8), device)
    inputs = {name: arguments[name] for name in V1_INPUTS}
    expected = run_v1(arguments)
    assert_same_bits(ops.paged_attention_v1(**inputs), expected)
    assert_same_bits(ops.paged_attention_v1(**inputs | {"scale": None}, max_seq_len=20), expected)
    out = torch.empty_like(expected)
    assert ops.paged_attention_v1(**inputs, out=out) is out
    assert_same_bits(out, expected)


# ---- errors --------------------------------------------------------------------------------------------------------
# what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)


def entry(arguments: dict, name: str, index: tuple[int, ...], value: int) -> dict:
    """The change of one entry of one tensor."""
    tensor = arguments[name].clone()
    tensor[index] = value
    return {name: tensor}


def columns_first(arguments: dict, name: str) -> dict:
    """The same elements and shape, but the last two dimensions lie in memory the other way round."""
    return {name: arguments[name].mT.contiguous().mT}


def starts(*query_start_loc: int) -> dict:
    return {"query_start_loc": torch.tensor(query_start_loc, dtype=torch.int32)}


def with_query(arguments: dict, *shape: int) -> dict:
    """The changes that make query, and out where there is one, of this shape."""
    query = arguments["query"].new_ones(shape)
    return {"query": query, "out": query.clone()} if "out" in arguments else {"query": query}


def with_caches(head_size: int, block_size: int) -> dict:
    shapes = {"key_cache": (7, 2, head_size // 4, block_size, 4), "value_cache": (7, 2, head_size, block_size)}
    return {name: torch.ones(shape) for name, shape in shapes.items()}


ERRORS = {
    "query rank": ("query", ValueError, lambda a: {"query": a["query"].flatten(1)}),
    "query dtype": ("query", TypeError, lambda a: {"query": a["query"].double()}),
    "query not dense in a row": ("query", ValueError, lambda a: columns_first(a, "query")),
    "query head size": ("(query|key_cache)", ValueError, lambda a: {"query": a["query"][:, :, :12].contiguous()}),
    "key_cache rank": ("key_cache", ValueError, lambda a: {"key_cache": a["key_cache"].flatten(3)}),
    "key_cache dtype": (
        "(query|key_cache|value_cache)",
        TypeError,
        lambda a: {"key_cache": a["key_cache"].half().reshape(7, 2, 2, 8, 8)},
    ),
    "scale": ("scale", ValueError, lambda a: {"scale": math.nan}),
    "key_cache float8": ("key_cache", TypeError, lambda a: {"key_cache": a["key_cache"].to(torch.float8_e4m3fn)}),
    "key_cache x": ("key_cache", ValueError, lambda a: {"key_cache": a["key_cache"].reshape(-1, 2, 2, 8, 8)}),
    "key_cache not contiguous": ("key_cache", ValueError, lambda a: columns_first(a, "key_cache")),
    "value_cache rank": ("value_cache", ValueError, lambda a: {"value_cache": a["value_cache"].flatten(2)}),
    "value_cache dtype": ("value_cache", TypeError, lambda a: {"value_cache": a["value_cache"].half()}),
    "value_cache shape": ("value_cache", ValueError, lambda a: {"value_cache": a["value_cache"][:-1]}),
    "value_cache layout": ("value_cache", ValueError, lambda a: {"value_cache": a["value_cache"].mT.contiguous()}),
    "value_cache not contiguous": ("value_cache", ValueError, lambda a: columns_first(a, "value_cache")),
    "block_tables dtype": ("block_tables", TypeError, lambda a: {"block_tables": a["block_tables"].long()}),
    "block_tables rank": ("block_tables", ValueError, lambda a: {"block_tables": a["block_tables"].flatten()}),
    "block_tables rows": ("block_tables", ValueError, lambda a: {"block_tables": a["block_tables"][:1]}),
    "seq_lens dtype": ("seq_lens", TypeError, lambda a: {"seq_lens": a["seq_lens"].long()}),
    "seq_lens rank": ("seq_lens", ValueError, lambda a: {"seq_lens": a["seq_lens"][:, None]}),
    "seq_lens negative": ("seq_lens", ValueError, lambda a: entry(a, "seq_lens", (1,), -1)),
    "seq_lens past block_tables": ("seq_lens", ValueError, lambda a: entry(a, "seq_lens", (1,), 99)),
    "block id too large": ("block_tables", ValueError, lambda a: entry(a, "block_tables", (1, 1), 7)),
    "block id negative": ("block_tables", ValueError, lambda a: entry(a, "block_tables", (1, 0), -1)),
    "alibi_slopes shape": ("alibi_slopes", ValueError, lambda a: {"alibi_slopes": torch.ones(3)}),
    "alibi_slopes dtype": ("alibi_slopes", TypeError, lambda a: {"alibi_slopes": torch.ones(4).half()}),
    "heads not a multiple": ("(query|num_kv_heads|key_cache)", ValueError, lambda a: with_query(a, 2, 3, 16)),
    "head size": (
        "(query|key_cache)",
        ValueError,
        lambda a: with_query(a, 2, 4, 260) | with_caches(260, 8),
    ),
    "block size": (
        "(key_cache|value_cache|block_size)",
        ValueError,
        lambda a: with_caches(16, 12) | ({"block_size": 12} if "block_size" in a else {}),
    ),
}
V1_ERRORS = {
    "out dtype": ("out", TypeError, lambda a: {"out": a["out"].half()}),
    "out shape": ("out", ValueError, lambda a: {"out": a["out"][:1]}),
    "out not dense in a row": ("out", ValueError, lambda a: columns_first(a, "out")),
    "num_kv_heads": ("num_kv_heads", ValueError, lambda a: {"num_kv_heads": 1}),
    "block_size": ("block_size", ValueError, lambda a: {"block_size": 16}),
    "max_seq_len": ("max_seq_len", ValueError, lambda a: {"max_seq_len": 11}),
}
RAGGED_ERRORS = {
    "query_start_loc dtype": ("query_start_loc", TypeError, lambda a: {"query_start_loc": torch.tensor([0, 1, 2])}),
    "query_start_loc shape": ("query_start_loc", ValueError, lambda a: starts(0, 2)),
    "query_start_loc start": ("query_start_loc", ValueError, lambda a: starts(1, 1, 2)),
    "query_start_loc end": ("query_start_loc", ValueError, lambda a: starts(0, 1, 3)),
    "query_start_loc falls": ("query_start_loc", ValueError, lambda a: starts(0, 3, 2)),
    "no query_start_loc, rows": ("query", ValueError, lambda a: with_query(a, 3, 4, 16) | {"query_start_loc": None}),
    "sliding_window": ("sliding_window", ValueError, lambda a: {"sliding_window": 0}),
    "softcap": ("softcap", ValueError, lambda a: {"softcap": -1.0}),
    "sinks shape": ("sinks", ValueError, lambda a: {"sinks": torch.ones(2)}),
    "sinks dtype": ("sinks", TypeError, lambda a: {"sinks": torch.ones(4).half()}),
}
SMALL = Case(((1, 9), (1, 12)), head_size=16, block_size=8)  # 7 blocks, 2 of them for each sequence


@pytest.mark.parametrize("what", [*ERRORS, *V1_ERRORS])
def test_paged_attention_v1_rejects(device, what):
    argument, error, change = (ERRORS | V1_ERRORS)[what]
    arguments = make_v1_arguments(SMALL, device)
    assert_rejected("paged_attention_v1", arguments | change(arguments), argument, error)


@pytest.mark.parametrize("what", [*ERRORS, *RAGGED_ERRORS])
def test_paged_attention_rejects(device, what):
    argument, error, change = (ERRORS | RAGGED_ERRORS)[what]
    arguments = make_arguments(SMALL, device)
    assert_rejected("paged_attention", arguments | change(arguments), argument, error)


@pytest.mark.parametrize("block_id", [-1, 7, 2**31 - 1])
def test_bad_block_id_names_its_row(device, block_id):
    arguments = make_v1_arguments(SMALL, device)
    arguments["block_tables"][1, 1] = block_id
    match = f"block_tables: expected .*, got {block_id} at sequence 1"
    assert_raises_and_writes_nothing(OPS.paged_attention_v1, arguments, RuntimeError, match)


@pytest.mark.parametrize("what", ["kv_cache_dtype", "k_scale", "v_scale"])
def test_quantised_cache_is_not_supported_yet(device, what):
    change = {what: "fp8" if what == "kv_cache_dtype" else torch.ones((), device=device)}
    for op, arguments in [
        (OPS.paged_attention, make_arguments(SMALL, device)),
        (OPS.paged_attention_v1, make_v1_arguments(SMALL, device)),
    ]:
        assert_raises_and_writes_nothing(op, arguments | change, RuntimeError, f"{what}.*not supported yet")
