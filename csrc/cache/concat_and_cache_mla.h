// concat_and_cache_mla: parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

struct ConcatAndCacheMlaParams {
  DType dtype;
  int64_t num_tokens;
  int64_t latent_size;
  int64_t rope_size;
  int64_t block_size;
  const void* kv_c;     // [num_tokens, latent_size]
  int64_t kv_c_stride;  // elements between tokens
  const void* k_pe;     // [num_tokens, rope_size]
  int64_t k_pe_stride;
  void* kv_cache;        // [num_blocks, block_size, latent_size + rope_size]
  int64_t block_stride;  // elements between blocks
  int64_t token_stride;  // elements between the tokens of a block
  Indices slot_mapping;  // [num_tokens], block * block_size + offset; negative: skipped
};

// Tokens [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(concat_and_cache_mla, const ConcatAndCacheMlaParams& params, int64_t begin, int64_t end)

namespace cuda {
void concat_and_cache_mla(const ConcatAndCacheMlaParams& params, cudaStream_t stream);
}

}  // namespace pagedattn
