// Dot products of keys with query rows, for paged_attention_cpu.cpp.
//
// 16 bytes of the key cache, a chunk, belong to one token, and the next 16 to the next token, so a vector holds the
// same chunk of NUM_LANES tokens, one a 128-bit lane. It is multiplied with that chunk of a query row, repeated in
// every lane; each token ends up with four partial sums.
#pragma once

#include "cpu_vec.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// A lane holds PARTS elements of the cache; they are taken apart into as many vectors of floats.
template <typename CacheT>
struct KeyDot {
  static constexpr int CHUNK_ELEMENTS = ELEMENTS_PER_CHUNK<CacheT>;
  static constexpr int PARTS = CHUNK_ELEMENTS / 4;

  struct Keys {
    Vec part[PARTS];
  };

  static PAGEDATTN_INLINE Keys load_keys(const CacheT* keys);

  // From a row made by unpack_query, what `part` of that chunk of the keys is multiplied with.
  static PAGEDATTN_INLINE Vec load_query(const float* row, int64_t chunk, int part) {
    return load_repeated_lane(row + (chunk * PARTS + part) * 4);
  }

  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec keys, Vec query) { return fma(keys, query, sum); }

  // A query row, once, in the order that load_query wants: row is [head_size / CHUNK_ELEMENTS, PARTS, 4].
  template <typename T>
  static void unpack_query(const T* query, int64_t head_size, float* row) {
    float in_order[MAX_HEAD_SIZE];
    for_each_vector(head_size, [&](int64_t d, auto load, auto store) { store(in_order + d, load(query + d)); });
    for (int64_t d = 0; d < head_size; ++d) {
      const int64_t within = d % CHUNK_ELEMENTS;
      row[d - within + within % PARTS * 4 + within / PARTS] = in_order[d];
    }
  }
};

template <>
PAGEDATTN_INLINE KeyDot<float>::Keys KeyDot<float>::load_keys(const float* keys) {
  return {{load(keys)}};
}

template <>
PAGEDATTN_INLINE KeyDot<float16>::Keys KeyDot<float16>::load_keys(const float16* keys) {
  const UintVec pairs = load_as<UintVec>(keys);
  return {{float16_to_float(narrow(pairs & 0xffff)), float16_to_float(narrow(pairs >> 16))}};
}

template <typename CacheT>
PAGEDATTN_INLINE typename KeyDot<CacheT>::Keys load_float8_keys(const CacheT* keys) {
  const UintVec quads = load_as<UintVec>(keys);
  typename KeyDot<CacheT>::Keys result;
  for (int i = 0; i < 4; ++i) {
    result.part[i] = float8_to_float(narrow(quads >> (8 * i) & 0xff), CacheT{});
  }
  return result;
}
template <>
PAGEDATTN_INLINE KeyDot<float8_e4m3>::Keys KeyDot<float8_e4m3>::load_keys(const float8_e4m3* keys) {
  return load_float8_keys(keys);
}
template <>
PAGEDATTN_INLINE KeyDot<float8_e5m2>::Keys KeyDot<float8_e5m2>::load_keys(const float8_e5m2* keys) {
  return load_float8_keys(keys);
}

template <>
PAGEDATTN_INLINE KeyDot<bfloat16>::Keys KeyDot<bfloat16>::load_keys(const bfloat16* keys) {
  const UintVec pairs = load_as<UintVec>(keys);
  return {{(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000)}};
}

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIR_DOT = true;

// The same for queries in bfloat16, and keys that are, or that it can hold: the dot product instruction multiplies
// pairs as they are, and adds in fp32.
template <typename CacheT>
struct PairDot {
  static constexpr int CHUNK_ELEMENTS = ELEMENTS_PER_CHUNK<CacheT>;
  static constexpr int PARTS = CHUNK_ELEMENTS / 8;

  struct Keys {
    Bfloat16Vec part[PARTS];
  };

  static PAGEDATTN_INLINE Keys load_keys(const CacheT* keys) {
    if constexpr (PARTS == 1) {
      return {{load_as<Bfloat16Vec>(keys)}};
    } else {
      const Bfloat16Halves halves = float8_to_bfloat16_halves(load_as<UintVec>(keys), CacheT{});
      return {{halves.lower, halves.upper}};
    }
  }

  // 8 elements.
  static PAGEDATTN_INLINE Bfloat16Vec load_query(const float* row, int64_t chunk, int part) {
    return (Bfloat16Vec)load_repeated_lane(row + (chunk * PARTS + part) * 4);
  }

  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Bfloat16Vec keys, Bfloat16Vec query) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, keys, query);
  }

  template <typename T>
  static void unpack_query(const T* query, int64_t head_size, float* row) {
    bfloat16* bits = reinterpret_cast<bfloat16*>(row);
    for_each_vector(head_size, [&](int64_t d, auto load, auto store) { store(bits + d, load(query + d)); });
  }
};
#else
constexpr bool HAS_PAIR_DOT = false;
#endif

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
