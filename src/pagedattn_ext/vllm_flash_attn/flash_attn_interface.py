"""The functions of `vllm.vllm_flash_attn.flash_attn_interface`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagedattn_ext import flash_attn
from pagedattn_ext._adapters import expect_defaults

# `flash_attn_varlen_func` takes both versions.
FA2_AVAILABLE = True
FA3_AVAILABLE = True


def is_fa_version_supported(fa_version: int, device: object = None) -> bool:
    """Whether `flash_attn_varlen_func` takes this fa_version: 2, 3 and 4, which are the same here. device, which some
    versions of the fork have, has no effect."""
    return fa_version_unsupported_reason(fa_version) is None


def fa_version_unsupported_reason(fa_version: int, device: object = None) -> str | None:
    return None if fa_version in (2, 3, 4) else f"fa_version: expected 2, 3 or 4, got {fa_version}"


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
    window_size: Sequence[int] = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor: nothing needs to be planned."""
    return cache_seqlens.new_empty(0, dtype=torch.int32)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    output_scale: Tensor | None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_tensor_leading_dims: Any = None,
    dynamic_causal: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    gather_kv_valid_length: Tensor | None = None,
) -> Any:
    """Attention of a ragged batch: out, with return_softmax_lse (out, lse). return_attn_probs has no effect."""
    function = flash_attn_varlen_func
    if cp_world_size != 1 or cp_rank != 0:
        expect_defaults(function, cp_world_size=cp_world_size, cp_rank=cp_rank)
    expect_defaults(
        function, q_v=q_v, output_scale=output_scale, cp_tot_seqused_k=cp_tot_seqused_k, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors,
        aux_tensor_leading_dims=aux_tensor_leading_dims, dynamic_causal=dynamic_causal,
        gather_kv_indices=gather_kv_indices, gather_kv_valid_length=gather_kv_valid_length,
    )  # fmt: skip
    return flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=(-1, -1) if window_size is None else window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, block_table=block_table, seqused_k=seqused_k, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, s_aux=s_aux, return_softmax_lse=return_softmax_lse, out=out,
    )  # fmt: skip


def compile_flash_attn_varlen_func_from_specs(**specs: Any) -> None:
    """Does nothing, whatever is in specs: the kernels of `flash_attn_varlen_func` are compiled with the package."""
