"""What FlashInfer means in the terms of the ops, and what its wrappers share."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._adapters import call_as, expect_defaults, window_of
from .._index_checks import check_page_lists, check_result, check_starts
from .page import PagedCache, check_layout, get_seq_lens, pages_of

Scale = float | Tensor | None
Dtype = str | torch.dtype


def scale_of(sm_scale: float | None, head_dim: int, *factors: Scale) -> float:
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    for factor in factors:
        if factor is not None:
            scale *= float(factor)
    return scale


def options_of(scale: float, causal: bool, window_left: int, logits_soft_cap: float | None) -> dict[str, Any]:
    """Keyword arguments of the attention ops."""
    sliding_window, softcap = window_of(window_left), logits_soft_cap or 0.0
    return {"scale": scale, "causal": causal, "sliding_window": sliding_window, "softcap": softcap}


def results_of(
    function: Callable[..., Any],
    attended: Tensor,
    natural_lse: Tensor,
    v_scale: Scale,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
) -> Any:
    """What `run` returns, of the results of the op."""
    check_result(function, "out", out, attended)
    check_result(function, "lse", lse, natural_lse)
    if v_scale is not None:
        attended = attended.mul_(v_scale)
    attended = attended if out is None else out.copy_(attended)
    if not return_lse:
        return attended
    binary_lse = natural_lse * math.log2(math.e)
    return attended, binary_lse if lse is None else lse.copy_(binary_lse)


# What FlashInfer calls the arguments of the ops.
NAMES = {"query": "q", "key": "k", "value": "v", "key_cache": "paged_kv_cache", "value_cache": "paged_kv_cache"}
NAMES |= {"scale": "sm_scale", "sliding_window": "window_left", "softcap": "logits_soft_cap"}
NAMES |= {"query_start_loc": "qo_indptr", "key_start_loc": "kv_indptr"}


@dataclass(frozen=True)
class Plan:
    """What `plan` says of the batches that `run` gets."""

    query_shape: tuple[int, int]  # num_qo_heads, head_dim
    key_shape: tuple[int, ...]  # of a page [page_size, num_kv_heads, head_dim], or of a ragged batch without page_size
    causal: bool
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None

    def options(self, q_scale: Scale, k_scale: Scale) -> dict[str, Any]:
        scale = scale_of(self.sm_scale, self.query_shape[1], q_scale, k_scale)
        return options_of(scale, self.causal, self.window_left, self.logits_soft_cap)

    def check_shapes(self, function: Callable[..., Any], q: Tensor, key: Tensor) -> None:
        for name, tensor, shape in (("q", q, self.query_shape), ("keys", key, self.key_shape)):
            if tensor.shape[1:] != shape:
                planned = ", ".join(map(str, ("*", *shape)))
                raise ValueError(
                    f"{function.__qualname__}: {name}: expected shape [{planned}], as planned, got {list(tensor.shape)}"
                )


class Wrapper:
    """What the wrappers share: a layout, one plan at a time, and older names."""

    run: Callable[..., Any]
    forward: Callable[..., Any]

    def __init__(self, kv_layout: str) -> None:
        check_layout(type(self), kv_layout)
        self._kv_layout = kv_layout
        self._int_workspace_buffer = torch.empty(0)  # callers make wrappers share it
        self._planned: Plan | None = None

    @property
    def _plan(self) -> Plan:
        if self._planned is None:
            raise RuntimeError(f"{type(self).__name__}.run: expected a plan, got none: call plan() first")
        return self._planned

    def _replace_options(self, pos_encoding_mode: str, **options: Any) -> None:
        """What the older `forward` does before it runs: its options replace the plan's."""
        expect_defaults(type(self).forward, pos_encoding_mode=pos_encoding_mode)
        self._planned = replace(self._plan, **options)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: there is no workspace."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """(out, lse) of `run`."""
        return self.run(*args, **kwargs, return_lse=True)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """(out, lse) of `forward`."""
        return self.forward(*args, **kwargs, return_lse=True)


class PagedWrapper(Wrapper):
    """Of a paged cache: its block tables, made of the page lists of `plan`."""

    _query_starts: Tensor | None  # None: one row a sequence
    _block_tables: Tensor
    _seq_lens: Tensor
    _names: dict[str, str]  # what the last plan calls the arguments of the ops

    def _plan_pages(
        self, function: Callable[..., Any], qo_indptr: Tensor | None, page_size: int, **lists: Tensor
    ) -> None:
        """lists: those of `check_page_lists`."""
        check_page_lists(function, page_size, **lists)
        indptr, indices, last_page_len = lists.values()
        if qo_indptr is not None:
            check_starts(function, "qo_indptr", qo_indptr, num_seqs=indptr.shape[0] - 1)
        _, of_indices, of_last_page_len = lists
        self._names = NAMES | {"block_tables": of_indices, "seq_lens": of_last_page_len}
        indptr, last_page_len = indptr.to(indices.device), last_page_len.to(indices.device)
        self._query_starts = None if qo_indptr is None else qo_indptr.to(indices.device)
        num_pages = int(indptr.diff().max()) if indptr.shape[0] > 1 else 0
        entries = indptr[:-1, None] + torch.arange(num_pages, device=indices.device)
        # Behind a list's own pages stand any others.
        self._block_tables = indices[entries.clamp(max=indices.shape[0] - 1)]
        # last_page_len of a sequence without pages may be anything.
        self._seq_lens = get_seq_lens(indptr, last_page_len, page_size) * (indptr.diff() > 0)

    def _attend(
        self,
        function: Callable[..., Any],
        q: Tensor,
        paged_kv_cache: PagedCache,
        scales: tuple[Scale, Scale, Scale],  # of q, k, v
        window_left: int | None,
        sinks: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
    ) -> Any:
        plan = self._plan if window_left is None else replace(self._plan, window_left=window_left)
        key_cache, value_cache = pages_of(paged_kv_cache, self._kv_layout)
        plan.check_shapes(function, q, key_cache)
        q_scale, k_scale, v_scale = scales
        attended, natural_lse = call_as(
            function,
            self._names,
            ops.paged_attention,
            q,
            key_cache,
            value_cache,
            self._block_tables,
            self._seq_lens,
            query_start_loc=self._query_starts,
            sinks=sinks,
            **plan.options(q_scale, k_scale),
        )
        return results_of(function, attended, natural_lse, v_scale, out, lse, return_lse)


def attend_one(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, kv_layout: str, options: dict[str, Any]
) -> Any:
    """The last rows of one sequence, which is a page."""
    check_layout(function, kv_layout)
    key_cache, value_cache = pages_of((k[None], v[None]), kv_layout)
    lengths = torch.tensor([[0, q.shape[0]], [0, key_cache.shape[1]]], dtype=torch.int32, device=q.device)
    names = NAMES | {"key_cache": "k", "value_cache": "v"}
    tables = lengths[:1, :1], lengths[1, 1:]
    return call_as(
        function, names, ops.paged_attention, q, key_cache, value_cache, *tables, query_start_loc=lengths[0], **options
    )
