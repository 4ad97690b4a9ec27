// The ops as torch calls them. Schemas and documentation: torch_bindings.cpp and pagedattn_ext/ops.
//
// A `str` comes as a StringHandle, for take_string() of door.h.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace pagedattn {

using torch::stable::Tensor;

// Registers all ops as torch.ops.<op_namespace>, which must be without ops so far.
void register_all(const std::string& op_namespace);

// attention
void paged_attention_v1(Tensor& out, const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                        int64_t num_kv_heads, double scale, const Tensor& block_tables, const Tensor& seq_lens,
                        int64_t block_size, int64_t max_seq_len, const std::optional<Tensor>& alibi_slopes,
                        StringHandle kv_cache_dtype, const std::optional<Tensor>& k_scale,
                        const std::optional<Tensor>& v_scale);
void paged_attention_v2(Tensor& out, Tensor& exp_sums, Tensor& max_logits, Tensor& tmp_out, const Tensor& query,
                        const Tensor& key_cache, const Tensor& value_cache, int64_t num_kv_heads, double scale,
                        const Tensor& block_tables, const Tensor& seq_lens, int64_t block_size, int64_t max_seq_len,
                        const std::optional<Tensor>& alibi_slopes, StringHandle kv_cache_dtype,
                        const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale);
std::tuple<Tensor, Tensor> paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                                           const Tensor& block_tables, const Tensor& seq_lens,
                                           const std::optional<Tensor>& query_start_loc, double scale,
                                           std::optional<int64_t> max_seq_len,
                                           const std::optional<Tensor>& alibi_slopes,
                                           std::optional<int64_t> sliding_window, double softcap,
                                           const std::optional<Tensor>& sinks, StringHandle kv_cache_dtype,
                                           const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                                           bool causal, std::optional<int64_t> right_window, int64_t attention_chunk);
std::tuple<Tensor, Tensor> varlen_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const Tensor& query_start_loc, const Tensor& key_start_loc, double scale,
                                            std::optional<int64_t> max_seq_len,
                                            const std::optional<Tensor>& alibi_slopes,
                                            std::optional<int64_t> sliding_window, double softcap,
                                            const std::optional<Tensor>& sinks, bool causal,
                                            std::optional<int64_t> right_window, int64_t attention_chunk);
std::tuple<Tensor, Tensor> append_and_attend(
    const Tensor& query, const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
    const Tensor& block_tables, const Tensor& cached_lens, const std::optional<Tensor>& query_start_loc,
    const std::optional<Tensor>& key_start_loc, double scale, const std::optional<Tensor>& alibi_slopes,
    std::optional<int64_t> sliding_window, double softcap, const std::optional<Tensor>& sinks,
    StringHandle kv_cache_dtype, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    bool causal, std::optional<int64_t> right_window, int64_t attention_chunk, const std::optional<Tensor>& rotary_cos,
    const std::optional<Tensor>& rotary_sin, bool rotary_is_neox, const std::optional<Tensor>& rotary_lens);
std::tuple<Tensor, Tensor> mla_attention(const Tensor& q_nope, const Tensor& q_pe, const Tensor& kv_c_cache,
                                         const Tensor& k_pe_cache, const Tensor& block_tables, const Tensor& seq_lens,
                                         const std::optional<Tensor>& query_start_loc, double scale, bool causal);
void merge_attn_states(Tensor& output, const std::optional<Tensor>& output_lse, const Tensor& prefix_output,
                       const Tensor& prefix_lse, const Tensor& suffix_output, const Tensor& suffix_lse,
                       double lse_base);

// cache
void reshape_and_cache(const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                       const Tensor& slot_mapping, StringHandle kv_cache_dtype, const std::optional<Tensor>& k_scale,
                       const std::optional<Tensor>& v_scale);
void reshape_and_cache_flash(const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                             const Tensor& slot_mapping, StringHandle kv_cache_dtype,
                             const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale);
void concat_and_cache_mla(const Tensor& kv_c, const Tensor& k_pe, Tensor& kv_cache, const Tensor& slot_mapping);
void gather_cached_kv(Tensor& key, Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                      const Tensor& slot_mapping);
void copy_blocks(const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
                 const Tensor& block_mapping);
void swap_blocks(const Tensor& src, Tensor& dst, const Tensor& block_mapping);
std::tuple<Tensor, Tensor> batch_positions(const std::optional<Tensor>& start_loc, const Tensor& first_positions,
                                           int64_t num_tokens);
Tensor compute_slot_mapping(const Tensor& positions, const Tensor& block_tables, int64_t block_size, int64_t num_blocks,
                            const std::optional<Tensor>& batch_indices, const std::optional<Tensor>& block_start_loc,
                            const std::optional<Tensor>& last_block_lens);
Tensor consecutive_block_tables(const Tensor& first_blocks, const Tensor& end_blocks, const Tensor& seq_lens,
                                int64_t max_num_blocks_per_seq, int64_t num_blocks,
                                const std::optional<Tensor>& left_padding);

// layernorm
void rms_norm(Tensor& out, const Tensor& input, const Tensor& weight, double epsilon);
void fused_add_rms_norm(Tensor& input, Tensor& residual, const Tensor& weight, double epsilon);
void gemma_rms_norm(Tensor& out, const Tensor& input, const Tensor& weight, double epsilon);
void gemma_fused_add_rms_norm(Tensor& input, Tensor& residual, const Tensor& weight, double epsilon);
void layer_norm(Tensor& out, const Tensor& input, const Tensor& weight, const Tensor& bias, double epsilon);

// pos_encoding
void rotary_embedding(const Tensor& positions, Tensor& query, const std::optional<Tensor>& key, int64_t head_size,
                      const Tensor& cos_sin_cache, bool is_neox, const std::optional<Tensor>& sin_cache);
void rotary_embedding_neox(const Tensor& positions, Tensor& query, Tensor& key, int64_t head_size,
                           const Tensor& cos_sin_cache);

// activation
void silu_and_mul(Tensor& out, const Tensor& input);
void mul_and_silu(Tensor& out, const Tensor& input);
void gelu_and_mul(Tensor& out, const Tensor& input);
void gelu_tanh_and_mul(Tensor& out, const Tensor& input);
void gelu_new(Tensor& out, const Tensor& input);
void gelu_fast(Tensor& out, const Tensor& input);
void gelu_quick(Tensor& out, const Tensor& input);

// linear, on the CPU alone
Tensor linear_packed(const Tensor& input, const Tensor& packed_weight, int64_t out_features,
                     const std::optional<Tensor>& bias);
Tensor linear_int4(const Tensor& input, const Tensor& packed_weight, int64_t group_size, int64_t out_features,
                   const std::optional<Tensor>& bias, std::optional<torch::headeronly::ScalarType> scale_dtype);
Tensor linear_int8(const Tensor& input, const Tensor& packed_weight, const Tensor& weight_scales,
                   const std::optional<Tensor>& bias);
Tensor grouped_linear_packed(const Tensor& input, const Tensor& offsets, const Tensor& packed_weight,
                             int64_t out_features, const std::optional<Tensor>& bias);
Tensor grouped_linear_int4(const Tensor& input, const Tensor& offsets, const Tensor& packed_weight, int64_t group_size,
                           int64_t out_features, const std::optional<Tensor>& bias,
                           std::optional<torch::headeronly::ScalarType> scale_dtype);
Tensor grouped_linear_int8(const Tensor& input, const Tensor& offsets, const Tensor& packed_weight,
                           const Tensor& weight_scales, const std::optional<Tensor>& bias);
void pack_linear_weight(Tensor& out, const Tensor& weight);
void pack_linear_weight_int4(Tensor& out, const Tensor& codes, const Tensor& scales, const Tensor& zeros);
void pack_linear_weight_int8(Tensor& out, const Tensor& weight);
void quantize_weight_int4(Tensor& codes, Tensor& scales, Tensor& zeros, const Tensor& weight);
void quantize_weight_int8(Tensor& codes, Tensor& scales, const Tensor& weight);

// state
void causal_conv1d(Tensor& out, const Tensor& input, Tensor& conv_states, const Tensor& weight,
                   const std::optional<Tensor>& bias, bool silu, const std::optional<Tensor>& query_start_loc,
                   const std::optional<Tensor>& state_indices, const std::optional<Tensor>& has_initial_state);
void gated_delta_rule(Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& g,
                      const Tensor& beta, Tensor& states, std::optional<double> scale, bool use_qk_l2norm,
                      const std::optional<Tensor>& query_start_loc, const std::optional<Tensor>& state_indices,
                      const std::optional<Tensor>& has_initial_state);
void selective_scan(Tensor& out, const Tensor& input, const Tensor& dt, const Tensor& a, const Tensor& b,
                    const Tensor& c, Tensor& states, const std::optional<Tensor>& d, const std::optional<Tensor>& z,
                    const std::optional<Tensor>& dt_bias, bool dt_softplus, double dt_min, std::optional<double> dt_max,
                    const std::optional<Tensor>& query_start_loc, const std::optional<Tensor>& state_indices,
                    const std::optional<Tensor>& has_initial_state);

// collectives, on the CPU alone
void all_reduce_shared(Tensor& input, int64_t group);
void all_gather_shared(Tensor& out, const Tensor& input, int64_t group);

// sampling
void apply_token_bitmask(Tensor& logits, const Tensor& bitmask, const std::optional<Tensor>& indices);
void softmax(Tensor& out, const Tensor& logits, const std::optional<Tensor>& temperature);
void renorm_probs(Tensor& out, const Tensor& probs, const std::optional<Tensor>& top_k,
                  const std::optional<Tensor>& top_p);
void top_k_mask_logits(Tensor& out, const Tensor& logits, const Tensor& top_k);
void sample_from_probs(Tensor& out, Tensor& valid, const Tensor& probs, const std::optional<Tensor>& indices,
                       const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                       const std::optional<Tensor>& min_p, const Tensor& seed, const Tensor& offset, bool top_k_first,
                       const std::optional<Tensor>& subsequence);
void chain_speculative_sampling(Tensor& out, Tensor& num_accepted, Tensor& num_emitted, const Tensor& draft_probs,
                                const Tensor& draft_token_ids, const Tensor& target_probs, const Tensor& seed,
                                const Tensor& offset);

}  // namespace pagedattn
