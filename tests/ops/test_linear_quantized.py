"""Linear layers with weights of 8 and of 4 bits: exact sums, each row by itself, edges, wrong arguments."""

import math
import re
from collections.abc import Callable

import pytest
import reference
import torch
from checks import (
    DTYPES,
    assert_close_to_reference,
    assert_raises_and_writes_nothing,
    assert_rejected,
    assert_same_bits,
    with_row_gap,
)
from hypothesis import example, given
from hypothesis import strategies as st
from op_calls import make_arguments
from op_table import OPS
from torch import Tensor

from pagedattn_ext import ops

# On every instruction set.
pytestmark = [
    pytest.mark.devices("cpu"),
    pytest.mark.code_for("avx512_vnni", "amx"),
    pytest.mark.usefixtures("device", "exact_weights"),
]


def make_int8_layer(
    in_features: int, out_features: int, seed: int = 0, with_bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """weight, weight_scales, bias; of all values that a weight can have."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8, generator=generator)
    scales = torch.rand(out_features, generator=generator) / 100 + 1e-3
    return weight, scales, torch.randn(out_features, generator=generator) if with_bias else None


def make_rows(num_rows: int, in_features: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of very different magnitudes, each with a few elements that are larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, in_features, generator=generator) * torch.logspace(-2, 2, num_rows)[:, None]
    return torch.where(torch.rand(rows.shape, generator=generator) < 0.02, rows * 8, rows).to(dtype)


def check_int8(rows: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> None:
    assert_close_to_reference(out, reference.linear_int8(rows, weight, scales, bias))


# ---- int8 ----------------------------------------------------------------------------------------------------------


@given(
    num_rows=st.integers(0, 40),
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    gap=st.sampled_from([0, 3]),
    seed=st.integers(0, 9),
)
@example(260, 2100, 17, torch.float32, True, 0, 0)  # more than a chunk of rows, more than a block of a panel
def test_int8(num_rows, in_features, out_features, dtype, with_bias, gap, seed):
    weight, scales, bias = make_int8_layer(in_features, out_features, seed, with_bias)
    rows = with_row_gap(make_rows(num_rows, in_features, dtype, seed), gap)
    out = ops.linear_int8(rows, ops.pack_linear_weight_int8(weight), scales, bias)
    assert out.dtype == dtype
    check_int8(rows, weight, scales, bias, out)


def test_int8_takes_any_leading_dimensions():
    weight, scales, bias = make_int8_layer(20, 33)
    rows, packed = make_rows(6, 20, torch.float32), ops.pack_linear_weight_int8(weight)
    expected = ops.linear_int8(rows, packed, scales, bias)
    assert_same_bits(ops.linear_int8(rows[0], packed, scales, bias), expected[0])
    assert_same_bits(ops.linear_int8(rows.view(2, 3, 20), packed, scales, bias), expected.view(2, 3, 33))
    assert ops.linear_int8(rows[:0].view(0, 3, 20), packed, scales, bias).shape == (0, 3, 33)


def test_packed_int8_weight():
    weight, _, _ = make_int8_layer(6, 18)
    packed = ops.pack_linear_weight_int8(weight)
    assert packed.shape == (2, 2, 16, 4)
    assert packed[1, 1, 1].tolist() == [weight[17, 4] + 128, weight[17, 5] + 128, 128, 128]
    assert (packed[1, :, 2:] == 128).all()


@pytest.mark.parametrize("value", [-128, 127])
@pytest.mark.parametrize("in_features", [4, 12288, 131072])
@pytest.mark.parametrize("signs", ["same", "pairs", "alternating"])
@pytest.mark.parametrize("num_rows", [3, 17])  # few, and as many as meet tiles
def test_int8_sums_of_the_largest_products(num_rows, in_features, value, signs):
    """Exact, and never saturated on the way."""
    k = torch.arange(in_features)
    sign = {"same": torch.ones_like(k), "pairs": 1 - 2 * (k // 2 % 2), "alternating": 1 - 2 * (k % 2)}[signs]
    rows = (127 * sign).float().expand(num_rows, -1)
    weight = torch.full((5, in_features), value, dtype=torch.int8)
    weight[1] = (value * sign).clamp(-128, 127)
    weight[2] = 0
    out = ops.linear_int8(rows, ops.pack_linear_weight_int8(weight), torch.ones(5))
    assert_same_bits(out, (rows.long() @ weight.T.long()).float())


def test_int8_sums_are_exact():
    """Codes that are the elements themselves."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-127, 128, (40, 777), generator=generator)
    rows[:, 5] = 127
    weight, _, _ = make_int8_layer(777, 50)
    out = ops.linear_int8(rows.float(), ops.pack_linear_weight_int8(weight), torch.ones(50))
    assert_same_bits(out, (rows @ weight.T.long()).float())


@pytest.mark.parametrize("num_rows", [3, 17])
def test_int8_error_of_a_row(num_rows):
    """A share of its norm, however large its largest elements are. With codes of 8 bits alone: up to 3.6%."""
    rows = torch.randn(num_rows, 1024, generator=torch.Generator().manual_seed(0))
    rows = rows.sign() * rows.abs() ** torch.linspace(0.5, 9, num_rows)[:, None]
    out = ops.linear_int8(rows, ops.pack_linear_weight_int8(torch.eye(1024, dtype=torch.int8)), torch.ones(1024))
    assert ((out - rows).norm(dim=1) < 0.012 * rows.norm(dim=1)).all()


@pytest.mark.parametrize("num_rows", [3, 17])
@pytest.mark.parametrize("in_features", [48, 49, 131072])
def test_int8_row_of_one_element(in_features, num_rows):
    """All that a row holds. In a long row no code could be larger."""
    weight, scales, bias = make_int8_layer(in_features, 17)
    rows = torch.zeros(num_rows, in_features)
    rows[:, in_features - 1] = torch.logspace(-30, 30, num_rows)
    check_int8(rows, weight, scales, bias, ops.linear_int8(rows, ops.pack_linear_weight_int8(weight), scales, bias))


def test_ties_are_rounded_to_even():
    rows = torch.tensor([[127.0, 0.5, 1.5, -2.5, 3.5, 0.0]])
    out = ops.linear_int8(rows, ops.pack_linear_weight_int8(torch.eye(6, dtype=torch.int8)), torch.ones(6))
    assert out.tolist() == [[127, 0, 2, -2, 4, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_int8_row_that_is_not_finite(bad, dtype):
    """NaN in all its outputs, whichever element it is; other rows do not see it."""
    weight, scales, bias = make_int8_layer(37, 20)
    packed = ops.pack_linear_weight_int8(weight)
    rows = make_rows(19, 37, dtype)
    expected = ops.linear_int8(rows, packed, scales, bias)
    others = torch.arange(19) != 4
    for column in (0, 35, 36):
        changed = rows.clone()
        changed[4, column] = bad
        out = ops.linear_int8(changed, packed, scales, bias)
        assert out[4].isnan().all()
        assert_same_bits(out[others], expected[others])


@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, 1e-38, 1e-36])
def test_int8_row_of_next_to_nothing(tiny):
    weight, scales, bias = make_int8_layer(37, 20)
    out = ops.linear_int8(torch.full((2, 37), tiny), ops.pack_linear_weight_int8(weight), scales, bias)
    assert_same_bits(out, bias.expand(2, -1).contiguous())


def test_int8_row_of_the_largest_elements():
    rows = torch.tensor([[3e38, -3e38, 1e38, 0.0]])
    weight = torch.eye(4, dtype=torch.int8)
    out = ops.linear_int8(rows, ops.pack_linear_weight_int8(weight), torch.full((4,), 0.5))
    torch.testing.assert_close(out, rows / 2, rtol=1e-2, atol=0)


def assert_rows_are_independent(linear: Callable[[Tensor], Tensor], in_features: int) -> None:
    """Batches of 1 to 70 rows, which the dtypes share, and of more than a chunk, on one thread and on two: the bits of
    each row alone."""
    for i, dtype in enumerate(DTYPES):
        rows = make_rows(140, in_features, dtype)
        torch.set_num_threads(1)
        alone = torch.cat([linear(row[None]) for row in rows])
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for num_rows in [*range(1 + i, 71, len(DTYPES)), 140]:
                assert_same_bits(linear(rows[-num_rows:]), alone[-num_rows:])


def test_int8_rows_are_independent(several_threads):
    weight, scales, bias = make_int8_layer(1100, 70)
    packed = ops.pack_linear_weight_int8(weight)
    assert_rows_are_independent(lambda rows: ops.linear_int8(rows, packed, scales, bias), 1100)


# ---- int4 ----------------------------------------------------------------------------------------------------------


def make_int4_layer(
    in_features: int, out_features: int, group_size: int, scale_dtype: torch.dtype = torch.float16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """codes, scales, zeros."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, (out_features, in_features // group_size), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(zeros.shape, generator=generator) / 10 + 1e-3).to(scale_dtype)
    return codes, scales, zeros


@given(
    num_rows=st.integers(0, 40),
    num_groups=st.integers(1, 5),
    group_size=st.sampled_from([32, 64, 96, 128, 160, 288]),
    out_features=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    gap=st.sampled_from([0, 3]),
    seed=st.integers(0, 9),
)
@example(130, 9, 128, 17, torch.float32, torch.float16, True, 0, 0)  # more than a chunk of rows
@example(40, 3, 160, 35, torch.float32, torch.float16, True, 0, 0)  # blocks of 128 and of 32, in and across ranges
def test_int4(num_rows, num_groups, group_size, out_features, dtype, scale_dtype, with_bias, gap, seed):
    in_features = num_groups * group_size
    layer = make_int4_layer(in_features, out_features, group_size, scale_dtype, seed)
    bias = torch.randn(out_features, generator=torch.Generator().manual_seed(seed)) if with_bias else None
    rows = with_row_gap(make_rows(num_rows, in_features, dtype, seed), gap)
    out = ops.linear_int4(rows, ops.pack_linear_weight_int4(*layer), group_size, out_features, bias, scale_dtype)
    assert out.dtype == dtype
    assert_close_to_reference(out, reference.linear_int4(rows, *layer, bias))


@given(
    num_groups=st.integers(1, 9),
    group_size=st.sampled_from([32, 64, 96]),
    out_features=st.integers(1, 40),
    has_gap=st.booleans(),
    seed=st.integers(0, 9),
)
def test_int4_codes_in_words(num_groups, group_size, out_features, has_gap, seed):
    """Eight codes in an int32, the first in its lowest bits: the same packed weight as of a code in a byte."""
    codes, scales, zeros = make_int4_layer(num_groups * group_size, out_features, group_size, seed=seed)
    words = (codes.view(out_features, -1, 8).long() << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)
    if has_gap:
        words = torch.cat([words, ~words], dim=1)[:, : words.shape[1]]
    packed = ops.pack_linear_weight_int4(words, scales, zeros)
    assert_same_bits(packed, ops.pack_linear_weight_int4(codes, scales, zeros))


def test_int4_takes_any_leading_dimensions():
    packed = ops.pack_linear_weight_int4(*make_int4_layer(64, 33, 64))
    rows = make_rows(6, 64, torch.float32)
    expected = ops.linear_int4(rows, packed, 64, 33, scale_dtype=torch.float16)
    assert_same_bits(ops.linear_int4(rows[0], packed, 64, 33, scale_dtype=torch.float16), expected[0])
    assert_same_bits(
        ops.linear_int4(rows.view(2, 3, 64), packed, 64, 33, scale_dtype=torch.float16), expected.view(2, 3, 33)
    )


@pytest.mark.parametrize("zero", [0, 8, 15])
@pytest.mark.parametrize("code", [0, 15])
@pytest.mark.parametrize("num_rows", [5, 17])
def test_int4_of_the_largest_products(num_rows, code, zero):
    """Elements of one sign, so that codes and zeros both come to sums of all that 16 bits hold, and nearly cancel."""
    rows = torch.full((num_rows, 256), 127.0)
    codes = torch.full((20, 256), code, dtype=torch.uint8)
    zeros = torch.full((20, 2), zero, dtype=torch.uint8)
    out = ops.linear_int4(rows, ops.pack_linear_weight_int4(codes, torch.ones(20, 2), zeros), 128, 20)
    assert (out == 127 * 256 * (code - zero)).all()


def test_int4_scales_are_exact():
    """Of every dtype: one element a row, so that nothing is added."""
    generator = torch.Generator().manual_seed(0)
    codes, zeros = torch.full((40, 32), 9, dtype=torch.uint8), torch.full((40, 1), 8, dtype=torch.uint8)
    for dtype in DTYPES:
        scales = torch.exp2(torch.rand(40, 1, generator=generator) * 20 - 15).to(dtype)
        row = torch.zeros(1, 32)
        row[0, 7] = 127
        out = ops.linear_int4(row, ops.pack_linear_weight_int4(codes, scales, zeros), 32, 40, scale_dtype=dtype)
        assert_same_bits(out, 127 * scales.float().T)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_int4_row_that_is_not_finite(bad):
    packed = ops.pack_linear_weight_int4(*make_int4_layer(96, 20, 32))
    rows = make_rows(19, 96, torch.float32)
    expected = ops.linear_int4(rows, packed, 32, 20, scale_dtype=torch.float16)
    rows[4, 50] = bad
    out, others = ops.linear_int4(rows, packed, 32, 20, scale_dtype=torch.float16), torch.arange(19) != 4
    assert out[4].isnan().all()
    assert_same_bits(out[others], expected[others])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("in_features", "group_size", "scale_dtype"),
    [(1152, 32, torch.float16), (2176, 128, torch.float32), (672, 224, torch.float16)],
)
def test_int4_rows_are_independent(several_threads, in_features, group_size, scale_dtype):
    """Chunks have 128 rows, and 64 of more than 2048 features."""
    packed = ops.pack_linear_weight_int4(*make_int4_layer(in_features, 70, group_size, scale_dtype))
    assert_rows_are_independent(
        lambda rows: ops.linear_int4(rows, packed, group_size, 70, scale_dtype=scale_dtype), in_features
    )


# ---- float weights, quantized --------------------------------------------------------------------------------------


def make_weight(
    out_features: int, in_features: int, dtype: torch.dtype, magnitude: float = 1.0, seed: int = 0
) -> Tensor:
    """A row of zeros, a row on one side of zero, rows with zeros, and other rows."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    weight[1::5] = weight[1::5].abs()
    weight[2::5] = 0
    weight[3::5, ::3] = 0
    return (weight * magnitude).clamp(-1e30, 1e30).to(dtype)


@given(
    out_features=st.integers(0, 12),
    in_features=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    magnitude=st.sampled_from([1.0, 0.02, 1e-38, 1e29]),
    gap=st.sampled_from([0, 3]),
    seed=st.integers(0, 9),
)
def test_quantize_int8(out_features, in_features, dtype, magnitude, gap, seed):
    """Would catch a scale of another row, a tail of a row that is left out, a division that is not rounded once."""
    weight = with_row_gap(make_weight(out_features, in_features, dtype, magnitude, seed), gap)
    weight = weight.where(weight.isfinite(), 0)  # of fp16
    for actual, expected in zip(
        ops.quantize_weight_int8(weight), reference.quantise_weight_to_int8(weight), strict=True
    ):
        assert_same_bits(actual, expected)


@given(
    out_features=st.integers(0, 12),
    num_groups=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    magnitude=st.sampled_from([1.0, 0.02, 1e-38, 1e29]),
    gap=st.sampled_from([0, 3]),
    seed=st.integers(0, 9),
)
def test_quantize_int4(out_features, num_groups, dtype, magnitude, gap, seed):
    """Would catch a group that gets the levels of another, a span that is not tried, sums in another order."""
    weight = with_row_gap(make_weight(out_features, 32 * num_groups, dtype, magnitude, seed), gap)
    weight = weight.where(weight.isfinite(), 0)  # of fp16
    for actual, expected in zip(
        ops.quantize_weight_int4(weight), reference.quantise_weight_to_int4(weight), strict=True
    ):
        assert torch.equal(actual, expected)  # a scale of 0 has either sign


def test_quantize_on_several_threads(several_threads):
    weight = make_weight(1000, 256, torch.bfloat16)
    for quantize in (ops.quantize_weight_int8, ops.quantize_weight_int4):
        torch.set_num_threads(1)
        alone = quantize(weight)
        torch.set_num_threads(2)
        assert all(map(torch.equal, quantize(weight), alone))


def test_quantize_nothing():
    codes, scales = ops.quantize_weight_int8(torch.ones(3, 0))
    assert codes.shape == (3, 0) and scales.tolist() == [0, 0, 0]
    codes, scales, zeros = ops.quantize_weight_int4(torch.ones(3, 0))
    assert codes.shape == scales.shape == zeros.shape == (3, 0)


@pytest.mark.parametrize("quantize", [ops.quantize_weight_int8, ops.quantize_weight_int4])
@pytest.mark.parametrize("column", [0, 40, 63])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -1.1e30])
def test_quantize_rejects_an_element(quantize, column, value):
    """Wherever it is, and it is named; the largest that may come is not."""
    weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    weight[7, 5], weight[8, 5] = 1e30, -1e30
    quantize(weight)
    weight[33, column] = value
    with pytest.raises(ValueError, match=re.escape(f"between -1e+30 and 1e+30, got {value:g}")):
        quantize(weight)


@pytest.mark.parametrize("name", ["quantize_weight_int8", "quantize_weight_int4"])
@pytest.mark.parametrize(
    ("argument", "wrong", "error"),
    [
        ("weight", torch.zeros(3, 64, dtype=torch.float64), TypeError),
        ("weight", torch.zeros(64), ValueError),
        ("codes", torch.zeros(3, 64, dtype=torch.int16), TypeError),
        ("codes", torch.zeros(2, 64, dtype=torch.uint8), (TypeError, ValueError)),
        ("scales", torch.zeros(3, 2, dtype=torch.float16), TypeError),
        ("scales", torch.zeros(3, 3), ValueError),
    ],
)
def test_quantize_rejects(name, argument, wrong, error):
    assert_rejected(name, make_arguments(name) | {argument: wrong}, argument, error)


def test_quantize_int4_rejects_a_part_of_a_group():
    with pytest.raises(ValueError, match=r"weight: expected in_features that are a multiple of 32, got 33"):
        ops.quantize_weight_int4(torch.zeros(3, 33))


# ---- wrong arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "wrong", "error"),
    [
        ("input", torch.zeros(3, 14, dtype=torch.float64), TypeError),
        ("input", torch.zeros(3, 14, 2)[..., 0], ValueError),
        ("input", torch.zeros(3, 0), ValueError),
        ("input", torch.zeros(1, 131073), ValueError),
        ("packed_weight", torch.zeros(2, 4, 16, 4, dtype=torch.int8), TypeError),
        ("packed_weight", torch.zeros(2, 4, 64, dtype=torch.uint8), ValueError),
        ("packed_weight", torch.zeros(1, 4, 16, 4, dtype=torch.uint8), ValueError),
        ("packed_weight", torch.zeros(2, 3, 16, 4, dtype=torch.uint8), ValueError),
        ("packed_weight", torch.zeros(2, 4, 4, 16, dtype=torch.uint8).transpose(2, 3), ValueError),
        ("weight_scales", torch.zeros(20, dtype=torch.float16), TypeError),
        ("weight_scales", torch.zeros(20, 1), ValueError),
        ("weight_scales", torch.zeros(40)[::2], ValueError),
        ("bias", torch.zeros(20, dtype=torch.float16), TypeError),
        ("bias", torch.zeros(19), ValueError),
        ("bias", torch.zeros(40)[::2], ValueError),
    ],
)
def test_linear_int8_rejects(argument, wrong, error):
    assert_rejected("linear_int8", make_arguments("linear_int8") | {argument: wrong}, argument, error)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(torch.zeros(3, 4), TypeError), (torch.zeros(4, dtype=torch.int8), ValueError), ("x", TypeError)],
    ids=str,
)
def test_pack_int8_rejects(wrong, error):
    with pytest.raises(error, match=r"^pack_linear_weight_int8: weight: expected .+, got .+"):
        ops.pack_linear_weight_int8(wrong)


@pytest.mark.parametrize(
    ("argument", "wrong", "error"),
    [
        ("input", torch.zeros(3, 64, dtype=torch.float64), TypeError),
        ("input", torch.zeros(3, 64, 2)[..., 0], ValueError),
        ("input", torch.zeros(3, 0), ValueError),
        ("input", torch.zeros(3, 65), ValueError),
        ("packed_weight", torch.zeros(2, 2, 336, dtype=torch.int8), TypeError),
        ("packed_weight", torch.zeros(2, 672, dtype=torch.uint8), ValueError),
        ("packed_weight", torch.zeros(3, 2, 336, dtype=torch.uint8), ValueError),
        ("packed_weight", torch.zeros(2, 3, 336, dtype=torch.uint8), ValueError),
        ("packed_weight", torch.zeros(2, 2, 320, dtype=torch.uint8), ValueError),
        ("packed_weight", torch.zeros(2, 2, 672, dtype=torch.uint8)[..., ::2], ValueError),
        ("packed_weight|group_size", 64, ValueError),
        ("group_size", 0, ValueError),
        ("group_size", -32, ValueError),
        ("group_size", 48, ValueError),
        ("out_features", -1, ValueError),
        ("packed_weight|out_features", 33, ValueError),
        ("packed_weight|scale_dtype", torch.float16, ValueError),
        ("bias", torch.zeros(20, dtype=torch.float16), TypeError),
        ("bias", torch.zeros(19), ValueError),
        ("scale_dtype", torch.float64, ValueError),
    ],
)
def test_linear_int4_rejects(argument, wrong, error):
    name, _, changed = argument.partition("|")
    assert_rejected("linear_int4", make_arguments("linear_int4") | {changed or name: wrong}, name, error)


@pytest.mark.parametrize(
    ("argument", "wrong", "error"),
    [
        ("codes", torch.zeros(20, 64, dtype=torch.int8), TypeError),
        ("codes", torch.zeros(20, dtype=torch.uint8), ValueError),
        ("codes", torch.full((20, 64), 16, dtype=torch.uint8), ValueError),
        ("codes", torch.zeros(20, 8, dtype=torch.int64), TypeError),
        ("codes", torch.zeros(20, dtype=torch.int32), ValueError),
        ("scales", torch.zeros(20, 2, dtype=torch.float64), TypeError),
        ("scales", torch.zeros(20), ValueError),
        ("scales", torch.zeros(21, 2), ValueError),
        ("scales", torch.zeros(20, 0), ValueError),
        ("scales", torch.zeros(20, 3), ValueError),
        ("zeros", torch.zeros(20, 2), TypeError),
        ("zeros", torch.zeros(20, 1, dtype=torch.uint8), ValueError),
        ("zeros", torch.full((20, 2), 16, dtype=torch.uint8), ValueError),
        ("zeros", None, TypeError),
        ("scales", torch.zeros(20, 4), ValueError),  # of 64 codes in bytes, not in words
    ],
)
def test_pack_int4_rejects(argument, wrong, error):
    codes, scales, zeros = make_int4_layer(64, 20, 32)
    arguments = {"codes": codes, "scales": scales, "zeros": zeros, argument: wrong}
    with pytest.raises(error, match=rf"^pack_linear_weight_int4: {argument}: expected .+, got .+"):
        ops.pack_linear_weight_int4(**arguments)


@pytest.mark.parametrize("argument", ["codes", "zeros"])
def test_raw_pack_int4_looks_at_codes(argument):
    """A code of more than four bits would run into the code beside it."""
    codes, scales, zeros = make_int4_layer(64, 20, 32)
    out = torch.full_like(ops.pack_linear_weight_int4(codes, scales, zeros), 7)
    arguments = {"codes": codes.clone(), "scales": scales, "zeros": zeros.clone()}
    arguments[argument][19, -1] = 200
    message = f"^pack_linear_weight_int4: {argument}: expected values up to 15, got 200"
    assert_raises_and_writes_nothing(OPS.pack_linear_weight_int4, {"out": out, **arguments}, RuntimeError, message)
