"""Attention to pages by block tables, without a plan: under the names of one backend of FlashInfer."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._adapters import call_as, expect_defaults, window_of
from .._index_checks import check_indices
from ..ops._call import call, check_rank, check_tensors, given, to_int
from ._plan import in_dtype, one_factor, refusal, results_of
from ._ragged import attend_to_values, with_dense_heads
from .page import PagedCache, check_layout, pages_of

# What these functions call the arguments of the op.
NAMES = {"key_cache": "kv_cache", "value_cache": "kv_cache", "query_start_loc": "cum_seq_lens_q"}
NAMES |= {"scale": "bmm1_scale", "sliding_window": "window_left"}


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
    bf16q_fp8kv_transform_mode: str | None = None,
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
    bf16q_fp8kv_transform_mode, and o_scale, which is for results in fp8. Refused: o_sf_scale, o_sf_vec_size, mask,
    skip_softmax_threshold_scale_factor, kv_cache_sf, enable_block_sparse_attention, uses_shared_paged_kv_idx=False.
    """
    function = trtllm_batch_decode_with_kv_cache
    expect_defaults(
        function, o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, mask=mask,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf,
        enable_block_sparse_attention=enable_block_sparse_attention,
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
            starts = torch.arange(0, len(seq_lens) + 1, dtype=torch.int32, device=query.device) * rows
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
) -> Any:
    """As `trtllm_batch_decode_with_kv_cache`, of any number of rows a sequence.

    Args:
        cum_seq_lens_q: int32 or int64 [batch_size + 1], where the rows of each sequence begin, and the last end.
        causal: whether a row sees no token after its own.

    Without effect beside those of that function: max_kv_len, batch_size, cum_seq_lens_kv, use_fp16_softmax. Refused
    beside: uses_spcompress.
    """
    function = trtllm_batch_context_with_kv_cache
    expect_defaults(
        function, o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, uses_spcompress=uses_spcompress,
    )  # fmt: skip
    check_tensors(function.__qualname__, cum_seq_lens_q=cum_seq_lens_q)
    scale = one_factor(function, "bmm1_scale", bmm1_scale)
    return _attend(
        function, query, kv_cache, block_tables, seq_lens, cum_seq_lens_q, scale, bmm2_scale, window_left, out,
        out_dtype, sinks, kv_layout, causal, lse, return_lse, uses_shared_paged_kv_idx,
    )  # fmt: skip


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
    key_cache, value_cache = pages_of(kv_cache, kv_layout)
    options = given({"sliding_window": window_of(window_left), "query_start_loc": starts, "sinks": sinks})
    rows = with_dense_heads(query)

    def attend(values: Tensor) -> Any:
        tensors = rows, key_cache, values, block_tables, seq_lens
        return call_as(function, NAMES, call, "paged_attention", *tensors, scale=scale, causal=causal, **options)

    attended, natural_lse = attend_to_values(attend, value_cache, key_cache.shape[-1])
    if out_dtype is None and out is not None:
        out_dtype = out.dtype
    if out_dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise refusal(function, "out_dtype", "torch.float32, torch.float16 or torch.bfloat16", out_dtype)
    attended = in_dtype(attended, out_dtype)
    factor = one_factor(function, "bmm2_scale", bmm2_scale)
    return results_of(function, attended, natural_lse, None if factor == 1 else factor, out, lse, return_lse)
