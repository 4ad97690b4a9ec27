"""Attention of one new token of each sequence."""

from typing import Any

import torch
from torch import Tensor

from .._adapters import expect_defaults
from .._index_checks import check_indices
from ..ops._call import check_rank, check_tensors, to_int
from ._plan import Dtype, refusal, results_of
from ._single import attend_one
from ._trtllm import trtllm_batch_decode_with_kv_cache as trtllm_batch_decode_with_kv_cache
from ._trtllm import trtllm_batch_decode_with_kv_cache_mla as trtllm_batch_decode_with_kv_cache_mla
from ._wrapper import PagedWrapper
from .page import PagedCache


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """One new token of each sequence over its cached tokens."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """With use_cuda_graph a captured `run` sees later plans, which have the batch size of the buffers and at most
        the pages that paged_kv_indices_buffer holds. `plan` writes to the buffers. On a GPU, tables take 4 bytes for
        each sequence and each page of that buffer."""
        buffers = {
            "indptr": ("paged_kv_indptr_buffer", paged_kv_indptr_buffer),
            "indices": ("paged_kv_indices_buffer", paged_kv_indices_buffer),
            "last_page_len": ("paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer),
        }
        super().__init__(kv_layout, use_cuda_graph, buffers, jit_args)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype | None = "float16",
        kv_data_type: Dtype | None = None,
        o_data_type: Dtype | None = None,
        data_type: Dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Says which pages the sequences of the next calls of `run` have.

        Args:
            indptr: int32 [batch + 1], where the pages of each sequence begin in `indices`; on any device.
            indices: int32 or int64 [indptr[-1]], pages.
            last_page_len: int32 [batch], tokens in the last page of each sequence, the new one included.
            pos_encoding_mode: "NONE"; "ROPE_LLAMA", where `run` turns q, and copies of the keys, by their positions in
                the sequence; or "ALIBI", with slopes by the number of heads.
            window_left: tokens that a row sees before its own; -1 is all.
            logits_soft_cap: None or 0 is none.
            sm_scale: default head_dim ** -0.5.
            o_data_type: of the results, a dtype or its name; default that of q. The other data types have no effect.
            rope_scale, rope_theta: positions are divided by rope_scale, default 1; theta is 10000 by default.
            q_len_per_req: rows of each sequence in `run`, the last of its tokens.
        """
        q_len_per_req = to_int(type(self).plan.__qualname__, "q_len_per_req", q_len_per_req)
        expect_defaults(type(self).plan, window_right=window_right, use_token_head_sf=use_token_head_sf)
        if is_causal not in (None, q_len_per_req > 1):  # FlashInfer takes nothing else either
            raise refusal(type(self).plan, "is_causal", "None, or whether q_len_per_req is more than 1", is_causal)
        if q_len_per_req < 1:
            raise refusal(type(self).plan, "q_len_per_req", "1 or more", q_len_per_req)
        plan = self._new_plan(
            function=type(self).plan,
            query_shape=(num_qo_heads, head_dim),
            key_shape=(page_size, num_kv_heads, head_dim),
            value_shape=(page_size, num_kv_heads, head_dim),
            causal=True,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            o_data_type=o_data_type,
        )
        query_starts = None
        if q_len_per_req > 1:
            check_indices(type(self).plan, "indptr", indptr)
            query_starts = torch.arange(0, indptr.shape[0], dtype=torch.int32) * q_len_per_req
        made = self._made_of_pages(
            plan, query_starts, page_size, indptr=indptr, indices=indices, last_page_len=last_page_len
        )
        self._set_pages(made)
        self._q_len_per_req, self._num_rows = q_len_per_req, last_page_len.shape[0] * q_len_per_req

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Attention of q [batch * q_len_per_req, num_qo_heads, head_dim].

        Args:
            args: sinks and sm_scale, if the wrapper was made with the jit_args of attention with sinks.
            q_scale, k_scale, v_scale: what q, the keys and the values are multiplied with.
            out, lse: where the results go; allocated by default.
            window_left: in place of the plan's.
            sinks: fp32 [num_qo_heads], a logit more in the softmax's denominator.
            q_len_per_req: that of the plan.

        Returns:
            out, like q; with return_lse (out, lse), lse fp32 [batch * q_len_per_req, num_qo_heads] in base 2.
        """
        run = type(self).run
        if skip_softmax_threshold_scale_factor is not None or kv_cache_sf is not None:
            skip = {"skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor}
            expect_defaults(run, **skip, kv_cache_sf=kv_cache_sf)
        plan, sinks = self._plan_and_sinks(run, args, sinks, window_left)
        if q_len_per_req not in (None, self._q_len_per_req):
            raise refusal(run, "q_len_per_req", f"{self._q_len_per_req}, as planned", q_len_per_req)
        if self._q_len_per_req > 1:
            check_tensors(run.__qualname__, q=q)
            if q.shape[:1] != (self._num_rows,):
                raise refusal(run, "q", f"{self._num_rows} rows (batch * q_len_per_req)", f"shape {list(q.shape)}")
        results = {"out": out, "lse": lse, "return_lse": return_lse}
        return self._attend(run, q, paged_kv_cache, plan, (q_scale, k_scale, v_scale), sinks, results)

    begin_forward = plan

    def workspace_size(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype | None = "float16",
        kv_data_type: Dtype | None = None,
        o_data_type: Dtype | None = None,
        data_type: Dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> tuple[int, int]:
        """The bytes of both workspaces for a `plan` with these arguments: none."""
        return 0, 0

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
            "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
        }
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self._run_with(options, q, paged_kv_cache, **scales, return_lse=return_lse)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with use_cuda_graph."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = indptr_buffer, indices_buffer, last_page_len_buffer
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Dtype | None = None,
    kv_data_type: Dtype | None = None,
    data_type: Dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """`plan` of a decode wrapper, which callers put in its place: `partial(fast_decode_plan, wrapper)`.

    global_override_indptr_cpu: indptr on the CPU, in place of the one on a GPU.
    """
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self,
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        q_len_per_req=q_len_per_req,
    )


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one token, q [num_qo_heads, head_dim], over the tokens k and v [kv_len, num_kv_heads, head_dim]
    (HND: [num_kv_heads, kv_len, head_dim]). Returns out, like q; with return_lse (out, lse), lse [num_qo_heads]."""
    check_tensors("single_decode_with_kv_cache", q=q)
    check_rank("single_decode_with_kv_cache", "q", q, 2)
    out, lse = attend_one(
        single_decode_with_kv_cache,
        q[None],
        k,
        v,
        kv_layout,
        scales=(q_scale, k_scale),
        causal=True,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
    )
    lse = lse[0] if return_lse else lse
    return results_of(single_decode_with_kv_cache, out[0], lse, v_scale, None, None, return_lse)
