"""Names, order and defaults of the arguments of pagedattn_ext.flashinfer are those of FlashInfer 0.7.4."""

import inspect
from typing import Any

import pytest
import torch

from pagedattn_ext import flashinfer

EMPTY = inspect.Parameter.empty


def required(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, EMPTY)


# FlashInfer 0.7.4, in order, as its wheel has them. "*" stands before what is taken by keyword alone. For `plan` of the
# decode wrapper, this is the order that its deprecated positional arguments have.
SIGNATURES: dict[str, dict[str, Any]] = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__": {
        **required("self", "float_workspace_buffer"),
        **{"kv_layout": "NHD", "use_cuda_graph": False, "use_tensor_cores": False, "paged_kv_indptr_buffer": None},
        **{"paged_kv_indices_buffer": None, "paged_kv_last_page_len_buffer": None, "backend": "auto"},
        **{"jit_args": None, "jit_kwargs": None},
    },
    "BatchDecodeWithPagedKVCacheWrapper.plan": {
        **required("self", "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim"),
        **required("page_size"),
        **{"pos_encoding_mode": "NONE", "window_left": -1, "logits_soft_cap": None, "q_data_type": "float16"},
        **dict.fromkeys(("kv_data_type", "o_data_type", "data_type", "sm_scale", "rope_scale", "rope_theta")),
        **{"non_blocking": True, "block_tables": None, "seq_lens": None, "fixed_split_size": None},
        **{"disable_split_kv": False, "q_len_per_req": 1},
        **required("*"),
        **{"window_right": 0, "is_causal": None, "use_token_head_sf": False},
    },
    "BatchDecodeWithPagedKVCacheWrapper.run": {
        **required("self", "q", "paged_kv_cache", "args"),
        **dict.fromkeys(("q_scale", "k_scale", "v_scale", "out", "lse")),
        **{"return_lse": False},
        **dict.fromkeys(("enable_pdl", "window_left", "sinks", "q_len_per_req")),
        **dict.fromkeys(("skip_softmax_threshold_scale_factor", "kv_cache_sf")),
    },
    "BatchDecodeWithPagedKVCacheWrapper.workspace_size": {
        **required("self", "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim"),
        **required("page_size"),
        **{"pos_encoding_mode": "NONE", "window_left": -1, "logits_soft_cap": None, "q_data_type": "float16"},
        **dict.fromkeys(("kv_data_type", "o_data_type", "data_type", "sm_scale", "rope_scale", "rope_theta")),
        **dict.fromkeys(("block_tables", "seq_lens", "fixed_split_size")),
        **{"disable_split_kv": False, "q_len_per_req": 1},
    },
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__": {
        **required("self", "workspace_buffer", "indptr_buffer", "indices_buffer", "last_page_len_buffer"),
        **{"kv_layout": "NHD", "use_tensor_cores": False},
    },
    "fast_decode_plan": {
        **required("self", "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim"),
        **required("page_size"),
        **{"pos_encoding_mode": "NONE", "window_left": -1},
        **dict.fromkeys(("logits_soft_cap", "q_data_type", "kv_data_type", "data_type", "sm_scale", "rope_scale")),
        **{"rope_theta": None},
        **{"non_blocking": True, "fixed_split_size": None, "disable_split_kv": False, "q_len_per_req": 1},
        **{"global_override_indptr_cpu": None},
    },
    "BatchPrefillWithPagedKVCacheWrapper.__init__": {
        **required("self", "float_workspace_buffer"),
        **{"kv_layout": "NHD", "use_cuda_graph": False},
        **dict.fromkeys(("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf")),
        **dict.fromkeys(("paged_kv_last_page_len_buf", "custom_mask_buf", "mask_indptr_buf")),
        **{"backend": "auto", "jit_args": None, "jit_kwargs": None, "variant_owns_mask": False},
        **{"max_total_num_rows": None},
    },
    "BatchPrefillWithPagedKVCacheWrapper.plan": {
        **required("self", "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
        **required("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"),
        **{"head_dim_vo": None, "custom_mask": None, "packed_custom_mask": None, "causal": False},
        **{"pos_encoding_mode": "NONE", "use_fp16_qk_reduction": False, "sm_scale": None, "window_left": -1},
        **{"logits_soft_cap": None, "rope_scale": None, "rope_theta": None, "q_data_type": "float16"},
        **{"kv_data_type": None, "o_data_type": None, "non_blocking": True, "prefix_len_ptr": None},
        **{"token_pos_in_items_ptr": None, "token_pos_in_items_len": 0},
        **dict.fromkeys(("max_item_len_ptr", "seq_lens", "seq_lens_q", "block_tables", "max_token_per_sequence")),
        **dict.fromkeys(("max_sequence_kv", "fixed_split_size")),
        **{"disable_split_kv": False, "uniform_q_len": None, "use_token_head_sf": False},
    },
    "BatchPrefillWithPagedKVCacheWrapper.run": {
        **required("self", "q", "paged_kv_cache", "args"),
        **dict.fromkeys(("q_scale", "k_scale", "v_scale", "out", "lse")),
        **{"return_lse": False, "lse_base": "log2", "lse_layout": "NH"},
        **dict.fromkeys(("enable_pdl", "window_left", "sinks", "kv_cache_sf", "skip_softmax_threshold_scale_factor")),
        **dict.fromkeys(("use_fp16_softmax", "uses_spcompress")),
    },
    "BatchPrefillWithPagedKVCacheWrapper.workspace_size": {
        **required("self", "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
        **required("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"),
        **{"head_dim_vo": None, "custom_mask": None, "packed_custom_mask": None, "causal": False},
        **{"pos_encoding_mode": "NONE", "use_fp16_qk_reduction": False, "sm_scale": None, "window_left": -1},
        **{"logits_soft_cap": None, "rope_scale": None, "rope_theta": None, "q_data_type": "float16"},
        **dict.fromkeys(("kv_data_type", "o_data_type", "prefix_len_ptr", "token_pos_in_items_ptr")),
        **{"token_pos_in_items_len": 0},
        **dict.fromkeys(("max_item_len_ptr", "seq_lens", "seq_lens_q", "block_tables", "max_token_per_sequence")),
        **dict.fromkeys(("max_sequence_kv", "fixed_split_size")),
        **{"disable_split_kv": False, "uniform_q_len": None},
    },
    "BatchPrefillWithRaggedKVCacheWrapper.run": {
        **required("self", "q", "k", "v", "args"),
        **dict.fromkeys(("q_scale", "k_scale", "v_scale", "o_scale", "out", "lse")),
        **{"return_lse": False, "lse_base": "log2", "lse_layout": "NH", "enable_pdl": None, "kv_cache_sf": None},
    },
    "BatchPrefillWithRaggedKVCacheWrapper.plan": {
        **required("self", "qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk"),
        **{"head_dim_vo": None, "custom_mask": None, "packed_custom_mask": None, "causal": False},
        **{"pos_encoding_mode": "NONE", "use_fp16_qk_reduction": False, "window_left": -1},
        **dict.fromkeys(("logits_soft_cap", "sm_scale", "rope_scale", "rope_theta")),
        **{"q_data_type": "float16", "kv_data_type": None, "o_data_type": None, "non_blocking": True},
        **{"prefix_len_ptr": None, "token_pos_in_items_ptr": None, "token_pos_in_items_len": 0},
        **{"max_item_len_ptr": None, "fixed_split_size": None, "disable_split_kv": False},
        **dict.fromkeys(("seq_lens", "seq_lens_q", "max_token_per_sequence", "max_sequence_kv", "v_indptr")),
        **dict.fromkeys(("o_indptr", "qo_indptr_cpu", "kv_indptr_cpu", "uniform_q_len")),
        **{"use_token_head_sf": False},
    },
    "BatchPrefillWithRaggedKVCacheWrapper.__init__": {
        **required("self", "float_workspace_buffer"),
        **{"kv_layout": "NHD", "use_cuda_graph": False},
        **dict.fromkeys(("qo_indptr_buf", "kv_indptr_buf", "custom_mask_buf", "mask_indptr_buf")),
        **{"backend": "auto", "jit_args": None, "jit_kwargs": None, "variant_owns_mask": False},
    },
    "single_decode_with_kv_cache": {
        **required("q", "k", "v"),
        **{"kv_layout": "NHD", "pos_encoding_mode": "NONE", "use_tensor_cores": False, "q_scale": None},
        **{"k_scale": None, "v_scale": None, "window_left": -1},
        **dict.fromkeys(("logits_soft_cap", "sm_scale", "rope_scale", "rope_theta")),
        **{"return_lse": False},
    },
    "single_prefill_with_kv_cache": {
        **required("q", "k", "v"),
        **dict.fromkeys(("scale_q", "scale_k", "scale_v", "o_dtype", "custom_mask", "packed_custom_mask")),
        **{"causal": False, "kv_layout": "NHD", "pos_encoding_mode": "NONE", "use_fp16_qk_reduction": False},
        **{"sm_scale": None, "window_left": -1, "logits_soft_cap": None, "rope_scale": None, "rope_theta": None},
        **{"backend": "auto", "return_lse": False, "kv_cache_sf": None, "k_scale": None, "v_scale": None},
    },
    "MultiLevelCascadeAttentionWrapper.__init__": {
        **required("self", "num_levels", "float_workspace_buffer"),
        **{"kv_layout": "NHD", "use_cuda_graph": False},
        **dict.fromkeys(("qo_indptr_buf_arr", "paged_kv_indptr_buf_arr", "paged_kv_indices_buf_arr")),
        **{"paged_kv_last_page_len_buf_arr": None},
    },
    "MultiLevelCascadeAttentionWrapper.plan": {
        **required("self", "qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len"),
        **required("num_qo_heads", "num_kv_heads", "head_dim", "page_size"),
        **{"causal": False, "pos_encoding_mode": "NONE", "use_fp16_qk_reduction": False, "sm_scale": None},
        **{"window_left": -1, "logits_soft_cap": None, "rope_scale": None, "rope_theta": None},
        **{"q_data_type": "float16", "kv_data_type": None},
    },
    "MultiLevelCascadeAttentionWrapper.run": required("self", "q", "paged_kv_cache"),
    "BatchAttention.plan": {
        **required("self", "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_qo_heads", "num_kv_heads"),
        **required("head_dim_qk", "head_dim_vo", "page_size"),
        **{"causal": False, "sm_scale": None, "logits_soft_cap": None, "q_data_type": torch.bfloat16},
        **{"kv_data_type": torch.bfloat16, "use_profiler": False},
    },
    "BatchAttention.__init__": {
        **required("self"),
        **{"kv_layout": "NHD", "device": "cuda"},
    },
    "BatchAttention.run": {
        **required("self", "q", "kv_cache"),
        **dict.fromkeys(("out", "lse", "k_scale", "v_scale")),
        **{"logits_soft_cap": 0.0, "profiler_buffer": None, "kv_cache_sf": None},
    },
    "BatchMLAPagedAttentionWrapper.__init__": {
        **required("self", "float_workspace_buffer"),
        **{"use_cuda_graph": False},
        **dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")),
        **{"backend": "auto"},
    },
    "BatchMLAPagedAttentionWrapper.plan": {
        **required("self"),
        **dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv")),
        **dict.fromkeys(("head_dim_kpe", "page_size", "causal", "sm_scale", "q_data_type", "kv_data_type")),
        **{"use_profiler": False},
        **required("*"),
        **dict.fromkeys(("metadata", "cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len", "query_layout")),
        **{"kv_cache_layout": None},
        **{"lse_mode": "none", "output_dtype": None, "output_scale": "none", "scale_mode": "default"},
        **{"skip_softmax": False, "enable_pdl": None, "use_sinks": False},
    },
    "BatchMLAPagedAttentionWrapper.run": {
        **required("self"),
        **dict.fromkeys(("q_nope", "q_pe", "ckv_cache", "kpe_cache", "out", "lse")),
        **{"return_lse": False, "profiler_buffer": None, "kv_len": None, "page_table": None},
        **{"return_lse_base_on_e": False, "o_scale": None},
        **required("*"),
        **dict.fromkeys(("query", "kv_cache", "ckv_scale", "ckv_scale_arr", "kpe_scale", "sinks")),
        **dict.fromkeys(("skip_softmax_threshold_scale_factor", "bmm1_scale", "bmm2_scale")),
    },
    "packbits": {
        **required("x"),
        **{"bitorder": "big"},
    },
    "segment_packbits": {
        **required("x", "indptr"),
        **{"bitorder": "big"},
    },
    "append_paged_kv_cache": {
        **required("append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", "kv_indices"),
        **required("kv_indptr", "kv_last_page_len"),
        **{"kv_layout": "NHD"},
    },
    "get_batch_indices_positions": {
        **required("append_indptr", "seq_lens", "nnz"),
        **{"batch_indices": None, "positions": None},
    },
    "get_seq_lens": required("kv_indptr", "kv_last_page_len", "page_size"),
    "merge_state": required("v_a", "s_a", "v_b", "s_b"),
    "merge_state_in_place": {
        **required("v", "s", "v_other", "s_other"),
        **{"mask": None},
    },
    "merge_states": required("v", "s"),
    "rmsnorm": {
        **required("input", "weight"),
        **{"eps": 1e-06, "out": None, "enable_pdl": None},
    },
    "fused_add_rmsnorm": {
        **required("input", "residual", "weight"),
        **{"eps": 1e-06, "enable_pdl": None},
    },
    "silu_and_mul": {
        **required("input"),
        **{"out": None, "enable_pdl": None},
    },
    "gelu_and_mul": {
        **required("input"),
        **{"out": None, "enable_pdl": None},
    },
    "gelu_tanh_and_mul": {
        **required("input"),
        **{"out": None, "enable_pdl": None},
    },
    "top_k": {
        **required("input", "k"),
        **{"sorted": False, "deterministic": False, "tie_break": 0, "dsa_graph_safe": False},
    },
    "top_k_ragged_transform": {
        **required("input", "offsets", "lengths", "k"),
        **{"deterministic": False, "tie_break": 0, "dsa_graph_safe": False, "row_starts": None},
    },
    "top_k_page_table_transform": {
        **required("input", "src_page_table", "lengths", "k"),
        **{"row_to_batch": None, "deterministic": False, "tie_break": 0},
        **{"dsa_graph_safe": False, "row_starts": None, "page_table_row_starts": None},
        **required("*"),
        **{"page_size": 1, "out": None, "out_raw_indices": None},
    },
    "decode.trtllm_batch_decode_with_kv_cache": {
        **required("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"),
        **{"bmm1_scale": 1.0, "bmm2_scale": 1.0, "window_left": -1},
        **dict.fromkeys(("out", "out_dtype", "o_sf_scale", "o_sf_vec_size", "sinks")),
        **{"kv_layout": "HND", "enable_pdl": None, "backend": "auto", "q_len_per_req": 1, "o_scale": 1.0},
        **dict.fromkeys(("mask", "max_q_len", "cum_seq_lens_q", "skip_softmax_threshold_scale_factor")),
        **{"kv_cache_sf": None},
        **{"uses_shared_paged_kv_idx": True, "lse": None, "return_lse": False, "bmm1_scale_log2": None},
        **{"multi_ctas_kv_counter_buffer": None, "enable_block_sparse_attention": False, "cp_world": 1, "cp_rank": 0},
        **dict.fromkeys(("causal_seqlens_kv_global", "bf16q_fp8kv_transform_mode", "request_order")),
        **{"request_order_plan": None},
        **{"sparse_top_k": 0, "length_aware_schedule": False},
    },
    "prefill.trtllm_batch_context_with_kv_cache": {
        **required("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_q_len", "max_kv_len"),
        **required("bmm1_scale", "bmm2_scale", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv"),
        **{"window_left": -1},
        **dict.fromkeys(("out", "out_dtype", "o_sf_scale", "o_sf_vec_size")),
        **{"kv_layout": "HND"},
        **dict.fromkeys(("enable_pdl", "sinks", "kv_cache_sf", "skip_softmax_threshold_scale_factor")),
        **{"uses_shared_paged_kv_idx": True, "causal": True, "lse": None, "return_lse": False},
        **{"multi_ctas_kv_counter_buffer": None, "use_fp16_softmax": None, "uses_spcompress": None},
        **{"backend": "trtllm-gen", "window_right": -1, "variable_window_token_starts": None},
        **{"variable_window_token_ends": None},
    },
    "decode.trtllm_batch_decode_with_kv_cache_mla": {
        **required("query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
        **required("block_tables", "seq_lens", "max_seq_len"),
        **{"sparse_mla_top_k": 0, "out": None, "bmm1_scale": 1.0, "bmm2_scale": 1.0, "sinks": None},
        **{"skip_softmax_threshold_scale_factor": None, "enable_pdl": None, "backend": "auto", "is_var_seq": True},
        **{"uses_shared_paged_kv_idx": True, "lse": None, "return_lse": False, "cute_dsl_impl": "auto"},
        **{"kv_scale_format": "auto"},
        **dict.fromkeys(("cum_seq_lens_q", "max_q_len", "multi_ctas_kv_counter_buffer", "sparse_mla_top_k_lens")),
        **{"enable_dcp": False, "cp_world": 1, "cp_rank": 0, "causal_seqlens_kv_global": None},
        **{"use_fp16_softmax": None, "return_lse_base": None},
    },
    "prefill.trtllm_ragged_attention_deepseek": {
        **required("query", "key", "value", "workspace_buffer", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale"),
        **required("bmm2_scale", "o_sf_scale", "batch_size", "window_left", "cum_seq_lens_q", "cum_seq_lens_kv"),
        **required("enable_pdl", "is_causal", "return_lse"),
        **dict.fromkeys(("attention_sinks", "skip_softmax_threshold_scale_factor", "out", "lse")),
        **{"sage_attn_sfs": (None, None, None, None), "num_elts_per_sage_attn_blk": (0, 0, 0, 0)},
        **{"backend": "trtllm-gen"},
        **dict.fromkeys(("q_seq_lens_cpu", "kv_seq_lens_cpu", "use_fp16_softmax", "uses_spcompress")),
        **{"skip_all_rows_active_check": True},
    },
    "concat_ops.concat_mla_k": {
        **required("k", "k_nope", "k_rope", "*"),
        **{"backend": "default"},
    },
    "chunk_gated_delta_rule": {
        **required("q", "k", "v"),
        **dict.fromkeys(("g", "beta", "scale", "initial_state")),
        **{"output_final_state": False, "cu_seqlens": None, "use_qk_l2norm_in_kernel": False},
        **dict.fromkeys(("output", "output_state", "state_checkpoints", "checkpoint_cu_starts")),
        **{"checkpoint_every_n_tokens": 0, "use_cp": "auto", "state_indices": None, "_cp_chunk_len": None},
        **{"backend": "auto", "max_seqlen": None},
        **required("*"),
        **{"gate_domain": "linear", "use_gate_in_kernel": False, "A_log": None, "dt_bias": None},
        **{"beta_is_logit": False},
        **dict.fromkeys(("cu_seqlens_cpu", "output_state_indices", "checkpoint_state_indices", "prefix_lens")),
    },
    "mamba.selective_state_update": {
        **required("state", "x", "dt", "A", "B", "C", "D"),
        **{"z": None, "dt_bias": None, "dt_softplus": False, "state_batch_indices": None, "pad_slot_id": -1},
        **{"state_scale": None, "out": None, "disable_state_update": False},
        **dict.fromkeys(("intermediate_states_buffer", "intermediate_state_indices", "intermediate_state_scales")),
        **{"rand_seed": None},
        **{"philox_rounds": 10, "cache_steps": 0, "algorithm": "auto", "dst_state_batch_indices": None},
        **{"cu_seqlens": None, "num_accepted_tokens": None, "backend": "auto"},
    },
    "apply_rope_with_cos_sin_cache_inplace": {
        **required("positions", "query", "key", "head_size", "cos_sin_cache"),
        **{"is_neox": True},
    },
    "BatchAttentionWithAttentionSinkWrapper.__init__": {
        **required("self", "float_workspace_buffer"),
        **{"kv_layout": "NHD", "use_cuda_graph": False},
        **dict.fromkeys(("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf")),
        **dict.fromkeys(("paged_kv_last_page_len_buf", "custom_mask_buf", "mask_indptr_buf")),
        **{"backend": "auto", "pos_encoding_mode": "NONE", "use_fp16_qk_reduction": False},
        **{"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "head_dim_qk": 128, "head_dim_vo": 128},
        **{"window_left": -1},
    },
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.__init__": {
        **required("self", "float_workspace_buffer"),
        **{"kv_layout": "NHD"},
    },
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.begin_forward": {
        **required("self", "unique_kv_indptr", "unique_kv_indices", "unique_kv_last_page_len", "num_qo_heads"),
        **required("num_kv_heads", "head_dim", "page_size"),
        **{"data_type": "float16"},
    },
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward": {
        **required("self", "q", "k_shared", "v_shared", "unique_kv_cache"),
    },
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.__init__": {
        **required("self", "float_workspace_buffer"),
        **{"kv_layout": "NHD"},
    },
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.begin_forward": {
        **required("self", "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
        **required("num_qo_heads", "num_kv_heads", "head_dim", "page_size"),
    },
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward": {
        **required("self", "q", "k_shared", "v_shared", "unique_kv_cache"),
        **{"causal": False, "use_fp16_qk_reduction": False, "sm_scale": None, "rope_scale": None, "rope_theta": None},
    },
    "append_paged_mla_kv_cache": {
        **required("append_ckv", "append_kpe", "batch_indices", "positions", "ckv_cache", "kpe_cache", "kv_indices"),
        **required("kv_indptr", "kv_last_page_len"),
    },
    "mla_rope_quantize_fp8": {
        **required("q_rope", "k_rope", "q_nope", "k_nope", "cos_sin_cache", "pos_ids"),
        **{"is_neox": True, "quantize_dtype": None, "quant_scale_q": 1.0, "quant_scale_kv": 1.0},
        **dict.fromkeys(("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out")),
        **{"enable_pdl": False},
    },
    "rope_quantize_fp8": {
        **required("q_rope", "k_rope", "q_nope", "k_nope", "cos_sin_cache", "pos_ids"),
        **{"is_neox": True, "quantize_dtype": None, "quant_scale_q": 1.0, "quant_scale_kv": 1.0},
        **dict.fromkeys(("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out")),
        **{"enable_pdl": False, "backend": "cuda"},
    },
    "rope_quantize_fp8_append_paged_kv_cache": {
        **required("q_rope", "k_rope", "q_nope", "k_nope", "v", "cos_sin_cache", "pos_ids", "paged_kv_cache"),
        **required("kv_indices", "kv_indptr", "batch_indices", "positions"),
        **{"is_neox": True, "quantize_dtype": None, "quant_scale_q": 1.0, "quant_scale_kv": 1.0, "page_size": 16},
        **{"kv_layout": "NHD", "q_rope_out": None, "q_nope_out": None, "enable_pdl": False},
    },
    "mla.MLAPlanMetadata.csr": required("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"),
    "mla.MLAPlanMetadata.dense": {
        **required("cum_seq_lens_q", "block_tables", "seq_lens"),
        **{"max_q_len": None},
    },
    "mla.MLAPlanMetadata.dual": {
        **required("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "*", "cum_seq_lens_q", "block_tables"),
        **required("seq_lens"),
        **{"max_q_len": None},
    },
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    function: Any = flashinfer
    for part in name.split("."):
        function = getattr(function, part)
    actual: dict[str, Any] = {}
    takes_any = False
    for parameter in inspect.signature(function).parameters.values():
        takes_any |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not takes_any:
            actual["*"] = EMPTY
        actual[parameter.name] = parameter.default
    assert list(actual.items()) == list(SIGNATURES[name].items())


def test_version() -> None:
    """Callers ask which functions are there by FlashInfer's version."""
    assert flashinfer.__version__ == "0.7.4"
