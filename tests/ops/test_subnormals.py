"""Subnormal numbers of fp32 and bf16 count as zeros in attention, in linear layers and in layers with a state on every
instruction set, whether vectors or tiles multiply. All else in the process computes with subnormal numbers as before.
"""

import pytest
import torch
from attention_cases import Case, make_arguments
from checks import assert_same_bits
from op_table import OPS

from pagedattn_ext import CPUGraph, ops

pytestmark = [
    pytest.mark.devices("cpu"),
    pytest.mark.code_for("avx512_vnni", "avx512_bf16", "amx"),
    pytest.mark.usefixtures("device"),
]

TINY = 2.0**-130  # the least normal number is 2^-126
LARGE = 2.0**20  # makes a normal number of TINY


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Not above 8, so that TINY times it is subnormal."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).clamp(-8, 8)


# ---- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["chunked", "hnd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_attention(dtype, layout, num_rows):
    """With 1, 2, 3 and 20 heads, and so as many columns of AMX in decode. The scale makes normal logits of a tiny query
    or key that counts."""
    for group_size in (1, 2, 3, 20):
        case = Case(((num_rows, 150),), dtype, num_kv_heads=1, group_size=group_size, head_size=72, layout=layout)
        arguments = make_arguments(case, torch.device("cpu"))
        one_tiny = {
            "query": {"query": TINY, "key_cache": LARGE, "scale": 2.0**110},
            "key_cache": {"query": LARGE, "key_cache": TINY, "scale": 2.0**110},
            "value_cache": {"value_cache": TINY},
        }
        for name, factors in one_tiny.items():
            tiny = arguments | {of: arguments[of] * factor for of, factor in factors.items() if of != "scale"}
            tiny["scale"] = factors.get("scale", arguments["scale"])
            results = OPS.paged_attention(**tiny)
            expected = OPS.paged_attention(**tiny | {name: tiny[name] * 0})
            for result, of_zeros in zip(results, expected, strict=True):
                assert_same_bits(result, of_zeros)


def test_attention_with_fp16():
    """A subnormal number of fp16 is a normal one of fp32."""
    for layout in ("chunked", "hnd"):
        arguments = make_arguments(Case(((1, 40), (20, 40)), torch.float16, layout=layout), torch.device("cpu"))
        arguments["value_cache"][:] = 3 * 2.0**-24
        out, _ = OPS.paged_attention(**arguments)
        assert_same_bits(out, torch.full_like(out, 3 * 2.0**-24))


# ---- linear layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [39, 64])
def test_linear_packed(dtype, in_features):
    input, weight = normal(20, in_features), normal(40, in_features, seed=1)
    for num_rows in (1, 2, 20):
        for of_input, of_weight in ((TINY, LARGE), (LARGE, TINY)):
            rows = (input[:num_rows] * of_input).to(dtype)
            out = ops.linear_packed(rows, ops.pack_linear_weight((weight * of_weight).to(dtype)), 40)
            assert_same_bits(out, torch.zeros(num_rows, 40, dtype=dtype))
    rows = (input * 2.0**-70).to(dtype)  # numbers that are normal, and products that are not
    out = ops.linear_packed(rows, ops.pack_linear_weight((weight * 2.0**-70).to(dtype)), 40)
    assert_same_bits(out.abs(), torch.zeros(20, 40, dtype=dtype))


def test_linear_packed_with_fp16():
    input = torch.full((20, 64), 3 * 2.0**-24, dtype=torch.float16)
    out = ops.linear_packed(input, ops.pack_linear_weight(torch.ones(40, 64, dtype=torch.float16)), 40)
    assert_same_bits(out, torch.full((20, 40), 64 * 3 * 2.0**-24, dtype=torch.float16))


@pytest.mark.parametrize("bits", [8, 4])
def test_linear_of_tiny_scales(bits):
    """Of a quantized weight. Rows are large, so that products with a scale that counts are normal."""
    for num_rows in (1, 20):
        rows = normal(num_rows, 64, seed=1) * LARGE
        if bits == 8:
            codes, scales = ops.quantize_weight_int8(normal(40, 64))
            out = ops.linear_int8(rows, ops.pack_linear_weight_int8(codes), torch.full_like(scales, TINY))
        else:
            codes, scales, zeros = ops.quantize_weight_int4(normal(40, 64))
            packed = ops.pack_linear_weight_int4(codes, torch.full_like(scales, TINY), zeros)
            out = ops.linear_int4(rows, packed, 32, 40)
        assert_same_bits(out.abs(), torch.zeros(num_rows, 40))


# ---- layers with a state -------------------------------------------------------------------------------------------


def test_layers_with_a_state():
    """A number that a layer with a state copies stays."""
    tiny, ones = torch.full((1, 1, 1), TINY), torch.ones(1, 1, 1)
    states = torch.zeros(1, 32, 1)
    out = ops.causal_conv1d(torch.full((1, 32), TINY), states, torch.tensor([[0.0, 1.0]]).repeat(32, 1))
    assert_same_bits(out, torch.zeros(1, 32))
    assert_same_bits(states, torch.full((1, 32, 1), TINY))
    states = torch.zeros(1, 1, 1, 1)
    out = ops.gated_delta_rule(ones, ones, tiny, torch.zeros(1, 1), torch.ones(1, 1), states, scale=1.0)
    assert out.item() == 0 and states.item() == 0
    out = ops.selective_scan(tiny, ones[..., 0], torch.zeros(1), ones, ones, states)
    assert out.item() == 0 and states.item() == 0


# ---- what is not changed -------------------------------------------------------------------------------------------


def assert_subnormals_count() -> None:
    """On this thread and on the others of torch's pool."""
    tiny = torch.full((2**20,), TINY)
    assert torch.equal(tiny * 2, torch.full((2**20,), 2 * TINY))
    assert ops.rms_norm(torch.full((2, 8), TINY), torch.ones(8), epsilon=1.0).count_nonzero() == 16
    parts, lse = torch.full((1, 1, 4), TINY), torch.zeros(1, 1)
    assert ops.merge_attn_states(parts, lse, parts, lse)[0].count_nonzero() == 4


def test_afterwards_subnormals_count(several_threads):
    """After ops that run on several threads, and after they are replayed."""
    arguments = make_arguments(Case(((1, 2000), (60, 600)), head_size=128), torch.device("cpu"))
    rows, weight = normal(130, 512), ops.pack_linear_weight(normal(512, 512))
    graph = CPUGraph()
    with graph.capture():
        OPS.paged_attention(**arguments)
        ops.linear_packed(rows, weight, 512)
    assert_subnormals_count()
    graph.replay()
    assert_subnormals_count()
    OPS.paged_attention(**arguments)
    ops.linear_packed(rows, weight, 512)
    assert_subnormals_count()


def test_a_process_that_flushes_goes_on_flushing():
    """torch.set_flush_denormal stays as it is set."""
    assert torch.set_flush_denormal(True)
    try:
        ops.linear_packed(normal(2, 8), ops.pack_linear_weight(normal(8, 8)), 8)
        assert torch.full((1,), TINY).mul(2).item() == 0
    finally:
        torch.set_flush_denormal(False)
