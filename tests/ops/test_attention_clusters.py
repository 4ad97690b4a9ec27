"""Decode of small batches from sm_90 on: a block for each partition of a sequence, in clusters that merge what they
have in shared memory. Results have the bits of the two kernels that larger batches and older GPUs take.

On a GPU, the cases that tell the two apart by the size of the batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from attention_cases import (
    OPS,
    Case,
    assert_attention,
    assert_v1,
    cases,
    make_arguments,
    make_v1_arguments,
    run_v1,
)
from checks import assert_row_gap_untouched, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from op_table import num_simt_launches

pytestmark = pytest.mark.devices("simt")

H100 = {"PAGEDATTN_SIMT_MULTIPROCESSORS": "132"}
ONE_MULTIPROCESSOR = {"PAGEDATTN_SIMT_MULTIPROCESSORS": "1"}
SM_80 = {"PAGEDATTN_SIMT_ARCH": "80"}


def run(arguments: dict, environment: dict[str, str]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """out, lse and the number of kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        before = num_simt_launches()
        out, lse = OPS.paged_attention(**arguments)
        return out, lse, num_simt_launches() - before


def assert_clusters_are_two_kernels(arguments: dict, environments: Sequence[dict[str, str]]) -> None:
    out, lse, num_kernels = run(arguments, H100)
    assert_attention(arguments, out, lse)
    for environment in environments:
        other_out, other_lse, other_num_kernels = run(arguments, environment)
        assert other_num_kernels == num_kernels + 1
        assert_same_bits(other_out, out)
        assert_same_bits(other_lse, lse)


RAGGED = ((1, 700), (1, 0), (1, 30), (1, 1025), (1, 512), (1, 513))
CASES = {
    "ragged": Case(RAGGED),
    "eight partitions": Case(((1, 4080),)),
    "seven and six": Case(((1, 3500), (1, 3072)), group_size=1),
    "a head each": Case(RAGGED, group_size=1),
    "groups of 3": Case(RAGGED, group_size=3),
    "groups of 16": Case(RAGGED, group_size=16, num_kv_heads=1),
    "groups of 17": Case(((1, 1300), (1, 0), (1, 70)), group_size=17),
    "groups of 71": Case(((1, 1300), (1, 7)), group_size=71, num_kv_heads=1),
    "several rows": Case(((3, 1300), (1, 600), (0, 5), (2, 1), (4, 515)), group_size=4),
    "eight rows": Case(((8, 1030), (8, 7)), group_size=1),
    "window": Case(RAGGED, sliding_window=600),
    "narrow window": Case(RAGGED, sliding_window=3),
    "chunks": Case(RAGGED, attention_chunk=500),
    "all options": Case(RAGGED, alibi=True, softcap=20.0, sinks=True),
    "rows at any address": Case(RAGGED, row_gap=1, block_gap=64),
}
DTYPES_AND_CACHES = {
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "fp16-e5m2": (torch.float16, ("fp8_e5m2", torch.uint8)),
    "bf16-e4m3": (torch.bfloat16, ("fp8", torch.uint8)),
}


@pytest.mark.parametrize(
    ("types", "head_size"),
    [("fp16", 64), ("bf16", 128), ("fp16", 256), ("bf16-e4m3", 64), ("fp16-e5m2", 128), ("bf16-e4m3", 256)],
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sweep
def test_clusters_give_the_bits_of_two_kernels(device, case, types, head_size):
    dtype, cache = DTYPES_AND_CACHES[types]
    arguments = make_arguments(replace(CASES[case], dtype=dtype, cache=cache, head_size=head_size), device)
    assert_clusters_are_two_kernels(arguments, [ONE_MULTIPROCESSOR, H100 | SM_80])


@pytest.mark.parametrize("types", DTYPES_AND_CACHES)
def test_decode_beside_prefill(device, types):
    """Which has a kernel of its own on sm_90, with bits of its own."""
    case = Case(((1, 1300), (40, 600), (1, 20), (3, 515)), *DTYPES_AND_CACHES[types], group_size=4)
    assert_clusters_are_two_kernels(make_arguments(case, device), [ONE_MULTIPROCESSOR])


@pytest.mark.parametrize("types", DTYPES_AND_CACHES)
def test_rows_of_out_at_any_address(device, types):
    dtype, cache = DTYPES_AND_CACHES[types]
    case = Case(RAGGED, dtype, cache, group_size=3, alibi=True)
    results = []
    for environment, out_gap in ((H100, 1), (H100, 0), (ONE_MULTIPROCESSOR, 1)):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            arguments = make_v1_arguments(case, device, out_gap)
            results.append(run_v1(arguments))
        assert_v1(arguments, results[-1])
        assert_row_gap_untouched(results[-1])
        assert_same_bits(results[-1], results[0])


@given(
    cases(rows=st.integers(0, 9)),
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([1, 4, 20]),
)
def test_any_call_gives_the_same_bits_on_any_gpu(device, case, dtype, head_size, group_size):
    cache = case.cache and ("fp8", torch.uint8)
    case = replace(case, dtype=dtype, cache=cache, head_size=head_size, block_size=16, group_size=group_size)
    arguments = make_arguments(case, device)
    out, lse, _ = run(arguments, H100)
    other_out, other_lse, _ = run(arguments, ONE_MULTIPROCESSOR)
    assert_same_bits(other_out, out)
    assert_same_bits(other_lse, lse)


@pytest.mark.devices("simt", "cuda")
@pytest.mark.parametrize("types", DTYPES_AND_CACHES)
@pytest.mark.parametrize("seq_len", [513, 1300, 4000])
@pytest.mark.parametrize(("group_size", "head_size"), [(1, 128), (4, 128), (20, 64), (2, 256)])
@pytest.mark.sweep
def test_alone_as_in_a_large_batch(device, monkeypatch, seq_len, types, group_size, head_size):
    """The others are empty, but make too many works for any GPU to run at a time."""
    monkeypatch.setenv("PAGEDATTN_SIMT_MULTIPROCESSORS", "132")
    dtype, cache = DTYPES_AND_CACHES[types]
    lens = ((1, seq_len), *[(1, 0)] * 150)
    case = Case(lens, dtype, cache, group_size=group_size, head_size=head_size, sinks=True)
    arguments = make_arguments(case, device) | {"query_start_loc": None}
    out, lse = OPS.paged_attention(**arguments)
    rows = {name: arguments[name][:1] for name in ("query", "block_tables", "seq_lens")}
    out_alone, lse_alone = OPS.paged_attention(**arguments | rows)
    assert_same_bits(out_alone, out[:1])
    assert_same_bits(lse_alone, lse[:1])
    assert_attention(arguments | rows, out_alone, lse_alone)


def num_kernels(device: torch.device, case: Case, environment: dict[str, str] = H100) -> int:
    arguments = make_arguments(replace(case, dtype=torch.float16), device) | {"query_start_loc": None}
    return run(arguments, environment)[2]


def test_which_batches_take_clusters(device):
    """Where all blocks run at the same time, one on each multiprocessor, as far as shapes tell: tables have a spare
    column. And where bulk copies bring the slices."""
    case = Case(((1, 1000),), num_kv_heads=2)  # 4 works
    assert num_kernels(device, case) == 1
    assert num_kernels(device, case, {"PAGEDATTN_SIMT_MULTIPROCESSORS": "4"}) == 1
    assert num_kernels(device, case, {"PAGEDATTN_SIMT_MULTIPROCESSORS": "3"}) == 2
    assert num_kernels(device, case, H100 | SM_80) == 2
    assert num_kernels(device, replace(case, lens=((1, 1000),) * 33)) == 1  # 132 works
    assert num_kernels(device, replace(case, lens=((1, 1000),) * 34)) == 2
    assert num_kernels(device, replace(case, lens=((1, 4080),))) == 1  # 8 partitions
    assert num_kernels(device, replace(case, lens=((1, 4081),))) == 2
    wide = replace(case, lens=((1, 1000), (1, 5000)))  # whose table holds more than clusters may have
    assert num_kernels(device, wide) == 2
    short = make_arguments(replace(wide, dtype=torch.float16), device) | {"query_start_loc": None}
    short |= {"query": short["query"][:1], "block_tables": short["block_tables"][:1], "seq_lens": short["seq_lens"][:1]}
    out, lse, num_without = run(short, H100)
    out_bounded, lse_bounded, num_bounded = run(short | {"max_seq_len": 1000}, H100)
    assert (num_without, num_bounded) == (2, 1)
    assert_same_bits(out_bounded, out)
    assert_same_bits(lse_bounded, lse)
    for other in ({"block_size": 8}, {"block_size": 32}, {"block_gap": 1}, {"head_size": 112}):
        assert num_kernels(device, replace(case, **other)) == 2
    fp32 = make_arguments(case, device) | {"query_start_loc": None}
    assert run(fp32, H100)[2] == 2
