"""mla_attention: all heads share a latent and a rotary part; against the reference, on caches whose unused slots and
blocks are NaN."""

import math
from dataclasses import dataclass, replace

import pytest
import reference
import torch
from checks import (
    DTYPES,
    assert_close_to_reference,
    assert_rejected,
    assert_same_bits,
    filled_with_nan,
    with_row_gap,
)
from op_table import OPS


@dataclass(frozen=True)
class Case:
    lens: tuple[tuple[int, int], ...]  # rows and tokens of each sequence
    dtype: torch.dtype = torch.float32
    num_heads: int = 3
    latent_size: int = 40
    rope_size: int = 8
    block_size: int = 16
    causal: bool = True


def make_arguments(case: Case, device: torch.device) -> dict:
    generator = torch.Generator().manual_seed(0)
    head_size = case.latent_size + case.rope_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    widths = [-(-seq_len // case.block_size) for _, seq_len in case.lens]
    num_blocks = sum(widths) + 1
    cache = filled_with_nan(num_blocks, case.block_size, head_size, dtype=case.dtype)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(case.lens), max(widths, default=0)), -1, dtype=torch.int32)
    for s, (_, seq_len) in enumerate(case.lens):
        blocks = [free.pop() for _ in range(widths[s])]
        tables[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        tokens = torch.arange(seq_len)
        block_of = torch.tensor(blocks, dtype=torch.long)[tokens // case.block_size]
        cache[block_of, tokens % case.block_size] = normal(seq_len, head_size)
    cache = cache.to(device)
    rows = [num_rows for num_rows, _ in case.lens]
    query = normal(sum(rows), case.num_heads, head_size).to(device)
    return {
        "q_nope": query[..., : case.latent_size],
        "q_pe": query[..., case.latent_size :],
        "kv_c_cache": cache[..., : case.latent_size],
        "k_pe_cache": cache[..., case.latent_size :],
        "block_tables": tables.to(device),
        "seq_lens": torch.tensor([seq_len for _, seq_len in case.lens], dtype=torch.int32, device=device),
        "query_start_loc": torch.tensor([0, *rows], device=device).cumsum(0).int(),
        "scale": head_size**-0.5,
        "causal": case.causal,
    }


def expected(arguments: dict, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    query = torch.cat([arguments["q_nope"], arguments["q_pe"]], dim=2)
    cache = torch.cat([arguments["kv_c_cache"], arguments["k_pe_cache"]], dim=2)
    out, lse = query.new_zeros(arguments["q_nope"].shape, dtype=dtype), query.new_zeros(query.shape[:2])
    lse = lse.to(torch.promote_types(dtype, torch.float32))
    starts = arguments["query_start_loc"].tolist()
    for s, seq_len in enumerate(arguments["seq_lens"].tolist()):
        key = cache[arguments["block_tables"][s].long()].flatten(0, 1)[:seq_len, None]
        rows = slice(starts[s], starts[s + 1])
        out[rows], lse[rows] = reference.attention(
            query[rows], key, key[..., : out.shape[2]],
            scale=arguments["scale"], causal=arguments["causal"], dtype=dtype,
        )  # fmt: skip
    return out, lse


CASES = {
    "one row each": Case(((1, 5), (1, 130), (1, 64), (1, 1)), num_heads=16),
    "ragged rows": Case(((1, 33), (20, 41), (0, 7), (3, 3), (9, 70)), num_heads=5),
    "no heads to fill a vector": Case(((2, 3), (1, 90)), num_heads=1, latent_size=1, rope_size=1, block_size=1),
    "odd sizes": Case(((7, 69), (1, 66)), num_heads=7, latent_size=37, rope_size=3, block_size=5),
    "no rotary part": Case(((3, 10),), rope_size=0),
    "several partitions": Case(((2, 1100), (1, 513), (1, 512)), num_heads=2, latent_size=16, rope_size=16),
    "rows of several items": Case(((30, 90),), num_heads=9),
    "not causal": Case(((5, 77), (3, 3)), causal=False),
    "rows before the first token": Case(((6, 4), (2, 0), (1, 0))),
    "the sizes of DeepSeek": Case(((1, 20), (3, 67)), num_heads=16, latent_size=512, rope_size=64, block_size=64),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_mla_attention(device, name, dtype):
    arguments = make_arguments(replace(CASES[name], dtype=dtype), device)
    out, lse = OPS.mla_attention(**arguments)
    assert_close_to_reference(out, expected(arguments, torch.float64)[0], expected(arguments, dtype)[0])
    assert_close_to_reference(lse, expected(arguments, torch.float64)[1], expected(arguments, torch.float32)[1])


def rows_of(arguments: dict, seq: int, first: int = 0) -> dict:
    """The call of one sequence alone, with its rows from `first` on."""
    begin, end = arguments["query_start_loc"][seq : seq + 2].tolist()
    queries = {name: arguments[name][begin + first : end] for name in ("q_nope", "q_pe")}
    lens = {name: arguments[name][seq : seq + 1] for name in ("block_tables", "seq_lens")}
    return arguments | queries | lens | {"query_start_loc": torch.tensor([0, end - begin - first]).int()}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(device, dtype):
    """Alone, with fewer rows of its sequence, and however many threads share the work."""
    arguments = make_arguments(Case(((9, 1100), (1, 8300), (20, 50)), dtype, num_heads=12), device)
    calls = [(0, 0), (0, 5), (1, 0), (2, 7)]
    results = []
    num_threads = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            results.append(OPS.mla_attention(**arguments))
            alone = [OPS.mla_attention(**rows_of(arguments, seq, first)) for seq, first in calls]
        finally:
            torch.set_num_threads(num_threads)
        starts = arguments["query_start_loc"].tolist()
        for whole, first_whole in zip(results[-1], results[0], strict=True):
            assert_same_bits(whole, first_whole)
        for (seq, first), result in zip(calls, alone, strict=True):
            rows = slice(starts[seq] + first, starts[seq + 1])
            for part, whole in zip(result, results[0], strict=True):
                assert_same_bits(part, whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_later_token_does_not_matter(device, dtype):
    """A row does not see it, be it NaN, though it is in the tile of rows that do."""
    arguments = make_arguments(Case(((6, 70),), dtype), device)
    before, _ = OPS.mla_attention(**arguments)
    last = 67
    arguments["kv_c_cache"][arguments["block_tables"][0, last // 16].item(), last % 16] = math.nan
    after, _ = OPS.mla_attention(**arguments)
    assert_same_bits(after[:3], before[:3])  # positions 64, 65 and 66
    assert after[3:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(device, dtype):
    """The latent and the rotary part in caches of their own, heads before rows, tables of 64 bits with gaps."""
    arguments = make_arguments(Case(((3, 40), (1, 70)), dtype, num_heads=6), device)
    strided = {name: with_row_gap(arguments[name], 3, 2) for name in ("kv_c_cache", "k_pe_cache")}
    strided |= {name: arguments[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("q_nope", "q_pe")}
    tables = torch.full((2, 9), -1, device=device)
    tables[:, :5] = arguments["block_tables"]
    strided |= {"block_tables": tables[:, :5], "seq_lens": arguments["seq_lens"].long()}
    strided |= {"query_start_loc": arguments["query_start_loc"].long()}
    for actual, plain in zip(OPS.mla_attention(**arguments | strided), OPS.mla_attention(**arguments), strict=True):
        assert_same_bits(actual, plain)


def test_one_row_a_sequence_needs_no_query_start_loc(device):
    arguments = make_arguments(Case(((1, 9), (1, 20))), device)
    out, _ = OPS.mla_attention(**arguments)
    assert_same_bits(OPS.mla_attention(**arguments | {"query_start_loc": None})[0], out)


def test_nothing_to_do(device):
    arguments = make_arguments(Case(()), device)
    out, lse = OPS.mla_attention(**arguments)
    assert out.shape == (0, 3, 40)
    assert lse.shape == (0, 3)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


ERRORS = {
    "q_nope dtype": ("q_nope", TypeError, lambda a: {"q_nope": a["q_nope"].double()}),
    "q_nope rank": ("q_nope", ValueError, lambda a: {"q_nope": a["q_nope"][0]}),
    "q_nope strides": ("q_nope", ValueError, lambda a: {"q_nope": a["q_nope"].mT.contiguous().mT}),
    "no heads": ("q_nope", ValueError, lambda a: {"q_nope": a["q_nope"][:, :0]}),
    "latent size": ("q_nope", ValueError, lambda a: {"q_nope": torch.zeros(4, 3, 520)}),
    "q_pe dtype": ("q_pe", TypeError, lambda a: {"q_pe": a["q_pe"].half()}),
    "q_pe heads": ("q_pe", ValueError, lambda a: {"q_pe": a["q_pe"][:, :2]}),
    "rotary size": ("q_pe", ValueError, lambda a: {"q_pe": torch.zeros(4, 3, 520)}),
    "kv_c_cache dtype": ("kv_c_cache", TypeError, lambda a: {"kv_c_cache": a["kv_c_cache"].bfloat16()}),
    "kv_c_cache size": ("kv_c_cache", ValueError, lambda a: {"kv_c_cache": a["kv_c_cache"][..., :39]}),
    "kv_c_cache strides": ("kv_c_cache", ValueError, lambda a: {"kv_c_cache": a["kv_c_cache"].mT.contiguous().mT}),
    "no slots": ("kv_c_cache", ValueError, lambda a: {"kv_c_cache": a["kv_c_cache"][:, :0]}),
    "k_pe_cache blocks": ("k_pe_cache", ValueError, lambda a: {"k_pe_cache": a["k_pe_cache"][1:]}),
    "block_tables dtype": ("block_tables", TypeError, lambda a: {"block_tables": a["block_tables"].float()}),
    "block_tables rows": ("block_tables", ValueError, lambda a: {"block_tables": a["block_tables"][:1]}),
    "a block that is not there": ("block_tables", ValueError, lambda a: {"block_tables": a["block_tables"] + 4}),
    "a first block that is not there": (
        "block_tables",
        ValueError,
        lambda a: {"block_tables": int32(99, -1, 3, 1).view(2, 2)},
    ),
    "a negative block": ("block_tables", ValueError, lambda a: {"block_tables": a["block_tables"] * 0 - 1}),
    "seq_lens longer": ("seq_lens", ValueError, lambda a: {"seq_lens": int32(9, 33)}),
    "seq_lens negative": ("seq_lens", ValueError, lambda a: {"seq_lens": int32(-1, 20)}),
    "query_start_loc size": ("query_start_loc", ValueError, lambda a: {"query_start_loc": int32(0, 4)}),
    "query_start_loc falls": ("query_start_loc", ValueError, lambda a: {"query_start_loc": int32(0, 5, 4)}),
    "query_start_loc end": ("query_start_loc", ValueError, lambda a: {"query_start_loc": int32(0, 1, 5)}),
    "rows without query_start_loc": ("q_nope", ValueError, lambda a: {"query_start_loc": None}),
    "scale": ("scale", ValueError, lambda a: {"scale": math.inf}),
}


@pytest.mark.parametrize("what", ERRORS)
def test_mla_attention_rejects(device, what):
    argument, error, change = ERRORS[what]
    arguments = make_arguments(Case(((1, 9), (3, 20))), device)
    assert_rejected("mla_attention", arguments | change(arguments), argument, error)
