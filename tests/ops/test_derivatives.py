"""Forward-mode derivatives and torch.func: the ops have none, and say so. Backward is in test_registration.py."""

import pytest
import torch
from checks import assert_same_bits
from op_calls import (
    CALLS,
    SCHEMA_OF,
    call_wrapper,
    inferred_by_wrapper,
    make_arguments,
    optional_tensors,
    require_grad,
    results,
    wrapper,
)
from torch.autograd import forward_ad

from pagedattn_ext import ops


@pytest.mark.parametrize("name", SCHEMA_OF)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_wrapper_of_a_tensor_with_a_tangent_is_an_error(mode, name):
    """Forward mode: torch.no_grad() does not switch it off. Each argument in turn."""
    for argument, value in (make_arguments(name) | optional_tensors(name)).items():
        values = value if isinstance(value, list) else [value]
        if argument in inferred_by_wrapper(name) or not (torch.is_tensor(values[0]) and values[0].is_floating_point()):
            continue
        with mode(), forward_ad.dual_level():
            dual = forward_ad.make_dual(values[0], torch.ones_like(values[0]))
            changed = {argument: [dual] if isinstance(value, list) else dual}
            arguments = make_arguments(name) | optional_tensors(name) | changed
            with pytest.raises(RuntimeError, match=f"^{name}: {argument}: carries a tangent"):
                call_wrapper(name, arguments)


@pytest.mark.parametrize("call", CALLS)
def test_wrapper_beside_forward_mode(call):
    """Tensors without a tangent, some that require grad under torch.no_grad() among them."""
    expected = results(wrapper(call), make_arguments(call))
    with torch.no_grad(), forward_ad.dual_level():
        actual = results(wrapper(call), require_grad(make_arguments(call)))
    for tensor, wanted in zip(actual, expected, strict=True):
        assert_same_bits(tensor, wanted)


def rms_norm_of(input: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(input, torch.ones(16))


PAGED = make_arguments("paged_attention")  # not within a transform, which would see the random numbers


def attention_of(query: torch.Tensor) -> torch.Tensor:
    return ops.paged_attention(**PAGED | {"query": query})[0]


@pytest.mark.parametrize("function", [rms_norm_of, attention_of])
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), "requires grad"),
        (lambda f, x: torch.func.vjp(f, x)[1](x), "requires grad"),
        (lambda f, x: torch.func.jacrev(f)(x), "requires grad"),
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), "carries a tangent"),
        (lambda f, x: torch.func.jacfwd(f)(x), "carries a tangent"),
    ],
    ids=["grad", "vjp", "jacrev", "jvp", "jacfwd"],
)
def test_derivatives_of_torch_func_are_errors(function, transform, message):
    with pytest.raises(RuntimeError, match=message):
        transform(function, torch.ones(3, 4, 16))


def test_vmap():
    """torch loops over an op that returns its result, and refuses one that writes into an argument."""
    queries = torch.randn(2, 3, 4, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([attention_of(query) for query in queries])
    assert_same_bits(torch.func.vmap(attention_of)(queries), expected)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for pagedattn_ext::rms_norm"):
        torch.func.vmap(rms_norm_of)(queries)
