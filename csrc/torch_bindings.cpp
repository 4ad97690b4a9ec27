// Table of contents: every op's schema, by family, and the device keys that have it. Documentation: pagedattn_ext/ops.
#include <torch/csrc/stable/library.h>

#include <deque>
#include <string>

#include "ops.h"

namespace {

using torch::stable::detail::StableLibrary;

void define_ops(StableLibrary& m) {
  // attention
  m.def(
      "paged_attention_v1(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, SymInt num_kv_heads, "
      "float scale, Tensor block_tables, Tensor seq_lens, SymInt block_size, SymInt max_seq_len, "
      "Tensor? alibi_slopes=None, str kv_cache_dtype=\"auto\", Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(
      "paged_attention_v2(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, "
      "Tensor query, Tensor key_cache, Tensor value_cache, SymInt num_kv_heads, float scale, Tensor block_tables, "
      "Tensor seq_lens, SymInt block_size, SymInt max_seq_len, Tensor? alibi_slopes=None, "
      "str kv_cache_dtype=\"auto\", Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, *, "
      "Tensor? query_start_loc=None, float scale, SymInt? max_seq_len=None, Tensor? alibi_slopes=None, "
      "SymInt? sliding_window=None, float softcap=0.0, Tensor? sinks=None, str kv_cache_dtype=\"auto\", "
      "Tensor? k_scale=None, Tensor? v_scale=None, bool causal=True, SymInt? right_window=None, "
      "SymInt attention_chunk=0) -> (Tensor, Tensor)");
  m.def(
      "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor query_start_loc, Tensor key_start_loc, *, "
      "float scale, SymInt? max_seq_len=None, Tensor? alibi_slopes=None, SymInt? sliding_window=None, "
      "float softcap=0.0, Tensor? sinks=None, bool causal=True, SymInt? right_window=None, SymInt attention_chunk=0) "
      "-> (Tensor, Tensor)");
  m.def(
      "append_and_attend(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor block_tables, Tensor cached_lens, *, Tensor? query_start_loc=None, Tensor? key_start_loc=None, "
      "float scale, Tensor? alibi_slopes=None, SymInt? sliding_window=None, float softcap=0.0, Tensor? sinks=None, "
      "str kv_cache_dtype=\"auto\", Tensor? k_scale=None, Tensor? v_scale=None, bool causal=True, "
      "SymInt? right_window=None, SymInt attention_chunk=0, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
      "bool rotary_is_neox=True, Tensor? rotary_lens=None) -> (Tensor, Tensor)");
  m.def(
      "mla_attention(Tensor q_nope, Tensor q_pe, Tensor kv_c_cache, Tensor k_pe_cache, Tensor block_tables, "
      "Tensor seq_lens, *, Tensor? query_start_loc=None, float scale, bool causal=True) -> (Tensor, Tensor)");
  m.def(
      "merge_attn_states(Tensor(a!) output, Tensor(b!)? output_lse, Tensor prefix_output, Tensor prefix_lse, "
      "Tensor suffix_output, Tensor suffix_lse, *, float lse_base=2.7182818284590451) -> ()");

  // cache
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
      "str kv_cache_dtype=\"auto\", Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(
      "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, str kv_cache_dtype=\"auto\", Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def("concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()");
  m.def(
      "gather_cached_kv(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping) "
      "-> ()");
  m.def("copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()");
  m.def("swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()");
  m.def("batch_positions(Tensor? start_loc, Tensor first_positions, SymInt num_tokens) -> (Tensor, Tensor)");
  m.def(
      "compute_slot_mapping(Tensor positions, Tensor block_tables, SymInt block_size, SymInt num_blocks, *, "
      "Tensor? batch_indices=None, Tensor? block_start_loc=None, Tensor? last_block_lens=None) -> Tensor");
  m.def(
      "consecutive_block_tables(Tensor first_blocks, Tensor end_blocks, Tensor seq_lens, "
      "SymInt max_num_blocks_per_seq, SymInt num_blocks, *, Tensor? left_padding=None) -> Tensor");

  // layernorm
  m.def("rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()");
  m.def("fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()");
  m.def("gemma_rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()");
  m.def("gemma_fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()");
  m.def("layer_norm(Tensor(a!) out, Tensor input, Tensor weight, Tensor bias, float epsilon) -> ()");

  // pos_encoding
  m.def(
      "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, SymInt head_size, Tensor cos_sin_cache, "
      "bool is_neox, *, Tensor? sin_cache=None) -> ()");
  m.def(
      "rotary_embedding_neox(Tensor positions, Tensor(a!) query, Tensor(b!) key, SymInt head_size, "
      "Tensor cos_sin_cache) -> ()");

  // activation
  m.def("silu_and_mul(Tensor(a!) out, Tensor input) -> ()");
  m.def("mul_and_silu(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_and_mul(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_tanh_and_mul(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_new(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_fast(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_quick(Tensor(a!) out, Tensor input) -> ()");

  // sampling
  m.def("apply_token_bitmask(Tensor(a!) logits, Tensor bitmask, Tensor? indices=None) -> ()");
  m.def("softmax(Tensor(a!) out, Tensor logits, Tensor? temperature=None) -> ()");
  m.def("renorm_probs(Tensor(a!) out, Tensor probs, Tensor? top_k=None, Tensor? top_p=None) -> ()");
  m.def("top_k_mask_logits(Tensor(a!) out, Tensor logits, Tensor top_k) -> ()");
  m.def(
      "sample_from_probs(Tensor(a!) out, Tensor(b!) valid, Tensor probs, Tensor? indices, Tensor? top_k, "
      "Tensor? top_p, Tensor? min_p, Tensor seed, Tensor offset, bool top_k_first=True, Tensor? subsequence=None) "
      "-> ()");
  m.def(
      "chain_speculative_sampling(Tensor(a!) out, Tensor(b!) num_accepted, Tensor(c!) num_emitted, "
      "Tensor draft_probs, Tensor draft_token_ids, Tensor target_probs, Tensor seed, Tensor offset) -> ()");

  // state
  m.def(
      "causal_conv1d(Tensor(a!) out, Tensor input, Tensor(b!) conv_states, Tensor weight, Tensor? bias=None, "
      "bool silu=False, *, Tensor? query_start_loc=None, Tensor? state_indices=None, Tensor? has_initial_state=None) "
      "-> ()");
  m.def(
      "gated_delta_rule(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, "
      "Tensor(b!) states, float? scale=None, bool use_qk_l2norm=False, *, Tensor? query_start_loc=None, "
      "Tensor? state_indices=None, Tensor? has_initial_state=None) -> ()");
  m.def(
      "selective_scan(Tensor(a!) out, Tensor input, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(b!) states, "
      "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, float dt_min=0.0, "
      "float? dt_max=None, *, Tensor? query_start_loc=None, Tensor? state_indices=None, "
      "Tensor? has_initial_state=None) -> ()");

#if !defined(PAGEDATTN_SIMT)
  // linear, on the CPU alone
  m.def("linear_packed(Tensor input, Tensor packed_weight, SymInt out_features, Tensor? bias=None) -> Tensor");
  m.def(
      "linear_int4(Tensor input, Tensor packed_weight, SymInt group_size, SymInt out_features, Tensor? bias=None, "
      "ScalarType? scale_dtype=None) -> Tensor");
  m.def("linear_int8(Tensor input, Tensor packed_weight, Tensor weight_scales, Tensor? bias=None) -> Tensor");
  m.def(
      "grouped_linear_packed(Tensor input, Tensor offsets, Tensor packed_weight, SymInt out_features, "
      "Tensor? bias=None) -> Tensor");
  m.def(
      "grouped_linear_int4(Tensor input, Tensor offsets, Tensor packed_weight, SymInt group_size, "
      "SymInt out_features, Tensor? bias=None, ScalarType? scale_dtype=None) -> Tensor");
  m.def(
      "grouped_linear_int8(Tensor input, Tensor offsets, Tensor packed_weight, Tensor weight_scales, "
      "Tensor? bias=None) -> Tensor");
  m.def("pack_linear_weight(Tensor(a!) out, Tensor weight) -> ()");
  m.def("pack_linear_weight_int4(Tensor(a!) out, Tensor codes, Tensor scales, Tensor zeros) -> ()");
  m.def("pack_linear_weight_int8(Tensor(a!) out, Tensor weight) -> ()");
  m.def("quantize_weight_int4(Tensor(a!) codes, Tensor(b!) scales, Tensor(c!) zeros, Tensor weight) -> ()");
  m.def("quantize_weight_int8(Tensor(a!) codes, Tensor(b!) scales, Tensor weight) -> ()");

  // collectives, on the CPU alone
  m.def("all_reduce_shared(Tensor(a!) input, int group) -> ()");
  m.def("all_gather_shared(Tensor(a!) out, Tensor input, int group) -> ()");
#endif
}

// An op has one function for all devices. The function looks where its tensors are.
void register_ops(StableLibrary& m) {
  m.impl("paged_attention_v1", TORCH_BOX(&pagedattn::paged_attention_v1));
  m.impl("paged_attention_v2", TORCH_BOX(&pagedattn::paged_attention_v2));
  m.impl("paged_attention", TORCH_BOX(&pagedattn::paged_attention));
  m.impl("varlen_attention", TORCH_BOX(&pagedattn::varlen_attention));
  m.impl("append_and_attend", TORCH_BOX(&pagedattn::append_and_attend));
  m.impl("mla_attention", TORCH_BOX(&pagedattn::mla_attention));
  m.impl("merge_attn_states", TORCH_BOX(&pagedattn::merge_attn_states));
  m.impl("reshape_and_cache", TORCH_BOX(&pagedattn::reshape_and_cache));
  m.impl("reshape_and_cache_flash", TORCH_BOX(&pagedattn::reshape_and_cache_flash));
  m.impl("concat_and_cache_mla", TORCH_BOX(&pagedattn::concat_and_cache_mla));
  m.impl("gather_cached_kv", TORCH_BOX(&pagedattn::gather_cached_kv));
  m.impl("copy_blocks", TORCH_BOX(&pagedattn::copy_blocks));
  m.impl("swap_blocks", TORCH_BOX(&pagedattn::swap_blocks));
  m.impl("batch_positions", TORCH_BOX(&pagedattn::batch_positions));
  m.impl("compute_slot_mapping", TORCH_BOX(&pagedattn::compute_slot_mapping));
  m.impl("consecutive_block_tables", TORCH_BOX(&pagedattn::consecutive_block_tables));
  m.impl("rms_norm", TORCH_BOX(&pagedattn::rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&pagedattn::fused_add_rms_norm));
  m.impl("gemma_rms_norm", TORCH_BOX(&pagedattn::gemma_rms_norm));
  m.impl("gemma_fused_add_rms_norm", TORCH_BOX(&pagedattn::gemma_fused_add_rms_norm));
  m.impl("layer_norm", TORCH_BOX(&pagedattn::layer_norm));
  m.impl("rotary_embedding", TORCH_BOX(&pagedattn::rotary_embedding));
  m.impl("rotary_embedding_neox", TORCH_BOX(&pagedattn::rotary_embedding_neox));
  m.impl("silu_and_mul", TORCH_BOX(&pagedattn::silu_and_mul));
  m.impl("mul_and_silu", TORCH_BOX(&pagedattn::mul_and_silu));
  m.impl("gelu_and_mul", TORCH_BOX(&pagedattn::gelu_and_mul));
  m.impl("gelu_tanh_and_mul", TORCH_BOX(&pagedattn::gelu_tanh_and_mul));
  m.impl("gelu_new", TORCH_BOX(&pagedattn::gelu_new));
  m.impl("gelu_fast", TORCH_BOX(&pagedattn::gelu_fast));
  m.impl("gelu_quick", TORCH_BOX(&pagedattn::gelu_quick));
  m.impl("apply_token_bitmask", TORCH_BOX(&pagedattn::apply_token_bitmask));
  m.impl("softmax", TORCH_BOX(&pagedattn::softmax));
  m.impl("renorm_probs", TORCH_BOX(&pagedattn::renorm_probs));
  m.impl("top_k_mask_logits", TORCH_BOX(&pagedattn::top_k_mask_logits));
  m.impl("sample_from_probs", TORCH_BOX(&pagedattn::sample_from_probs));
  m.impl("chain_speculative_sampling", TORCH_BOX(&pagedattn::chain_speculative_sampling));
  m.impl("causal_conv1d", TORCH_BOX(&pagedattn::causal_conv1d));
  m.impl("gated_delta_rule", TORCH_BOX(&pagedattn::gated_delta_rule));
  m.impl("selective_scan", TORCH_BOX(&pagedattn::selective_scan));
}

#if !defined(PAGEDATTN_SIMT)
void register_cpu_ops(StableLibrary& m) {
  m.impl("linear_packed", TORCH_BOX(&pagedattn::linear_packed));
  m.impl("linear_int4", TORCH_BOX(&pagedattn::linear_int4));
  m.impl("linear_int8", TORCH_BOX(&pagedattn::linear_int8));
  m.impl("grouped_linear_packed", TORCH_BOX(&pagedattn::grouped_linear_packed));
  m.impl("grouped_linear_int4", TORCH_BOX(&pagedattn::grouped_linear_int4));
  m.impl("grouped_linear_int8", TORCH_BOX(&pagedattn::grouped_linear_int8));
  m.impl("pack_linear_weight", TORCH_BOX(&pagedattn::pack_linear_weight));
  m.impl("pack_linear_weight_int4", TORCH_BOX(&pagedattn::pack_linear_weight_int4));
  m.impl("pack_linear_weight_int8", TORCH_BOX(&pagedattn::pack_linear_weight_int8));
  m.impl("quantize_weight_int4", TORCH_BOX(&pagedattn::quantize_weight_int4));
  m.impl("quantize_weight_int8", TORCH_BOX(&pagedattn::quantize_weight_int8));
  m.impl("all_reduce_shared", TORCH_BOX(&pagedattn::all_reduce_shared));
  m.impl("all_gather_shared", TORCH_BOX(&pagedattn::all_gather_shared));
}
#endif

}  // namespace

#if defined(PAGEDATTN_SIMT)
STABLE_TORCH_LIBRARY(pagedattn_simt, m) { define_ops(m); }
STABLE_TORCH_LIBRARY_IMPL(pagedattn_simt, CPU, m) { register_ops(m); }
#else
void pagedattn::register_all(const std::string& op_namespace) {
  static std::deque<StableLibrary> libraries;  // torch keeps the ops for as long as these live
  const auto library = [&](StableLibrary::Kind kind, const char* dispatch_key) -> StableLibrary& {
    return libraries.emplace_back(kind, op_namespace.c_str(), dispatch_key, "csrc/torch_bindings.cpp", __LINE__);
  };
  define_ops(library(StableLibrary::Kind::DEF, nullptr));
  StableLibrary& cpu = library(StableLibrary::Kind::IMPL, "CPU");
  register_ops(cpu);
  register_cpu_ops(cpu);
#if defined(PAGEDATTN_WITH_CUDA)
  register_ops(library(StableLibrary::Kind::IMPL, "CUDA"));
#endif
}
#endif
