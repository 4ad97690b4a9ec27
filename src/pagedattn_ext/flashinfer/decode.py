"""Attention of one new token of each sequence."""

from typing import Any

from torch import Tensor

from .._adapters import expect_defaults
from ._wrapper import Dtype, PagedWrapper, Plan, attend_one, options_of, results_of, scale_of
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
    ) -> None:
        expect_defaults(type(self).__init__, use_cuda_graph=use_cuda_graph, jit_args=jit_args)
        super().__init__(kv_layout)

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
    ) -> None:
        """Says which pages the sequences of the next calls of `run` have.

        Args:
            indptr: int32 [batch + 1], where the pages of each sequence begin in `indices`; on any device.
            indices: int32 or int64 [indptr[-1]], pages.
            last_page_len: int32 [batch], tokens in the last page of each sequence, the new one included.
            window_left: tokens that a row sees before its own; -1 is all.
            logits_soft_cap: None or 0 is none.
            sm_scale: default head_dim ** -0.5.
        """
        expect_defaults(type(self).plan, pos_encoding_mode=pos_encoding_mode, q_len_per_req=q_len_per_req)
        lists = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        self._plan_pages(type(self).plan, None, page_size, **lists)
        shapes = (num_qo_heads, head_dim), (page_size, num_kv_heads, head_dim)
        self._planned = Plan(*shapes, True, window_left, logits_soft_cap, sm_scale)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Any:
        """Attention of q [batch, num_qo_heads, head_dim].

        Args:
            q_scale, k_scale, v_scale: what q, the keys and the values are multiplied with.
            out, lse: where the results go; allocated by default.
            window_left: in place of the plan's.
            sinks: fp32 [num_qo_heads], a logit more in the softmax's denominator.

        Returns:
            out, like q; with return_lse (out, lse), lse fp32 [batch, num_qo_heads] in base 2.
        """
        scales = q_scale, k_scale, v_scale
        return self._attend(type(self).run, q, paged_kv_cache, scales, window_left, sinks, out, lse, return_lse)

    begin_forward = plan

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
        """The older `run`, whose options replace the plan's."""
        options = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        self._replace_options(pos_encoding_mode, **options)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)


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
    expect_defaults(single_decode_with_kv_cache, pos_encoding_mode=pos_encoding_mode)
    scale = scale_of(sm_scale, q.shape[-1], q_scale, k_scale)
    options = options_of(scale, True, window_left, logits_soft_cap)
    out, lse = attend_one(single_decode_with_kv_cache, q[None], k, v, kv_layout, options)
    return results_of(single_decode_with_kv_cache, out[0], lse[0], v_scale, None, None, return_lse)
