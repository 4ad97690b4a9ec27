// gated_delta_rule: parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "state/sequences.h"

namespace pagedattn {

constexpr int64_t MAX_DELTA_K_DIM = 512;
constexpr float DELTA_NORM_EPSILON = 1e-6f;

struct GatedDeltaRuleParams {
  DType dtype;
  StateSequences sequences;
  int64_t num_k_heads;
  int64_t num_v_heads;  // num_k_heads times the value heads of a key head
  int64_t k_dim;
  int64_t v_dim;
  const void* query;  // [num_tokens, num_k_heads, k_dim]
  int64_t query_stride;
  const void* key;  // [num_tokens, num_k_heads, k_dim]
  int64_t key_stride;
  const void* value;  // [num_tokens, num_v_heads, v_dim]
  int64_t value_stride;
  HeadNumbers g;  // logarithms of the decay
  HeadNumbers beta;
  float* states;  // [num_slots, num_v_heads, k_dim, v_dim]
  int64_t state_stride;
  float scale;
  bool use_qk_l2norm;
  void* out;  // [num_tokens, num_v_heads, v_dim]
  int64_t out_stride;

  constexpr int64_t k_head(int64_t v_head) const { return v_head / (num_v_heads / num_k_heads); }
};

// Items [begin, end). Item i is value head i % num_v_heads of sequence i / num_v_heads.
PAGEDATTN_DECLARE_CPU_KERNEL(gated_delta_rule, const GatedDeltaRuleParams& params, int64_t begin, int64_t end)

namespace cuda {
void gated_delta_rule(const GatedDeltaRuleParams& params, cudaStream_t stream);
}  // namespace cuda

}  // namespace pagedattn
