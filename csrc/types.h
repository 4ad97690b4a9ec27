// Types shared by op files and kernels. No torch, no CUDA.
//
// The paged cache has one of two layouts, x = 16 / sizeof(element):
//   CHUNKED  key_cache    [num_blocks, num_kv_heads, head_size / x, block_size, x]
//            value_cache  [num_blocks, num_kv_heads, head_size, block_size]
//   NHD      both         [num_blocks, block_size, num_kv_heads, head_size], the last dimension contiguous. The other
//                         dimensions may have any strides, so that HND is this layout with other strides.
// Token t of a sequence sits in block block_table[t / block_size] at offset t % block_size.
//
// A cache of int8 is CHUNKED, and its value_cache has INT8_SCALE_ROWS more rows after the head_size rows of each KV
// head: 4 * block_size bytes with the keys' scales of the block's tokens, as fp32, then as many with the values'
// scales.
#pragma once

#include <cstdint>

using cudaStream_t = struct CUstream_st*;  // as the CUDA toolkit declares it; op files do not include the toolkit

namespace pagedattn {

enum class DType { FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, INT8 };

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
struct int8 {  // -127 to 127, times the scale of the token's key or value at the KV head
  int8_t value;
};

enum class CacheLayout { CHUNKED, NHD };

// Elements from one to the next, in a key cache or a value cache. A CHUNKED cache has these strides as well.
struct CacheStrides {
  int64_t block;
  int64_t token;  // of a block
  int64_t kv_head;
};

// Indices as a tensor of int64 or of int32 holds them.
struct Indices {
  const void* data;  // nullptr: not given
  bool are_int64;

  constexpr int64_t operator[](int64_t i) const {
    return are_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  // Of an index that int32 holds, the low half, by one load for both widths: CUDA kernels have no registers for more.
  constexpr int32_t low(int64_t i) const { return static_cast<const int32_t*>(data)[are_int64 ? 2 * i : i]; }
  constexpr bool is_given() const { return data != nullptr; }
  constexpr Indices from(int64_t first) const {
    return {static_cast<const char*>(data) + first * (are_int64 ? 8 : 4), are_int64};
  }
};

constexpr int64_t MAX_HEAD_SIZE = 512;
constexpr int64_t MAX_TOKENS = int64_t{1} << 30;  // of a sequence: CUDA kernels count on from a token in int32
constexpr int64_t INT8_SCALE_ROWS = 8;

// The `x` of the key cache: elements of one token that are adjacent in memory.
template <typename T>
inline constexpr int ELEMENTS_PER_CHUNK = 16 / sizeof(T);

constexpr bool is_float8(DType dtype) { return dtype == DType::FLOAT8_E4M3 || dtype == DType::FLOAT8_E5M2; }
constexpr bool has_8_bits(DType dtype) { return is_float8(dtype) || dtype == DType::INT8; }
constexpr int64_t element_size(DType dtype) { return dtype == DType::FLOAT32 ? 4 : has_8_bits(dtype) ? 1 : 2; }

}  // namespace pagedattn
