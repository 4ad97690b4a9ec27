"""Linear layers of experts: each row by the weight of its own expert, with the bits of the plain op."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import reference
import torch
from checks import DTYPES, assert_close_to_reference, assert_rejected, assert_same_bits, with_row_gap
from hypothesis import given
from hypothesis import strategies as st
from op_calls import LINEAR, make_arguments
from torch import Tensor

from pagedattn_ext import ops

# On every instruction set.
pytestmark = [
    pytest.mark.devices("cpu"),
    pytest.mark.code_for("avx512_vnni", "avx512_bf16", "amx"),
    pytest.mark.usefixtures("device", "exact_weights"),
]
# Rows of the experts: none, one, more than a tile, more than a chunk (128, or 256), more than a group of chunks (512).
COUNTS = st.lists(st.integers(0, 20) | st.sampled_from([64, 129, 257, 300]), min_size=1, max_size=6)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Experts:
    """plain(rows, expert): by the op for one weight. exact(rows, expert): in fp64."""

    grouped: Callable[[Tensor, Tensor], Tensor]
    plain: Callable[[Tensor, int], Tensor]
    exact: Callable[[Tensor, int], Tensor]


def packed(weights: Tensor, bias: Tensor | None) -> Experts:
    packed = torch.stack([ops.pack_linear_weight(weight) for weight in weights])
    n = weights.shape[1]
    return Experts(
        lambda rows, offsets: ops.grouped_linear_packed(rows, offsets, packed, n, bias),
        lambda rows, e: ops.linear_packed(rows, packed[e], n, of(bias, e)),
        lambda rows, e: reference.linear(rows, weights[e], of(bias, e)),
    )


def int8(weights: Tensor, bias: Tensor | None) -> Experts:
    quantized = [ops.quantize_weight_int8(weight) for weight in weights]
    packed = torch.stack([ops.pack_linear_weight_int8(codes) for codes, _ in quantized])
    scales = torch.stack([scales for _, scales in quantized])
    return Experts(
        lambda rows, offsets: ops.grouped_linear_int8(rows, offsets, packed, scales, bias),
        lambda rows, e: ops.linear_int8(rows, packed[e], scales[e], of(bias, e)),
        lambda rows, e: reference.linear_int8(rows, *quantized[e], of(bias, e)),
    )


def int4(weights: Tensor, bias: Tensor | None) -> Experts:
    quantized = [ops.quantize_weight_int4(weight) for weight in weights]
    packed = torch.stack([ops.pack_linear_weight_int4(*codes_and_scales) for codes_and_scales in quantized])
    n = weights.shape[1]
    return Experts(
        lambda rows, offsets: ops.grouped_linear_int4(rows, offsets, packed, 32, n, bias),
        lambda rows, e: ops.linear_int4(rows, packed[e], 32, n, of(bias, e)),
        lambda rows, e: reference.linear_int4(rows, *quantized[e], of(bias, e)),
    )


FORMATS = {"packed": packed, "int8": int8, "int4": int4}


def of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def offsets_of(counts: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(dtype)


@given(
    format=st.sampled_from([*FORMATS]),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    counts=COUNTS,
    in_features=st.sampled_from([32, 64, 288]),
    out_features=st.integers(1, 80),
    has_bias=st.booleans(),
    offsets_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 99),
)
def test_grouped_linear(format, dtype, weight_dtype, counts, in_features, out_features, has_bias, offsets_dtype, seed):
    """Beside fp64, and the bits of the plain op."""
    weights = normal(len(counts), out_features, in_features, dtype=weight_dtype, seed=seed)
    bias = normal(len(counts), out_features, seed=seed + 1) if has_bias else None
    experts = FORMATS[format](weights, bias)
    input = with_row_gap(normal(sum(counts), in_features, dtype=dtype, seed=seed + 2), 3)
    out = experts.grouped(input, offsets_of(counts, offsets_dtype))
    assert out.dtype == dtype and out.shape == (sum(counts), out_features)
    for expert, (rows, mine) in enumerate(zip(input.split(counts), out.split(counts), strict=True)):
        assert_same_bits(mine, experts.plain(rows, expert))
        if len(rows) > 0:
            eager = reference.linear(rows, weights[expert], of(bias, expert), torch.float32).to(dtype)
            assert_close_to_reference(mine, experts.exact(rows, expert), eager if format == "packed" else None)


@pytest.mark.parametrize("format", FORMATS)
def test_threads_share_experts_and_features(several_threads, format):
    """A row in each of many experts; all rows in one expert."""
    experts = FORMATS[format](normal(40, 150, 256), None)
    for counts in ([1] * 40, [0] * 7 + [600] + [0] * 32):
        input = normal(sum(counts), 256, dtype=torch.bfloat16)
        expected = [experts.plain(rows, e) for e, rows in enumerate(input.split(counts)) if len(rows)]
        assert_same_bits(experts.grouped(input, offsets_of(counts)), torch.cat(expected))


@pytest.mark.parametrize("op", [f"grouped_{name}" for name in LINEAR])
def test_wrong_arguments(op):
    valid = make_arguments(op)
    assert getattr(ops, op)(**valid).shape == (3, 20)
    for argument, wrong, error in [
        ("input", valid["input"][None], ValueError),
        ("input", valid["input"].double(), TypeError),
        ("offsets", offsets_of([1, 0, 1]), ValueError),
        ("offsets", offsets_of([1, 0, 3]), ValueError),
        ("offsets", offsets_of([2, -1, 2]), ValueError),
        ("offsets", offsets_of([1, 0, 2]) + 1, ValueError),
        ("offsets", torch.empty(0, dtype=torch.int32), ValueError),
        ("offsets", torch.zeros(4), TypeError),
        ("packed_weight", valid["packed_weight"][:2], ValueError),
        ("packed_weight", valid["packed_weight"][0], ValueError),
        ("bias", valid["bias"][:2], ValueError),
        ("bias", valid["bias"][0], ValueError),
        ("bias", valid["bias"].half(), TypeError),
    ]:
        assert_rejected(op, valid | {argument: wrong}, argument, error)
