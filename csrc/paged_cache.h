// The check of one layer's key and value cache, for every op that takes one (layout: types.h).
#pragma once

#include <cmath>

#include "index_checks.h"

namespace pagedattn {

constexpr int64_t MAX_BLOCK_SIZE = 256;  // of a CHUNKED cache

// The factor is on_host times *on_device, and one of the two is always 1 (nullptr stands for 1). The scale of a cache
// that is not fp8 is 1.
struct CacheScale {
  float on_host = 1.0f;              // for a kernel on a GPU
  const float* on_device = nullptr;  // in the kernel's own memory, read when the kernel runs
  HostValues values{};               // of on_device
};

inline float check_scale_value(const Door& door, const char* argument, float value) {
  door.check(std::isfinite(value) && value > 0, argument, "expected a positive finite number, got ", value);
  return value;
}

struct ScaleCheck {
  Door door;
  CacheScale key_scale;
  CacheScale value_scale;

  void operator()() const {
    check("k_scale", key_scale.values);
    check("v_scale", value_scale.values);
  }
  void check(const char* argument, const HostValues& values) const {
    if (values.are_given) check_scale_value(door, argument, *static_cast<const float*>(values.data));
  }
};

struct PagedCache {
  DType dtype;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t block_size;
  CacheLayout layout;
  CacheStrides key_strides;
  CacheStrides value_strides;
  CacheScale key_scale;  // what a stored key is multiplied with
  CacheScale value_scale;
};

inline DType cache_dtype(const Door& door, const Tensor& key_cache, const std::string& kv_cache_dtype) {
  door.present("key_cache", key_cache);
  const ScalarType dtype = dtype_of(key_cache);
  const auto float8 = [&](DType result, ScalarType expected) {
    door.check_type(dtype == expected || dtype == ScalarType::Byte, "key_cache", "expected dtype ", expected,
                    " or uint8 (kv_cache_dtype is \"", kv_cache_dtype, "\"), got ", dtype);
    return result;
  };
  if (kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3") {
    return float8(DType::FLOAT8_E4M3, ScalarType::Float8_e4m3fn);
  }
  if (kv_cache_dtype == "fp8_e5m2") return float8(DType::FLOAT8_E5M2, ScalarType::Float8_e5m2);
  if (kv_cache_dtype == "int8") {
    door.check_type(dtype == ScalarType::Char, "key_cache", "expected dtype int8 (kv_cache_dtype is \"int8\"), got ",
                    dtype);
    return DType::INT8;
  }
  door.check(kv_cache_dtype == "auto", "kv_cache_dtype",
             "expected \"auto\", \"fp8\", \"fp8_e4m3\", \"fp8_e5m2\" or \"int8\", got \"", kv_cache_dtype, "\"");
  if (dtype == ScalarType::Char) return DType::INT8;
  if (dtype == ScalarType::Float8_e4m3fn) return DType::FLOAT8_E4M3;
  if (dtype == ScalarType::Float8_e5m2) return DType::FLOAT8_E5M2;
  return door.float_dtype("key_cache", key_cache);
}

// None is 1. A cache that is not fp8 is not scaled, whatever the scale says, because frameworks always pass the scales
// of a layer. An op on a GPU takes a scale in the memory of the host or of the GPU.
inline CacheScale cache_scale(const Door& door, const char* argument, const std::optional<Tensor>& scale, DType dtype) {
  if (!scale.has_value()) return {};
  door.dtype_anywhere(argument, *scale, ScalarType::Float);
  door.check(scale->numel() == 1, argument, "expected one element, got shape ", scale->sizes());
  if (!is_float8(dtype)) return {};
  if (door.runs_on_cuda() && !is_on_cuda(*scale)) {
    return {check_scale_value(door, argument, *scale->const_data_ptr<float>()), nullptr};
  }
  door.present(argument, *scale);
  return {1.0f, scale->const_data_ptr<float>(), door.values(*scale)};
}

inline CacheStrides nhd_strides(const Door& door, const char* argument, const Tensor& cache) {
  door.contiguous_from(argument, cache, 3);
  return {cache.stride(0), cache.stride(1), cache.stride(2)};
}

// Sets what the shapes of the two caches say. The rank of the key cache tells the layout.
inline void check_nhd_cache(const Door& door, const Tensor& key_cache, const Tensor& value_cache, PagedCache& cache) {
  cache.layout = CacheLayout::NHD;
  cache.num_blocks = key_cache.size(0);
  cache.block_size = key_cache.size(1);
  cache.num_kv_heads = key_cache.size(2);
  cache.head_size = key_cache.size(3);
  door.shape("value_cache", value_cache, key_cache.sizes());
  cache.key_strides = nhd_strides(door, "key_cache", key_cache);
  cache.value_strides = nhd_strides(door, "value_cache", value_cache);
  door.check(cache.block_size > 0, "key_cache", "expected a block size of at least 1, got shape ", key_cache.sizes());
}

inline void check_chunked_cache(const Door& door, const Tensor& key_cache, const Tensor& value_cache,
                                PagedCache& cache) {
  const int64_t x = 16 / element_size(cache.dtype);
  const int64_t scale_rows = cache.dtype == DType::INT8 ? INT8_SCALE_ROWS : 0;
  door.shape("key_cache", key_cache, {ANY, ANY, ANY, ANY, x});
  door.contiguous_from("key_cache", key_cache, 1);
  cache.num_blocks = key_cache.size(0);
  cache.num_kv_heads = key_cache.size(1);
  cache.head_size = key_cache.size(2) * x;
  cache.block_size = key_cache.size(3);
  cache.layout = CacheLayout::CHUNKED;
  door.check(
      cache.block_size >= 1 && cache.block_size <= MAX_BLOCK_SIZE && (cache.block_size & (cache.block_size - 1)) == 0,
      "key_cache", "expected a block size that is a power of two from 1 to ", MAX_BLOCK_SIZE, ", got ",
      cache.block_size, " (shape ", key_cache.sizes(), ")");
  const int64_t value_rows = cache.head_size + scale_rows;
  door.shape("value_cache", value_cache, {cache.num_blocks, cache.num_kv_heads, value_rows, cache.block_size});
  door.contiguous_from("value_cache", value_cache, 1);
  cache.key_strides = {key_cache.stride(0), x, cache.head_size * cache.block_size};
  cache.value_strides = {value_cache.stride(0), 1, value_rows * cache.block_size};
}

inline void check_head_size(const Door& door, const char* argument, const Tensor& tensor, int64_t head_size,
                            DType dtype) {
  const int64_t x = 16 / element_size(dtype);
  door.check(head_size > 0 && head_size <= MAX_HEAD_SIZE && head_size % x == 0, argument, "expected a head size of ", x,
             " to ", MAX_HEAD_SIZE, ", a multiple of ", x, ", got ", head_size, " (shape ", tensor.sizes(), ")");
}

inline PagedCache check_paged_cache(const Door& door, const Tensor& key_cache, const Tensor& value_cache,
                                    const std::string& kv_cache_dtype, const std::optional<Tensor>& k_scale,
                                    const std::optional<Tensor>& v_scale) {
  PagedCache cache{};
  cache.dtype = cache_dtype(door, key_cache, kv_cache_dtype);
  door.check(key_cache.dim() == 4 || key_cache.dim() == 5, "key_cache",
             "expected 5 dimensions [num_blocks, num_kv_heads, head_size / x, block_size, x], or 4 dimensions "
             "[num_blocks, block_size, num_kv_heads, head_size], got ",
             key_cache.dim(), " (shape ", key_cache.sizes(), ")");
  door.dtype("value_cache", value_cache, dtype_of(key_cache));
  if (cache.dtype == DType::INT8) {
    door.check(!door.runs_on_cuda(), "key_cache", "expected another dtype on a GPU (int8 caches are for the CPU), got ",
               dtype_of(key_cache));
    door.check(key_cache.dim() == 5, "key_cache",
               "expected 5 dimensions [num_blocks, num_kv_heads, head_size / x, block_size, x] of dtype int8, got ",
               key_cache.dim(), " (shape ", key_cache.sizes(), ")");
  }
  if (key_cache.dim() == 4) {
    check_nhd_cache(door, key_cache, value_cache, cache);
  } else {
    check_chunked_cache(door, key_cache, value_cache, cache);
  }
  check_num_blocks(door, "key_cache", cache.num_blocks);
  door.check(cache.num_kv_heads > 0, "key_cache", "expected at least 1 KV head, got shape ", key_cache.sizes());
  check_head_size(door, "key_cache", key_cache, cache.head_size, cache.dtype);
  cache.key_scale = cache_scale(door, "k_scale", k_scale, cache.dtype);
  cache.value_scale = cache_scale(door, "v_scale", v_scale, cache.dtype);
  return cache;
}

// The dtype of a tensor that is computed with the cache. It must be the cache's dtype. Beside a cache in 8 bits it may
// be fp32, fp16 or bf16.
inline DType check_meets_cache(const Door& door, const char* argument, const Tensor& tensor, const PagedCache& cache,
                               const Tensor& key_cache) {
  if (!has_8_bits(cache.dtype)) door.dtype(argument, tensor, dtype_of(key_cache));
  return door.float_dtype(argument, tensor);
}

}  // namespace pagedattn
