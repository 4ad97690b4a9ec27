"""What FlashInfer's wrappers share."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from .._adapters import call_as, refuse_bools
from .._index_checks import check_page_lists, check_starts
from ..ops._call import call
from ._graph import Buffers, GraphMemory
from ._mask import Mask, mask_of
from ._plan import NAMES, Plan, Scale, in_dtype, refusal, results_of
from ._ragged import RaggedBatch, attend_ragged, attend_to_values, with_alibi_of_flashinfer, with_dense_heads
from .page import PagedCache, check_layout, get_seq_lens, pages_of


class Wrapper:
    """What the wrappers share: a layout, one plan at a time, and older names."""

    run: Callable[..., Any]
    forward: Callable[..., Any]
    _mask: Mask | None
    _batch: RaggedBatch | None  # None: `run` attends to the pages themselves

    def __init__(
        self, kv_layout: str, use_cuda_graph: bool, buffers: Buffers, jit_args: Sequence[Any] | None = None
    ) -> None:
        """buffers: those that use_cuda_graph needs."""
        check_layout(type(self), kv_layout)
        self._kv_layout = kv_layout
        self._takes_sinks = jit_args is not None
        if jit_args is not None:
            names = [list(part) for part in (*jit_args[7:8], *jit_args[9:10])]  # of additional tensors and scalars
            if names != [["sink"], ["sm_scale"]]:
                raise refusal(type(self).__init__, "jit_args", "those of attention with sinks, or None", names)
        self._graph = GraphMemory(type(self).__init__, buffers) if use_cuda_graph else None
        self._int_workspace_buffer = torch.empty(0)  # callers make wrappers share it
        self._planned: Plan | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph is not None

    @property
    def _plan(self) -> Plan:
        if self._planned is None:
            raise RuntimeError(f"{type(self).__name__}.run: expected a plan, got none: call plan() first")
        return self._planned

    def _new_plan(self, **options: Any) -> Plan:
        plan = Plan(**options)
        if self._graph is not None:
            self._graph.check_kind(plan)
        return plan

    def _set_plan(self, plan: Plan, mask: Mask | None) -> None:
        self._mask = mask
        self._batch = self._ragged_batch(plan)
        self._planned = plan
        if self._graph is not None:
            self._graph.first = self._graph.first or plan

    def _ragged_batch(self, plan: Plan) -> RaggedBatch | None:
        raise NotImplementedError

    def _batch_of(self, plan: Plan) -> RaggedBatch | None:
        """Of the plan, or of one that `run` has made of it."""
        if plan.window_left == self._plan.window_left or self._batch is None or self._batch.visible is None:
            return self._batch
        if self._graph is not None:
            planned = self._plan.window_left
            raise refusal(
                type(self).run, "window_left", f"{planned}, as planned, with use_cuda_graph", plan.window_left
            )
        return self._ragged_batch(plan)

    def _replace_options(self, **options: Any) -> None:
        """What the older `forward` does before it runs: its options replace the plan's."""
        of_plan = {field.name: getattr(self._plan, field.name) for field in fields(Plan) if field.init}
        self._set_plan(self._new_plan(**of_plan | {"function": type(self).forward} | options), self._mask)

    def _plan_and_sinks(
        self, function: Callable[..., Any], args: tuple[Any, ...], sinks: Tensor | None, window_left: int | None = None
    ) -> tuple[Plan, Tensor | None]:
        """What holds for one call of `run`.

        args: behind the tensors: of a wrapper with sinks, these and sm_scale.
        """
        plan = self._plan
        if args:
            if not self._takes_sinks or len(args) != 2:
                expected = "sinks and sm_scale" if self._takes_sinks else "no more positional arguments"
                raise refusal(function, "args", expected, f"{len(args)} arguments")
            sinks, sm_scale = args
            refuse_bools(function, sm_scale=sm_scale)
            plan = replace(plan, sm_scale=float(sm_scale))
        if self._takes_sinks and sinks is None:
            raise refusal(function, "sinks", "a tensor, by jit_args", None)
        return (plan if window_left is None else replace(plan, window_left=window_left)), sinks

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: there is no workspace."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: there is nothing to compile."""

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
        self,
        plan: Plan,
        qo_indptr: Tensor | None,
        page_size: int,
        masks: tuple[Tensor | None, Tensor | None] = (None, None),  # custom_mask, packed_custom_mask
        **lists: Tensor,
    ) -> None:
        """lists: those of `check_page_lists`. All is checked before anything of the plan before is written to."""
        function = plan.function
        check_page_lists(function, page_size, **lists)
        indptr, indices, last_page_len = lists.values()
        if qo_indptr is not None:
            check_starts(function, "qo_indptr", qo_indptr, num_seqs=indptr.shape[0] - 1)
        indptr, last_page_len = indptr.to(indices.device), last_page_len.to(indices.device)
        query_starts = None if qo_indptr is None else qo_indptr.to(indices.device)
        num_pages = int(indptr.diff().max()) if indptr.shape[0] > 1 else 0
        entries = indptr[:-1, None] + torch.arange(num_pages, device=indices.device)
        # Behind a list's own pages stand any others.
        block_tables = indices[entries.clamp(max=indices.shape[0] - 1)]
        # last_page_len of a sequence without pages may be anything.
        seq_lens = get_seq_lens(indptr, last_page_len, page_size) * (indptr.diff() > 0)
        mask = mask_of(function, *masks, *starts_of(query_starts, seq_lens))

        _, of_indices, of_last_page_len = lists
        if self._graph is not None:
            given = lists if qo_indptr is None else lists | {"qo_indptr": qo_indptr}
            if is_ragged(plan):
                self._graph.check_ends(function, qo_indptr=starts_of(query_starts, seq_lens)[0])
            self._graph.fill(function, given, may_be_shorter=of_indices)
            room = self._graph.room(of_indices)
            query_starts, block_tables, seq_lens = self._graph.keep_pages(query_starts, block_tables, seq_lens, room)
        self._query_starts, self._block_tables, self._seq_lens = query_starts, block_tables, seq_lens
        self._names = NAMES | {"block_tables": of_indices, "seq_lens": of_last_page_len}
        self._set_plan(plan, mask)

    def _ragged_batch(self, plan: Plan) -> RaggedBatch | None:
        if not is_ragged(plan):
            return None
        batch = self._batch_in_pages(plan)
        if self._graph is None:
            return batch
        return self._graph.keep_ragged(batch, num_keys=self._block_tables.shape[1] * plan.key_shape[0])

    def _batch_in_pages(self, plan: Plan) -> RaggedBatch:
        batch = RaggedBatch.of(plan, self._mask, *starts_of(self._query_starts, self._seq_lens))
        return batch.in_pages(self._block_tables, page_size=plan.key_shape[0])

    def _attend(
        self,
        function: Callable[..., Any],
        q: Tensor,
        paged_kv_cache: PagedCache,
        plan: Plan,
        scales: tuple[Scale, Scale, Scale],  # of q, k, v
        sinks: Tensor | None,
        results: dict[str, Any],  # arguments of `results_of`
    ) -> Any:
        key_cache, value_cache = pages_of(function, "paged_kv_cache", paged_kv_cache, self._kv_layout)
        plan.check_tensors(function, q=q, keys=key_cache, values=value_cache)
        q_scale, k_scale, v_scale = scales
        options = plan.options(function, q_scale, k_scale, sinks, q.device)
        batch = self._batch_of(plan)
        width = plan.value_shape[-1]
        if batch is None and width < plan.key_shape[-1]:
            if begins(value_cache, key_cache):
                value_cache = key_cache
            elif self._graph is not None:
                raise refusal(function, "values", "the start of the keys, or no narrower, with use_cuda_graph", width)
            else:
                batch = self._batch_in_pages(plan)
        if batch is None:
            attended, natural_lse = self._attend_to_pages(function, plan, q, key_cache, value_cache, options)
            if attended.shape[-1] > width:
                attended = attended[..., :width]
        else:
            assert batch.tokens is not None
            pages, offsets = batch.tokens
            # The op checks the pages, here and at each replay.
            sizes = key_cache.shape[1], key_cache.shape[0]
            call_as(function, self._names, ops.compute_slot_mapping, offsets, pages[:, None], *sizes)
            keys, values = key_cache[batch.tokens], value_cache[batch.tokens]  # copies
            attended, natural_lse = attend_ragged(function, self._names, plan, batch, q, keys, values, options)
        attended = in_dtype(attended, plan.o_data_type)
        return results_of(function, attended, natural_lse, v_scale, **results)

    def _attend_to_pages(
        self,
        function: Callable[..., Any],
        plan: Plan,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        if self._graph is not None and self._query_starts is not None:
            self._query_starts[-1:].fill_(q.shape[0])
        of_op = options if self._query_starts is None else options | {"query_start_loc": self._query_starts}
        q = with_dense_heads(q)

        def attend(values: Tensor) -> Any:
            tensors = q, key_cache, values, self._block_tables, self._seq_lens
            return call_as(function, self._names, call, "paged_attention", *tensors, **of_op)

        out, lse = attend_to_values(attend, value_cache, key_cache.shape[-1])
        if plan.pos_encoding_mode == "ALIBI":
            starts = starts_of(self._query_starts, self._seq_lens)
            lse = with_alibi_of_flashinfer(lse, plan, options, *starts)
        return out, lse


def is_ragged(plan: Plan) -> bool:
    """Whether the plan says what only `attend_ragged` can."""
    return plan.has_mask or plan.pos_encoding_mode == "ROPE_LLAMA" or plan.biases_future


def starts_of(query_starts: Tensor | None, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Where the rows and the keys of each sequence begin. query_starts: None is one row a sequence."""
    key_starts = pad(seq_lens.cumsum(0), (1, 0))
    if query_starts is None:
        query_starts = torch.arange(key_starts.shape[0], device=key_starts.device)
    return query_starts, key_starts


def begins(value: Tensor, key: Tensor) -> bool:
    """Whether the heads of the values are the start of those of the keys, in the same memory."""
    return value.data_ptr() == key.data_ptr() and value.stride() == key.stride()
