#include "cache/reshape_and_cache.h"

#include "append.h"
#include "cache/cache_op.h"
#include "ops.h"
#include "paged_cache.h"
#include "run.h"

namespace pagedattn {
namespace {

struct ScaledSlotCheck : SlotCheck {
  ScaleCheck scales;
};

ScaledSlotCheck value_check(const Door& door, const PagedCache& cache, const Tensor& slot_mapping,
                            const Indices& slots) {
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  return {{door, door.values(slot_mapping), slots.are_int64, slot_mapping.size(0), num_slots},
          {door, cache.key_scale, cache.value_scale}};
}

// Tokens [num_tokens, num_kv_heads, head_size] as rows.
RowView check_rows(const Door& door, const char* argument, const Tensor& tokens, int64_t num_tokens,
                   const PagedCache& cache) {
  door.shape(argument, tokens, {num_tokens, cache.num_kv_heads, cache.head_size});
  door.contiguous_from(argument, tokens, 1);
  return {num_tokens, cache.num_kv_heads * cache.head_size, tokens.stride(0)};
}

// The same of `key` and `value`. in_sequences: both may be [num_seqs, tokens_per_seq, num_kv_heads, head_size].
std::pair<RowView, RowView> check_key_and_value(const Door& door, const Tensor& key, const Tensor& value,
                                                int64_t num_tokens, const PagedCache& cache, bool in_sequences) {
  if (!in_sequences || key.dim() != 4) {
    return {check_rows(door, "key", key, num_tokens, cache), check_rows(door, "value", value, num_tokens, cache)};
  }
  const int64_t num_seqs = key.size(0), tokens_per_seq = key.size(1);
  door.check(num_seqs * tokens_per_seq == num_tokens, "key", "expected ", num_tokens, " tokens, got shape ",
             key.sizes());
  door.shape("key", key, {num_seqs, tokens_per_seq, cache.num_kv_heads, cache.head_size});
  door.shape("value", value, key.sizes());
  const auto rows_of = [&](const char* argument, const Tensor& tokens) {
    door.contiguous_from(argument, tokens, 2);
    return door.rows_before(argument, tokens, 2, cache.num_kv_heads * cache.head_size);
  };
  return {rows_of("key", key), rows_of("value", value)};
}

// The parameters that both ops have, but for the pointers.
template <typename Params>
void set_sizes(Params& params, const PagedCache& cache, const RowView& key, const RowView& value) {
  params.num_kv_heads = cache.num_kv_heads;
  params.head_size = cache.head_size;
  params.block_size = cache.block_size;
  params.key_stride = key.stride;
  params.value_stride = value.stride;
  params.layout = cache.layout;
  params.key_strides = cache.key_strides;
  params.value_strides = cache.value_strides;
}

void check_written_cache(const Door& door, const char* argument, const Tensor& tensor, CacheLayout layout) {
  if (layout == CacheLayout::CHUNKED) {
    door.written_from_1(argument, tensor);
  } else {
    door.written_elements(argument, tensor);
  }
}

}  // namespace

void write_tokens(const Door& door, const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                  const Tensor& slot_mapping, const std::string& kv_cache_dtype, const std::optional<Tensor>& k_scale,
                  const std::optional<Tensor>& v_scale, TokenShape shape) {
  const PagedCache cache = check_paged_cache(door, key_cache, value_cache, kv_cache_dtype, k_scale, v_scale);
  ReshapeAndCacheParams params{};
  params.slot_mapping = check_slots(door, slot_mapping);
  params.num_tokens = slot_mapping.size(0);
  params.dtype = check_meets_cache(door, "key", key, cache, key_cache);
  const bool is_padded = shape == TokenShape::PADDED && key.dim() > 0 && key.size(0) > params.num_tokens;
  const int64_t num_tokens = is_padded ? key.size(0) : params.num_tokens;
  door.dtype("value", value, dtype_of(key));
  const auto [key_rows, value_rows] =
      check_key_and_value(door, key, value, num_tokens, cache, shape == TokenShape::IN_SEQUENCES);
  check_written_cache(door, "key_cache", key_cache, cache.layout);
  check_written_cache(door, "value_cache", value_cache, cache.layout);
  door.other_memory("value_cache", value_cache, "key_cache", key_cache);
  params.cache_dtype = cache.dtype;
  set_sizes(params, cache, key_rows, value_rows);
  params.key = key.const_data_ptr();
  params.value = value.const_data_ptr();
  params.key_cache = key_cache.mutable_data_ptr();
  params.value_cache = value_cache.mutable_data_ptr();
  params.key_scale = cache.key_scale.on_host;
  params.value_scale = cache.value_scale.on_host;
  params.key_scale_on_device = cache.key_scale.on_device;
  params.value_scale_on_device = cache.value_scale.on_device;
  run_rows(door, value_check(door, cache, slot_mapping, params.slot_mapping), PAGEDATTN_ROW_KERNELS(reshape_and_cache),
           params, params.num_tokens, 2 * cache.num_kv_heads * cache.head_size);
}

void reshape_and_cache(const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                       const Tensor& slot_mapping, StringHandle kv_cache_dtype, const std::optional<Tensor>& k_scale,
                       const std::optional<Tensor>& v_scale) {
  const std::string cache_dtype = take_string(kv_cache_dtype);
  write_tokens(Door("reshape_and_cache", key_cache), key, value, key_cache, value_cache, slot_mapping, cache_dtype,
               k_scale, v_scale, TokenShape::PLAIN);
}

void reshape_and_cache_flash(const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                             const Tensor& slot_mapping, StringHandle kv_cache_dtype,
                             const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  const std::string cache_dtype = take_string(kv_cache_dtype);
  const Door door("reshape_and_cache_flash", key_cache);
  door.defined("key_cache", key_cache);
  door.rank("key_cache", key_cache, 4);
  write_tokens(door, key, value, key_cache, value_cache, slot_mapping, cache_dtype, k_scale, v_scale,
               TokenShape::PADDED);
}

void gather_cached_kv(Tensor& key, Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                      const Tensor& slot_mapping) {
  const Door door("gather_cached_kv", key_cache);
  const PagedCache cache = check_paged_cache(door, key_cache, value_cache, "auto", std::nullopt, std::nullopt);
  door.float_dtype("key_cache", key_cache);
  GatherCachedKvParams params{};
  params.slot_mapping = check_slots(door, slot_mapping);
  params.num_tokens = slot_mapping.size(0);
  door.dtype("key", key, dtype_of(key_cache));
  const RowView key_rows = check_rows(door, "key", key, params.num_tokens, cache);
  door.dtype("value", value, dtype_of(key_cache));
  const RowView value_rows = check_rows(door, "value", value, params.num_tokens, cache);
  door.written_from_1("key", key);
  door.written_from_1("value", value);
  door.other_memory("value", value, "key", key);
  params.dtype = cache.dtype;
  set_sizes(params, cache, key_rows, value_rows);
  params.key = key.mutable_data_ptr();
  params.value = value.mutable_data_ptr();
  params.key_cache = key_cache.const_data_ptr();
  params.value_cache = value_cache.const_data_ptr();
  run_rows(door, value_check(door, cache, slot_mapping, params.slot_mapping), PAGEDATTN_ROW_KERNELS(gather_cached_kv),
           params, params.num_tokens, 2 * cache.num_kv_heads * cache.head_size);
}

}  // namespace pagedattn
