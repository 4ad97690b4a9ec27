// Vectors of fp32 to and from memory that holds any storage type, past the caches or through them, for the CPU kernels.
#pragma once

#include <type_traits>

#include "cpu_float16.h"
#include "cpu_float8.h"
#include "cpu_model.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// ---- load and store VEC_SIZE elements, or the first `count`

PAGEDATTN_INLINE Vec load(const float* source) { return load_as<Vec>(source); }
PAGEDATTN_INLINE Vec load(const float16* source) { return float16_to_float(load_as<ShortVec>(source)); }
PAGEDATTN_INLINE Vec load(const bfloat16* source) { return bfloat16_to_float(load_as<ShortVec>(source)); }
PAGEDATTN_INLINE Vec load(const float8_e4m3* source) {
  return float8_to_float(widen(load_as<ByteVec>(source)), float8_e4m3{});
}
PAGEDATTN_INLINE Vec load(const float8_e5m2* source) {
  return float8_to_float(widen(load_as<ByteVec>(source)), float8_e5m2{});
}

PAGEDATTN_INLINE Vec to_stored(Vec value, float) { return value; }
PAGEDATTN_INLINE ShortVec to_stored(Vec value, float16) { return float_to_float16(value); }
PAGEDATTN_INLINE ShortVec to_stored(Vec value, bfloat16) { return float_to_bfloat16(value); }

template <typename T>
PAGEDATTN_INLINE void store(T* target, Vec value) {
  const auto stored = to_stored(value, T{});
  __builtin_memcpy(target, &stored, sizeof stored);
}

PAGEDATTN_INLINE void store_bytes(void* target, UintVec values) {
  const ByteVec bytes = low_bytes(values);
  __builtin_memcpy(target, &bytes, sizeof bytes);
}
PAGEDATTN_INLINE void store(float8_e4m3* target, Vec value) {
  store_bytes(target, float_to_float8<3, 7>(value, 448.0f));
}
PAGEDATTN_INLINE void store(float8_e5m2* target, Vec value) {
  store_bytes(target, float_to_float8<2, 15>(value, 57344.0f));
}

// The other elements are zero.
template <typename T>
PAGEDATTN_INLINE Vec load_first(const T* source, int64_t count) {
  T buffer[VEC_SIZE] = {};
  __builtin_memcpy(buffer, source, count * sizeof(T));
  return load(buffer);
}

template <typename T>
PAGEDATTN_INLINE void store_first(T* target, Vec value, int64_t count) {
  T buffer[VEC_SIZE];
  store(buffer, value);
  __builtin_memcpy(target, buffer, count * sizeof(T));
}

// With STREAM, the store goes past the caches, and the target is aligned to V. Intrinsics, as GCC 12 has no other name
// for such a store.
template <bool STREAM, typename V>
PAGEDATTN_INLINE void store_bits(void* target, V bits) {
#if defined(__x86_64__)
  if constexpr (STREAM && sizeof bits == 8) {
    _mm_stream_si64(static_cast<long long*>(target), (long long)bits);
  } else if constexpr (STREAM && sizeof bits == 16) {
    _mm_stream_si128(static_cast<__m128i*>(target), (__m128i)bits);
#if defined(__AVX2__)
  } else if constexpr (STREAM && sizeof bits == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(target), (__m256i)bits);
#endif
#if defined(__AVX512F__)
  } else if constexpr (STREAM && sizeof bits == 64) {
    _mm512_stream_si512(static_cast<__m512i*>(target), (__m512i)bits);
#endif
  } else
#endif
    __builtin_memcpy(target, &bits, sizeof bits);
}

// Whether load_two and store_two have a vector of the elements at even places and a vector of the elements at odd
// places, instead of two vectors in order. For bf16 a shift and a mask do this; to put the elements in order takes
// several shuffles on AVX2. An instruction that rounds to bf16 puts them in order.
#if defined(PAGEDATTN_BFLOAT16_DOTS)
template <typename T>
constexpr bool EVEN_AND_ODD = false;
#else
template <typename T>
constexpr bool EVEN_AND_ODD = std::is_same_v<T, bfloat16> && VEC_SIZE <= 8;
#endif

template <typename T>
PAGEDATTN_INLINE Vecs<2> load_two(const T* source) {
  if constexpr (EVEN_AND_ODD<T>) {
    const UintVec pairs = load_as<UintVec>(source);
    return {{(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000)}};
  } else {
    return {{load(source), load(source + VEC_SIZE)}};
  }
}

template <bool STREAM, typename T>
PAGEDATTN_INLINE void store_two(T* target, Vec a, Vec b) {
#if defined(PAGEDATTN_BFLOAT16_DOTS)
  if constexpr (std::is_same_v<T, bfloat16>) return store_bits<STREAM>(target, float_to_bfloat16(a, b));
#elif !defined(__AVX512F__)
  if constexpr (EVEN_AND_ODD<T>) return store_bits<STREAM>(target, float_to_bfloat16_pairs(a, b));
#endif
  store_bits<STREAM>(target, to_stored(a, T{}));
  store_bits<STREAM>(target + VEC_SIZE, to_stored(b, T{}));
}

// Other threads see the stores past the caches before any later store, which may say that the work is done.
PAGEDATTN_INLINE void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Fetches the cache line of `address` into the second-level cache; on a Zen 5, which reads faster so, into the first.
// TRIES is how often the CPU is asked: beside a kernel's own loads and stores it drops some of the requests, and waits
// for these lines later.
template <int TRIES = 1>
PAGEDATTN_INLINE void prefetch_line(const void* address) {
  // Volatile, or GCC would make a copy of the loop around for each case. Its requests come in bursts then, and
  // decoding one row takes a tenth longer.
  const volatile bool& is_zen_5 = IS_ZEN_5;
  PAGEDATTN_UNROLL
  for (int i = 0; i < TRIES; ++i) {
    if (VEC_SIZE == 16 && is_zen_5) {
      __builtin_prefetch(address, 0, 3);
    } else {
      __builtin_prefetch(address, 0, 2);
    }
  }
}

// Fetches the cache line of `address`, which is read once, into the first-level cache alone. The second keeps what
// other code has there.
PAGEDATTN_INLINE void prefetch_into_first_level(const void* address) { __builtin_prefetch(address, 0, 0); }

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
