// Vectors of fp32 for the CPU kernels, as wide as the capability that the file is compiled for, on the vector
// extensions of GCC and Clang. Intrinsics appear only where the extensions lack an operation, or where GCC 12 makes
// slow code of it.
//
// Everything is in an anonymous namespace: the copies of a kernel must not share symbols, or the linker may keep the
// AVX512 copy of a helper for all of them.
#pragma once

#include <type_traits>
#include <utility>

#include "types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)  // neon and better; `default` of ARM64 has the results of every `default`
#include <arm_neon.h>
#endif

#define PAGEDATTN_ALWAYS_INLINE __attribute__((always_inline))
#define PAGEDATTN_INLINE inline PAGEDATTN_ALWAYS_INLINE

// Before a loop of constant length over accumulators: unrolled, they stay in registers. PAGEDATTN_UNROLL_BY: before a
// loop that would be too much code as a whole, or whose length is not constant. A draft does without both:
// attend_amx_bf16 compiles in a third of the time.
#define PAGEDATTN_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define PAGEDATTN_UNROLL _Pragma("unroll")
#define PAGEDATTN_UNROLL_BY(times) PAGEDATTN_PRAGMA(unroll(times))
#elif defined(PAGEDATTN_DRAFT)
#define PAGEDATTN_UNROLL _Pragma("GCC unroll 1")
#define PAGEDATTN_UNROLL_BY(times) _Pragma("GCC unroll 1")
#else
#define PAGEDATTN_UNROLL _Pragma("GCC unroll 16")
#define PAGEDATTN_UNROLL_BY(times) PAGEDATTN_PRAGMA(GCC unroll times)
#endif

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int VEC_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VEC_BYTES = 32;
#else
constexpr int VEC_BYTES = 16;
#endif

constexpr int VEC_SIZE = VEC_BYTES / 4;    // floats in a vector
constexpr int NUM_LANES = VEC_BYTES / 16;  // 128-bit lanes in a vector

#if defined(__AVX512F__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int NUM_REGISTERS = 32;
#else
constexpr int NUM_REGISTERS = 16;
#endif

typedef float Vec __attribute__((vector_size(VEC_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t UintVec __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t ShortVec __attribute__((vector_size(VEC_BYTES / 2)));
typedef uint8_t ByteVec __attribute__((vector_size(VEC_BYTES / 4)));

template <int N>
struct Vecs {
  Vec of[N];
};

// ---- building vectors

PAGEDATTN_INLINE Vec broadcast(float value) { return Vec{} + value; }

template <typename V>
PAGEDATTN_INLINE V load_as(const void* source) {
  V vector;
  __builtin_memcpy(&vector, source, sizeof vector);
  return vector;
}

template <typename IndexOf, int... I>
PAGEDATTN_INLINE Vec shuffle(Vec a, Vec b, IndexOf, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, IndexOf{}(I)...);
}

// result[i] = concat(a, b)[index_of(i)]; index_of is a lambda without captures.
template <typename IndexOf>
PAGEDATTN_INLINE Vec shuffle(Vec a, Vec b, IndexOf index_of) {
  return shuffle(a, b, index_of, std::make_integer_sequence<int, VEC_SIZE>{});
}

// N floats (1, 4 or 8), repeated. Intrinsics, as GCC 12 would store the floats, and wait to load them again.
template <int N>
PAGEDATTN_INLINE Vec load_repeated(const float* source) {
  if constexpr (N == VEC_SIZE) {
    return load_as<Vec>(source);
  } else if constexpr (N == 1) {
    return shuffle(Vec{*source}, Vec{}, [](int) { return 0; });
#if defined(__AVX512F__)
  } else if constexpr (N == 8) {
    return (Vec)_mm512_maskz_broadcast_f32x8(0xffff, _mm256_loadu_ps(source));
  } else {
    return (Vec)_mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(source));
#elif defined(__AVX2__)
  } else {
    return (Vec)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(source));
#endif
  }
}

template <typename IndexOf>
PAGEDATTN_INLINE IntVec shuffle(IntVec a, IntVec b, IndexOf index_of) {
  return (IntVec)shuffle((Vec)a, (Vec)b, index_of);
}

// Keeps a loaded vector in a register, where loads are the bottleneck. GCC would load the vector again for each use.
PAGEDATTN_INLINE Vec in_register(Vec loaded) {
#if defined(__x86_64__)
  asm("" : "+v"(loaded));
#elif defined(__aarch64__)
  asm("" : "+w"(loaded));
#endif
  return loaded;
}

// Hides from the compiler where a pointer comes from. Constant offsets from the pointer are then part of the
// instructions. Otherwise GCC 12 would keep a register for each of them over a loop.
template <typename T>
PAGEDATTN_INLINE T* as_base(T* pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}

template <int... I>
PAGEDATTN_INLINE IntVec iota(std::integer_sequence<int, I...>) {
  return IntVec{I...};
}
PAGEDATTN_INLINE IntVec iota() { return iota(std::make_integer_sequence<int, VEC_SIZE>{}); }

PAGEDATTN_INLINE bool any_bit(IntVec v) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
  int64_t halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  return (halves[0] | halves[1]) != 0;
#endif
}

PAGEDATTN_INLINE Vec select(IntVec mask, Vec if_true, Vec if_false) { return mask ? if_true : if_false; }

// a * b + c. Written out wherever a product is added. The compiler is told not to contract on its own: it would
// contract one copy of an inlined function and not another, and the same row would have other bits in another batch.
PAGEDATTN_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// If one of the two is NaN, the result is `b`. Intrinsics, as GCC 12 would compare and blend.
#if defined(__AVX2__) && !defined(__AVX512F__)
PAGEDATTN_INLINE Vec max(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
PAGEDATTN_INLINE Vec min(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
PAGEDATTN_INLINE IntVec max(IntVec a, IntVec b) { return (IntVec)_mm256_max_epi32((__m256i)a, (__m256i)b); }
PAGEDATTN_INLINE IntVec min(IntVec a, IntVec b) { return (IntVec)_mm256_min_epi32((__m256i)a, (__m256i)b); }
#else
PAGEDATTN_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
PAGEDATTN_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
PAGEDATTN_INLINE IntVec max(IntVec a, IntVec b) { return a > b ? a : b; }
PAGEDATTN_INLINE IntVec min(IntVec a, IntVec b) { return a < b ? a : b; }
#endif

// ---- reductions

template <typename V>
PAGEDATTN_INLINE auto reduce_max(V v) {
  if constexpr (VEC_SIZE > 8) v = max(v, shuffle(v, v, [](int i) { return i ^ 8; }));
  if constexpr (VEC_SIZE > 4) v = max(v, shuffle(v, v, [](int i) { return i ^ 4; }));
  v = max(v, shuffle(v, v, [](int i) { return i ^ 2; }));
  return max(v, shuffle(v, v, [](int i) { return i ^ 1; }))[0];
}

PAGEDATTN_INLINE float reduce_sum(Vec v) {
  if constexpr (VEC_SIZE > 8) v = v + shuffle(v, v, [](int i) { return i ^ 8; });
  if constexpr (VEC_SIZE > 4) v = v + shuffle(v, v, [](int i) { return i ^ 4; });
  v = v + shuffle(v, v, [](int i) { return i ^ 2; });
  return (v + shuffle(v, v, [](int i) { return i ^ 1; }))[0];
}

// In every 128-bit lane: a0+a1, a2+a3, b0+b1, b2+b3.
template <typename V>
PAGEDATTN_INLINE V add_neighbours(V a, V b) {
  const V even = shuffle(a, b, [](int i) { return i / 4 * 4 + i % 2 * 2 + (i % 4 < 2 ? 0 : VEC_SIZE); });
  const V odd = shuffle(a, b, [](int i) { return i / 4 * 4 + i % 2 * 2 + (i % 4 < 2 ? 0 : VEC_SIZE) + 1; });
  return even + odd;
}

// In every 128-bit lane: the sums of that lane of a, b, c and d.
template <typename V>
PAGEDATTN_INLINE V sum_lanes(V a, V b, V c, V d) {
  return add_neighbours(add_neighbours(a, b), add_neighbours(c, d));
}

// Of the 128-bit lanes of concat(a, b): the even ones plus the odd ones.
template <typename V>
PAGEDATTN_INLINE V add_neighbour_lanes(V a, V b) {
  const V even = shuffle(a, b, [](int i) { return i / 4 * 8 + i % 4; });
  const V odd = shuffle(a, b, [](int i) { return i / 4 * 8 + 4 + i % 4; });
  return even + odd;
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
