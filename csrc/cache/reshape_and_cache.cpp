#include "cache/reshape_and_cache.h"

#include "ops.h"
#include "paged_cache.h"
#include "parallel.h"

namespace pagedattn {

void reshape_and_cache(const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                       const Tensor& slot_mapping, const std::string& kv_cache_dtype,
                       const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  const Door door("reshape_and_cache");
  door.no_quantised_cache(kv_cache_dtype, k_scale, v_scale);
  const PagedCache cache = check_paged_cache(door, key_cache, value_cache);

  door.dtype("slot_mapping", slot_mapping, ScalarType::Long);
  door.rank("slot_mapping", slot_mapping, 1);
  door.contiguous("slot_mapping", slot_mapping);
  const int64_t num_tokens = slot_mapping.size(0);
  door.dtype("key", key, key_cache.scalar_type());
  door.shape("key", key, {num_tokens, cache.num_kv_heads, cache.head_size});
  door.contiguous_from("key", key, 1);
  door.dtype("value", value, key_cache.scalar_type());
  door.shape("value", value, {num_tokens, cache.num_kv_heads, cache.head_size});
  door.contiguous_from("value", value, 1);

  ReshapeAndCacheParams params{};
  params.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t slot = params.slot_mapping[token];
    door.check(slot < num_slots, "slot_mapping", "expected slots below ", num_slots, ", got ", slot, " at token ",
               token);
  }

  params.dtype = cache.dtype;
  params.num_tokens = num_tokens;
  params.num_kv_heads = cache.num_kv_heads;
  params.head_size = cache.head_size;
  params.block_size = cache.block_size;
  params.key = key.const_data_ptr();
  params.key_stride = key.stride(0);
  params.value = value.const_data_ptr();
  params.value_stride = value.stride(0);
  params.key_cache = key_cache.mutable_data_ptr();
  params.key_block_stride = cache.key_block_stride;
  params.value_cache = value_cache.mutable_data_ptr();
  params.value_block_stride = cache.value_block_stride;
  const auto kernel = PAGEDATTN_CPU_KERNEL(reshape_and_cache);
  parallel_for_rows(num_tokens, 2 * cache.num_kv_heads * cache.head_size,
                    [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

}  // namespace pagedattn
