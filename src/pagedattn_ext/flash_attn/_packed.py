"""flash-attn's functions of queries, keys and values in one tensor, or of keys and values in one."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._adapters import call_as, refuse_gradients
from ..ops._call import check_rank
from ._arguments import WindowSize
from ._attention import flash_attn_func, flash_attn_varlen_func

QKV_NAMES = {"q": "qkv", "k": "qkv", "v": "qkv", "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens"}
KV_NAMES = {"k": "kv", "v": "kv"}


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv [batch, seqlen, 3, num_heads, head_size]."""
    function = flash_attn_qkvpacked_func
    refuse_gradients(function, qkv=qkv)
    _check_packed(function, "qkv", qkv, rank=5, count=3)
    return call_as(
        function, QKV_NAMES, flash_attn_func,
        *qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of kv [batch, seqlen_k, 2, num_kv_heads, head_size]."""
    function = flash_attn_kvpacked_func
    refuse_gradients(function, q=q, kv=kv)
    _check_packed(function, "kv", kv, rank=5, count=2)
    return call_as(
        function, KV_NAMES, flash_attn_func,
        q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv [total, 3, num_heads, head_size], whose sequences cu_seqlens tells apart."""
    function = flash_attn_varlen_qkvpacked_func
    refuse_gradients(function, qkv=qkv)
    _check_packed(function, "qkv", qkv, rank=4, count=3)
    return call_as(
        function, QKV_NAMES, flash_attn_varlen_func,
        *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of kv [total_k, 2, num_kv_heads, head_size]."""
    function = flash_attn_varlen_kvpacked_func
    refuse_gradients(function, q=q, kv=kv)
    _check_packed(function, "kv", kv, rank=4, count=2)
    return call_as(
        function, KV_NAMES, flash_attn_varlen_func,
        q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _check_packed(function: Callable[..., Any], name: str, tensor: Tensor, *, rank: int, count: int) -> None:
    check_rank(function.__name__, name, tensor, rank)
    if tensor.shape[-3] != count:
        message = f"expected {count} in dimension {rank - 3}, got {tensor.shape[-3]} (shape {list(tensor.shape)})"
        raise ValueError(f"{function.__name__}: {name}: {message}")
