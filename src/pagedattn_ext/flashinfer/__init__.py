"""FlashInfer's functions and wrappers on the ops of this package, on a CPU as on CUDA.

    from pagedattn_ext import flashinfer

    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout="NHD")
    decode.plan(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size)
    out = decode.run(q, paged_kv_cache)

Names, order, defaults and meaning of the arguments are those of FlashInfer 0.7.4. A paged cache is a pair (keys,
values) or one tensor [num_pages, 2, ...], with pages [page_size, num_kv_heads, head_dim] (NHD) or [num_kv_heads,
page_size, head_dim] (HND), of any page size. The lse has base 2. A row without keys gives zeros and an lse of -inf.

More than theirs: fp32, and dtypes that `plan` was not told, because `run` looks at its tensors.

Taken, and without effect: workspaces, backend, use_tensor_cores, use_fp16_qk_reduction and use_fp16_softmax, data
types but o_data_type, non_blocking, block_tables, seq_lens and all that says how to split the work, enable_pdl.

With use_cuda_graph a captured `run` sees later plans: in a `CPUGraph` on a CPU. Masks and positions are of one kind in
all plans of such a wrapper, and other options are those of the plan before the capture.

What costs more than in FlashInfer, because `run` makes copies for ops that have no such argument: masks, "ROPE_LLAMA",
"ALIBI" of rows that see later keys, and values of another width than the keys. `_ragged.py` says how much.

Refused, with a ValueError that names the argument: jit_args other than those of attention with sinks, all of multi-item
scoring, scales that differ by head or token, an output scale, block scales of 4-bit caches, "ALIBI" with
logits_soft_cap, a mask or sinks; of latent attention (`mla`) also use_cuda_graph, fp8, sinks, and what is for the
cutlass backend. Left out: sparse attention, quantization but for packed masks, norms and rotations, pipes of logits,
communication, mixtures of experts, top_k_varlen, gdn_decode, and the functions of one backend alone (cudnn, xqa, and
those of trtllm but the four in `_trtllm.py`).
"""

from typing import NoReturn

from . import concat_ops, mamba
from .activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from .attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from .cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from .decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from .gdn_prefill import chunk_gated_delta_rule
from .mla import BatchMLAPagedAttentionWrapper
from .norm import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_quant,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    layernorm_quant,
    rmsnorm,
    rmsnorm_quant,
)
from .page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from .prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from .quantization import packbits, segment_packbits
from .rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from .sampling import (
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from .topk import TopKTieBreak, top_k, top_k_page_table_transform, top_k_ragged_transform

__version__ = "0.7.4"  # of the FlashInfer whose functions these are

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "TopKTieBreak",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "chain_speculative_sampling",
    "chunk_gated_delta_rule",
    "concat_ops",
    "fast_decode_plan",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "get_batch_indices_positions",
    "get_seq_lens",
    "layernorm",
    "layernorm_quant",
    "mamba",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "min_p_sampling_from_probs",
    "mla_rope_quantize_fp8",
    "packbits",
    "rmsnorm",
    "rmsnorm_quant",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
    "sampling_from_logits",
    "sampling_from_probs",
    "segment_packbits",
    "silu_and_mul",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "softmax",
    "top_k",
    "top_k_mask_logits",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"pagedattn_ext.flashinfer: {name} is left out; it has {', '.join(__all__)}")
