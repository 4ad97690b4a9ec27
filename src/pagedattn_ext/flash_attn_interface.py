"""FlashAttention-3's functions on the ops of this package, on a CPU as on CUDA.

    from pagedattn_ext.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Names, order, defaults and results are those of FlashAttention-3, which differ from flash-attn 2: there is no dropout_p,
and `return_attn_probs` gives (out, lse). `pagedattn_ext.flash_attn` computes, and says what the arguments mean, what
has no effect and what is refused.
"""

from typing import Any

import torch
from torch import Tensor

from . import flash_attn
from ._adapters import call_as, check_memory, refuse_gradients
from .flash_attn._arguments import WindowSize
from .ops._call import check_rank

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of a batch whose sequences are equally long: out, with return_attn_probs (out, lse)."""
    return flash_attn.flash_attn_func(
        q, k, v,
        softmax_scale=softmax_scale, causal=causal, qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
        return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv [batch, seqlen, 3, num_heads, head_size], or with num_heads_q of [batch, seqlen,
    num_heads_q + 2 * num_kv_heads, head_size]."""
    function = flash_attn_qkvpacked_func
    refuse_gradients(function, qkv=qkv)
    check_rank(function.__name__, "qkv", qkv, 5 if num_heads_q is None else 4)
    heads = qkv.flatten(2, -2)
    num_heads = heads.shape[2] // 3 if num_heads_q is None else num_heads_q
    num_kv_heads = (heads.shape[2] - num_heads) // 2
    if (
        (num_heads_q is None and qkv.shape[2] != 3)
        or num_kv_heads < 1
        or heads.shape[2] != num_heads + 2 * num_kv_heads
    ):
        raise ValueError(
            f"{function.__name__}: qkv: expected 3 groups of heads, as many of keys as of values, got shape "
            f"{list(qkv.shape)} with num_heads_q {num_heads_q}"
        )
    q, k, v = heads.tensor_split((num_heads, num_heads + num_kv_heads), 2)
    return call_as(
        function, {"q": "qkv", "k": "qkv", "v": "qkv"}, flash_attn_func, q, k, v,
        softmax_scale=softmax_scale, causal=causal, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        window_size=window_size, attention_chunk=attention_chunk, softcap=softcap, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of a ragged batch: out, with return_attn_probs (out, lse)."""
    return flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        seqused_q=seqused_q, seqused_k=seqused_k, softmax_scale=softmax_scale, causal=causal, qv=qv,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, window_size=window_size,
        attention_chunk=attention_chunk, softcap=softcap, return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, to which k and v are appended first: out, with return_softmax_lse (out, lse, and two
    empty tensors, which in FlashAttention-3 are the results of its splits)."""
    result = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v,
        qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
        rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip
    return (*result, q.new_empty(0), q.new_empty(0)) if return_softmax_lse else result


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over several sets of tokens, of the results for each: (out [..., head_size], lse fp32 [...]).

    Args:
        out_partial: [num_splits, batch, seqlen, num_heads, head_size], or without batch.
        lse_partial: fp32 [num_splits, batch, seqlen, num_heads]; -inf for a set without tokens.
        out: where the result goes, of any float dtype; allocated by default.
        out_dtype: its dtype; default that of out_partial.
    """
    function = flash_attn_combine
    refuse_gradients(function, out_partial=out_partial, lse_partial=lse_partial)
    if lse_partial.shape != out_partial.shape[:-1]:
        expected, got = list(out_partial.shape[:-1]), list(lse_partial.shape)
        raise ValueError(f"{function.__name__}: lse_partial: expected shape {expected}, got {got}")
    natural = lse_partial.float()
    lse = natural.logsumexp(0)
    weights = torch.where(natural == -torch.inf, 0, (natural - lse).exp())[..., None]
    combined = torch.where(weights == 0, 0, weights * out_partial).sum(0).to(out_dtype or out_partial.dtype)
    check_memory(function, "out", out, combined.shape, None, combined.device)
    return (combined if out is None else out.copy_(combined)), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor: nothing needs to be planned. The functions take any scheduler_metadata."""
    return cache_seqlens.new_empty(0, dtype=torch.int32)
