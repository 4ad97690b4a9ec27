// The check of one layer's key and value cache, for every op that takes one (layout: types.h).
#pragma once

#include "torch_utils.h"

namespace pagedattn {

struct PagedCache {
  DType dtype;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t block_size;
  int64_t key_block_stride;  // elements between blocks
  int64_t value_block_stride;
};

inline PagedCache check_paged_cache(const Door& door, const Tensor& key_cache, const Tensor& value_cache) {
  constexpr int64_t MAX_HEAD_SIZE = 256;
  constexpr int64_t MIN_BLOCK_SIZE = 8;
  constexpr int64_t MAX_BLOCK_SIZE = 256;

  PagedCache cache{};
  cache.dtype = door.float_dtype("key_cache", key_cache);
  const int64_t x = 16 / element_size(cache.dtype);
  door.rank("key_cache", key_cache, 5);
  door.shape("key_cache", key_cache, {ANY, ANY, ANY, ANY, x});
  door.contiguous_from("key_cache", key_cache, 1);
  cache.num_blocks = key_cache.size(0);
  cache.num_kv_heads = key_cache.size(1);
  cache.head_size = key_cache.size(2) * x;
  cache.block_size = key_cache.size(3);
  cache.key_block_stride = key_cache.stride(0);
  door.check(cache.num_kv_heads > 0, "key_cache", "expected at least 1 KV head, got shape ", key_cache.sizes());
  door.check(cache.head_size > 0 && cache.head_size <= MAX_HEAD_SIZE, "key_cache", "expected a head size of ", x,
             " to ", MAX_HEAD_SIZE, ", got ", cache.head_size, " (shape ", key_cache.sizes(), ")");
  door.check(cache.block_size >= MIN_BLOCK_SIZE && cache.block_size <= MAX_BLOCK_SIZE &&
                 (cache.block_size & (cache.block_size - 1)) == 0,
             "key_cache", "expected a block size that is a power of two from ", MIN_BLOCK_SIZE, " to ", MAX_BLOCK_SIZE,
             ", got ", cache.block_size, " (shape ", key_cache.sizes(), ")");

  door.dtype("value_cache", value_cache, key_cache.scalar_type());
  door.shape("value_cache", value_cache, {cache.num_blocks, cache.num_kv_heads, cache.head_size, cache.block_size});
  door.contiguous_from("value_cache", value_cache, 1);
  cache.value_block_stride = value_cache.stride(0);
  return cache;
}

}  // namespace pagedattn
