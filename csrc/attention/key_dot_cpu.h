// Dot products of keys with query rows, for paged_attention_cpu.cpp.
//
// 16 bytes of the key cache, a chunk, belong to one token, and the next 16 to the next token, so a vector holds the
// same chunk of NUM_LANES tokens, one a 128-bit lane. It is multiplied with that chunk of a query row, repeated in
// every lane; each token ends up with four partial sums.
#pragma once

#include "cpu_vec.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// 16-bit elements are taken as 32-bit pairs: the even elements in one vector, the odd ones in another.
struct ChunkPair {
  Vec even, odd;
};

PAGEDATTN_INLINE Vec load_keys(const float* keys) { return load(keys); }

#if defined(__AVX512BF16__)
typedef __m512bh Bf16Vec;
PAGEDATTN_INLINE Bf16Vec load_keys(const bfloat16* keys) { return load_as<Bf16Vec>(keys); }
#else
PAGEDATTN_INLINE ChunkPair load_keys(const bfloat16* keys) {
  const UintVec pairs = load_as<UintVec>(keys);
  return {(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000)};
}
#endif

PAGEDATTN_INLINE ChunkPair load_keys(const float16* keys) {
  const UintVec pairs = load_as<UintVec>(keys);
  return {float16_to_float(narrow(pairs & 0xffff)), float16_to_float(narrow(pairs >> 16))};
}

PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec keys, Vec query) { return fma(keys, query, sum); }
PAGEDATTN_INLINE Vec multiply_add(Vec sum, const ChunkPair& keys, const ChunkPair& query) {
  return fma(keys.odd, query.odd, fma(keys.even, query.even, sum));
}
#if defined(__AVX512BF16__)
PAGEDATTN_INLINE Vec multiply_add(Vec sum, Bf16Vec keys, Bf16Vec query) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, keys, query);
}
#endif

// A query row is unpacked once, chunk by chunk, into the form that multiply_add takes; it needs at most head_size
// floats.
template <typename T>
struct QueryRow {
  static constexpr int CHUNK_FLOATS = 8;
  static void unpack(const T* query, int64_t head_size, float* row) {
    for (int64_t d = 0; d < head_size; d += 8, row += 8) {
      float chunk[2 * VEC_SIZE];
      store(chunk, load_first(query + d, 8 < VEC_SIZE ? 8 : VEC_SIZE));
      if constexpr (VEC_SIZE < 8) store(chunk + VEC_SIZE, load_first(query + d + VEC_SIZE, 8 - VEC_SIZE));
      for (int i = 0; i < 4; ++i) {
        row[i] = chunk[2 * i];
        row[4 + i] = chunk[2 * i + 1];
      }
    }
  }
  static PAGEDATTN_INLINE ChunkPair load_chunk(const float* chunk) {
    return {load_repeated_lane(chunk), load_repeated_lane(chunk + 4)};
  }
};

template <>
struct QueryRow<float> {
  static constexpr int CHUNK_FLOATS = 4;
  static void unpack(const float* query, int64_t head_size, float* row) {
    __builtin_memcpy(row, query, head_size * sizeof(float));
  }
  static PAGEDATTN_INLINE Vec load_chunk(const float* chunk) { return load_repeated_lane(chunk); }
};

#if defined(__AVX512BF16__)
template <>
struct QueryRow<bfloat16> {
  static constexpr int CHUNK_FLOATS = 4;
  static void unpack(const bfloat16* query, int64_t head_size, float* row) {
    __builtin_memcpy(row, query, head_size * sizeof(bfloat16));
  }
  static PAGEDATTN_INLINE Bf16Vec load_chunk(const float* chunk) {
    return (Bf16Vec)_mm512_castps_si512((__m512)load_repeated_lane(chunk));
  }
};
#endif

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
