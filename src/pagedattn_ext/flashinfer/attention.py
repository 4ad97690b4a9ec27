"""The prefill wrapper under other names: for prompts and new tokens in one batch, and with sinks."""

from typing import Any

import torch
from torch import Tensor

from .._adapters import expect_defaults
from .._index_checks import check_indices, num_seqs_of
from ._plan import Dtype, refusal
from ._wrapper import PagedWrapper
from .page import PagedCache
from .prefill import BatchPrefillWithPagedKVCacheWrapper

# What FlashInfer's wrapper with sinks is made of: names of its additional tensors and scalars stand at 7 and 9.
JIT_ARGS_OF_SINKS = [*[None] * 7, ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", ""]


class BatchAttention(PagedWrapper):
    """The last rows of each sequence, of prompts and of new tokens in one batch, over its cached tokens."""

    _cache_name = "kv_cache"

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        super().__init__(kv_layout, use_cuda_graph=False, buffers={})

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """`plan` of the prefill wrapper, with the length of each sequence, kv_len_arr int32 [batch], in place of that
        of its last page. Raises ValueError if a length does not end in the last page of its sequence."""
        expect_defaults(type(self).plan, use_profiler=use_profiler)
        plan = self._new_plan(
            function=type(self).plan,
            query_shape=(num_qo_heads, head_dim_qk),
            key_shape=(page_size, num_kv_heads, head_dim_qk),
            value_shape=(page_size, num_kv_heads, head_dim_vo or head_dim_qk),
            causal=causal,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        check_indices(plan.function, "kv_len_arr", kv_len_arr, num_seqs_of(plan.function, "kv_indptr", kv_indptr))
        num_pages = kv_indptr.diff()
        lengths = kv_len_arr.to(num_pages.device)
        if (-(-lengths // page_size) != num_pages).any():
            expected = f"lengths that end in the last of {num_pages.tolist()} pages of {page_size}"
            raise refusal(plan.function, "kv_len_arr", expected, lengths.tolist())
        last_page_len = lengths - (num_pages - 1) * page_size
        pages = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": last_page_len}
        self._set_pages(self._made_of_pages(plan, qo_indptr, page_size, (None, None), **pages))

    def run(
        self,
        q: Tensor,
        kv_cache: PagedCache,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """(out, lse) of the prefill wrapper. logits_soft_cap is that of the plan."""
        run = type(self).run
        expect_defaults(run, profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        plan = self._planned.plan
        planned = plan.logits_soft_cap or 0.0
        if logits_soft_cap not in (0.0, planned):
            raise refusal(run, "logits_soft_cap", f"0 or {planned}, as planned", logits_soft_cap)
        results = {"out": out, "lse": lse, "return_lse": True}
        return self._attend(run, q, kv_cache, plan, (None, k_scale, v_scale), None, results)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The prefill wrapper whose `run` takes two arguments more: run(q, paged_kv_cache, sinks, sm_scale)."""

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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: Dtype = torch.bfloat16,
        kv_data_type: Dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        """The arguments from use_fp16_qk_reduction on are those of `plan`, and without effect here."""
        expect_defaults(type(self).__init__, pos_encoding_mode=pos_encoding_mode)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
            jit_args=JIT_ARGS_OF_SINKS,
        )
