"""What FlashInfer's wrappers share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from .._adapters import call_as
from .._index_checks import check_page_lists, check_starts
from ..ops._call import call
from ._graph import Buffers, GraphMemory
from ._mask import Mask, mask_of
from ._plan import NAMES, Plan, Scale, in_dtype, one_factor, refusal, results_of
from ._ragged import RaggedBatch, attend_ragged, attend_to_values, with_alibi_of_flashinfer, with_dense_heads
from .page import PagedCache, check_layout, get_seq_lens, pages_of, tables_of


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What `plan` leaves for `run`."""

    plan: Plan
    mask: Mask | None
    batch: RaggedBatch | None = None  # None: `run` attends to the pages themselves

    def by(self, plan: Plan) -> Self:
        """The same sequences by this plan."""
        return replace(self, plan=plan, batch=self.batch_by(plan))

    def batch_by(self, plan: Plan) -> RaggedBatch | None:
        raise NotImplementedError

    @property
    def most_keys(self) -> int | None:
        """The keys of all later plans of a graph; None: at most those of the first plan."""
        return None


P = TypeVar("P", bound=Planned)


class Wrapper(Generic[P]):
    """What the wrappers share: a layout, one plan at a time, and older names."""

    run: Callable[..., Any]
    forward: Callable[..., Any]
    _current: P | None = None  # replaced as a whole, when all of a plan is made

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

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph is not None

    @property
    def _planned(self) -> P:
        if self._current is None:
            raise RuntimeError(f"{type(self).__name__}.run: expected a plan, got none: call plan() first")
        return self._current

    def _new_plan(self, **options: Any) -> Plan:
        plan = Plan(**options)
        if self._graph is not None:
            self._graph.check_kind(plan)
        return plan

    def _set_plan(self, planned: P) -> None:
        """Replaces the plan before."""
        if self._graph is not None:
            if planned.batch is not None:
                planned = replace(planned, batch=self._graph.keep_ragged(planned.batch, planned.most_keys))
            self._graph.first = self._graph.first or planned.plan
        self._current = planned

    def _batch_of(self, plan: Plan) -> RaggedBatch | None:
        """Of the plan, or of one that `run` has made of it."""
        planned = self._planned
        window_left = planned.plan.window_left
        if plan.window_left == window_left or planned.batch is None or planned.batch.visible is None:
            return planned.batch
        if self._graph is not None:
            expected = f"{window_left}, as planned, with use_cuda_graph"
            raise refusal(type(self).run, "window_left", expected, plan.window_left)
        return planned.batch_by(plan)

    def _run_with(self, options: dict[str, Any], *tensors: Any, **arguments: Any) -> Any:
        """The older `forward`: its options replace the plan's, unless `run` fails."""
        planned = self._planned
        of_plan = {field.name: getattr(planned.plan, field.name) for field in fields(Plan) if field.init}
        replaced = planned.by(self._new_plan(**of_plan | {"function": type(self).forward} | options))
        try:
            self._set_plan(replaced)
            return self.run(*tensors, **arguments)
        except BaseException:
            self._set_plan(planned if self._graph is None else planned.by(planned.plan))
            raise

    def _plan_and_sinks(
        self, function: Callable[..., Any], args: tuple[Any, ...], sinks: Tensor | None, window_left: int | None = None
    ) -> tuple[Plan, Tensor | None]:
        """What holds for one call of `run`.

        args: behind the tensors: of a wrapper with sinks, these and sm_scale.
        """
        plan = self._planned.plan
        if args:
            if not self._takes_sinks or len(args) != 2:
                expected = "sinks and sm_scale" if self._takes_sinks else "no more positional arguments"
                raise refusal(function, "args", expected, f"{len(args)} arguments")
            sinks, sm_scale = args
            plan = replace(plan, function=function, sm_scale=one_factor(function, "sm_scale", sm_scale))
        if self._takes_sinks and sinks is None:
            raise refusal(function, "sinks", "a tensor, by jit_args", None)
        if window_left is not None:
            plan = replace(plan, function=function, window_left=window_left)
        return plan, sinks

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


@dataclass(frozen=True, kw_only=True)
class PlannedPages(Planned):
    """The pages of each sequence, made of the lists of `plan`."""

    buffered: dict[str, Tensor]  # arguments of `plan` for the buffers of a graph
    query_starts: Tensor | None  # None: one row a sequence
    block_tables: Tensor
    seq_lens: Tensor
    names: dict[str, str]  # what the plan calls the arguments of the ops

    @property
    def starts(self) -> tuple[Tensor, Tensor]:
        """Where the rows and the keys of each sequence begin."""
        return starts_of(self.query_starts, self.seq_lens)

    @property
    def most_keys(self) -> int:
        return self.block_tables.shape[1] * self.plan.key_shape[0]

    def batch_by(self, plan: Plan) -> RaggedBatch | None:
        return self.batch_in_pages(plan) if is_ragged(plan) else None

    def batch_in_pages(self, plan: Plan) -> RaggedBatch:
        batch = RaggedBatch.of(plan, self.mask, *self.starts)
        return batch.in_pages(self.block_tables, page_size=plan.key_shape[0])


class PagedWrapper(Wrapper[PlannedPages]):
    """Of a paged cache."""

    _cache_name = "paged_kv_cache"  # an argument of `run`

    def _made_of_pages(
        self,
        plan: Plan,
        qo_indptr: Tensor | None,
        page_size: int,
        masks: tuple[Tensor | None, Tensor | None] = (None, None),  # custom_mask, packed_custom_mask
        **lists: Tensor,
    ) -> PlannedPages:
        """What `_set_pages` takes; lists are those of `check_page_lists`. Nothing of the plan before is written to."""
        function = plan.function
        check_page_lists(function, page_size, **lists)
        indptr, indices, last_page_len = lists.values()
        if qo_indptr is not None:
            check_starts(function, "qo_indptr", qo_indptr, num_seqs=indptr.shape[0] - 1)
        # Where the caller has them: offsets on the host make nobody wait for a GPU.
        most, total = int(indptr.diff().max()) if indptr.shape[0] > 1 else 0, int(indptr[-1])
        indptr, last_page_len = indptr.to(indices.device), last_page_len.to(indices.device)
        query_starts = None if qo_indptr is None else qo_indptr.to(indices.device)
        # last_page_len of a sequence without pages may be anything.
        seq_lens = get_seq_lens(indptr, last_page_len, page_size) * (indptr.diff() > 0)
        if self._graph is not None and query_starts is not None:
            # One sequence more, without keys, is for rows of `run` that no other sequence has.
            query_starts, seq_lens = torch.cat([query_starts, query_starts[-1:]]), pad(seq_lens, (0, 1))
        mask = mask_of(function, *masks, *starts_of(query_starts, seq_lens))

        _, of_indices, of_last_page_len = lists
        buffered = {}
        if self._graph is not None:
            buffered = lists if qo_indptr is None else lists | {"qo_indptr": qo_indptr}
            if is_ragged(plan):
                self._graph.check_ends(function, qo_indptr=starts_of(query_starts, seq_lens)[0])
            self._graph.check_sizes(function, buffered, may_be_shorter=of_indices)
        names = dict.fromkeys(("key", "value", "key_cache", "value_cache"), self._cache_name)
        names |= {"block_tables": of_indices, "seq_lens": of_last_page_len}
        return PlannedPages(
            plan=plan, mask=mask, buffered=buffered, query_starts=query_starts,
            block_tables=tables_of(indices, indptr, most, total), seq_lens=seq_lens, names=NAMES | names,
        ).by(plan)  # fmt: skip

    def _set_pages(self, made: PlannedPages) -> None:
        if self._graph is not None:
            self._graph.fill(made.buffered)
            room = self._graph.room(made.names["block_tables"])
            kept = self._graph.keep_pages(made.query_starts, made.block_tables, made.seq_lens, room)
            made = replace(made, query_starts=kept[0], block_tables=kept[1], seq_lens=kept[2])
        self._set_plan(made)

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
        planned, name = self._planned, self._cache_name
        key_cache, value_cache = pages_of(function, name, paged_kv_cache, self._kv_layout)
        plan.check_tensors(function, ("q", f"{name}: keys", f"{name}: values"), q, key_cache, value_cache)
        q_scale, k_scale, v_scale = scales
        options = plan.options(function, q_scale, k_scale, sinks, q.device)
        batch = self._batch_of(plan)
        width = plan.value_shape[-1]
        if batch is None and width < plan.key_shape[-1]:
            if begins(value_cache, key_cache):
                value_cache = key_cache
            elif self._graph is not None:
                expected = "values that are the start of the keys, or no narrower, with use_cuda_graph"
                raise refusal(function, name, expected, f"values of {width}")
            else:
                batch = planned.batch_in_pages(plan)
        if batch is None:
            attended, natural_lse = self._attend_to_pages(function, planned, plan, q, key_cache, value_cache, options)
            if attended.shape[-1] > width:
                attended = attended[..., :width]
        else:
            assert batch.tokens is not None
            pages, offsets = batch.tokens
            # The op checks the pages, here and at each replay.
            sizes = key_cache.shape[1], key_cache.shape[0]
            call_as(function, planned.names, ops.compute_slot_mapping, offsets, pages[:, None], *sizes)
            keys, values = key_cache[batch.tokens], value_cache[batch.tokens]  # copies
            attended, natural_lse = attend_ragged(function, planned.names, plan, batch, q, keys, values, options)
        attended = in_dtype(attended, plan.o_data_type)
        return results_of(function, attended, natural_lse, v_scale, **results)

    def _attend_to_pages(
        self,
        function: Callable[..., Any],
        planned: PlannedPages,
        plan: Plan,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        starts = planned.query_starts
        if self._graph is not None and starts is not None:
            starts[-1:].fill_(q.shape[0])
        of_op = options if starts is None else options | {"query_start_loc": starts}
        q = with_dense_heads(q)

        def attend(values: Tensor) -> Any:
            tensors = q, key_cache, values, planned.block_tables, planned.seq_lens
            return call_as(function, planned.names, call, "paged_attention", *tensors, **of_op)

        out, lse = attend_to_values(attend, value_cache, key_cache.shape[-1])
        if plan.pos_encoding_mode == "ALIBI":
            lse = with_alibi_of_flashinfer(lse, plan, options, *planned.starts)
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
