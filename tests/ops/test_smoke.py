"""What runs first on a GPU, and under compute-sanitizer: a small call of each op, and attention in each of its ways."""

import os
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from attention_cases import Case, assert_attention, make_arguments
from checks import assert_close_to_reference, assert_same_bits, to_device
from op_calls import CALLS_ON_CUDA, op_of, results
from op_calls import make_arguments as arguments_of
from op_table import OPS, simt_uses

pytestmark = pytest.mark.devices("simt", "cuda")


@pytest.mark.parametrize("call", CALLS_ON_CUDA)
def test_each_op_as_on_the_cpu(device, call):
    expected = results(getattr(torch.ops.pagedattn_ext, op_of(call)), arguments_of(call))
    actual = results(getattr(OPS, op_of(call)), to_device(arguments_of(call), device))
    for one, wanted in zip(actual, expected, strict=True):
        assert one.device == device
        if wanted.is_floating_point():
            assert_close_to_reference(one.cpu(), wanted.double(), wanted)
        else:
            assert_same_bits(one.cpu(), wanted)


class Way(NamedTuple):
    """A call, and what its kernels use of what GPUs of sm_90 have, with 132 multiprocessors."""

    case: Case
    uses: set[str]


BULK, CLUSTER, WGMMA, PDL = "bulk_copies", "clusters", "wgmma", "dependent_launches"
BF16 = Case((), torch.bfloat16, group_size=4, head_size=128)
LONG = ((1, 1300),)
DECODE_AND_PREFILL = ((1, 1300), (40, 300), (1, 20))
MIXED = replace(BF16, lens=DECODE_AND_PREFILL)

# Decode is two kernels where it is in several partitions and not in clusters; prefill is, where few tiles are split.
WAYS = {
    "one partition": Way(replace(BF16, lens=((1, 300), (1, 17))), {BULK}),
    "160 works": Way(replace(BF16, lens=((1, 600), *[(1, 40)] * 9), num_kv_heads=8), {BULK, PDL}),
    "three partitions": Way(replace(BF16, lens=LONG), {BULK, CLUSTER}),
    "groups of 20": Way(replace(BF16, lens=((1, 300), (1, 30)), group_size=20), {BULK}),
    "blocks of 32": Way(replace(BF16, lens=LONG, block_size=32), {PDL}),
    "heads of 64": Way(replace(MIXED, head_size=64), {BULK, CLUSTER, WGMMA, PDL}),
    "heads of 80": Way(replace(MIXED, head_size=80), {WGMMA, PDL}),
    "heads of 256": Way(replace(MIXED, head_size=256), {BULK, CLUSTER, PDL}),
    "heads of 512": Way(replace(MIXED, head_size=512), {PDL}),
    "e4m3": Way(replace(MIXED, cache=("fp8", torch.uint8), scales=(0.5, 0.25)), {BULK, CLUSTER, PDL}),
    "e5m2": Way(replace(MIXED, cache=("fp8_e5m2", torch.uint8), scales=(0.5, 0.25)), {BULK, CLUSTER, PDL}),
    "200 rows": Way(replace(BF16, lens=((200, 200),)), {WGMMA}),
    "short chunk after a long prefix": Way(replace(BF16, lens=((16, 2000),)), {WGMMA, PDL, CLUSTER}),
    "window": Way(replace(MIXED, sliding_window=300), {BULK, CLUSTER, WGMMA, PDL}),
    "chunks": Way(replace(MIXED, attention_chunk=290), {BULK, CLUSTER, WGMMA, PDL}),
    "window to both sides": Way(
        replace(MIXED, sliding_window=300, causal=False, right_window=30), {BULK, CLUSTER, WGMMA, PDL}
    ),
    "NHD, blocks of 5": Way(replace(MIXED, layout="nhd", block_size=5), {WGMMA, PDL}),
    "HND, e4m3, blocks of 1": Way(
        replace(MIXED, layout="hnd", block_size=1, cache=("fp8", torch.uint8), scales=(0.5, 0.25)), {PDL}
    ),
    "fp16 with all options": Way(
        replace(MIXED, dtype=torch.float16, alibi=True, softcap=20.0, sinks=True), {BULK, CLUSTER, WGMMA, PDL}
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_attention_in_each_way(device, monkeypatch, name):
    """On the simt device, that it goes this way: one that is not taken would be a mechanism that no smoke test sees."""
    case, uses = WAYS[name]
    monkeypatch.setenv("PAGEDATTN_SIMT_MULTIPROCESSORS", "132")
    arguments = make_arguments(case, device)
    if all(rows == 1 for rows, _ in case.lens):
        arguments["query_start_loc"] = None
    counts = OPS.namespace == "pagedattn_simt" and "PAGEDATTN_CUDA_WITHOUT" not in os.environ
    before = simt_uses() if counts else {}
    out, lse = OPS.paged_attention(**arguments)
    assert_attention(arguments, out, lse)
    if counts:
        after = simt_uses()
        assert {use for use in (BULK, CLUSTER, WGMMA, PDL) if after[use] > before[use]} == uses
