"""Multi-head latent attention over a paged cache of latents."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._adapters import call_as, expect_defaults
from ..ops._call import check_bool, check_rank, to_int
from ._mla_plan import MLAPlanMetadata as MLAPlanMetadata
from ._mla_plan import Sequences, sequences_of_plan
from ._plan import check_planned, check_result_dtype, in_dtype, one_factor, refusal, results_of
from ._trtllm import trtllm_batch_decode_with_kv_cache_mla as trtllm_batch_decode_with_kv_cache_mla

# What the op calls the tensors of `run`.
PARTS = ("q_nope", "q_pe", "kv_c_cache", "k_pe_cache")


@dataclass(frozen=True)
class MlaPlan:
    """The sequences, and the shapes of what `run` gets."""

    sequences: Sequences
    shapes: tuple[tuple[int, int], ...]  # of q_nope, q_pe, ckv_cache and kpe_cache, behind the first dimension
    causal: bool
    sm_scale: float
    output_dtype: torch.dtype | None


class BatchMLAPagedAttentionWrapper:
    """Latent attention of the last tokens of each sequence, with absorbed weights."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        """The workspace, the backend, and the buffers, which are for CUDA graphs, have no effect. Raises ValueError for
        use_cuda_graph: a captured `run` would not see later plans."""
        expect_defaults(type(self).__init__, use_cuda_graph=use_cuda_graph)
        self._plan: MlaPlan | None = None

    def plan(
        self,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Says which pages the sequences of the next calls of `run` have: by offsets (the first four arguments), by
        tables (cum_seq_lens_q, block_tables, seq_lens), or by metadata, an `MLAPlanMetadata` of these.

        Args:
            qo_indptr: int32 [batch + 1], where the rows of each sequence begin.
            kv_indptr: int32 [batch + 1], where the pages of each sequence begin in `kv_indices`. More elements have no
                meaning.
            kv_indices: int32 or int64, kv_indptr[-1] pages or more.
            kv_len_arr: int32 [batch], tokens of each sequence, the rows' own included.
            cum_seq_lens_q, seq_lens: as qo_indptr and kv_len_arr.
            block_tables: int32 or int64 [batch, max_num_pages_per_seq].
            causal: whether a row sees no token after its own.
            sm_scale: of the heads before their weights were absorbed.
            output_dtype: fp32, fp16 or bf16; default that of the queries.

        Without effect, because `run` looks at its own arguments: the data types, query_layout, kv_cache_layout,
        lse_mode, max_q_len, enable_pdl, and the scale modes of bmm1_scale. Refused: use_profiler, output_scale,
        scale_mode="kv-per-tensor", skip_softmax and use_sinks. Raises ValueError and TypeError for lists that do not
        fit together, before anything of the plan before is replaced.
        """
        function = type(self).plan
        name = function.__qualname__
        expect_defaults(
            function, use_profiler=use_profiler, output_scale=output_scale, skip_softmax=skip_softmax,
            use_sinks=use_sinks,
        )  # fmt: skip
        if scale_mode not in ("bmm-scalar", "bmm-tensor"):
            expect_defaults(function, scale_mode=scale_mode)
        check_result_dtype(function, "output_dtype", output_dtype)
        sm_scale = one_factor(function, "sm_scale", sm_scale)  # type: ignore[arg-type]  # None is refused
        check_bool(name, "causal", causal)
        assert causal is not None
        num_heads, head_dim_ckv = to_int(name, "num_heads", num_heads), to_int(name, "head_dim_ckv", head_dim_ckv)
        head_dim_kpe, page_size = to_int(name, "head_dim_kpe", head_dim_kpe), to_int(name, "page_size", page_size)
        if page_size < 1:
            raise refusal(function, "page_size", "1 or more", page_size)
        lists = MLAPlanMetadata(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        )
        if lists.has_offsets() and lists.has_tables():
            raise refusal(function, "block_tables", "None beside offsets", "lists of both forms")
        if metadata is None and not (lists.has_offsets() or lists.has_tables()):
            raise refusal(function, "qo_indptr", "offsets, tables or metadata", None)
        if metadata is not None:
            if not isinstance(metadata, MLAPlanMetadata):
                raise TypeError(f"{name}: metadata: expected an MLAPlanMetadata, got {type(metadata).__name__}")
            if lists.has_offsets() or lists.has_tables():
                raise refusal(function, "metadata", "None beside lists", "an MLAPlanMetadata")
            lists = metadata
        self._plan = MlaPlan(
            sequences_of_plan(function, lists, page_size),
            tuple((size, width) for size in (num_heads, page_size) for width in (head_dim_ckv, head_dim_kpe)),
            causal,
            sm_scale,
            output_dtype,
        )

    def run(
        self,
        q_nope: Tensor | None = None,
        q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Tensor | tuple[Tensor, Tensor] | None = None,
        kv_cache: Tensor | tuple[Tensor, Tensor] | None = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | Tensor | None = None,
        bmm2_scale: float | Tensor | None = None,
    ) -> Any:
        """Attends as planned.

        Args:
            q_nope: [num_tokens, num_heads, head_dim_ckv]; q_pe: [num_tokens, num_heads, head_dim_kpe].
            ckv_cache: [num_pages, page_size, head_dim_ckv]; kpe_cache: [num_pages, page_size, head_dim_kpe]. Both may
                be slices of one tensor.
            out, lse: memory for the results.
            return_lse_base_on_e: the natural log; default the base is 2.
            query: in place of q_nope and q_pe, the pair of both, or one tensor [num_tokens, num_heads, head_dim_ckv +
                head_dim_kpe].
            kv_cache: in place of ckv_cache and kpe_cache, the pair of both, or one tensor.
            bmm1_scale, bmm2_scale: in place of sm_scale, and what the result is multiplied with; only together.

        Returns [num_tokens, num_heads, head_dim_ckv], with return_lse also the lse, fp32 [num_tokens, num_heads]. What
        is for other backends, or for fp8, is refused: profiler_buffer, kv_len, page_table, o_scale, ckv_scale,
        ckv_scale_arr, kpe_scale, sinks, skip_softmax_threshold_scale_factor.
        """
        function = type(self).run
        expect_defaults(
            function, profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale,
            ckv_scale=ckv_scale, ckv_scale_arr=ckv_scale_arr, kpe_scale=kpe_scale, sinks=sinks,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )  # fmt: skip
        plan = self._plan
        if plan is None:
            raise RuntimeError(f"{type(self).__name__}.run: expected a plan, got none: call plan() first")
        if (bmm1_scale is None) != (bmm2_scale is None):
            raise refusal(function, "bmm2_scale", "a scale with bmm1_scale, and None without", bmm2_scale)
        widths = [width for _, width in plan.shapes[:2]]
        parts = _parts(function, widths, "query", query, q_nope=q_nope, q_pe=q_pe)
        parts += _parts(function, widths, "kv_cache", kv_cache, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        names, tensors = zip(*parts, strict=True)
        check_planned(function, names, tensors, plan.shapes)
        sequences = plan.sequences
        attended, natural_lse = call_as(
            function, {"scale": "sm_scale"} | sequences.names | dict(zip(PARTS, names, strict=True)),
            ops.mla_attention, *tensors, sequences.block_tables, sequences.seq_lens,
            query_start_loc=sequences.query_start_loc, causal=plan.causal,
            scale=plan.sm_scale if bmm1_scale is None else one_factor(function, "bmm1_scale", bmm1_scale),
        )  # fmt: skip
        attended = in_dtype(attended, plan.output_dtype)
        factor = None if bmm2_scale is None else one_factor(function, "bmm2_scale", bmm2_scale)
        base = "ln" if return_lse_base_on_e else "log2"
        return results_of(function, attended, natural_lse, factor, out, lse, return_lse, base)


def _parts(
    function: Callable[..., Any], widths: list[int], name: str, whole: Any, **parts: Tensor | None
) -> list[tuple[str, Any]]:
    """The latent and the rotary part, each with what to call it: as they are given, or of `whole`, which is the pair of
    them or one tensor."""
    if whole is None:
        return list(parts.items())
    for part, tensor in parts.items():
        if tensor is not None:
            raise refusal(function, part, f"None beside {name}", "a tensor")
    if isinstance(whole, (tuple, list)):
        if len(whole) != 2:
            raise refusal(function, name, "a tensor or a pair", f"{len(whole)} elements")
        return [(name, part) for part in whole]
    check_rank(function.__qualname__, name, whole, 3)
    if whole.shape[2] != sum(widths):
        expected = f"{widths[0]} and {widths[1]} numbers in the last dimension, as planned"
        raise refusal(function, name, expected, whole.shape[2])
    return [(name, part) for part in whole.split(widths, 2)]
