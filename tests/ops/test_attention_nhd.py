"""Caches of [num_blocks, block_size, num_kv_heads, head_size] in the CUDA kernels: what any call of the attention tests
may leave out.
"""

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, assert_attention, make_arguments
from cache_layouts import NHD_LAYOUTS
from checks import DTYPES, assert_same_bits
from op_table import OPS

pytestmark = pytest.mark.devices("simt", "cuda")


@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("cache", [None, "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.sweep
def test_each_kernel(device, monkeypatch, head_size, dtype, cache, arch):
    """Decode in one partition and several, a wide group, and prefill of several tiles; blocks of no power of two."""
    monkeypatch.setenv("PAGEDATTN_SIMT_ARCH", arch)
    case = Case(
        ((1, 600), (1, 40), (70, 150)),
        dtype,
        None if cache is None else (cache, torch.uint8),
        num_kv_heads=1,
        head_size=head_size,
        block_size=3,
        layout="nhd",
    )
    for one in (case, replace(case, lens=((1, 70), (1, 0)), group_size=20)):
        arguments = make_arguments(one, device)
        assert_attention(arguments, *OPS.paged_attention(**arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", NHD_LAYOUTS)
@pytest.mark.parametrize(("block_size", "block_gap"), [(8, 0), (16, 3), (64, 0)])
def test_bits_are_those_of_the_other_layout(device, monkeypatch, dtype, layout, block_size, block_gap):
    """With 16 bits: operands are the same, and only the way to them differs."""
    monkeypatch.setenv("PAGEDATTN_CUDA_WITHOUT", "wgmma")
    case = Case(
        ((1, 1300), (1, 17), (3, 90), (40, 50)),
        dtype,
        num_kv_heads=1,
        head_size=128,
        block_size=block_size,
        block_gap=block_gap,
        sliding_window=700,
    )
    chunked, nhd = (make_arguments(replace(case, layout=name), device) for name in ("chunked", layout))
    for actual, expected in zip(OPS.paged_attention(**nhd), OPS.paged_attention(**chunked), strict=True):
        assert_same_bits(actual, expected)
