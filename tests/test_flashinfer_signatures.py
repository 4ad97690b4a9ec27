"""Names, order and defaults of the arguments of pagedattn_ext.flashinfer are those of FlashInfer 0.7."""

import inspect
from typing import Any

import pytest
import torch

from pagedattn_ext import flashinfer

EMPTY = inspect.Parameter.empty
PLAN_OF_PAGES = ["num_qo_heads", "num_kv_heads", "head_dim", "page_size"]
ROPE = {"rope_scale": None, "rope_theta": None}
DATA_TYPES = {"q_data_type": "float16", "kv_data_type": None, "o_data_type": None}
MASKS = {"custom_mask": None, "packed_custom_mask": None}
ITEMS = {"prefix_len_ptr": None, "token_pos_in_items_ptr": None, "token_pos_in_items_len": 0, "max_item_len_ptr": None}
SPLIT = {"fixed_split_size": None, "disable_split_kv": False}
SCALES = {"q_scale": None, "k_scale": None, "v_scale": None}
RESULTS = {"out": None, "lse": None, "return_lse": False}
LSE = {"lse_base": "log2", "lse_layout": "NH"}
TRTLLM_OUT = dict.fromkeys(("out", "out_dtype", "o_sf_scale", "o_sf_vec_size"))
TOP_K = {"deterministic": False, "tie_break": 0, "dsa_graph_safe": False}
LENGTHS = {"max_token_per_sequence": None, "max_sequence_kv": None}


def required(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, EMPTY)


# FlashInfer 0.7, in order.
SIGNATURES: dict[str, dict[str, Any]] = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__": {
        **required("self", "float_workspace_buffer"),
        "kv_layout": "NHD",
        "use_cuda_graph": False,
        "use_tensor_cores": False,
        "paged_kv_indptr_buffer": None,
        "paged_kv_indices_buffer": None,
        "paged_kv_last_page_len_buffer": None,
        "backend": "auto",
        "jit_args": None,
    },
    "BatchDecodeWithPagedKVCacheWrapper.plan": {
        **required("self", "indptr", "indices", "last_page_len", *PLAN_OF_PAGES),
        "pos_encoding_mode": "NONE",
        "window_left": -1,
        "logits_soft_cap": None,
        **DATA_TYPES,
        "data_type": None,
        "sm_scale": None,
        **ROPE,
        "non_blocking": True,
        "block_tables": None,
        "seq_lens": None,
        **SPLIT,
        "q_len_per_req": 1,
        "window_right": 0,
        "is_causal": None,
    },
    "BatchDecodeWithPagedKVCacheWrapper.run": {
        **required("self", "q", "paged_kv_cache", "args"),
        **SCALES,
        **RESULTS,
        "enable_pdl": None,
        "window_left": None,
        "sinks": None,
        "q_len_per_req": None,
        "skip_softmax_threshold_scale_factor": None,
        "kv_cache_sf": None,
    },
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__": {
        **required("self", "workspace_buffer", "indptr_buffer", "indices_buffer", "last_page_len_buffer"),
        "kv_layout": "NHD",
        "use_tensor_cores": False,
    },
    "fast_decode_plan": {
        **required("self", "indptr", "indices", "last_page_len", *PLAN_OF_PAGES),
        "pos_encoding_mode": "NONE",
        "window_left": -1,
        "logits_soft_cap": None,
        "q_data_type": None,
        "kv_data_type": None,
        "data_type": None,
        "sm_scale": None,
        **ROPE,
        "non_blocking": True,
        **SPLIT,
        "q_len_per_req": 1,
        "global_override_indptr_cpu": None,
    },
    "BatchPrefillWithPagedKVCacheWrapper.__init__": {
        **required("self", "float_workspace_buffer"),
        "kv_layout": "NHD",
        "use_cuda_graph": False,
        "qo_indptr_buf": None,
        "paged_kv_indptr_buf": None,
        "paged_kv_indices_buf": None,
        "paged_kv_last_page_len_buf": None,
        "custom_mask_buf": None,
        "mask_indptr_buf": None,
        "backend": "auto",
        "jit_args": None,
        "jit_kwargs": None,
        "variant_owns_mask": False,
    },
    "BatchPrefillWithPagedKVCacheWrapper.plan": {
        **required("self", "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
        **required("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"),
        "head_dim_vo": None,
        **MASKS,
        "causal": False,
        "pos_encoding_mode": "NONE",
        "use_fp16_qk_reduction": False,
        "sm_scale": None,
        "window_left": -1,
        "logits_soft_cap": None,
        **ROPE,
        **DATA_TYPES,
        "non_blocking": True,
        **ITEMS,
        "seq_lens": None,
        "seq_lens_q": None,
        "block_tables": None,
        **LENGTHS,
        **SPLIT,
        "uniform_q_len": None,
    },
    "BatchPrefillWithPagedKVCacheWrapper.run": {
        **required("self", "q", "paged_kv_cache", "args"),
        **SCALES,
        **RESULTS,
        **LSE,
        "enable_pdl": None,
        "window_left": None,
        "sinks": None,
        "kv_cache_sf": None,
        "skip_softmax_threshold_scale_factor": None,
        "use_fp16_softmax": None,
        "uses_spcompress": None,
    },
    "BatchPrefillWithRaggedKVCacheWrapper.run": {
        **required("self", "q", "k", "v", "args"),
        **SCALES,
        "o_scale": None,
        **RESULTS,
        **LSE,
        "enable_pdl": None,
        "kv_cache_sf": None,
    },
    "BatchPrefillWithRaggedKVCacheWrapper.plan": {
        **required("self", "qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk"),
        "head_dim_vo": None,
        **MASKS,
        "causal": False,
        "pos_encoding_mode": "NONE",
        "use_fp16_qk_reduction": False,
        "window_left": -1,
        "logits_soft_cap": None,
        "sm_scale": None,
        **ROPE,
        **DATA_TYPES,
        "non_blocking": True,
        **ITEMS,
        **SPLIT,
        "seq_lens": None,
        "seq_lens_q": None,
        **LENGTHS,
        "v_indptr": None,
        "o_indptr": None,
        "uniform_q_len": None,
    },
    "single_decode_with_kv_cache": {
        **required("q", "k", "v"),
        "kv_layout": "NHD",
        "pos_encoding_mode": "NONE",
        "use_tensor_cores": False,
        "q_scale": None,
        "k_scale": None,
        "v_scale": None,
        "window_left": -1,
        "logits_soft_cap": None,
        "sm_scale": None,
        **ROPE,
        "return_lse": False,
    },
    "single_prefill_with_kv_cache": {
        **required("q", "k", "v"),
        "scale_q": None,
        "scale_k": None,
        "scale_v": None,
        "o_dtype": None,
        **MASKS,
        "causal": False,
        "kv_layout": "NHD",
        "pos_encoding_mode": "NONE",
        "use_fp16_qk_reduction": False,
        "sm_scale": None,
        "window_left": -1,
        "logits_soft_cap": None,
        **ROPE,
        "backend": "auto",
        "return_lse": False,
        "kv_cache_sf": None,
        "k_scale": None,
        "v_scale": None,
    },
    "MultiLevelCascadeAttentionWrapper.__init__": {
        **required("self", "num_levels", "float_workspace_buffer"),
        "kv_layout": "NHD",
        "use_cuda_graph": False,
        "qo_indptr_buf_arr": None,
        "paged_kv_indptr_buf_arr": None,
        "paged_kv_indices_buf_arr": None,
        "paged_kv_last_page_len_buf_arr": None,
    },
    "MultiLevelCascadeAttentionWrapper.plan": {
        **required("self", "qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len"),
        **required(*PLAN_OF_PAGES),
        "causal": False,
        "pos_encoding_mode": "NONE",
        "use_fp16_qk_reduction": False,
        "sm_scale": None,
        "window_left": -1,
        "logits_soft_cap": None,
        **ROPE,
        "q_data_type": "float16",
        "kv_data_type": None,
    },
    "BatchAttention.plan": {
        **required("self", "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_qo_heads", "num_kv_heads"),
        **required("head_dim_qk", "head_dim_vo", "page_size"),
        "causal": False,
        "sm_scale": None,
        "logits_soft_cap": None,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
        "use_profiler": False,
    },
    "BatchMLAPagedAttentionWrapper.__init__": {
        **required("self", "float_workspace_buffer"),
        "use_cuda_graph": False,
        **dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")),
        "backend": "auto",
    },
    "BatchMLAPagedAttentionWrapper.plan": {
        **required("self", "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv"),
        **required("head_dim_kpe", "page_size", "causal", "sm_scale", "q_data_type", "kv_data_type"),
        "use_profiler": False,
    },
    "BatchMLAPagedAttentionWrapper.run": {
        **required("self", "q_nope", "q_pe", "ckv_cache", "kpe_cache"),
        **RESULTS,
        **dict.fromkeys(("profiler_buffer", "kv_len", "page_table")),
        "return_lse_base_on_e": False,
        **dict.fromkeys(("o_scale", "ckv_scale", "ckv_scale_arr", "kpe_scale")),
    },
    "packbits": required("x") | {"bitorder": "big"},
    "segment_packbits": required("x", "indptr") | {"bitorder": "big"},
    "append_paged_kv_cache": {
        **required("append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", "kv_indices"),
        **required("kv_indptr", "kv_last_page_len"),
        "kv_layout": "NHD",
    },
    "get_batch_indices_positions": {
        **required("append_indptr", "seq_lens", "nnz"),
        "batch_indices": None,
        "positions": None,
    },
    "get_seq_lens": required("kv_indptr", "kv_last_page_len", "page_size"),
    "merge_state": required("v_a", "s_a", "v_b", "s_b"),
    "merge_state_in_place": required("v", "s", "v_other", "s_other") | {"mask": None},
    "merge_states": required("v", "s"),
    "rmsnorm": required("input", "weight") | {"eps": 1e-6, "out": None, "enable_pdl": None},
    "fused_add_rmsnorm": required("input", "residual", "weight") | {"eps": 1e-6, "enable_pdl": None},
    "silu_and_mul": required("input") | {"out": None, "enable_pdl": None},
    "gelu_and_mul": required("input") | {"out": None, "enable_pdl": None},
    "gelu_tanh_and_mul": required("input") | {"out": None, "enable_pdl": None},
    "top_k": required("input", "k") | {"sorted": False} | TOP_K,
    "top_k_ragged_transform": required("input", "offsets", "lengths", "k") | TOP_K | {"row_starts": None},
    "top_k_page_table_transform": {
        **required("input", "src_page_table", "lengths", "k"),
        "row_to_batch": None,
        **TOP_K,
        **dict.fromkeys(("row_starts", "page_table_row_starts")),
        "page_size": 1,
        **dict.fromkeys(("out", "out_raw_indices")),
    },
    "decode.trtllm_batch_decode_with_kv_cache": {
        **required("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"),
        **{"bmm1_scale": 1.0, "bmm2_scale": 1.0, "window_left": -1, **TRTLLM_OUT, "sinks": None, "kv_layout": "HND"},
        **{"enable_pdl": None, "backend": "auto", "q_len_per_req": 1, "o_scale": 1.0},
        **dict.fromkeys(("mask", "max_q_len", "cum_seq_lens_q", "skip_softmax_threshold_scale_factor", "kv_cache_sf")),
        **{"uses_shared_paged_kv_idx": True, "lse": None, "return_lse": False, "bmm1_scale_log2": None},
        **{"multi_ctas_kv_counter_buffer": None, "enable_block_sparse_attention": False},
        "bf16q_fp8kv_transform_mode": None,
    },
    "prefill.trtllm_batch_context_with_kv_cache": {
        **required("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_q_len", "max_kv_len"),
        **required("bmm1_scale", "bmm2_scale", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv"),
        **{"window_left": -1, **TRTLLM_OUT, "kv_layout": "HND", "enable_pdl": None, "sinks": None},
        **{"kv_cache_sf": None, "skip_softmax_threshold_scale_factor": None, "uses_shared_paged_kv_idx": True},
        **{"causal": True, "lse": None, "return_lse": False, "multi_ctas_kv_counter_buffer": None},
        **{"use_fp16_softmax": None, "uses_spcompress": None},
    },
    "decode.trtllm_batch_decode_with_kv_cache_mla": {
        **required("query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
        **required("block_tables", "seq_lens", "max_seq_len"),
        **{"sparse_mla_top_k": 0, "out": None, "bmm1_scale": 1.0, "bmm2_scale": 1.0, "sinks": None},
        **{"skip_softmax_threshold_scale_factor": None, "enable_pdl": None, "backend": "auto", "is_var_seq": True},
        **{"uses_shared_paged_kv_idx": True, "lse": None, "return_lse": False, "cute_dsl_impl": "auto"},
        **{"kv_scale_format": "auto", "cum_seq_lens_q": None, "max_q_len": None, "multi_ctas_kv_counter_buffer": None},
        **{"sparse_mla_top_k_lens": None, "enable_dcp": False, "cp_world": 1, "cp_rank": 0},
        **{"causal_seqlens_kv_global": None, "use_fp16_softmax": None},
    },
    "prefill.trtllm_ragged_attention_deepseek": {
        **required("query", "key", "value", "workspace_buffer", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale"),
        **required("bmm2_scale", "o_sf_scale", "batch_size", "window_left", "cum_seq_lens_q", "cum_seq_lens_kv"),
        **required("enable_pdl", "is_causal", "return_lse"),
        **dict.fromkeys(("attention_sinks", "skip_softmax_threshold_scale_factor", "out", "lse")),
        **{"sage_attn_sfs": (None,) * 4, "num_elts_per_sage_attn_blk": (0,) * 4, "backend": "trtllm-gen"},
        **dict.fromkeys(("q_seq_lens_cpu", "kv_seq_lens_cpu", "use_fp16_softmax", "uses_spcompress")),
    },
    "concat_ops.concat_mla_k": required("k", "k_nope", "k_rope"),
    "chunk_gated_delta_rule": {
        **required("q", "k", "v"),
        **dict.fromkeys(("g", "beta", "scale", "initial_state")),
        "output_final_state": False,
        "cu_seqlens": None,
        "use_qk_l2norm_in_kernel": False,
        **dict.fromkeys(("output", "output_state", "state_checkpoints", "checkpoint_cu_starts")),
        "checkpoint_every_n_tokens": 0,
        "use_cp": "auto",
        **dict.fromkeys(("state_indices", "_cp_chunk_len")),
    },
    "mamba.selective_state_update": {
        **required("state", "x", "dt", "A", "B", "C", "D"),
        **{"z": None, "dt_bias": None, "dt_softplus": False, "state_batch_indices": None, "pad_slot_id": -1},
        **{"state_scale": None, "out": None, "disable_state_update": False},
        **dict.fromkeys(("intermediate_states_buffer", "intermediate_state_indices", "intermediate_state_scales")),
        **{"rand_seed": None, "philox_rounds": 10, "cache_steps": 0, "algorithm": "auto"},
        **dict.fromkeys(("dst_state_batch_indices", "cu_seqlens", "num_accepted_tokens")),
        "backend": "auto",
    },
    "apply_rope_with_cos_sin_cache_inplace": {
        **required("positions", "query", "key", "head_size", "cos_sin_cache"),
        "is_neox": True,
    },
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    function: Any = flashinfer
    for part in name.split("."):
        function = getattr(function, part)
    actual = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    assert list(actual.items()) == list(SIGNATURES[name].items())


def test_version() -> None:
    """Callers ask which functions are there by FlashInfer's version."""
    assert flashinfer.__version__.startswith("0.7.")
