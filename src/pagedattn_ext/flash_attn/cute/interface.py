"""The functions of `flash_attn.cute`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedattn_ext import flash_attn, flash_attn_interface
from pagedattn_ext._adapters import expect_defaults, starts_of_equal
from pagedattn_ext.flash_attn._arguments import WindowSize
from pagedattn_ext.ops._call import check_rank, check_tensors

Results = tuple[Tensor, Tensor | None]


class SchedulerMetadataTensorsTorch(NamedTuple):
    """What FlashAttention-4 plans ahead. Nothing needs to be planned here."""

    num_m_blocks_ptr: Tensor | None = None
    num_splits_dynamic_ptr: Tensor | None = None
    virtual_batch_idx_ptr: Tensor | None = None
    num_nheads_in_l2_ptr: Tensor | None = None
    tile_count_semaphore: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_total_splits_m_blocks: Tensor | None = None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Results:
    """Attention of a batch whose sequences are equally long: (out, lse), with None for the lse without return_lse."""
    function = flash_attn_func
    expect_defaults(
        function, qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, mask_mod=mask_mod,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    out, lse = flash_attn.flash_attn_func(
        q, k, v,
        softmax_scale=softmax_scale, causal=causal, window_size=_window(function, causal, window_size),
        softcap=softcap, learnable_sink=learnable_sink, return_lse=True,
    )  # fmt: skip
    return out, lse if return_lse else None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Results:
    """Attention of a ragged batch: (out, lse), with None for the lse without return_lse.

    Args:
        q: [total_q, num_heads, head_size] with cu_seqlens_q, otherwise [batch, seqlen_q, num_heads, head_size].
        k, v: [total_k, num_kv_heads, head_size] with cu_seqlens_k, with a page table [num_pages, page_size, ...],
            otherwise [batch, seqlen_k, num_kv_heads, head_size].
        seqused_q, seqused_k: int32 [batch], how many rows and keys of each sequence are used; default all.
    """
    function = flash_attn_varlen_func
    expect_defaults(
        function, qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, mask_mod=mask_mod,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    check_tensors(function.__name__, q=q, k=k, v=v)
    rows, keys, values = q, k, v
    if cu_seqlens_q is None:
        check_rank(function.__name__, "q", q, 4)
        rows, cu_seqlens_q = q.flatten(0, 1), starts_of_equal(q.shape[0], q.shape[1], q.device)
    if cu_seqlens_k is None and page_table is None:
        check_rank(function.__name__, "k", k, 4)
        check_rank(function.__name__, "v", v, 4)
        keys, values, cu_seqlens_k = k.flatten(0, 1), v.flatten(0, 1), starts_of_equal(k.shape[0], k.shape[1], k.device)
    out, lse = flash_attn.flash_attn_varlen_func(
        rows, keys, values, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table, softmax_scale=softmax_scale, causal=causal,
        window_size=_window(function, causal, window_size), softcap=softcap, learnable_sink=learnable_sink,
        return_lse=True,
    )  # fmt: skip
    if q.dim() == 4:
        out = out.view(*q.shape[:2], *out.shape[1:])
        lse = lse.view(-1, *q.shape[:2]).transpose(0, 1).contiguous()
    return out, lse if return_lse else None


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> Results:
    """`flash_attn_interface.flash_attn_combine`, with None for the lse without return_lse. Without effect: cu_seqlens,
    seqused (all rows are computed) and virtual_batch_idx."""
    combined, lse = flash_attn_interface.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return combined, lse if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: bool | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> SchedulerMetadataTensorsTorch:
    """Metadata that say nothing. `flash_attn_varlen_func` takes any."""
    return SchedulerMetadataTensorsTorch(cu_total_m_blocks=torch.empty(0, dtype=torch.int32))


def _window(function: Callable[..., Any], causal: bool, window_size: WindowSize) -> WindowSize:
    """The window in flash-attn's terms. In FlashAttention-4 a negative side is none only if the sum of both is less
    than 0; otherwise the window begins behind the row, or ends before it."""
    left, right = window_size[0], 0 if causal else window_size[1]
    if left is not None and right is not None and left + right < 0:
        return None, 0 if causal else None
    for side in (left, right):
        if side is not None and side < 0:
            raise ValueError(f"{function.__name__}: window_size: expected None, or 0 or more, got {window_size}")
    return left, right
