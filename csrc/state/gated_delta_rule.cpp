#include "state/gated_delta_rule.h"

#include "ops.h"
#include "state/state_op.h"

namespace pagedattn {

void gated_delta_rule(Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& g,
                      const Tensor& beta, Tensor& states, std::optional<double> scale, bool use_qk_l2norm,
                      const std::optional<Tensor>& query_start_loc, const std::optional<Tensor>& state_indices,
                      const std::optional<Tensor>& has_initial_state) {
  const Door door("gated_delta_rule", value);
  GatedDeltaRuleParams params{};
  params.dtype = door.float_dtype("value", value);
  door.rank("value", value, 3);
  door.contiguous_from("value", value, 1);
  const int64_t num_tokens = value.size(0);
  params.num_v_heads = value.size(1);
  params.v_dim = value.size(2);
  params.value = value.const_data_ptr();
  params.value_stride = value.stride(0);

  check_rows(door, "key", key, value, std::initializer_list<int64_t>{num_tokens, ANY, ANY});
  params.num_k_heads = key.size(1);
  params.k_dim = key.size(2);
  door.check(params.k_dim >= 1 && params.k_dim <= MAX_DELTA_K_DIM, "key", "expected a head size of 1 to ",
             MAX_DELTA_K_DIM, ", got shape ", key.sizes());
  door.check(params.num_k_heads > 0 && params.num_v_heads > 0 && params.num_v_heads % params.num_k_heads == 0, "value",
             "expected a number of heads that is a multiple of the ", params.num_k_heads, " key heads, got shape ",
             value.sizes());
  params.key = key.const_data_ptr();
  params.key_stride = key.stride(0);
  check_rows(door, "query", query, value, key.sizes());
  params.query = query.const_data_ptr();
  params.query_stride = query.stride(0);
  params.g = check_head_numbers(door, "g", g, value);
  params.beta = check_head_numbers(door, "beta", beta, value);

  door.dtype("out", out, dtype_of(value));
  door.shape("out", out, value.sizes());
  door.written_from_1("out", out);
  door.other_memory("out", out, "query", query);
  door.other_memory("out", out, "key", key);
  params.out = out.mutable_data_ptr();
  params.out_stride = out.stride(0);
  door.dtype("states", states, ScalarType::Float);
  door.shape("states", states, {ANY, params.num_v_heads, params.k_dim, params.v_dim});
  door.written_from_1("states", states);
  door.other_memory("states", states, "out", out);
  params.states = states.mutable_data_ptr<float>();
  params.state_stride = states.stride(0);
  params.scale = door.finite("scale", scale.value_or(1.0 / std::sqrt(static_cast<double>(params.k_dim))));
  params.use_qk_l2norm = use_qk_l2norm;

  const SequenceArguments arguments{query_start_loc, state_indices, has_initial_state};
  const int64_t num_slots = states.size(0);
  params.sequences = check_sequences(door, num_tokens, num_slots, arguments);
  const int64_t multiply_adds = num_tokens * params.num_v_heads * params.k_dim * params.v_dim * 3;
  run_items(door, sequence_check(door, params.sequences, num_slots, arguments), PAGEDATTN_ROW_KERNELS(gated_delta_rule),
            params, params.sequences.num_seqs * params.num_v_heads, multiply_adds);
}

}  // namespace pagedattn
