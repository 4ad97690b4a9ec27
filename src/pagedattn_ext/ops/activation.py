"""Activations, and the gates made of them."""

from torch import Tensor

from ._call import call, check_tensors, empty_like


def silu_and_mul(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = silu(input[..., :d]) * input[..., d:] with silu(x) = x / (1 + exp(-x)) (the gate of SwiGLU, Shazeer 2020).

    Args:
        input: [..., 2 * d], evenly spaced rows.
        out: [..., d]; allocated by default.

    Returns:
        out.
    """
    return _activate_and_multiply("silu_and_mul", input, out)


def mul_and_silu(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = input[..., :d] * silu(input[..., d:]); arguments as in `silu_and_mul`."""
    return _activate_and_multiply("mul_and_silu", input, out)


def gelu_and_mul(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = gelu(input[..., :d]) * input[..., d:] with gelu(x) = x (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel,
    2016; the gate of GEGLU); arguments as in `silu_and_mul`."""
    return _activate_and_multiply("gelu_and_mul", input, out)


def gelu_tanh_and_mul(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = gelu_new(input[..., :d]) * input[..., d:]; arguments as in `silu_and_mul`."""
    return _activate_and_multiply("gelu_tanh_and_mul", input, out)


def gelu_new(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), GPT-2's gelu (Hendrycks and Gimpel, 2016).

    Args:
        input: [..., d], evenly spaced rows.
        out: like input (it may be input); allocated by default.

    Returns:
        out.
    """
    return _activate("gelu_new", input, out)


def gelu_fast(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = 0.5 x (1 + tanh(0.7978845608 x (1 + 0.044715 x^2))); arguments as in `gelu_new`."""
    return _activate("gelu_fast", input, out)


def gelu_quick(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = x / (1 + exp(-1.702 x)) (Hendrycks and Gimpel, 2016); arguments as in `gelu_new`."""
    return _activate("gelu_quick", input, out)


def _activate(op: str, input: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        out = empty_like(op, input)
    call(op, out, input)
    return out


def _activate_and_multiply(op: str, input: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        if not isinstance(input, Tensor):
            check_tensors(op, input=input)
        *rows, width = input.shape or [0]
        out = input.new_empty((*rows, width // 2))
    call(op, out, input)
    return out
