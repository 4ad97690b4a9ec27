"""Calls of the attention ops: drawn or named in small numbers, as tensors, and compared with the reference."""

import math
from dataclasses import dataclass

import reference
import torch
from cache_layouts import LAYOUTS, make_cache_pair
from checks import DTYPES, assert_close_to_reference, assert_same_bits, filled_with_nan, with_row_gap
from hypothesis import strategies as st
from op_table import OPS, runs_cuda_kernels

NO_BLOCK = 2**31 - 1  # what block_tables holds past the last block of a sequence: never looked at
UNUSED_BLOCKS = 3
PARTITION_TOKENS = 512  # of paged_attention_v2's scratch

# The fp8 caches: kv_cache_dtype and the dtype of the cache tensors.
FP8_CACHES = [
    ("auto", torch.float8_e4m3fn),
    ("auto", torch.float8_e5m2),
    ("fp8", torch.float8_e4m3fn),
    ("fp8", torch.uint8),
    ("fp8_e4m3", torch.float8_e4m3fn),
    ("fp8_e4m3", torch.uint8),
    ("fp8_e5m2", torch.float8_e5m2),
    ("fp8_e5m2", torch.uint8),
]
FP8_IDS = ["-".join([name, str(dtype).removeprefix("torch.")]) for name, dtype in FP8_CACHES]


@dataclass(frozen=True)
class Case:
    """One call in small numbers; `make_arguments` turns it into tensors."""

    lens: tuple[tuple[int, int], ...]  # (query rows, seq_len) of each sequence
    dtype: torch.dtype = torch.float32
    cache: tuple[str, torch.dtype] | None = None  # of FP8_CACHES; None: like query
    scales: tuple[float, float] | None = None  # k_scale and v_scale
    num_kv_heads: int = 2
    group_size: int = 2
    head_size: int = 64
    block_size: int = 16
    layout: str = "chunked"  # of cache_layouts.LAYOUTS
    row_gap: int = 0  # elements between two rows of query
    block_gap: int = 0  # elements between two blocks of the key cache, and half of those of the value cache
    alibi: bool = False
    sliding_window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    causal: bool = True
    right_window: int | None = None
    attention_chunk: int = 0
    int64: tuple[str, ...] = ()  # the index tensors that are int64, not int32
    seed: int = 0


def make_caches(
    num_blocks: int, case: Case, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A key and a value cache in which every slot is NaN."""

    def make(*shape: int) -> torch.Tensor:
        return filled_with_nan(*shape, dtype=dtype, device=device)

    sizes = num_blocks, case.num_kv_heads, case.head_size, case.block_size
    return make_cache_pair(case.layout, *sizes, make, case.block_gap)


def make_arguments(case: Case, device: torch.device) -> dict:
    """The arguments of paged_attention: normal data in blocks scattered over the caches, NaN everywhere else."""
    generator = torch.Generator().manual_seed(case.seed)
    num_heads = case.num_kv_heads * case.group_size
    rows, seq_lens = [row for row, _ in case.lens], [seq_len for _, seq_len in case.lens]

    num_blocks = [math.ceil(seq_len / case.block_size) for seq_len in seq_lens]
    block_ids = torch.randperm(sum(num_blocks) + UNUSED_BLOCKS, generator=generator, dtype=torch.int32)
    columns = max(num_blocks, default=0) + 1
    block_tables = torch.full((len(seq_lens), columns + case.block_gap), NO_BLOCK, dtype=torch.int32)[:, :columns]
    for block_table, n, ids in zip(block_tables, num_blocks, block_ids[:-UNUSED_BLOCKS].split(num_blocks), strict=True):
        block_table[:n] = ids
    slots = [reference.slots_of(t, n, case.block_size) for t, n in zip(block_tables, seq_lens, strict=True)]

    key, value = torch.randn(2, sum(seq_lens), case.num_kv_heads, case.head_size, generator=generator).to(case.dtype)
    kv_cache_dtype, cache_dtype = case.cache or ("auto", case.dtype)
    scales = [None, None] if case.scales is None else [torch.tensor(scale) for scale in case.scales]
    quantisation = {"kv_cache_dtype": kv_cache_dtype, "k_scale": scales[0], "v_scale": scales[1]}
    caches = make_caches(len(block_ids), case, cache_dtype, device)
    all_slots = torch.cat([torch.empty(0, dtype=torch.int64), *slots])
    on_cpu = [cache.cpu() for cache in caches]
    for cache, filled in zip(
        caches, reference.reshape_and_cache(key, value, *on_cpu, all_slots, **quantisation), strict=True
    ):
        cache.copy_(filled)
    query = torch.randn(sum(rows), num_heads, case.head_size, generator=generator).to(case.dtype)
    slopes = torch.rand(num_heads, generator=generator) / 2 - 0.25  # of both signs
    sinks = torch.randn(num_heads, generator=generator)
    arguments = {
        "query": with_row_gap(query.to(device), case.row_gap),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": block_tables,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *rows]).cumsum(0).int(),
        "scale": case.head_size**-0.5,
        "alibi_slopes": slopes if case.alibi else None,
        "sliding_window": case.sliding_window,
        "softcap": case.softcap,
        "sinks": sinks if case.sinks else None,
        "causal": case.causal,
        "right_window": case.right_window,
        "attention_chunk": case.attention_chunk,
        **quantisation,
    }
    arguments |= {name: arguments[name].long() for name in case.int64}
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in arguments.items()}


V1_INPUTS = [
    *("query", "key_cache", "value_cache", "block_tables", "seq_lens", "scale", "alibi_slopes"),
    *("kv_cache_dtype", "k_scale", "v_scale"),
]


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


def make_v2_arguments(case: Case, device: torch.device, out_gap: int = 0, spare_partitions: int = 0) -> dict:
    """The arguments of paged_attention_v2: those of v1, and scratch full of NaN."""
    arguments = make_v1_arguments(case, device, out_gap)
    num_seqs, num_heads, head_size = arguments["out"].shape
    partitions = (num_seqs, num_heads, math.ceil(arguments["max_seq_len"] / PARTITION_TOKENS) + spare_partitions)
    return arguments | {
        "exp_sums": torch.full(partitions, math.nan, device=device),
        "max_logits": torch.full(partitions, math.nan, device=device),
        "tmp_out": torch.full((*partitions, head_size), math.nan, dtype=case.dtype, device=device),
    }


def run_v1(arguments: dict) -> torch.Tensor:
    OPS.paged_attention_v1(**arguments)
    return arguments["out"]


def run_v2(arguments: dict) -> torch.Tensor:
    OPS.paged_attention_v2(**arguments)
    return arguments["out"]


def size_of_logits(query: torch.Tensor, scale: float) -> float:
    """Of a logit whose products do not cancel, where the elements of keys are about 1: that of a single token may be
    next to nothing, and so may the lse of a single row."""
    norms = query.double().norm(dim=-1)
    return abs(scale) * max(norms[norms.isfinite()].tolist(), default=0.0)


def assert_attention(arguments: dict, out: torch.Tensor, lse: torch.Tensor) -> None:
    """out against eager PyTorch in its own dtype; lse is fp32, so its yardstick is eager PyTorch in fp32."""
    expected_out, expected_lse = reference.paged_attention(**arguments)
    eager_out, eager_lse = reference.paged_attention(**arguments, dtype=out.dtype)
    if out.dtype != torch.float32:
        _, eager_lse = reference.paged_attention(**arguments, dtype=torch.float32)
    assert out.dtype == arguments["query"].dtype and out.is_contiguous()
    assert lse.dtype == torch.float32
    # Logits are rounded at their own size, twice: to 2^-23 of it, where NOISE is 2^-20.
    size_of_logits_of_row = expected_lse.nan_to_num(posinf=0.0, neginf=0.0).abs()[..., None]
    assert_close_to_reference(out, expected_out, eager_out, size_of_logits_of_row / 8)
    size_of_terms = size_of_logits(arguments["query"], arguments["scale"])
    assert_close_to_reference(lse, expected_lse, eager_lse, size_of_terms)


def assert_as_alone(arguments: dict, device: torch.device) -> None:
    """Each sequence of a call has the bits that it has in a call of its own; in prefill of the CUDA kernels, the
    values."""
    out, lse = OPS.paged_attention(**arguments)
    starts = arguments["query_start_loc"].tolist()
    for s in range(len(arguments["seq_lens"])):
        rows = slice(starts[s], starts[s + 1])
        alone = arguments | {
            "query": arguments["query"][rows],
            "block_tables": arguments["block_tables"][s : s + 1],
            "seq_lens": arguments["seq_lens"][s : s + 1],
            "query_start_loc": torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=device),
        }
        out_alone, lse_alone = OPS.paged_attention(**alone)
        if runs_cuda_kernels(device) and rows.stop - rows.start > 1:
            assert_attention(alone, out[rows], lse[rows])
            assert_attention(alone, out_alone, lse_alone)
        else:
            assert_same_bits(out[rows], out_alone)
            assert_same_bits(lse[rows], lse_alone)


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
    cache = draw(st.none() | st.none() | st.sampled_from(FP8_CACHES))
    x = 16 // (dtype if cache is None else cache[1]).itemsize
    causal = draw(st.booleans()) if options else True
    any_head_size = st.integers(1, 256 // x).map(lambda chunks: chunks * x)
    layout = draw(st.sampled_from(LAYOUTS))
    block_sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256] if layout == "chunked" else [1, 3, 16, 48, 256, 1200]
    named_head_size = st.sampled_from([n for n in (64, 80, 96, 112, 120, 128, 192, 256, 288, 512) if n % x == 0])
    return Case(
        lens=tuple(draw(st.lists(st.tuples(rows, seq_len), max_size=4))),
        dtype=dtype,
        cache=cache,
        scales=None if cache is None else draw(st.sampled_from([None, (1.0, 1.0), (0.037, 0.5), (0.3, 2.6)])),
        num_kv_heads=draw(st.integers(1, 3)),
        group_size=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16])),
        head_size=draw(named_head_size | any_head_size),
        block_size=draw(st.sampled_from(block_sizes)),
        layout=layout,
        row_gap=draw(st.sampled_from([0, 1, 8, 37])),
        block_gap=draw(st.sampled_from([0, 3, 512])),
        alibi=draw(st.booleans()),
        sliding_window=draw(st.none() | st.integers(1, 40) | st.integers(1, 1000)) if options else None,
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])) if options else 0.0,
        sinks=draw(st.booleans()) if options else False,
        causal=causal,
        right_window=None if causal else draw(st.none() | st.integers(0, 40) | st.integers(0, 1000)),
        attention_chunk=draw(st.just(0) | st.integers(0, 40) | st.integers(0, 1000)) if options else 0,
        int64=tuple(draw(st.sets(st.sampled_from(["block_tables", "seq_lens", "query_start_loc"])))),
        seed=draw(st.integers(0, 99)),
    )
