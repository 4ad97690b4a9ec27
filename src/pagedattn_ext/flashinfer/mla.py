"""Multi-head latent attention over a paged cache of latents."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .. import ops
from .._adapters import call_as, expect_defaults
from .._index_checks import check_indices, check_starts
from ..ops._call import check_bool, to_int
from ._plan import check_planned, one_factor, refusal, results_of
from ._trtllm import trtllm_batch_decode_with_kv_cache_mla as trtllm_batch_decode_with_kv_cache_mla

# What FlashInfer calls the arguments of the op.
NAMES = {"kv_c_cache": "ckv_cache", "k_pe_cache": "kpe_cache", "block_tables": "kv_indices", "scale": "sm_scale"}
NAMES |= {"seq_lens": "kv_len_arr", "query_start_loc": "qo_indptr"}


@dataclass(frozen=True)
class MlaPlan:
    """Which pages the sequences have, and the shapes of what `run` gets."""

    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    shapes: dict[str, tuple[int, int]]  # of the tensors of `run`, behind the first dimension
    causal: bool
    sm_scale: float


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
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Says which pages the sequences of the next calls of `run` have.

        Args:
            qo_indptr: int32 [batch + 1], where the rows of each sequence begin.
            kv_indptr: int32 [batch + 1], where the pages of each sequence begin in `kv_indices`. More elements have no
                meaning.
            kv_indices: int32 or int64, kv_indptr[-1] pages or more.
            kv_len_arr: int32 [batch], tokens of each sequence, the rows' own included.
            causal: whether a row sees no token after its own.
            sm_scale: of the heads before their weights were absorbed.

        The data types have no effect: `run` looks at its tensors. Raises ValueError and TypeError for lists that do not
        fit together, before anything of the plan before is replaced.
        """
        function = type(self).plan
        expect_defaults(function, use_profiler=use_profiler)
        sm_scale = one_factor(function, "sm_scale", sm_scale)
        check_bool(function.__qualname__, "causal", causal)
        if to_int(function.__qualname__, "page_size", page_size) < 1:
            raise refusal(function, "page_size", "1 or more", page_size)
        check_indices(function, "kv_indices", kv_indices)
        for name, tensor in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), ("kv_len_arr", kv_len_arr)):
            check_indices(function, name, tensor)
        if qo_indptr.shape[0] == kv_len_arr.shape[0] + 1:
            kv_indptr = kv_indptr[: qo_indptr.shape[0]]
        check_starts(function, "kv_indptr", kv_indptr, largest=kv_indices.shape[0])
        batch = kv_indptr.shape[0] - 1
        check_starts(function, "qo_indptr", qo_indptr, batch)
        check_indices(function, "kv_len_arr", kv_len_arr, batch)
        num_pages = kv_indptr.diff().tolist()
        for sequence, (length, pages) in enumerate(zip(kv_len_arr.tolist(), num_pages, strict=True)):
            if not 0 <= length <= pages * page_size:
                most = f"0 to {pages * page_size}, the slots of {pages} pages,"
                raise refusal(function, "kv_len_arr", most, f"{length} at sequence {sequence}")
        lists = torch.split(kv_indices[: sum(num_pages)], num_pages)
        device = kv_indices.device
        self._plan = MlaPlan(
            pad_sequence(list(lists), batch_first=True) if batch else kv_indices.new_empty(0, 0),
            kv_len_arr.to(device),
            qo_indptr.to(device),
            {
                "q_nope": (num_heads, head_dim_ckv),
                "q_pe": (num_heads, head_dim_kpe),
                "ckv_cache": (page_size, head_dim_ckv),
                "kpe_cache": (page_size, head_dim_kpe),
            },
            causal,
            sm_scale,
        )

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Any:
        """Attends as planned.

        Args:
            q_nope: [num_tokens, num_heads, head_dim_ckv]; q_pe: [num_tokens, num_heads, head_dim_kpe].
            ckv_cache: [num_pages, page_size, head_dim_ckv]; kpe_cache: [num_pages, page_size, head_dim_kpe]. Both may
                be slices of one tensor.
            out, lse: memory for the results.
            return_lse_base_on_e: the natural log; default the base is 2.

        Returns [num_tokens, num_heads, head_dim_ckv], with return_lse also the lse, fp32 [num_tokens, num_heads]. What
        is for other backends, or for fp8, is refused: profiler_buffer, kv_len, page_table, and the scales.
        """
        function = type(self).run
        expect_defaults(
            function, profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale,
            ckv_scale=ckv_scale, ckv_scale_arr=ckv_scale_arr, kpe_scale=kpe_scale,
        )  # fmt: skip
        plan = self._plan
        if plan is None:
            raise RuntimeError(f"{type(self).__name__}.run: expected a plan, got none: call plan() first")
        tensors = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
        check_planned(function, tensors, tensors.values(), plan.shapes.values())
        attended, natural_lse = call_as(
            function, NAMES, ops.mla_attention, *tensors.values(), plan.block_tables, plan.seq_lens,
            query_start_loc=plan.query_start_loc, scale=plan.sm_scale, causal=plan.causal,
        )  # fmt: skip
        base = "ln" if return_lse_base_on_e else "log2"
        return results_of(function, attended, natural_lse, None, out, lse, return_lse, base)
