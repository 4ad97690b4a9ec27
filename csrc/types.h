// Types shared by op files and kernels. No torch, no CUDA.
//
// The paged cache has one of two layouts, x = 16 / sizeof(element):
//   CHUNKED  key_cache    [num_blocks, num_kv_heads, head_size / x, block_size, x]
//            value_cache  [num_blocks, num_kv_heads, head_size, block_size]
//   NHD      both         [num_blocks, block_size, num_kv_heads, head_size], the last dimension contiguous. The other
//                         dimensions may have any strides, so that HND is this layout with other strides.
// Token t of a sequence sits in block block_table[t / block_size] at offset t % block_size.
#pragma once

#include <cstdint>

using cudaStream_t = struct CUstream_st*;  // as the CUDA toolkit declares it; op files do not include the toolkit

namespace pagedattn {

enum class DType { FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };

// Storage only: arithmetic is done in fp32 after a load.
struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
struct float8_e4m3 {  // 4 exponent bits of bias 7, 3 mantissa bits; no infinity, 0x7f is NaN
  uint8_t bits;
};
struct float8_e5m2 {  // the upper half of a float16
  uint8_t bits;
};

enum class CacheLayout { CHUNKED, NHD };

// Elements from one to the next, in a key cache or a value cache. A CHUNKED cache has these strides as well.
struct CacheStrides {
  int64_t block;
  int64_t token;  // of a block
  int64_t kv_head;
};

// Indices as a tensor of int64 or of int32 holds them. One of the two pointers is nullptr.
struct Indices {
  const int64_t* as_int64;
  const int32_t* as_int32;

  constexpr int64_t operator[](int64_t i) const { return as_int64 != nullptr ? as_int64[i] : as_int32[i]; }
  constexpr bool is_given() const { return as_int64 != nullptr || as_int32 != nullptr; }
  constexpr Indices from(int64_t first) const {
    return as_int64 != nullptr ? Indices{as_int64 + first, nullptr} : Indices{nullptr, as_int32 + first};
  }
};

constexpr int64_t MAX_HEAD_SIZE = 512;

// The `x` of the key cache: elements of one token that are adjacent in memory.
template <typename T>
inline constexpr int ELEMENTS_PER_CHUNK = 16 / sizeof(T);

constexpr bool is_float8(DType dtype) { return dtype == DType::FLOAT8_E4M3 || dtype == DType::FLOAT8_E5M2; }
constexpr int64_t element_size(DType dtype) { return dtype == DType::FLOAT32 ? 4 : is_float8(dtype) ? 1 : 2; }

}  // namespace pagedattn
