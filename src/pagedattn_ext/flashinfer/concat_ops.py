"""Keys of latent attention that are expanded for a prompt."""

from torch import Tensor

from .._adapters import check_memory, check_shape, refuse_gradients
from ..ops._call import check_rank, check_tensors


def concat_mla_k(k: Tensor, k_nope: Tensor, k_rope: Tensor, *, backend: str = "default") -> None:
    """Writes the keys of each head into k: its own numbers, and behind them the rotary part that all heads share.

    Args:
        k: [num_tokens, num_heads, nope_dim + rope_dim], written.
        k_nope: [num_tokens, num_heads, nope_dim], k's dtype.
        k_rope: [num_tokens, 1, rope_dim], k's dtype.
        backend: has no effect.
    """
    function = concat_mla_k
    check_tensors(function.__qualname__, k=k, k_nope=k_nope, k_rope=k_rope)
    refuse_gradients(function, k_nope=k_nope, k_rope=k_rope)
    check_rank(function.__qualname__, "k_nope", k_nope, 3)
    check_rank(function.__qualname__, "k_rope", k_rope, 3)
    num_tokens, num_heads, nope_dim = k_nope.shape
    check_shape(function, "k_rope", k_rope, (num_tokens, 1, k_rope.shape[2]))
    for name, tensor in (("k_nope", k_nope), ("k_rope", k_rope)):
        if tensor.dtype != k.dtype:
            expected, got = (str(dtype).removeprefix("torch.") for dtype in (k.dtype, tensor.dtype))
            raise TypeError(f"{function.__qualname__}: {name}: expected dtype {expected}, as k has, got {got}")
    check_memory(function, "k", k, (num_tokens, num_heads, nope_dim + k_rope.shape[2]), k_nope.dtype, k_nope.device)
    k[..., :nope_dim].copy_(k_nope)
    k[..., nope_dim:].copy_(k_rope)
