"""Attention without a plan, to pages or to a ragged batch: under the names of one backend of FlashInfer."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._adapters import call_as, check_shape, expect_defaults, starts_of_equal, window_of
from .._index_checks import check_indices
from ..ops._call import call, check_rank, check_tensors, given, to_int
from ._plan import check_result_dtype, in_dtype, one_factor, refusal, results_of
from ._ragged import attend_to_values, with_dense_heads
from .page import PagedCache, check_layout, pages_of

# What these functions call the arguments of the op.
NAMES = {"key_cache": "kv_cache", "value_cache": "kv_cache", "query_start_loc": "cum_seq_lens_q"}
NAMES |= {"scale": "bmm1_scale", "sliding_window": "window_left"}
NAMES_OF_RAGGED = NAMES | {"key_start_loc": "cum_seq_lens_kv", "sinks": "attention_sinks"}
NAMES_OF_MLA = (
    NAMES | dict.fromkeys(("q_nope", "q_pe"), "query") | dict.fromkeys(("kv_c_cache", "k_pe_cache"), "kv_cache")
)


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: PagedCache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: Tensor | None = None,
    request_order_plan: Any = None,
    sparse_top_k: int = 0,
    length_aware_schedule: bool = False,
) -> Any:
    """Causal attention of the last tokens of each sequence: out, like query; with return_lse (out, lse).

    Args:
        query: [num_tokens, num_qo_heads, head_dim], q_len_per_req rows a sequence.
        kv_cache: a pair (keys, values), or one tensor [num_pages, 2, ...], with pages of kv_layout; [num_pages, 1, ...]
            has the values of the keys.
        block_tables: int32 or int64 [batch_size, max_num_pages_per_seq].
        seq_lens: int32 or int64 [batch_size], cached tokens, those of query included.
        bmm1_scale: what the products of queries and keys are multiplied with.
        bmm2_scale: what the result is multiplied with.
        window_left: the tokens before its own that a row sees; -1 is all.
        out, lse: where the results go; allocated by default. lse is fp32 [num_tokens, num_qo_heads], in base 2.
        sinks: fp32 [num_qo_heads], a logit more in the softmax's denominator.
        cum_seq_lens_q: int32 or int64 [batch_size + 1], where the rows of each sequence begin, in place of
            q_len_per_req.
        bmm1_scale_log2: bmm1_scale times log2(e), in its place.

        out_dtype: fp32, fp16 or bf16; default that of out, or of query.

    Without effect: workspace_buffer, max_seq_len, max_q_len, enable_pdl, backend, multi_ctas_kv_counter_buffer,
    bf16q_fp8kv_transform_mode, request_order, request_order_plan, length_aware_schedule, and o_scale, which is for
    results in fp8. Refused: o_sf_scale, o_sf_vec_size, mask, skip_softmax_threshold_scale_factor, kv_cache_sf,
    enable_block_sparse_attention, sparse_top_k, cp_world, cp_rank, causal_seqlens_kv_global, and
    uses_shared_paged_kv_idx=False.
    """
    function = trtllm_batch_decode_with_kv_cache
    expect_defaults(
        function, o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, mask=mask,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf,
        enable_block_sparse_attention=enable_block_sparse_attention, sparse_top_k=sparse_top_k, cp_world=cp_world,
        cp_rank=cp_rank, causal_seqlens_kv_global=causal_seqlens_kv_global,
    )  # fmt: skip
    starts = cum_seq_lens_q
    if starts is None:
        check_tensors(function.__qualname__, query=query)
        check_indices(function, "seq_lens", seq_lens)
        rows = 1 if q_len_per_req is None else to_int(function.__qualname__, "q_len_per_req", q_len_per_req)
        if rows < 1:
            raise refusal(function, "q_len_per_req", "1 or more", rows)
        if query.shape[0] != len(seq_lens) * rows:
            raise refusal(function, "query", f"{len(seq_lens) * rows} rows (batch * q_len_per_req)", query.shape[0])
        if rows > 1:
            starts = starts_of_equal(len(seq_lens), rows, query.device)
    scale = one_factor(function, "bmm1_scale", bmm1_scale)
    if bmm1_scale_log2 is not None:
        scale = one_factor(function, "bmm1_scale_log2", bmm1_scale_log2) * math.log(2)
    return _attend(
        function, query, kv_cache, block_tables, seq_lens, starts, scale, bmm2_scale, window_left, out, out_dtype,
        sinks, kv_layout, True, lse, return_lse, uses_shared_paged_kv_idx,
    )  # fmt: skip


def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: PagedCache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Tensor | None = None,
    kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
    window_right: int = -1,
    variable_window_token_starts: Tensor | None = None,
    variable_window_token_ends: Tensor | None = None,
) -> Any:
    """As `trtllm_batch_decode_with_kv_cache`, of any number of rows a sequence.

    Args:
        cum_seq_lens_q: int32 or int64 [batch_size + 1], where the rows of each sequence begin, and the last end.
        causal: whether a row sees no token after its own.

    Without effect beside those of that function: max_kv_len, batch_size, cum_seq_lens_kv, use_fp16_softmax. Refused
    beside: uses_spcompress, variable_window_token_starts, variable_window_token_ends, and a window_right other than -1,
    or 0 with causal.
    """
    function = trtllm_batch_context_with_kv_cache
    expect_defaults(
        function, o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, uses_spcompress=uses_spcompress,
        variable_window_token_starts=variable_window_token_starts,
        variable_window_token_ends=variable_window_token_ends,
    )  # fmt: skip
    if window_right != -1 and not (causal and window_right == 0):
        raise refusal(function, "window_right", "-1, or 0 with causal", window_right)
    check_tensors(function.__qualname__, cum_seq_lens_q=cum_seq_lens_q)
    scale = one_factor(function, "bmm1_scale", bmm1_scale)
    return _attend(
        function, query, kv_cache, block_tables, seq_lens, cum_seq_lens_q, scale, bmm2_scale, window_left, out,
        out_dtype, sinks, kv_layout, causal, lse, return_lse, uses_shared_paged_kv_idx,
    )  # fmt: skip


def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sage_attn_sfs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: Tensor | None = None,
    kv_seq_lens_cpu: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> Any:
    """Attention of the last rows of each sequence to keys and values that lie one after the other: out; with return_lse
    (out, lse).

    Args:
        query: [num_tokens, num_qo_heads, head_dim].
        key: [num_keys, num_kv_heads, head_dim].
        value: [num_keys, num_kv_heads, value_dim].
        cum_seq_lens_q, cum_seq_lens_kv: int32 or int64 [batch_size + 1], where the rows and the keys of each sequence
            begin, and the last end.
        is_causal: whether a row sees no token after its own.
        bmm1_scale, bmm2_scale, window_left, out, lse, attention_sinks: as in `trtllm_batch_decode_with_kv_cache`.

    Without effect: workspace_buffer, seq_lens, max_q_len, max_kv_len, o_sf_scale, batch_size, enable_pdl, backend,
    num_elts_per_sage_attn_blk, q_seq_lens_cpu, kv_seq_lens_cpu, use_fp16_softmax, skip_all_rows_active_check. Refused:
    skip_softmax_threshold_scale_factor, sage_attn_sfs, uses_spcompress.
    """
    function = trtllm_ragged_attention_deepseek
    skip = {"skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor}
    expect_defaults(function, **skip, uses_spcompress=uses_spcompress)
    if any(factors is not None for factors in sage_attn_sfs):
        raise refusal(function, "sage_attn_sfs", "no factors", "a tensor")
    check_tensors(function.__qualname__, query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_rank(function.__qualname__, name, tensor, 3)
    scale = one_factor(function, "bmm1_scale", bmm1_scale)
    options = given({"sliding_window": window_of(window_left), "sinks": attention_sinks})
    rows, keys = with_dense_heads(query), with_dense_heads(key)

    def attend(values: Tensor) -> Any:
        tensors = rows, keys, with_dense_heads(values), cum_seq_lens_q, cum_seq_lens_kv
        return call_as(
            function, NAMES_OF_RAGGED, ops.varlen_attention, *tensors, scale=scale, causal=is_causal, **options
        )

    attended, natural_lse = attend_to_values(attend, value, key.shape[-1])
    return _results(function, attended, natural_lse, bmm2_scale, out, None, lse, return_lse)


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> Any:
    """Causal latent attention of the last tokens of each sequence: out, like query with heads of kv_lora_rank; with
    return_lse (out, lse).

    Args:
        query: [batch_size, num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim], absorbed; with cum_seq_lens_q
            [total number of tokens, ...].
        kv_cache: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim], or [num_pages, 1, ...].
        lse: fp32 [total number of tokens, num_heads], or [batch_size, num_tokens, num_heads].
        return_lse_base: "base2", the default, or "basee" for the natural lse.
        block_tables, seq_lens, bmm1_scale, bmm2_scale, out, cum_seq_lens_q: as in `trtllm_batch_decode_with_kv_cache`.

    Without effect: workspace_buffer, qk_nope_head_dim, max_seq_len, enable_pdl, backend, is_var_seq, cute_dsl_impl,
    kv_scale_format, max_q_len, multi_ctas_kv_counter_buffer, use_fp16_softmax. Refused: sparse_mla_top_k,
    sparse_mla_top_k_lens, sinks, skip_softmax_threshold_scale_factor, enable_dcp, cp_world, cp_rank,
    causal_seqlens_kv_global, and uses_shared_paged_kv_idx=False.
    """
    function = trtllm_batch_decode_with_kv_cache_mla
    expect_defaults(
        function, sparse_mla_top_k=sparse_mla_top_k, sparse_mla_top_k_lens=sparse_mla_top_k_lens, sinks=sinks,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, enable_dcp=enable_dcp,
        cp_world=cp_world, cp_rank=cp_rank, causal_seqlens_kv_global=causal_seqlens_kv_global,
    )  # fmt: skip
    if not uses_shared_paged_kv_idx:
        raise refusal(function, "uses_shared_paged_kv_idx", "True", uses_shared_paged_kv_idx)
    if return_lse_base not in (None, "base2", "basee"):
        raise refusal(function, "return_lse_base", "None, 'base2' or 'basee'", repr(return_lse_base))
    name = function.__qualname__
    check_tensors(name, query=query, kv_cache=kv_cache, block_tables=block_tables, seq_lens=seq_lens)
    check_rank(name, "query", query, 4 if cum_seq_lens_q is None else 3)
    kv_lora_rank = to_int(name, "kv_lora_rank", kv_lora_rank)
    width = kv_lora_rank + to_int(name, "qk_rope_head_dim", qk_rope_head_dim)
    if query.shape[-1] != width:
        raise refusal(function, "query", f"heads of {width} (kv_lora_rank + qk_rope_head_dim)", query.shape[-1])
    latents = kv_cache[:, 0] if kv_cache.dim() == 4 and kv_cache.shape[1] == 1 else kv_cache
    check_rank(name, "kv_cache", latents, 3)
    check_shape(function, "kv_cache", latents, (*latents.shape[:2], width))
    starts, rows = cum_seq_lens_q, query
    if cum_seq_lens_q is None:
        batch_size, num_tokens = query.shape[:2]
        check_indices(function, "seq_lens", seq_lens, batch_size)
        if num_tokens != 1:
            starts = starts_of_equal(batch_size, num_tokens, query.device)
        rows = query.flatten(0, 1)
    attended, natural_lse = call_as(
        function, NAMES_OF_MLA, ops.mla_attention,
        rows[..., :kv_lora_rank], rows[..., kv_lora_rank:], latents[..., :kv_lora_rank], latents[..., kv_lora_rank:],
        block_tables, seq_lens, query_start_loc=starts, scale=one_factor(function, "bmm1_scale", bmm1_scale),
    )  # fmt: skip
    attended = attended.view(*query.shape[:-1], kv_lora_rank)
    if isinstance(lse, Tensor) and lse.dim() == 3:
        natural_lse = natural_lse.view(*query.shape[:-1])
    base = "ln" if return_lse_base == "basee" else "log2"
    return _results(function, attended, natural_lse, bmm2_scale, out, None, lse, return_lse, base)


def _attend(
    function: Callable[..., Any],
    query: Tensor,
    kv_cache: PagedCache,
    block_tables: Tensor,
    seq_lens: Tensor,
    starts: Tensor | None,
    scale: float,
    bmm2_scale: float | Tensor,
    window_left: int,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    sinks: Tensor | None,
    kv_layout: str,
    causal: bool,
    lse: Tensor | None,
    return_lse: bool,
    uses_shared_paged_kv_idx: bool,
) -> Any:
    if not uses_shared_paged_kv_idx:
        raise refusal(function, "uses_shared_paged_kv_idx", "True", uses_shared_paged_kv_idx)
    check_tensors(function.__qualname__, query=query, block_tables=block_tables, seq_lens=seq_lens)
    check_rank(function.__qualname__, "query", query, 3)
    check_layout(function, kv_layout)
    if isinstance(kv_cache, Tensor) and kv_cache.dim() == 5 and kv_cache.shape[1] == 1:
        kv_cache = kv_cache[:, 0], kv_cache[:, 0]
    key_cache, value_cache = pages_of(function, "kv_cache", kv_cache, kv_layout)
    options = given({"sliding_window": window_of(window_left), "query_start_loc": starts, "sinks": sinks})
    rows = with_dense_heads(query)

    def attend(values: Tensor) -> Any:
        tensors = rows, key_cache, values, block_tables, seq_lens
        return call_as(function, NAMES, call, "paged_attention", *tensors, scale=scale, causal=causal, **options)

    attended, natural_lse = attend_to_values(attend, value_cache, key_cache.shape[-1])
    return _results(function, attended, natural_lse, bmm2_scale, out, out_dtype, lse, return_lse)


def _results(
    function: Callable[..., Any],
    attended: Tensor,
    natural_lse: Tensor,
    bmm2_scale: float | Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    lse: Tensor | None,
    return_lse: bool,
    lse_base: str = "log2",
) -> Any:
    if out is not None:
        check_tensors(function.__qualname__, out=out)
        out_dtype = out.dtype if out_dtype is None else out_dtype
    check_result_dtype(function, "out_dtype", out_dtype)
    attended = in_dtype(attended, out_dtype)
    factor = one_factor(function, "bmm2_scale", bmm2_scale)
    return results_of(function, attended, natural_lse, None if factor == 1 else factor, out, lse, return_lse, lse_base)
