"""linear_packed against the reference: fp32 arithmetic, one rounding at the store, rows that do not know each other."""

import math

import pytest
import reference
import torch
from checks import (
    DTYPES,
    assert_close_to_reference,
    assert_rejected,
    assert_same_bits,
    with_row_gap,
)
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_ext import ops

# On every instruction set.
pytestmark = [pytest.mark.devices("cpu"), pytest.mark.usefixtures("device", "exact_weights")]
# Around what the kernels count in: tiles of rows, the rows of a pass (128, on tiles 256), panels of 16 features, 4 at a
# time, blocks of 64 and of 256 steps.
NUM_ROWS = st.integers(0, 30) | st.sampled_from([64, 127, 128, 129, 257, 300])
IN_FEATURES = st.integers(1, 40) | st.sampled_from([255, 256, 257, 600])
OUT_FEATURES = st.integers(1, 80)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    num_rows=NUM_ROWS,
    in_features=IN_FEATURES,
    out_features=OUT_FEATURES,
    has_bias=st.booleans(),
    input_gap=st.sampled_from([0, 1, 16]),
    seed=st.integers(0, 99),
)
def test_linear_packed(dtype, weight_dtype, num_rows, in_features, out_features, has_bias, input_gap, seed):
    """Beside the error of torch in as many features and in 64 at least: the error of one sum alone may be anything."""
    input = normal(num_rows, in_features, dtype=dtype, seed=seed)
    weights = normal(max(out_features, 64), in_features, dtype=weight_dtype, seed=seed + 1)
    biases = normal(len(weights), dtype=torch.float32, seed=seed + 2) if has_bias else None
    weight, bias = weights[:out_features], None if biases is None else biases[:out_features]
    out = ops.linear_packed(with_row_gap(input, input_gap), ops.pack_linear_weight(weight), out_features, bias)
    assert out.dtype == dtype and out.shape == (num_rows, out_features)
    exact = reference.linear(input, weights, biases)
    eager = reference.linear(input, weights, biases, torch.float32).to(dtype)
    if num_rows > 0:
        assert_close_to_reference(torch.cat((out, eager[:, out_features:]), dim=1), exact, eager)


@pytest.mark.parametrize("in_features", [0, 1, 40])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 0), (0,)], ids=str)
def test_shapes(leading, in_features):
    """One row without a leading dimension, several, none; and no features, which leaves the bias."""
    input, bias = normal(*leading, in_features, dtype=torch.float32), normal(20, dtype=torch.float32, seed=2)
    weight = normal(20, in_features, dtype=torch.float32, seed=1)
    out = ops.linear_packed(input, ops.pack_linear_weight(weight), 20, bias)
    assert out.shape == (*leading, 20)
    if out.numel():
        assert_close_to_reference(out, reference.linear(input, weight, bias))


def test_a_parameter_can_be_packed():
    packed = ops.pack_linear_weight(torch.nn.Parameter(torch.ones(3, 4)))
    assert not packed.requires_grad
    assert ops.linear_packed(torch.ones(1, 4), packed, 3).tolist() == [[4, 4, 4]]


def test_layout_of_a_packed_weight():
    weight = torch.arange(20.0 * 3).view(20, 3)
    packed = ops.pack_linear_weight(weight)
    assert packed.shape == (2, 3, 16)
    for feature in range(20):
        assert torch.equal(packed[feature // 16, :, feature % 16], weight[feature])
    assert not packed[1, :, 4:].any()


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(several_threads, dtype, weight_dtype):
    """Whatever the tiles of rows, the panels at once and the threads."""
    input = normal(260, 700, dtype=dtype)
    weight = ops.pack_linear_weight(normal(150, 700, dtype=weight_dtype, seed=1))
    alone = torch.cat([ops.linear_packed(row[None], weight, 150) for row in input])
    for num_rows in [*range(2, 34), 48, 49, 64, 65, 127, 128, 129, 256, 257, 260]:
        assert_same_bits(ops.linear_packed(input[:num_rows], weight, 150), alone[:num_rows])
    assert_same_bits(ops.linear_packed(input[40:], weight, 150), alone[40:])


def test_a_weight_of_16_bits_is_what_it_is():
    """Rows of fp32 meet the same numbers, those that float16 could not hold among them."""
    weight = torch.tensor([[3e38, 2e-38, -1.0], [1e-37, 65536.0, 2.0]]).bfloat16()
    for input in torch.eye(3):
        out = ops.linear_packed(input, ops.pack_linear_weight(weight), 2)
        assert_same_bits(out, (weight.float() @ input))
    rows = normal(9, 4, dtype=torch.bfloat16)
    out = ops.linear_packed(rows, ops.pack_linear_weight(torch.full((2, 4), 1e38).bfloat16()), 2)
    torch.testing.assert_close(out, (rows.float().sum(-1, keepdim=True) * 1e38).expand(9, 2).bfloat16())
    widened = ops.linear_packed(normal(9, 3, dtype=torch.float32), ops.pack_linear_weight(weight.float()), 2)
    assert_same_bits(ops.linear_packed(normal(9, 3, dtype=torch.float32), ops.pack_linear_weight(weight), 2), widened)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_and_feature(special, dtype):
    input, weight = normal(20, 40, dtype=dtype), normal(40, 40, dtype=dtype, seed=1)
    expected = ops.linear_packed(input, ops.pack_linear_weight(weight), 40)
    input[7, 3] = special
    weight[21, 5] = special
    out = ops.linear_packed(input, ops.pack_linear_weight(weight), 40)
    assert not out[7].isfinite().any() and not out[:, 21].isfinite().any()
    kept = torch.ones(20, 40, dtype=torch.bool)
    kept[7], kept[:, 21] = False, False
    assert_same_bits(out[kept], expected[kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_any_bits_stays_nan(dtype):
    """Rounded as a number, a NaN whose bits are all set would become zero."""
    weight = normal(20, 3, dtype=torch.float32)
    weight.view(torch.int32)[[3, 8], 1] = torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32)
    for num_rows in (1, 5):
        out = ops.linear_packed(normal(num_rows, 3, dtype=dtype), ops.pack_linear_weight(weight), 20)
        assert out.isnan().all(0).nonzero().flatten().tolist() == [3, 8]


def test_wrong_arguments():
    def arguments(**changes):
        valid = {
            "input": torch.zeros(3, 8),
            "packed_weight": torch.zeros(2, 8, 16),
            "out_features": 20,
            "bias": torch.zeros(20),
        }
        return valid | changes

    for argument, wrong, is_dtype in [
        ("input", torch.zeros(3, 8).double(), True),
        ("input", torch.zeros(8, 3).T, False),
        ("out_features", -1, False),
        ("packed_weight", torch.zeros(1, 8, 16), False),
        ("packed_weight", torch.zeros(2, 7, 16), False),
        ("packed_weight", torch.zeros(2, 16, 8).mT, False),
        ("packed_weight", torch.zeros(20, 8), False),
        ("packed_weight", torch.zeros(2, 8, 16, dtype=torch.int8), True),
        ("bias", torch.zeros(19), False),
        ("bias", torch.zeros(20).bfloat16(), True),
    ]:
        assert_rejected(
            "linear_packed", arguments(**{argument: wrong}), argument, TypeError if is_dtype else ValueError
        )
    with pytest.raises(TypeError, match="pack_linear_weight: weight: expected dtype float32, float16 or bfloat16, got"):
        ops.pack_linear_weight(torch.zeros(2, 2, dtype=torch.int8))
    with pytest.raises(ValueError, match="pack_linear_weight: weight: expected 2 dimensions, got 1"):
        ops.pack_linear_weight(torch.zeros(2))


PACK = {
    "pack_linear_weight": lambda weight, **out: ops.pack_linear_weight(weight.bfloat16(), **out),
    "pack_linear_weight_int8": lambda weight, **out: ops.pack_linear_weight_int8(weight.to(torch.int8), **out),
    "pack_linear_weight_int4": lambda weight, **out: ops.pack_linear_weight_int4(
        weight.abs().byte().clamp(0, 15), weight[:, :2], weight[:, :2].abs().byte().clamp(0, 15), **out
    ),
}


@pytest.mark.parametrize("name", PACK)
def test_parts_of_a_weight_are_packed_in_their_place(name):
    weight = 9 * normal(70, 64, dtype=torch.float32)
    expected = PACK[name](weight)
    packed = torch.full_like(expected, 3)
    for begin, end in ((48, 70), (0, 16), (16, 48)):
        out = packed[begin // 16 : -(-end // 16)]
        assert PACK[name](weight[begin:end], out=out) is out
    assert_same_bits(packed, expected)


@pytest.mark.parametrize("name", PACK)
def test_places_that_are_refused(name):
    weight = torch.zeros(40, 64)
    right = PACK[name](weight)
    for wrong, error in [
        (right[:2], ValueError),
        (right.repeat(2, *[1] * (right.dim() - 1))[::2], ValueError),
        (right.double(), TypeError),
    ]:
        with pytest.raises(error, match=rf"^{name}: out: expected .+"):
            PACK[name](weight, out=wrong)


def test_no_output_features():
    """Of more rows than anybody could go through, as an expanded tensor has."""
    input = torch.ones(64).expand(2**40, -1)
    scales, codes = torch.empty(0, 2), torch.empty(0, 64, dtype=torch.uint8)
    for out in (
        ops.linear_packed(input, ops.pack_linear_weight(torch.empty(0, 64)), 0),
        ops.linear_int8(input, ops.pack_linear_weight_int8(codes.view(torch.int8)), torch.empty(0)),
        ops.linear_int4(input, ops.pack_linear_weight_int4(codes, scales, scales.byte()), 32, 0),
    ):
        assert out.shape == (2**40, 0)
