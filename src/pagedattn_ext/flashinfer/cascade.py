"""Merges of attention over several sets of tokens, and attention over prefixes that sequences share.

The lse has base 2. An infinite lse, of either sign, belongs to an empty set.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._adapters import call_as, check_memory, check_real, check_shape, refuse_gradients
from ..ops._call import check_rank, check_tensors
from ._plan import Dtype, refusal
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .page import PagedCache
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of tokens, of two results (v [seq_len, num_heads, head_dim], s [seq_len, num_heads])."""
    return _merged(merge_state, v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """`merge_state` into v and s, of the rows that mask (bool [seq_len]) has."""
    merged, lse = _merged(merge_state_in_place, v=v, s=s, v_other=v_other, s_other=s_other)
    check_memory(merge_state_in_place, "v", v, merged.shape, merged.dtype, merged.device)
    check_memory(merge_state_in_place, "s", s, lse.shape, None, lse.device)
    if mask is None:
        v.copy_(merged)
        s.copy_(lse)
    else:
        check_shape(merge_state_in_place, "mask", mask, v.shape[:1])
        mask = mask.bool()
        v.copy_(torch.where(mask[:, None, None], merged, v))
        s.copy_(torch.where(mask[:, None], lse, s))


def _merged(function: Callable[..., Any], **states: Tensor) -> tuple[Tensor, Tensor]:
    """states: v, s, v, s, under the function's names."""
    check_tensors(function.__qualname__, **states)
    check_real(function, **states)
    v_a, s_a, v_b, s_b = states.values()
    names = dict(zip(("prefix_output", "prefix_lse", "suffix_output", "suffix_lse"), states, strict=True))
    tensors = v_a.contiguous(), s_a.float().contiguous(), v_b.contiguous(), s_b.float().contiguous()
    return call_as(function, names, ops.merge_attn_states, *tensors, lse_base=2.0)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_state` of any number of states: v [seq_len, num_states, num_heads, head_dim], s [seq_len, num_states,
    num_heads]."""
    check_tensors("merge_states", v=v, s=s)
    refuse_gradients(merge_states, v=v, s=s)
    check_real(merge_states, v=v, s=s)
    check_rank("merge_states", "v", v, 4)
    check_shape(merge_states, "s", s, v.shape[:-1])
    # One empty state more, for no states at all.
    s = torch.nn.functional.pad(_of_empty_sets(s), (0, 0, 0, 1), value=-math.inf)
    base = _base(s.amax(1))
    weights = (s - base[:, None]).exp2()
    total = weights.sum(1)
    shares = torch.where(weights == 0, 0, weights / total[:, None])[:, :-1, :, None]
    of_empty_sets = s[:, :-1, :, None] == -math.inf
    return torch.where(of_empty_sets, 0, shares * v).sum(1).to(v.dtype), total.log2() + base


# The arguments of the prefill wrapper with the rows and pages of a level.
OF_LEVEL = "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
OWN = {"indptr": "unique_kv_indptr", "indices": "unique_kv_indices", "last_page_len": "unique_kv_last_page_len"}
SHARED = {"k": "k_shared", "v": "v_shared"}
CACHE = {"paged_kv_cache": "unique_kv_cache"}


class MultiLevelCascadeAttentionWrapper:
    """The last rows of each sequence over cached tokens, which sequences share level by level.

    On a level a sequence is a run of rows that have the level's pages in common: on the first, for example, all rows,
    and on the last the rows of one sequence each. Source: Ye et al., "Cascade Inference: Memory Bandwidth Efficient
    Shared Prefix Batch Decoding", 2024.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        """Of a level each list of buffers has that of the prefill wrapper."""
        names = [f"{name}_buf" for name in OF_LEVEL]
        arrays = qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr
        levels: list[dict[str, Any]] = [{} for _ in range(num_levels)]
        if use_cuda_graph:
            for name, buffers in zip(names, arrays, strict=True):
                _check_levels(type(self).__init__, f"{name}_arr", buffers, num_levels)
                for level, buffer in zip(levels, buffers or [], strict=True):
                    level[name] = buffer
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, **level)
            for level in levels
        ]
        self.is_cuda_graph_enabled = use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: list[Tensor]) -> None:
        """Does nothing: there is no workspace."""

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """`plan` of the prefill wrapper for each level, from lists with a tensor for each level. Only the last level is
        causal. On each level positions and windows count the tokens of that level alone, as in FlashInfer."""
        lists = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, tensors in lists.items():
            _check_levels(type(self).plan, name, tensors, len(self._wrappers))
        made = []
        for level, (wrapper, starts, *pages) in enumerate(zip(self._wrappers, *lists.values(), strict=True)):
            plan = wrapper._new_plan(
                function=type(self).plan,
                query_shape=(num_qo_heads, head_dim),
                key_shape=(page_size, num_kv_heads, head_dim),
                value_shape=(page_size, num_kv_heads, head_dim),
                causal=causal and level == len(self._wrappers) - 1,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
            )
            names = {of_level: f"{name}[{level}]" for of_level, name in zip(OF_LEVEL, lists, strict=True)}
            of_pages = dict(zip(OF_LEVEL[1:], pages, strict=True))
            make = wrapper._made_of_pages
            made.append(call_as(type(self).plan, names, make, plan, starts, page_size, (None, None), **of_pages))
        for wrapper, level_made in zip(self._wrappers, made, strict=True):
            wrapper._set_pages(level_made)

    def run(self, q: Tensor, paged_kv_cache: PagedCache) -> Tensor:
        """Attention of q [num_rows, num_qo_heads, head_dim], like q."""
        out, lse = self._wrappers[-1].run(q, paged_kv_cache, return_lse=True)
        for wrapper in self._wrappers[:-1]:
            out, lse = merge_state(out, lse, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return out

    begin_forward = plan
    forward = run

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: there is nothing to compile."""


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """The older form for one new token of each sequence: a prefix that all share, and pages of their own."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._own = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: there is no workspace."""

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Dtype = "float16",
    ) -> None:
        """`plan` of the decode wrapper, of the pages behind the prefix."""
        pages = unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        call_as(type(self).begin_forward, OWN, self._own.plan, *pages, *sizes)

    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: PagedCache) -> Tensor:
        """Attention of q [batch, num_qo_heads, head_dim] over k_shared and v_shared [prefix_len, num_kv_heads,
        head_dim] (HND: [num_kv_heads, prefix_len, head_dim]) and then the pages; like q."""
        options: dict[str, Any] = {"kv_layout": self._kv_layout, "return_lse": True}
        forward = type(self).forward
        prefix = call_as(forward, SHARED, single_prefill_with_kv_cache, q, k_shared, v_shared, **options)
        own = call_as(forward, CACHE, self._own.run_return_lse, q, unique_kv_cache)
        return merge_state(*prefix, *own)[0]


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """The older form for the last rows of each sequence: a prefix that all share, and pages of their own."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._own = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: there is no workspace."""

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """`plan` of the prefill wrapper, of the pages behind the prefix."""
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        call_as(type(self).begin_forward, {}, self._own.plan, qo_indptr, *pages, *sizes)

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: PagedCache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Attention of q [num_rows, num_qo_heads, head_dim]; the rest as in the wrapper of one new token. causal is for
        the pages."""
        options: dict[str, Any] = {"kv_layout": self._kv_layout, "sm_scale": sm_scale, "return_lse": True}
        forward = type(self).forward
        prefix = call_as(forward, SHARED, single_prefill_with_kv_cache, q, k_shared, v_shared, **options)
        own = call_as(
            forward, CACHE, self._own.forward_return_lse, q, unique_kv_cache, causal=causal, sm_scale=sm_scale
        )
        return merge_state(*prefix, *own)[0]


def _of_empty_sets(s: Tensor) -> Tensor:
    """fp32, -inf where the set is empty."""
    return s.float().masked_fill(s.isinf(), -math.inf)


def _base(largest: Tensor) -> Tensor:
    """What is taken off each lse before it is an exponent, so that an lse of any size keeps its differences."""
    return largest.masked_fill(largest.isinf(), 0)


def _check_levels(function: Callable[..., Any], name: str, tensors: list[Tensor] | None, num_levels: int) -> None:
    if tensors is None or len(tensors) != num_levels:
        got = None if tensors is None else len(tensors)
        raise refusal(function, name, f"{num_levels} tensors, one for each level", got)
