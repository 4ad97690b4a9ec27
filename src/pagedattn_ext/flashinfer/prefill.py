"""Attention of the last rows of each sequence, over pages or over keys and values that lie one after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._adapters import expect_defaults
from .._index_checks import check_starts
from ..ops._call import to_int
from ._mask import mask_of
from ._plan import NAMES, Dtype, Plan, Scale, check_dtype, in_dtype, refusal, results_of
from ._ragged import RaggedBatch, attend_ragged
from ._single import attend_one
from ._trtllm import trtllm_batch_context_with_kv_cache as trtllm_batch_context_with_kv_cache
from ._trtllm import trtllm_ragged_attention_deepseek as trtllm_ragged_attention_deepseek
from ._wrapper import PagedWrapper, Planned, Wrapper
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
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        """With use_cuda_graph a captured `run` sees later plans, which have the batch size of the buffers, and at most
        the pages that paged_kv_indices_buf holds. Rows of q behind qo_indptr[-1] are zeros. `plan` writes to the
        buffers, but for those of masks. With a mask or "ROPE_LLAMA", `run` copies as many pages as the buffer holds,
        and there are at most max_total_num_rows rows, or as many as in the first plan."""
        expect_defaults(type(self).__init__, variant_owns_mask=variant_owns_mask)
        buffers = {
            "qo_indptr": ("qo_indptr_buf", qo_indptr_buf),
            "paged_kv_indptr": ("paged_kv_indptr_buf", paged_kv_indptr_buf),
            "paged_kv_indices": ("paged_kv_indices_buf", paged_kv_indices_buf),
            "paged_kv_last_page_len": ("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf),
        }
        super().__init__(kv_layout, use_cuda_graph, buffers, jit_args)
        if max_total_num_rows is not None:
            if self._graph is None:
                expected = "None without use_cuda_graph"
                raise refusal(type(self).__init__, "max_total_num_rows", expected, max_total_num_rows)
            most = to_int(type(self).__init__.__qualname__, "max_total_num_rows", max_total_num_rows)
            if most < 0:
                raise refusal(type(self).__init__, "max_total_num_rows", "0 or more", most)
            self._graph.limit("qo_indptr", most)

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
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Says which rows and pages the sequences of the next calls of `run` have.

        Args:
            qo_indptr: int32 [batch + 1], where the rows of each sequence begin; on any device.
            head_dim_vo: of values and results; default head_dim_qk. Where values are narrower than keys, `run` copies
                the keys and values of the batch, unless the values are the start of the keys, in the same memory.
            custom_mask: of each sequence [rows, keys], flattened, one after the other; not 0 where a row sees a key. In
                place of causal. `run` copies the keys and values of the batch, and reads them once for each row.
            packed_custom_mask: the same in bits, of `segment_packbits` with bitorder "little".
            causal: whether a row sees no token after its own, with the last row at the last token.
            The other arguments are those of the decode wrapper.
        """
        expect_defaults(type(self).plan, use_token_head_sf=use_token_head_sf)
        refuse_items(type(self).plan, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        plan = self._new_plan(
            function=type(self).plan,
            query_shape=(num_qo_heads, head_dim_qk),
            key_shape=(page_size, num_kv_heads, head_dim_qk),
            value_shape=(page_size, num_kv_heads, head_dim_vo or head_dim_qk),
            causal=causal,
            has_mask=custom_mask is not None or packed_custom_mask is not None,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            o_data_type=o_data_type,
        )
        made = self._made_of_pages(
            plan,
            qo_indptr,
            page_size,
            (custom_mask, packed_custom_mask),
            paged_kv_indptr=paged_kv_indptr,
            paged_kv_indices=paged_kv_indices,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        self._set_pages(made)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim_qk]: out [qo_indptr[-1], num_qo_heads, head_dim_vo].

        Args:
            lse_base: "log2", or "ln" for the natural lse.
            lse_layout: "NH", or "HN" for an lse [num_qo_heads, qo_indptr[-1]].
            The other arguments are those of the decode wrapper.
        """
        run = type(self).run
        expect_defaults(
            run, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf
        )
        plan, sinks = self._plan_and_sinks(run, args, sinks, window_left)
        results = {"out": out, "lse": lse, "return_lse": return_lse, "lse_base": lse_base, "lse_layout": lse_layout}
        return self._attend(run, q, paged_kv_cache, plan, (q_scale, k_scale, v_scale), sinks, results)

    begin_forward = plan

    def workspace_size(
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
        uniform_q_len: int | None = None,
    ) -> tuple[int, int]:
        """The bytes of both workspaces for a `plan` with these arguments: none."""
        return 0, 0

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
        """The older `run`, whose options replace the plan's, unless it fails."""
        options = {
            "causal": causal,
            "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
        }
        return self._run_with(options, q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)


@dataclass(frozen=True, kw_only=True)
class PlannedRows(Planned):
    """Where the rows and the keys of each sequence begin."""

    starts: tuple[Tensor, Tensor]

    def batch_by(self, plan: Plan) -> RaggedBatch:
        return RaggedBatch.of(plan, self.mask, *self.starts)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper[PlannedRows]):
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
        variant_owns_mask: bool = False,
    ) -> None:
        """With use_cuda_graph a captured `run` sees later plans, which have the batch size of the buffers, and at most
        as many rows and keys as the first. `plan` writes to the buffers, but for those of masks."""
        expect_defaults(type(self).__init__, variant_owns_mask=variant_owns_mask)
        buffers = {"qo_indptr": ("qo_indptr_buf", qo_indptr_buf), "kv_indptr": ("kv_indptr_buf", kv_indptr_buf)}
        super().__init__(kv_layout, use_cuda_graph, buffers, jit_args)

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
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
        qo_indptr_cpu: Tensor | None = None,
        kv_indptr_cpu: Tensor | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Says where the rows (qo_indptr) and the keys (kv_indptr, int32 [batch + 1]) of each sequence begin. The other
        arguments are those of the wrapper of pages. `run` copies values that are narrower than keys."""
        expect_defaults(type(self).plan, v_indptr=v_indptr, o_indptr=o_indptr, use_token_head_sf=use_token_head_sf)
        refuse_items(type(self).plan, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        plan = self._new_plan(
            function=type(self).plan,
            query_shape=(num_qo_heads, head_dim_qk),
            key_shape=(num_kv_heads, head_dim_qk),
            value_shape=(num_kv_heads, head_dim_vo or head_dim_qk),
            causal=causal,
            has_mask=custom_mask is not None or packed_custom_mask is not None,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            o_data_type=o_data_type,
        )
        check_starts(type(self).plan, "qo_indptr", qo_indptr)
        check_starts(type(self).plan, "kv_indptr", kv_indptr, num_seqs=qo_indptr.shape[0] - 1)
        starts = qo_indptr, kv_indptr.to(qo_indptr.device)
        mask = mask_of(plan.function, custom_mask, packed_custom_mask, *starts)
        made = PlannedRows(plan=plan, mask=mask, starts=starts).by(plan)
        if self._graph is not None:
            buffered = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}
            self._graph.check_ends(plan.function, **buffered)
            self._graph.check_sizes(plan.function, buffered)
            self._graph.fill(buffered)
        self._set_plan(made)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim_qk] over k [kv_indptr[-1], num_kv_heads, head_dim_qk]
        and v [kv_indptr[-1], num_kv_heads, head_dim_vo]. Keys and values in fp8 are copied. The rest as in the wrapper
        of pages."""
        run = type(self).run
        expect_defaults(run, o_scale=o_scale, kv_cache_sf=kv_cache_sf)
        plan, sinks = self._plan_and_sinks(run, args, None)
        plan.check_tensors(run, ("q", "k", "v"), q, k, v)
        batch = self._planned.batch
        assert batch is not None
        options = plan.options(run, q_scale, k_scale, sinks, q.device)
        attended, natural_lse = attend_ragged(run, NAMES, plan, batch, q, k, v, options)
        attended = in_dtype(attended, plan.o_data_type)
        return results_of(run, attended, natural_lse, v_scale, out, lse, return_lse, lse_base, lse_layout)

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
        """The older `run`, whose options replace the plan's, unless it fails."""
        options = {
            "causal": causal,
            "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
        }
        return self._run_with(options, q, k, v, return_lse=return_lse)


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
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """Attention of the last rows of one sequence, q [qo_len, num_qo_heads, head_dim]; k and v as in
    `single_decode_with_kv_cache`, where heads of v may have another width. Masks are those of one sequence, packed by
    `packbits` with bitorder "little". Returns out [qo_len, num_qo_heads, head_dim of v]; with return_lse (out, lse),
    lse [qo_len, num_qo_heads]."""
    expect_defaults(
        single_prefill_with_kv_cache,
        scale_q=scale_q,
        scale_k=scale_k,
        scale_v=scale_v,
        kv_cache_sf=kv_cache_sf,
    )
    check_dtype(single_prefill_with_kv_cache, "o_dtype", o_dtype)
    out, lse = attend_one(
        single_prefill_with_kv_cache,
        q,
        k,
        v,
        kv_layout,
        scales=(None, k_scale),
        custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
        causal=causal,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
    )
    return results_of(single_prefill_with_kv_cache, in_dtype(out, o_dtype), lse, v_scale, None, None, return_lse)


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


def refuse_items(
    plan: Callable[..., Any],
    prefix_len_ptr: Tensor | None,
    token_pos_in_items_ptr: Tensor | None,
    token_pos_in_items_len: int,
    max_item_len_ptr: Tensor | None,
) -> None:
    """Refuses multi-item scoring."""
    expect_defaults(
        plan,
        prefix_len_ptr=prefix_len_ptr,
        token_pos_in_items_ptr=token_pos_in_items_ptr,
        token_pos_in_items_len=token_pos_in_items_len,
        max_item_len_ptr=max_item_len_ptr,
    )
