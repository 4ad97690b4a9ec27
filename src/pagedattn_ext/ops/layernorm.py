"""RMS norm, with and without a residual, as LLaMA and as Gemma have it; layer norm."""

from torch import Tensor

from ._call import call, empty_like


def rms_norm(input: Tensor, weight: Tensor, epsilon: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """out = input / sqrt(mean(input ** 2) + epsilon) * weight, over the last dimension (Zhang and Sennrich, 2019).

    Args:
        input: [..., hidden_size], rows of one stride or of two, as of the heads of a fused qkv.
        weight: [hidden_size].
        out: like input (it may be input); allocated by default.

    Returns:
        out.
    """
    if out is None:
        out = empty_like("rms_norm", input)
    call("rms_norm", out, input, weight, epsilon)
    return out


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """residual += input, then input = rms_norm(residual), both in place; the norm sees the unrounded sum.

    Args:
        input, residual: [..., hidden_size], rows of one stride or of two; updated.
        weight: [hidden_size].

    Returns:
        (input, residual).
    """
    call("fused_add_rms_norm", input, residual, weight, epsilon)
    return input, residual


def gemma_rms_norm(input: Tensor, weight: Tensor, epsilon: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """`rms_norm` with the weight 1 + weight, added in fp32: the norm of Gemma's layers."""
    if out is None:
        out = empty_like("gemma_rms_norm", input)
    call("gemma_rms_norm", out, input, weight, epsilon)
    return out


def gemma_fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """`fused_add_rms_norm` with the weight 1 + weight, added in fp32."""
    call("gemma_fused_add_rms_norm", input, residual, weight, epsilon)
    return input, residual


def layer_norm(
    input: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """out = (input - mean(input)) / sqrt(variance(input) + epsilon) * weight + bias, over the last dimension (Ba, Kiros
    and Hinton, 2016). The variance is the mean of the squared differences from the mean.

    Args:
        input: [..., hidden_size], rows of one stride or of two.
        weight, bias: [hidden_size], both fp32 or both of input's dtype.
        out: like input (it may be input); allocated by default.

    Returns:
        out.
    """
    if out is None:
        out = empty_like("layer_norm", input)
    call("layer_norm", out, input, weight, bias, epsilon)
    return out
