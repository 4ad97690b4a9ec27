"""The activations against the reference: fp32 arithmetic, one rounding at the store."""

import math
from collections.abc import Callable

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

GATED = ["silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul"]  # input [..., 2 * d]
PLAIN = ["gelu_new", "gelu_fast", "gelu_quick"]
ACTIVATIONS = [*GATED, *PLAIN]


def run(name: str, input: torch.Tensor) -> torch.Tensor:
    """The raw op, into an `out` full of NaN."""
    width = input.shape[-1] // (2 if name in GATED else 1)
    out = torch.full((*input.shape[:-1], width), math.nan, dtype=input.dtype, device=input.device)
    getattr(OPS, name)(out, input)
    return out


def formula(name: str) -> Callable[..., torch.Tensor]:
    return getattr(reference, name)


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0, magnitude: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * magnitude).to(dtype).to(device)


@given(
    name=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from(DTYPES),
    num_tokens=st.integers(0, 9),
    half_width=st.integers(1, 70) | st.sampled_from([384, 511, 1024, 1025]),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_activation(device, name, dtype, num_tokens, half_width, magnitude, seed):
    input = normal(num_tokens, 2 * half_width, dtype=dtype, device=device, seed=seed, magnitude=magnitude)
    assert_close_to_reference(run(name, input), formula(name)(input))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2,), (14,), (0, 64), (2, 3, 64), (2, 0, 64)], ids=str)
def test_shapes(device, name, dtype, shape):
    """No leading dimension, no rows, several leading dimensions."""
    input = normal(*shape, dtype=dtype, device=device)
    assert_close_to_reference(run(name, input), formula(name)(input))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_gaps(device, name, dtype):
    input = with_row_gap(normal(6, 34, dtype=dtype, device=device), 3).unflatten(0, (2, 3))
    expected = formula(name)(input)
    out = with_row_gap(torch.zeros(6, expected.shape[-1], dtype=dtype, device=device), 5)
    getattr(OPS, name)(out.unflatten(0, (2, 3)), input)
    assert_close_to_reference(out.unflatten(0, (2, 3)), expected)
    assert_row_gap_untouched(out)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(device, name, dtype):
    input = normal(5, 100, dtype=dtype, device=device)
    expected = getattr(ops, name)(input)
    getattr(OPS, name)(input, input)
    assert_same_bits(input, expected)


def test_formulas_are_those_of_torch(device):
    """The reference itself, where torch has the function."""
    functional, input = torch.nn.functional, normal(5, 100, dtype=torch.float64, device=device, magnitude=4.0)
    gate, up = input.chunk(2, dim=-1)
    torch.testing.assert_close(reference.silu_and_mul(input), functional.silu(gate) * up)
    torch.testing.assert_close(reference.mul_and_silu(input), gate * functional.silu(up))
    torch.testing.assert_close(reference.gelu_new(input), functional.gelu(input, approximate="tanh"))
    torch.testing.assert_close(reference.gelu_fast(input), reference.gelu_new(input))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(device, several_threads, name, dtype):
    """Large enough to run in parallel."""
    input = normal(300, 2048, dtype=dtype, device=device)
    assert_close_to_reference(run(name, input), formula(name)(input))


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_new"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_past_the_caches(device, several_threads, name, dtype):
    """Large enough on CPUs for stores that bypass the caches, with rows whose end does not fill a cache line."""
    input = normal(4500, 2002 if name in GATED else 1001, dtype=dtype, device=device)
    out = with_row_gap(torch.full((4500, 1001), math.nan, dtype=dtype), 23)
    assert out.stride(0) * out.element_size() % 64 == 0
    getattr(OPS, name)(out, input)
    assert_same_bits(out.contiguous(), torch.cat([run(name, rows) for rows in input.split(100)]))
    assert_row_gap_untouched(out)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("first", "gap"), [(1, 0), (0, 1)], ids=str)
def test_large_output_off_the_cache_lines(device, first, gap):
    """Stores that bypass the caches need whole vectors at aligned addresses, in every row."""
    input = normal(2200, 1024, dtype=torch.float32, device=device)
    memory = torch.full((2200 * 1025 + 32,), math.nan)
    line = -memory.data_ptr() % 64 // memory.element_size()
    out = memory.as_strided((2200, 1024), (1024 + gap, 1), line + first)
    OPS.gelu_new(out, input)
    assert_same_bits(out.contiguous(), run("gelu_new", input))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 1023])
def test_odd_width(device, name, dtype, width):
    input = normal(3, width, dtype=dtype, device=device)
    assert_close_to_reference(run(name, input), formula(name)(input))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_within_eager_pytorch(device, name, dtype):
    """What the one rounding says more sharply, against the yardstick that the other families use."""
    input = normal(64, 514, dtype=dtype, device=device, magnitude=3.0)
    expected, eager = (formula(name)(input, dtype=compute) for compute in (torch.float64, dtype))
    assert_close_to_reference(run(name, input), expected, eager)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [10.0, 88.0, 89.0, 104.0, 1e4, 3e4])
def test_large_inputs_do_not_overflow(device, name, dtype, magnitude):
    """exp(magnitude) and magnitude^3 leave fp32 and fp16; x and 0 are the limits."""
    input = torch.tensor([[magnitude, -magnitude, 1.0, 1.0]], dtype=dtype, device=device)
    assert_close_to_reference(run(name, input), formula(name)(input))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_very_negative_inputs_alone(device, name, dtype):
    """Nothing but underflow and cancellation: no large element raises the floor."""
    for gate in torch.linspace(-60, -2, 100, device=device).to(dtype):
        input = torch.stack([gate, torch.ones_like(gate)]) if name in GATED else gate[None]
        input = input.flip(0) if name == "mul_and_silu" else input
        expected, eager = (formula(name)(input, dtype=compute) for compute in (torch.float64, dtype))
        assert_close_to_reference(run(name, input), expected, eager)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_every_16_bit_input(device, name, dtype, sign):
    """Of 2^-12 to 16, and for each power of two by itself: no larger element raises the floor."""
    for exponent in range(-12, 4):
        gate = torch.arange(2**exponent, 2 ** (exponent + 1), torch.finfo(dtype).eps * 2**exponent, device=device)
        gate = (sign * gate).to(dtype)
        halves = (torch.ones_like(gate), gate) if name == "mul_and_silu" else (gate, torch.ones_like(gate))
        input = torch.cat(halves) if name in GATED else gate
        assert_close_to_reference(run(name, input), formula(name)(input))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_inputs_do_not_overflow(device, dtype):
    input = torch.tensor([[1e30, -1e30, 1.0, 1.0]], dtype=dtype, device=device)
    limits = torch.tensor([[input[0, 0].double(), 0.0]], dtype=torch.float64, device=device)
    for name in ACTIVATIONS:
        if name == "mul_and_silu":
            assert_close_to_reference(run(name, input.roll(2, dims=1)), limits)
        else:
            assert_close_to_reference(run(name, input if name in GATED else input[:, :2].contiguous()), limits)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_wrapper(device, name):
    input, wrapper = normal(3, 40, dtype=torch.float16, device=device), getattr(ops, name)
    expected = run(name, input)
    out = torch.empty_like(expected)
    assert wrapper(input, out=out) is out
    assert_same_bits(out, expected)
    assert_same_bits(wrapper(input), expected)


# what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)
ERRORS = {
    "input dtype": ("input", TypeError, lambda a: {"input": a["input"].double(), "out": a["out"].double()}),
    "input scalar": ("input", ValueError, lambda a: {"input": a["input"][0, 0], "out": a["out"][0, 0]}),
    "input not dense in a row": ("input", ValueError, lambda a: {"input": a["input"].T.contiguous().T}),
    "input rows not evenly spaced": (
        "input",
        ValueError,
        lambda a: {"input": torch.ones(2, 3, 8).transpose(0, 1), "out": a["out"].expand(2, 3, -1).mT.contiguous().mT},
    ),
    "out shape": ("out", ValueError, lambda a: {"out": a["out"][:2]}),
    "out width": ("out", ValueError, lambda a: {"out": torch.zeros(3, 5)}),
    "out dtype": ("out", TypeError, lambda a: {"out": a["out"].half()}),
    "out not dense in a row": ("out", ValueError, lambda a: {"out": a["out"].T.contiguous().T}),
    "out rows overlap": (
        "out",
        ValueError,
        lambda a: {"out": a["out"].as_strided(a["out"].shape, (a["out"].shape[1] - 1, 1))},
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("what", ERRORS)
def test_activation_rejects(device, name, what):
    argument, error, change = ERRORS[what]
    input = normal(3, 8, dtype=torch.float32, device=device)
    arguments = {"out": torch.zeros_like(run(name, input)), "input": input}
    assert_rejected(name, arguments | change(arguments), argument, error)


@pytest.mark.parametrize("name", GATED)
def test_gated_activation_rejects_an_odd_width(device, name):
    arguments = {"out": torch.zeros(3, 3, device=device), "input": torch.ones(3, 7, device=device)}
    assert_rejected(name, arguments, "input", ValueError)
