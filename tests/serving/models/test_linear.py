"""Packed linear layers: the results of `nn.Linear`, or of one with quantized weights; a row never minds the others."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from reference import int4_rows, int8_rows
from torch import Tensor, nn

from pagedattn_serve.config import check_quantization
from pagedattn_serve.models.linear import (
    Int4Linear,
    Int8Linear,
    LinearForms,
    PackedLinear,
    pack_linear_layers,
)
from pagedattn_serve.models.quantization import dequantized, quantize_int4, quantize_int8

GROWTH = """
from pathlib import Path
import torch
from pagedattn_serve.models.linear import Int4Linear, Int8Linear, PackedLinear
from pagedattn_serve.models.quantization import quantize_int4, quantize_int8

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

torch.set_num_threads(1)
weight = torch.ones(128, 128)
layers = [PackedLinear(weight, None), PackedLinear(weight.bfloat16(), None)]
layers += [Int8Linear(quantize_int8(weight), None), Int4Linear(quantize_int4(weight), None)]
hidden = torch.zeros(640, 128)
with torch.inference_mode():
    for layer in layers:
        layer(hidden), layer(hidden.bfloat16())
    before = resident_mib()
    for num_rows in range(1, 641):
        for layer in layers:
            layer(hidden[:num_rows]), layer(hidden[:num_rows].bfloat16())
    print(resident_mib() - before)
"""
VOCAB_SIZE = 1000
MAKERS: dict[str, Callable[[Tensor, Tensor | None], nn.Module]] = {
    "packed": PackedLinear,
    "int8": lambda weight, bias: Int8Linear(quantize_int8(weight), bias),
    "int4": lambda weight, bias: Int4Linear(quantize_int4(weight), bias),
}


def random_layer(in_features: int, out_features: int) -> tuple[Tensor, Tensor]:
    """A weight and a bias."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    return weight / in_features**0.5, torch.randn(out_features, generator=generator)


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1,), (33,), (2, 35), (7, 3, 5)])
@pytest.mark.parametrize("form", MAKERS)
def test_every_row_is_that_of_a_linear_layer(form: str, shape: tuple[int, ...], has_bias: bool) -> None:
    weight, bias = random_layer(64, 30)
    hidden = torch.randn(*shape, 64, generator=torch.Generator().manual_seed(1))
    layer = MAKERS[form](weight, bias if has_bias else None)
    with torch.inference_mode():
        out = layer(hidden)
        if form == "int8":
            weight, hidden = dequantized(quantize_int8(weight)), int8_rows(hidden)
        elif form == "int4":
            weight, hidden = dequantized(quantize_int4(weight)), int4_rows(hidden, 32)
        expected = nn.functional.linear(hidden, weight, bias if has_bias else None)
    assert out.shape == expected.shape and out.dtype == torch.float32 and out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", MAKERS)
def test_a_row_does_not_depend_on_how_many_there_are(form: str) -> None:
    layer = MAKERS[form](*random_layer(224, 97))
    hidden = torch.randn(300, 224, generator=torch.Generator().manual_seed(1))
    hidden[7] *= 1000  # by which the scale of another row would be seen
    with torch.inference_mode():
        whole = layer(hidden)
        for num_rows in (*range(1, 70), 127, 129, 200, 255, 257, 299):
            assert torch.equal(layer(hidden[:num_rows]), whole[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["packed", "int8", "int4"])
def test_rows_of_16_bits(form: str, dtype: torch.dtype) -> None:
    """The same arithmetic, and one rounding at its end; but for the order of sums where the CPU multiplies bf16."""
    weight, bias = (tensor.to(dtype) for tensor in random_layer(96, 50))
    hidden = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    layer = MAKERS[form](weight, bias)
    with torch.inference_mode():
        out, expected = layer(hidden), layer(hidden.float()).to(dtype)
    if form == "packed" and dtype == torch.bfloat16:
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5)
    else:
        assert torch.equal(out, expected)


# ---- weights in memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_that_fit_into_16_bits_take_16_bits(dtype: torch.dtype) -> None:
    weight = random_layer(48, 700)[0].to(dtype)
    packed = PackedLinear(weight.float(), None).packed_weight
    assert packed.dtype == dtype
    assert packed.nbytes == 704 * 48 * dtype.itemsize


@pytest.mark.parametrize("value", [1e38, -1e38, 1e-37, 65504.0 * 2, 2.0**-126])
def test_bf16_weights_come_through_exactly(value: float) -> None:
    """Also those that fp16 has no place for. (Subnormal ones count as zeros.)"""
    weight = torch.zeros(20, 32)
    weight[3, 5] = torch.tensor(value).bfloat16().float()
    layer = PackedLinear(weight, None)
    assert layer.packed_weight.dtype == torch.bfloat16
    with torch.inference_mode():
        out = layer(torch.eye(32))
    assert torch.equal(out, weight.t())


def test_one_element_decides() -> None:
    weight = torch.zeros(600, 32)
    weight[599, 31] = 1 + 2**-20
    assert PackedLinear(weight, None).packed_weight.dtype == torch.float32
    weight[599, 31] = 1 + 2**-10  # eleven bits
    assert PackedLinear(weight, None).packed_weight.dtype == torch.float16


@pytest.mark.parametrize(("form", "bits"), [("int8", 8), ("int4", 4.75)])
def test_quantized_weights_are_small(form: str, bits: float) -> None:
    """int4: with scale and zero."""
    layer = MAKERS[form](random_layer(256, 640)[0], None)
    assert not list(layer.parameters())
    assert (
        sum(value.nbytes for value in vars(layer).values() if isinstance(value, Tensor))
        <= 256 * 640 * bits / 8 + 4 * 640
    )


# ---- the form of a layer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "name", "shape", "expected"),
    [
        (None, "layer", (64, 64), PackedLinear),
        (None, "head", (64, VOCAB_SIZE), PackedLinear),
        ("int8", "layer", (50, 64), Int8Linear),
        ("int8", "head", (64, VOCAB_SIZE), Int8Linear),
        ("int4", "layer", (64, 50), Int4Linear),
        ("int4", "layer", (50, 64), Int8Linear),  # no multiple of 32
        ("int4", "head", (64, VOCAB_SIZE), Int8Linear),
        ("int4", "layer", (64, VOCAB_SIZE), Int4Linear),  # as large as the last layer
        ("int4", "head", (64, 2 * VOCAB_SIZE), Int8Linear),
    ],
)
def test_the_form_of_a_layer(
    quantization: str | None, name: str, shape: tuple[int, int], expected: type[nn.Module]
) -> None:
    forms = LinearForms("head", quantization)
    layer = nn.Linear(*shape)
    assert forms.of(name, layer.in_features) is type(forms.pack(name, layer)) is expected


def test_layers_are_replaced_one_by_one() -> None:
    """Their weights go with them; a tied one stays with the embedding."""
    model = nn.Sequential(nn.Embedding(VOCAB_SIZE, 64), nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, VOCAB_SIZE))
    model[2].weight = model[0].weight
    pack_linear_layers(model, LinearForms("2", "int4"))
    assert [type(module) for module in (model[0], model[1][0], model[2])] == [nn.Embedding, Int4Linear, Int8Linear]
    assert [name for name, _ in model.named_parameters()] == ["0.weight"]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(quantization: str, value: float) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)))
    with torch.no_grad():
        model[0][0].weight[60, 60] = value
    with pytest.raises(ValueError, match=rf"quantization: 0.0: weight: expected elements between .*, got {value}"):
        pack_linear_layers(model, LinearForms("head", quantization))


@pytest.mark.parametrize("quantization", ["int2", "INT8", "", 8, True, ["int8"]])
def test_quantizations_that_there_are_not(quantization: object) -> None:
    with pytest.raises(ValueError, match=r"quantization: expected None, int8 or int4 \(leave it out for a"):
        check_quantization(quantization)


def test_forms_in_words() -> None:
    """Of layers with so many inputs."""
    layers = {"0": 64, "1": 64, "2": 50, "3": 64}
    assert LinearForms("3", None).describe(layers) == PackedLinear.FORM
    assert LinearForms("3", "int8").describe(layers) == Int8Linear.FORM
    int4 = LinearForms("3", "int4")
    assert int4.describe(layers) == f"2 {Int4Linear.FORM}; 1 {Int8Linear.FORM}"
    assert int4.describe({"3": 64}) == f"the last one {Int8Linear.FORM}"
    assert int4.describe({"0": 64, "3": 64}) == f"{Int4Linear.FORM}; the last one {Int8Linear.FORM}"


def test_memory_does_not_grow_with_every_number_of_rows() -> None:
    """Code that is made for each number of rows, as by oneDNN, would take 300 MiB and more for a layer."""
    run = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=120)
    assert float(run.stdout) < 80
