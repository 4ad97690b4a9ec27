"""Attention of the last rows of each sequence, over pages or over keys and values that lie one after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._adapters import call_as, expect_defaults
from .._index_checks import check_starts
from ._wrapper import NAMES, Dtype, PagedWrapper, Plan, Scale, Wrapper, attend_one, options_of, results_of, scale_of
from .page import PagedCache


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """The last rows of each sequence, a ragged batch, over its cached tokens."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        expect_defaults(
            type(self).__init__,
            use_cuda_graph=use_cuda_graph,
            custom_mask_buf=custom_mask_buf,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
        )
        super().__init__(kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
        o_data_type: Dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Says which rows and pages the sequences of the next calls of `run` have.

        Args:
            qo_indptr: int32 [batch + 1], where the rows of each sequence begin; on any device.
            causal: whether a row sees no token after its own, with the last row at the last token.
            The other arguments are those of the decode wrapper.
        """
        _refuse_in_plan(
            type(self).plan,
            head_dim_qk,
            head_dim_vo,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            pos_encoding_mode=pos_encoding_mode,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
        )
        self._plan_pages(
            type(self).plan,
            qo_indptr,
            page_size,
            paged_kv_indptr=paged_kv_indptr,
            paged_kv_indices=paged_kv_indices,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        shapes = (num_qo_heads, head_dim_qk), (page_size, num_kv_heads, head_dim_qk)
        self._planned = Plan(*shapes, causal, window_left, logits_soft_cap, sm_scale)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Any:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim]; the rest as in the decode wrapper."""
        scales = q_scale, k_scale, v_scale
        return self._attend(type(self).run, q, paged_kv_cache, scales, window_left, sinks, out, lse, return_lse)

    begin_forward = plan

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """The older `run`, whose options replace the plan's."""
        options = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        self._replace_options(pos_encoding_mode, causal=causal, **options)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """The last rows of each sequence over keys and values that lie one after the other."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        expect_defaults(
            type(self).__init__,
            use_cuda_graph=use_cuda_graph,
            custom_mask_buf=custom_mask_buf,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
        )
        super().__init__(kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
        o_data_type: Dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
    ) -> None:
        """Says where the rows (qo_indptr) and the keys (kv_indptr, int32 [batch + 1]) of each sequence begin."""
        _refuse_in_plan(
            type(self).plan,
            head_dim_qk,
            head_dim_vo,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            pos_encoding_mode=pos_encoding_mode,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
        )
        check_starts(type(self).plan, "qo_indptr", qo_indptr)
        check_starts(type(self).plan, "kv_indptr", kv_indptr, num_seqs=qo_indptr.shape[0] - 1)
        self._starts = qo_indptr, kv_indptr
        shapes = (num_qo_heads, head_dim_qk), (num_kv_heads, head_dim_qk)
        self._planned = Plan(*shapes, causal, window_left, logits_soft_cap, sm_scale)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim] over k and v [kv_indptr[-1], num_kv_heads, head_dim];
        the rest as in the decode wrapper."""
        plan = self._plan
        plan.check_shapes(type(self).run, q, k)
        starts = [indptr.to(q.device) for indptr in self._starts]
        options = plan.options(q_scale, k_scale)
        attended, natural_lse = call_as(type(self).run, NAMES, ops.varlen_attention, q, k, v, *starts, **options)
        return results_of(type(self).run, attended, natural_lse, v_scale, out, lse, return_lse)

    begin_forward = plan

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """The older `run`, whose options replace the plan's."""
        options = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        self._replace_options(pos_encoding_mode, causal=causal, **options)
        return self.run(q, k, v, return_lse=return_lse)


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Attention of the last rows of one sequence, q [qo_len, num_qo_heads, head_dim]; k and v as in
    `single_decode_with_kv_cache`. Returns out, like q; with return_lse (out, lse), lse [qo_len, num_qo_heads]."""
    expect_defaults(
        single_prefill_with_kv_cache,
        scale_q=scale_q,
        scale_k=scale_k,
        scale_v=scale_v,
        o_dtype=o_dtype,
        custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
        pos_encoding_mode=pos_encoding_mode,
    )
    options = options_of(scale_of(sm_scale, q.shape[-1]), causal, window_left, logits_soft_cap)
    out, lse = attend_one(single_prefill_with_kv_cache, q, k, v, kv_layout, options)
    return results_of(single_prefill_with_kv_cache, out, lse, None, None, None, return_lse)


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


def _refuse_in_plan(
    function: Callable[..., Any], head_dim_qk: int, head_dim_vo: int | None, **arguments: object
) -> None:
    expect_defaults(function, **arguments)
    if head_dim_vo not in (None, head_dim_qk):
        raise ValueError(f"{function.__qualname__}: head_dim_vo: expected head_dim_qk {head_dim_qk}, got {head_dim_vo}")
