// merge_attn_states: parameters and kernel.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

struct MergeAttnStatesParams {
  DType dtype;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_size;
  void* output;               // [num_tokens, num_heads, head_size]
  float* output_lse;          // [num_tokens, num_heads]; may be nullptr
  const void* prefix_output;  // [num_tokens, num_heads, head_size]
  const float* prefix_lse;    // [num_tokens, num_heads]
  const void* suffix_output;  // [num_tokens, num_heads, head_size]
  const float* suffix_lse;    // [num_tokens, num_heads]
  float ln_base;              // the natural logarithm of the base that every lse has
};

// Rows [begin, end). A row is a (token, head) pair.
PAGEDATTN_DECLARE_CPU_KERNEL(merge_attn_states, const MergeAttnStatesParams& params, int64_t begin, int64_t end)

namespace cuda {
void merge_attn_states(const MergeAttnStatesParams& params, cudaStream_t stream);
}

}  // namespace pagedattn
