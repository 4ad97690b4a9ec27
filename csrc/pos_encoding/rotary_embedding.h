// Rotary position embedding (RoFormer, Su et al. 2021): parameters and kernel.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

struct RotaryEmbeddingParams {
  DType dtype;
  int64_t num_tokens;
  int64_t num_heads;         // of query
  int64_t num_kv_heads;      // of key
  int64_t rot_dim;           // the first rot_dim elements of a head are rotated; even
  bool is_neox;              // pairs: element i of the first half with i of the second; else 2i with 2i + 1
  const int64_t* positions;  // [num_tokens]
  void* query;               // [num_tokens, num_heads, head_size], updated
  int64_t query_stride;      // elements between tokens
  int64_t query_head_stride;
  void* key;  // [num_tokens, num_kv_heads, head_size], updated; nullptr if num_kv_heads is 0
  int64_t key_stride;
  int64_t key_head_stride;
  DType cos_sin_dtype;     // `dtype` or FLOAT32
  const void* cos;         // [max_position, rot_dim / 2]
  const void* sin;         // the same
  int64_t cos_sin_stride;  // elements between positions, of both
};

// Tokens [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(rotary_embedding, const RotaryEmbeddingParams& params, int64_t begin, int64_t end)

namespace cuda {
void rotary_embedding(const RotaryEmbeddingParams& params, cudaStream_t stream);
}

}  // namespace pagedattn
