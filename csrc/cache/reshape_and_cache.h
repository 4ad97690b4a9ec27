// reshape_and_cache and its inverse, gather_cached_kv: parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

struct ReshapeAndCacheParams {
  DType dtype;  // of key and value
  DType cache_dtype;
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t block_size;
  const void* key;     // [num_tokens, num_kv_heads, head_size]
  int64_t key_stride;  // elements between tokens
  const void* value;   // [num_tokens, num_kv_heads, head_size]
  int64_t value_stride;
  CacheLayout layout;
  void* key_cache;
  CacheStrides key_strides;
  void* value_cache;
  CacheStrides value_strides;
  float key_scale;  // stored key = key / key_scale; unused if cache_dtype is dtype
  float value_scale;
  const float* key_scale_on_device;  // kernels read the scale here when they run; nullptr: they use key_scale
  const float* value_scale_on_device;
  Indices slot_mapping;  // [num_tokens], block * block_size + offset; negative: skipped
};

struct GatherCachedKvParams {
  DType dtype;
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t block_size;
  void* key;           // [num_tokens, num_kv_heads, head_size]
  int64_t key_stride;  // elements between tokens
  void* value;         // [num_tokens, num_kv_heads, head_size]
  int64_t value_stride;
  CacheLayout layout;
  const void* key_cache;
  CacheStrides key_strides;
  const void* value_cache;
  CacheStrides value_strides;
  Indices slot_mapping;  // [num_tokens]; negative: the row is left as it is
};

// Tokens [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(reshape_and_cache, const ReshapeAndCacheParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(gather_cached_kv, const GatherCachedKvParams& params, int64_t begin, int64_t end)

namespace cuda {
void reshape_and_cache(const ReshapeAndCacheParams& params, cudaStream_t stream);
void gather_cached_kv(const GatherCachedKvParams& params, cudaStream_t stream);
}  // namespace cuda

}  // namespace pagedattn
