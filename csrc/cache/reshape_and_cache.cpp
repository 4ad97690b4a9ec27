#include "cache/reshape_and_cache.h"

#include "ops.h"
#include "paged_cache.h"
#include "run.h"

namespace pagedattn {
namespace {

const int64_t* check_slots(const Door& door, const Tensor& slot_mapping, const PagedCache& cache) {
  door.dtype("slot_mapping", slot_mapping, ScalarType::Long);
  door.rank("slot_mapping", slot_mapping, 1);
  door.contiguous("slot_mapping", slot_mapping);
  if (door.checks_values()) {
    const Tensor host_slots = on_host(slot_mapping);
    const int64_t* slots = host_slots.const_data_ptr<int64_t>();
    const int64_t num_slots = cache.num_blocks * cache.block_size;
    for (int64_t token = 0; token < slot_mapping.size(0); ++token) {
      door.check(slots[token] < num_slots, "slot_mapping", "expected slots below ", num_slots, ", got ", slots[token],
                 " at token ", token);
    }
  }
  return slot_mapping.const_data_ptr<int64_t>();
}

void check_rows(const Door& door, const char* argument, const Tensor& rows, int64_t num_tokens,
                const PagedCache& cache) {
  door.shape(argument, rows, {num_tokens, cache.num_kv_heads, cache.head_size});
  door.contiguous_from(argument, rows, 1);
}

// The parameters that both ops have, but for the pointers.
template <typename Params>
void set_sizes(const Door& door, Params& params, const PagedCache& cache, const Tensor& key, const Tensor& value) {
  params.num_kv_heads = cache.num_kv_heads;
  params.head_size = cache.head_size;
  params.block_size = cache.block_size;
  params.key_stride = key.stride(0);
  params.value_stride = value.stride(0);
  door.check(cache.layout == CacheLayout::CHUNKED, "key_cache", "expected 5 dimensions, got 4");
  params.layout = cache.layout;
  params.key_strides = cache.key_strides;
  params.value_strides = cache.value_strides;
}

}  // namespace

void reshape_and_cache(const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                       const Tensor& slot_mapping, StringHandle kv_cache_dtype, const std::optional<Tensor>& k_scale,
                       const std::optional<Tensor>& v_scale) {
  const std::string cache_dtype = take_string(kv_cache_dtype);
  const Door door("reshape_and_cache", key_cache);
  const PagedCache cache = check_paged_cache(door, key_cache, value_cache, cache_dtype, k_scale, v_scale);

  ReshapeAndCacheParams params{};
  params.slot_mapping = check_slots(door, slot_mapping, cache);
  params.num_tokens = slot_mapping.size(0);
  params.dtype = check_meets_cache(door, "key", key, cache, key_cache);
  check_rows(door, "key", key, params.num_tokens, cache);
  door.dtype("value", value, key.scalar_type());
  check_rows(door, "value", value, params.num_tokens, cache);
  door.written_from_1("key_cache", key_cache);
  door.written_from_1("value_cache", value_cache);
  door.other_memory("value_cache", value_cache, "key_cache", key_cache);
  params.cache_dtype = cache.dtype;
  set_sizes(door, params, cache, key, value);
  params.key = key.const_data_ptr();
  params.value = value.const_data_ptr();
  params.key_cache = key_cache.mutable_data_ptr();
  params.value_cache = value_cache.mutable_data_ptr();
  params.key_scale = cache.key_scale.on_host;
  params.value_scale = cache.value_scale.on_host;
  params.key_scale_on_device = cache.key_scale.on_device;
  params.value_scale_on_device = cache.value_scale.on_device;
  run_rows(door, PAGEDATTN_ROW_KERNELS(reshape_and_cache), params, params.num_tokens,
           2 * cache.num_kv_heads * cache.head_size);
}

void gather_cached_kv(Tensor& key, Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                      const Tensor& slot_mapping) {
  const Door door("gather_cached_kv", key_cache);
  const PagedCache cache = check_paged_cache(door, key_cache, value_cache, "auto", std::nullopt, std::nullopt);
  door.float_dtype("key_cache", key_cache);
  GatherCachedKvParams params{};
  params.slot_mapping = check_slots(door, slot_mapping, cache);
  params.num_tokens = slot_mapping.size(0);
  door.dtype("key", key, key_cache.scalar_type());
  check_rows(door, "key", key, params.num_tokens, cache);
  door.dtype("value", value, key_cache.scalar_type());
  check_rows(door, "value", value, params.num_tokens, cache);
  door.written_from_1("key", key);
  door.written_from_1("value", value);
  door.other_memory("value", value, "key", key);
  params.dtype = cache.dtype;
  set_sizes(door, params, cache, key, value);
  params.key = key.mutable_data_ptr();
  params.value = value.mutable_data_ptr();
  params.key_cache = key_cache.const_data_ptr();
  params.value_cache = value_cache.const_data_ptr();
  run_rows(door, PAGEDATTN_ROW_KERNELS(gather_cached_kv), params, params.num_tokens,
           2 * cache.num_kv_heads * cache.head_size);
}

}  // namespace pagedattn
