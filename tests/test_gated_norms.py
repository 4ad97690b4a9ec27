"""The norms with a gate of mamba-ssm's and flash-linear-attention's names, against torch's norms in fp64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagedattn_ext.fla.modules import (
    FusedLayerNormGated,
    FusedLayerNormSwishGate,
    FusedRMSNormGated,
    FusedRMSNormSwishGate,
)
from pagedattn_ext.fla.modules.fused_norm_gate import layer_norm_gated, rms_norm_gated
from pagedattn_ext.mamba_ssm.ops.triton.layernorm_gated import LayerNorm, RMSNorm, layernorm_fn, rmsnorm_fn

SIZE, EPS = 12, 1e-5


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(51)
        yield


def expected(x: Tensor, is_rms_norm: bool, weight: Tensor, bias: Tensor | None, size: int = SIZE) -> Tensor:
    """In fp64, of groups of `size` numbers."""
    norm = functional.rms_norm if is_rms_norm else functional.layer_norm
    normed = norm(x.double().unflatten(-1, (-1, size)), [size], eps=EPS).flatten(-2) * weight.double()
    return normed if bias is None else normed + bias.double()


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_gated_norm_of_mamba(is_rms_norm: bool, group_size: int | None, dtype: torch.dtype) -> None:
    """Catches a gate on the wrong side of the norm, and groups that are normed together."""
    x, z = torch.randn(2, 2, 3, SIZE).to(dtype)
    weight, bias = torch.randn(2, SIZE)
    function: Callable[..., Tensor] = rmsnorm_fn if is_rms_norm else layernorm_fn
    size, gate = group_size or SIZE, functional.silu(z.double())
    normed = expected(x, is_rms_norm, weight, bias, size)
    assert_close(function(x, weight, bias, z, EPS, group_size), normed * gate, dtype)
    assert_close(function(x, weight, bias, eps=EPS, group_size=group_size), normed, dtype)
    before = expected(x.double() * gate, is_rms_norm, weight, bias, size)
    assert_close(function(x, weight, bias, z, EPS, group_size, norm_before_gate=False), before, dtype)
    layer = RMSNorm(SIZE, EPS, group_size) if is_rms_norm else LayerNorm(SIZE, EPS, group_size)
    layer.weight.copy_(weight)
    assert_close(layer(x, z), expected(x, is_rms_norm, weight, None, size) * gate, dtype)


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_gated_norm_of_fla(is_rms_norm: bool, activation: str) -> None:
    """Catches a residual that is left out of the norm or of the sum, and a sum of a wrong dtype."""
    dtype = torch.bfloat16
    x, residual, g = torch.randn(3, 2, 3, SIZE)
    x, g = x.to(dtype), g.to(dtype)
    weight, bias = torch.randn(2, SIZE)
    function = rms_norm_gated if is_rms_norm else layer_norm_gated
    gate = functional.silu(g.double()) if activation == "swish" else g.double().sigmoid()
    normed, total = function(x, g, weight, bias, activation, residual, prenorm=True, eps=EPS)
    assert_close(normed, expected(x + residual, is_rms_norm, weight, bias) * gate, dtype)
    assert_close(total, (x + residual).double(), torch.float32)
    _, total = function(x, g, None, None, activation, prenorm=True, residual_in_fp32=True)
    assert_close(total, x.double(), torch.float32)
    layer: Any = FusedRMSNormGated if is_rms_norm else FusedLayerNormGated
    layer = layer(SIZE, activation=activation, eps=EPS)
    layer.weight.copy_(weight)
    # Rows of heads beside those of tokens: of as many numbers.
    rows = layer(x.flatten(0, 1), g)
    assert_close(rows, (expected(x, is_rms_norm, weight, None) * gate).flatten(0, 1), dtype)


def test_norms_with_a_swish_gate() -> None:
    """The classes without `activation`, whose further arguments move up. Catches one that is given to a wrong name."""
    x, g = torch.randn(2, 3, SIZE)
    layer_norm = FusedLayerNormSwishGate(SIZE, True, True, EPS, None, torch.bfloat16)
    rms_norm = FusedRMSNormSwishGate(SIZE, True, EPS, None, torch.bfloat16)
    assert layer_norm.bias is not None
    assert isinstance(layer_norm, FusedLayerNormGated) and isinstance(rms_norm, FusedRMSNormGated)
    for layer, is_rms_norm in ((layer_norm, False), (rms_norm, True)):
        assert layer.weight is not None and layer.weight.dtype == torch.bfloat16
        normed = expected(x, is_rms_norm, layer.weight, layer.bias)
        assert_close(layer(x, g), normed * functional.silu(g.double()), torch.float32)


X, W = torch.zeros(2, 3, SIZE), torch.zeros(SIZE)
WRONG: list[tuple[Callable[..., Any], list[Any], dict[str, Any], str]] = [
    (rms_norm_gated, [X[0, 0, 0], X[0, 0, 0], None, None], {}, r"x: expected rows of .* at least, got shape \[\]"),
    (layer_norm_gated, [X[..., :0], X[..., :0], None, None], {}, r"x: expected rows of .*, got shape \[2, 3, 0\]"),
    (layernorm_fn, [X, W[1:], None], {}, r"weight: expected shape \[12\], got \[11\]"),
    (rmsnorm_fn, [X, W, None, X[0]], {}, r"z: expected shape \[2, 3, 12\], got \[3, 12\]"),
    (rmsnorm_fn, [X, W, None], {"group_size": 5}, r"group_size: expected a divisor of 12 .*, got 5"),
    (rms_norm_gated, [X, X[0], W, None], {}, r"g: expected shape \[2, 3, 12\], got \[3, 12\]"),
    (layer_norm_gated, [X, X, W, None, "gelu"], {}, r"activation: expected one of \[.*\], got 'gelu'"),
    (layer_norm_gated, [X, X, W, None], {"residual": X[0]}, r"residual: expected shape \[2, 3, 12\], got"),
    (FusedRMSNormGated, [SIZE], {"activation": "gelu"}, "activation: expected one of"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "message"), WRONG, ids=lambda each: str(each)[:40])
def test_refused(function: Callable[..., Any], arguments: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{function.__name__}: {message}"):
        function(*arguments, **options)


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^rmsnorm_fn: z: expected a real dtype, got complex64"):
        rmsnorm_fn(X, W, None, X.to(torch.complex64))
    with pytest.raises(TypeError, match=r"^rms_norm_gated: g: expected a torch.Tensor, got int"):
        rms_norm_gated(X, 1, W, None)  # type: ignore[arg-type]
    with torch.inference_mode(False), torch.enable_grad(), pytest.raises(RuntimeError, match="weight: requires grad"):
        rmsnorm_fn(torch.zeros(SIZE), torch.zeros(SIZE, requires_grad=True), None)
