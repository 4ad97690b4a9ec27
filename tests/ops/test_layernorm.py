"""The norms against the reference: fp32 arithmetic, one rounding at the store."""

import math

import pytest
import reference
import torch
from checks import (
    DTYPES,
    assert_close_to_reference,
    assert_rejected,
    assert_row_gap_untouched,
    assert_same_bits,
    with_row_gap,
)
from hypothesis import given
from hypothesis import strategies as st
from op_table import OPS

from pagedattn_ext import ops

EPSILON = 1e-6
WIDTHS = st.integers(1, 70) | st.sampled_from([768, 1023, 1024, 2048, 2049])
GAPS = st.sampled_from([0, 1, 16])


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0, magnitude: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * magnitude).to(dtype).to(device)


def assert_rms_norm(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, epsilon: float = EPSILON) -> None:
    OPS.rms_norm(out, input, weight, epsilon)
    assert_close_to_reference(out, reference.rms_norm(input, weight, epsilon))


def assert_fused_add_rms_norm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    expected, _ = reference.fused_add_rms_norm(input, residual, weight, EPSILON)
    expected_residual = (input.float() + residual.float()).to(input.dtype)
    OPS.fused_add_rms_norm(input, residual, weight, EPSILON)
    assert_close_to_reference(input, expected)
    assert_same_bits(residual.contiguous(), expected_residual)


@given(
    dtype=st.sampled_from(DTYPES),
    num_tokens=st.integers(0, 9),
    width=WIDTHS,
    input_gap=GAPS,
    out_gap=GAPS,
    magnitude=st.sampled_from([1e-4, 1.0, 1e3]),
    epsilon=st.sampled_from([1e-6, 1e-5, 1.0]),
    seed=st.integers(0, 99),
)
def test_rms_norm(device, dtype, num_tokens, width, input_gap, out_gap, magnitude, epsilon, seed):
    input = normal(num_tokens, width, dtype=dtype, device=device, seed=seed, magnitude=magnitude)
    weight = normal(width, dtype=dtype, device=device, seed=seed + 1)
    out = with_row_gap(torch.full_like(input, math.nan), out_gap)
    assert_rms_norm(with_row_gap(input, input_gap), weight, out, epsilon)
    assert_row_gap_untouched(out)


@given(
    dtype=st.sampled_from(DTYPES),
    num_tokens=st.integers(0, 9),
    width=WIDTHS,
    input_gap=GAPS,
    residual_gap=GAPS,
    seed=st.integers(0, 99),
)
def test_fused_add_rms_norm(device, dtype, num_tokens, width, input_gap, residual_gap, seed):
    input = with_row_gap(normal(num_tokens, width, dtype=dtype, device=device, seed=seed), input_gap)
    residual = with_row_gap(normal(num_tokens, width, dtype=dtype, device=device, seed=seed + 1), residual_gap)
    assert_fused_add_rms_norm(input, residual, normal(width, dtype=dtype, device=device, seed=seed + 2))
    assert_row_gap_untouched(input)
    assert_row_gap_untouched(residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (1023,), (0, 64), (2, 3, 64), (2, 0, 64), (3, 1), (2, 2, 2, 7)], ids=str)
def test_shapes(device, dtype, shape):
    """One row without a leading dimension, no rows, several leading dimensions, odd widths."""
    input = normal(*shape, dtype=dtype, device=device)
    weight = normal(shape[-1], dtype=dtype, device=device, seed=1)
    assert_rms_norm(input, weight, torch.full_like(input, math.nan))
    assert_fused_add_rms_norm(input, normal(*shape, dtype=dtype, device=device, seed=2), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_evenly_spaced_rows_of_several_dimensions(device, dtype):
    input = with_row_gap(normal(6, 40, dtype=dtype, device=device), 3).unflatten(0, (2, 3))
    weight = normal(40, dtype=dtype, device=device, seed=1)
    out = with_row_gap(torch.zeros(6, 40, dtype=dtype, device=device), 5)
    assert_rms_norm(input, weight, out.unflatten(0, (2, 3)))
    assert_row_gap_untouched(out)
    residual = with_row_gap(normal(6, 40, dtype=dtype, device=device, seed=2), 7)
    assert_fused_add_rms_norm(input, residual.unflatten(0, (2, 3)), weight)
    assert_row_gap_untouched(input.flatten(0, 1))
    assert_row_gap_untouched(residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [40, 33])
def test_heads_of_a_fused_qkv(device, dtype, head_size):
    """[tokens, heads, head_size] whose tokens are further apart than their heads, alone and by sequences, in place."""
    qkv = normal(2, 3, 6 * head_size + 8, dtype=dtype, device=device)
    before = qkv.clone()
    weight = normal(head_size, dtype=dtype, device=device, seed=1)
    keys = qkv[..., 2 * head_size : 4 * head_size].unflatten(-1, (2, head_size))
    expected = reference.rms_norm(keys, weight, EPSILON)
    out = torch.full_like(qkv, math.nan)
    out_keys = out[..., head_size : 3 * head_size].unflatten(-1, (2, head_size))
    OPS.rms_norm(out_keys, keys, weight, EPSILON)
    assert_close_to_reference(out_keys, expected)
    assert out[..., :head_size].isnan().all() and out[..., 3 * head_size :].isnan().all()
    OPS.rms_norm(keys[1], keys[1], weight, EPSILON)
    assert_same_bits(keys[1].contiguous(), out_keys[1].contiguous())
    assert_same_bits(qkv[0], before[0])
    outside = [*range(2 * head_size), *range(4 * head_size, 6 * head_size + 8)]
    assert_same_bits(qkv[..., outside], before[..., outside])
    residual = torch.zeros(3, 2, head_size, dtype=dtype, device=device)
    assert_fused_add_rms_norm(keys[0], residual, weight)
    assert_same_bits(qkv[..., outside], before[..., outside])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(device, several_threads, dtype):
    """Large enough to run in parallel."""
    input = normal(300, 1024, dtype=dtype, device=device)
    weight = normal(1024, dtype=dtype, device=device, seed=1)
    assert_rms_norm(input, weight, torch.full_like(input, math.nan))
    assert_fused_add_rms_norm(input, normal(300, 1024, dtype=dtype, device=device, seed=2), weight)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_past_the_caches(device, several_threads, dtype):
    """Large enough on CPUs for stores that bypass the caches, with rows whose end does not fill a cache line."""
    input = normal(4500, 1001, dtype=dtype, device=device)
    weight = normal(1001, dtype=dtype, device=device, seed=1)
    out = with_row_gap(torch.full_like(input, math.nan), 23)
    assert out.stride(0) * out.element_size() % 64 == 0
    OPS.rms_norm(out, input, weight, EPSILON)
    assert_same_bits(out.contiguous(), torch.cat([ops.rms_norm(rows, weight, EPSILON) for rows in input.split(100)]))
    assert_row_gap_untouched(out)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(
    ("first", "strides"), [(1, (2048, 1024, 1)), (0, (2050, 1025, 1)), (0, (2049, 1024, 1))], ids=str
)
def test_large_output_off_the_cache_lines(device, first, strides):
    """Stores that bypass the caches need whole vectors at aligned addresses, in every row of every pair of rows."""
    input = normal(1100, 2, 1024, dtype=torch.float32, device=device)
    weight = normal(1024, dtype=torch.float32, device=device, seed=1)
    memory = torch.full((2200 * 1025 + 32,), math.nan)
    line = -memory.data_ptr() % 64 // memory.element_size()
    out = memory.as_strided(input.shape, strides, line + first)
    OPS.rms_norm(out, input, weight, EPSILON)
    assert_same_bits(out.contiguous(), ops.rms_norm(input, weight, EPSILON))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4099, 16392, 32776])
def test_wide_rows(device, dtype, width):
    """More than a kernel may hold in registers."""
    input, weight = normal(2, width, dtype=dtype, device=device), normal(width, dtype=dtype, device=device, seed=1)
    assert_rms_norm(input, weight, torch.full_like(input, math.nan))
    assert_fused_add_rms_norm(input, normal(2, width, dtype=dtype, device=device, seed=2), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_within_eager_pytorch(device, dtype):
    """What the one rounding says more sharply, against the yardstick that the other families use."""
    input, weight = normal(64, 515, dtype=dtype, device=device), normal(515, dtype=dtype, device=device, seed=1)
    out = ops.rms_norm(input, weight, EPSILON)
    expected, eager = (reference.rms_norm(input, weight, EPSILON, compute) for compute in (torch.float64, dtype))
    assert_close_to_reference(out, expected, eager)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_in_place(device, dtype):
    input, weight = normal(5, 100, dtype=dtype, device=device), normal(100, dtype=dtype, device=device, seed=1)
    expected = ops.rms_norm(input, weight, EPSILON)
    OPS.rms_norm(input, input, weight, EPSILON)
    assert_same_bits(input, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_of_the_unrounded_sum(device, dtype):
    """A residual so large that the rounded sum loses the input; the norm of the exact sum does not."""
    residual = torch.full((1, 64), 256.0, dtype=dtype, device=device)
    input = torch.linspace(0, 1, 64, device=device).to(dtype)[None]
    assert_fused_add_rms_norm(input, residual, torch.ones(64, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_large_values(device, dtype):
    """A row of zeros stays zeros; squares beyond fp16 do not overflow; NaN stays in its row."""
    input = torch.stack([torch.zeros(33), torch.full((33,), 3e4), torch.full((33,), math.nan), torch.ones(33)])
    out = ops.rms_norm(input.to(dtype).to(device), torch.ones(33, dtype=dtype, device=device), EPSILON)
    assert_same_bits(out[0], torch.zeros_like(out[0]))
    assert_close_to_reference(out[1], torch.ones_like(out[1]))
    assert out[2].isnan().all()
    assert_close_to_reference(out[3], torch.full_like(out[3], (1 + EPSILON) ** -0.5, dtype=torch.float64))


def test_wrappers(device):
    input, residual = (normal(3, 40, dtype=torch.float32, device=device, seed=seed) for seed in (0, 1))
    weight = normal(40, dtype=torch.float32, device=device, seed=2)
    out = torch.empty_like(input)
    assert ops.rms_norm(input, weight, out=out) is out
    assert_same_bits(ops.rms_norm(input, weight, 1e-6), out)
    expected, _ = reference.fused_add_rms_norm(input, residual, weight, 1e-6)
    result = ops.fused_add_rms_norm(input, residual, weight)
    assert result[0] is input and result[1] is residual
    assert_close_to_reference(input, expected)


# ---- Gemma's norms, and layer norm -----------------------------------------------------------------------------------


@given(
    dtype=st.sampled_from(DTYPES),
    num_tokens=st.integers(0, 9),
    width=WIDTHS,
    gap=GAPS,
    weight_magnitude=st.sampled_from([1e-3, 1.0]),
    seed=st.integers(0, 99),
)
def test_gemma_rms_norm(device, dtype, num_tokens, width, gap, weight_magnitude, seed):
    """With and without a residual. A weight that 1 + weight would swallow, in 16 bits, still counts."""
    input = with_row_gap(normal(num_tokens, width, dtype=dtype, device=device, seed=seed), gap)
    weight = normal(width, dtype=dtype, device=device, seed=seed + 1, magnitude=weight_magnitude)
    out = with_row_gap(torch.full_like(input, math.nan), gap)
    OPS.gemma_rms_norm(out, input, weight, EPSILON)
    assert_close_to_reference(out, reference.rms_norm(input, 1 + weight.double(), EPSILON))
    assert_row_gap_untouched(out)
    residual = normal(num_tokens, width, dtype=dtype, device=device, seed=seed + 2)
    expected, total = reference.fused_add_rms_norm(input, residual, 1 + weight.double(), EPSILON)
    OPS.gemma_fused_add_rms_norm(input, residual, weight, EPSILON)
    assert_close_to_reference(input, expected)
    assert_close_to_reference(residual, total)


@given(
    dtype=st.sampled_from(DTYPES),
    weight_is_fp32=st.booleans(),
    num_tokens=st.integers(0, 9),
    width=WIDTHS,
    gap=GAPS,
    offset=st.sampled_from([0.0, -7.0]),
    epsilon=st.sampled_from([1e-6, 1e-5, 1.0]),
    seed=st.integers(0, 99),
)
def test_layer_norm(device, dtype, weight_is_fp32, num_tokens, width, gap, offset, epsilon, seed):
    """Around any mean: what lies behind a row counts neither for the mean nor for the variance."""
    input = with_row_gap(normal(num_tokens, width, dtype=dtype, device=device, seed=seed) + offset, gap)
    weight_dtype = torch.float32 if weight_is_fp32 else dtype
    weight, bias = (normal(width, dtype=weight_dtype, device=device, seed=seed + i) for i in (1, 2))
    out = with_row_gap(torch.full_like(input, math.nan), gap)
    OPS.layer_norm(out, input, weight, bias, epsilon)
    expected = reference.layer_norm(input, weight, bias, epsilon)
    # A difference from the mean is as fine as the mean: the rest of its terms cancels.
    eager = reference.layer_norm(input, weight, bias, epsilon, torch.float32)
    assert_close_to_reference(out, expected, eager if num_tokens > 0 else None)
    assert_row_gap_untouched(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (2, 3, 64), (2, 0, 64), (2, 16392)], ids=str)
def test_shapes_of_layer_norm(device, dtype, shape):
    input, weight = normal(*shape, dtype=dtype, device=device), normal(shape[-1], dtype=dtype, device=device, seed=1)
    expected = reference.layer_norm(input, weight, weight, EPSILON)
    assert_close_to_reference(ops.layer_norm(input, weight, weight, EPSILON), expected)
    assert ops.layer_norm(input, weight, weight, EPSILON, out=input) is input
    assert_close_to_reference(input, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_variance_about_a_large_mean(device, dtype):
    """The mean of squares less the square of the mean would be noise."""
    input = (torch.tensor([-1.0, 1.0] * 32) + 2**10).to(dtype).to(device)[None]
    weight = torch.ones(64, device=device)
    expected = reference.layer_norm(input, weight, weight, 0.0).nan_to_num(nan=1.0)  # bf16 has no such neighbours
    assert_close_to_reference(ops.layer_norm(input, weight, weight, 1e-12), expected)


# what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)
RMS_NORM_ERRORS = {
    "input dtype": ("input", TypeError, lambda a: {"input": a["input"].long(), "out": a["out"].long()}),
    "input scalar": ("input", ValueError, lambda a: {"input": a["input"][0, 0], "out": a["out"][0, 0]}),
    "input not dense in a row": ("input", ValueError, lambda a: {"input": a["input"].T.contiguous().T}),
    "input rows not evenly spaced": (
        "input",
        ValueError,
        lambda a: {"input": torch.ones(2, 2, 2, 6).permute(2, 1, 0, 3), "out": torch.ones(2, 2, 2, 6)},
    ),
    "input rows of three strides": (
        "input",
        ValueError,
        lambda a: {"input": torch.ones(3, 2, 2, 6).transpose(0, 1), "out": torch.ones(2, 3, 2, 6)},
    ),
    "weight shape": ("weight", ValueError, lambda a: {"weight": a["weight"][:5]}),
    "weight rank": ("weight", ValueError, lambda a: {"weight": a["weight"][None]}),
    "weight dtype": ("weight", TypeError, lambda a: {"weight": a["weight"].half()}),
    "weight not contiguous": ("weight", ValueError, lambda a: {"weight": torch.ones(12)[::2]}),
    "out shape": ("out", ValueError, lambda a: {"out": a["out"][:2]}),
    "out dtype": ("out", TypeError, lambda a: {"out": a["out"].half()}),
    "out rows overlap": ("out", ValueError, lambda a: {"out": a["out"][..., :1, :].expand_as(a["out"])}),
    "out not dense in a row": ("out", ValueError, lambda a: {"out": a["out"].T.contiguous().T}),
}
FUSED_ERRORS = {
    "residual is input": ("residual", ValueError, lambda a: {"residual": a["input"]}),
    "input dtype": ("input", TypeError, lambda a: {"input": a["input"].double(), "residual": a["residual"].double()}),
    "residual shape": ("residual", ValueError, lambda a: {"residual": a["residual"][:2]}),
    "residual dtype": ("residual", TypeError, lambda a: {"residual": a["residual"].half()}),
    "input rows overlap": ("input", ValueError, lambda a: {"input": a["input"][:1].expand_as(a["input"])}),
    "residual rows overlap": (
        "residual",
        ValueError,
        lambda a: {"residual": a["residual"][:1].expand_as(a["residual"])},
    ),
    "residual not dense": ("residual", ValueError, lambda a: {"residual": a["residual"].T.contiguous().T}),
    "weight shape": ("weight", ValueError, lambda a: {"weight": a["weight"][:5]}),
    "weight dtype": ("weight", TypeError, lambda a: {"weight": a["weight"].half()}),
}


EPSILON_ERRORS = {
    f"epsilon {value}": ("epsilon", ValueError, lambda a, value=value: {"epsilon": value})
    for value in (-1e-6, math.nan, math.inf, 1e60)
}
RMS_NORM_ERRORS |= EPSILON_ERRORS
FUSED_ERRORS |= EPSILON_ERRORS


@pytest.mark.parametrize("name", ["rms_norm", "gemma_rms_norm"])
@pytest.mark.parametrize("what", RMS_NORM_ERRORS)
def test_rms_norm_rejects(device, what, name):
    argument, error, change = RMS_NORM_ERRORS[what]
    input = normal(3, 6, dtype=torch.float32, device=device)
    arguments = {"out": torch.zeros_like(input), "input": input, "weight": input[0].clone(), "epsilon": EPSILON}
    assert_rejected(name, arguments | change(arguments), argument, error)


@pytest.mark.parametrize("name", ["fused_add_rms_norm", "gemma_fused_add_rms_norm"])
@pytest.mark.parametrize("what", FUSED_ERRORS)
def test_fused_add_rms_norm_rejects(device, what, name):
    argument, error, change = FUSED_ERRORS[what]
    input = normal(3, 6, dtype=torch.float32, device=device)
    arguments = {"input": input, "residual": input.clone(), "weight": input[0].clone(), "epsilon": EPSILON}
    assert_rejected(name, arguments | change(arguments), argument, error)


LAYER_NORM_ERRORS = {name: case for name, case in RMS_NORM_ERRORS.items() if "dtype" not in name} | {
    "weight dtype": ("weight", TypeError, lambda a: {"weight": a["weight"].half(), "bias": a["bias"].half()}),
    "bias dtype": ("bias", TypeError, lambda a: {"bias": a["bias"].half()}),
    "bias shape": ("bias", ValueError, lambda a: {"bias": a["bias"][:5]}),
    "bias not contiguous": ("bias", ValueError, lambda a: {"bias": torch.ones(12)[::2]}),
}


@pytest.mark.parametrize("what", LAYER_NORM_ERRORS)
def test_layer_norm_rejects(device, what):
    argument, error, change = LAYER_NORM_ERRORS[what]
    input = normal(3, 6, dtype=torch.float32, device=device)
    arguments = {"out": torch.zeros_like(input), "input": input, "weight": input[0].clone(), "bias": input[1].clone()}
    arguments["epsilon"] = EPSILON
    assert_rejected("layer_norm", arguments | change(arguments), argument, error)
