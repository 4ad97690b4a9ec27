// Vectors of fp32 for the CPU kernels, as wide as the capability that the file is compiled for, on the vector
// extensions of GCC and Clang. Intrinsics appear only where the extensions cannot say it: fp16 and bf16 dot products.
//
// Everything is in an anonymous namespace: the copies of a kernel must not share symbols, or the linker may keep the
// AVX512 copy of a helper for all of them.
#pragma once

#include <utility>

#include "types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PAGEDATTN_ALWAYS_INLINE __attribute__((always_inline))
#define PAGEDATTN_INLINE inline PAGEDATTN_ALWAYS_INLINE

// Before a loop of constant length over accumulators: unrolled, they stay in registers.
#if defined(__clang__)
#define PAGEDATTN_UNROLL _Pragma("unroll")
#define PAGEDATTN_UNROLL_BY_2 _Pragma("unroll 2")  // where the whole loop would be too much code
#else
#define PAGEDATTN_UNROLL _Pragma("GCC unroll 16")
#define PAGEDATTN_UNROLL_BY_2 _Pragma("GCC unroll 2")
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

typedef float Vec __attribute__((vector_size(VEC_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t UintVec __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t ShortVec __attribute__((vector_size(VEC_BYTES / 2)));
typedef uint8_t ByteVec __attribute__((vector_size(VEC_BYTES / 4)));

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

// Four floats, repeated in every 128-bit lane. Intrinsics: GCC 12 would go through memory, and stall on it.
PAGEDATTN_INLINE Vec load_repeated_lane(const float* source) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(source));
#elif defined(__AVX2__)
  return (Vec)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(source));
#else
  return load_as<Vec>(source);
#endif
}

template <int... I>
PAGEDATTN_INLINE IntVec iota(std::integer_sequence<int, I...>) {
  return IntVec{I...};
}
PAGEDATTN_INLINE IntVec iota() { return iota(std::make_integer_sequence<int, VEC_SIZE>{}); }

PAGEDATTN_INLINE Vec select(IntVec mask, Vec if_true, Vec if_false) { return mask ? if_true : if_false; }

// a * b + c. Written out wherever a product is added: the compiler is told not to contract on its own, as it would do
// so in one copy of an inlined function and not in another, and the same row would give other bits in another batch.
PAGEDATTN_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

PAGEDATTN_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
PAGEDATTN_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }

// ---- conversions: 16-bit storage <-> fp32, round to nearest even

// Intrinsics, as GCC 12 takes vectors apart for __builtin_convertvector between these widths. For AVX512 in their
// masked forms with all bits set: they are the same instructions, and GCC 12 warns inside the plain ones (its bug
// 105593).
#if defined(__AVX512F__)
PAGEDATTN_INLINE UintVec widen(ShortVec bits) { return (UintVec)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)bits); }
PAGEDATTN_INLINE ShortVec narrow(UintVec bits) { return (ShortVec)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)bits); }
#elif defined(__AVX2__)
PAGEDATTN_INLINE UintVec widen(ShortVec bits) { return (UintVec)_mm256_cvtepu16_epi32((__m128i)bits); }
PAGEDATTN_INLINE ShortVec narrow(UintVec bits) {
  const __m256i low = _mm256_and_si256((__m256i)bits, _mm256_set1_epi32(0xffff));
  return (ShortVec)_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}
#else
PAGEDATTN_INLINE UintVec widen(ShortVec bits) { return __builtin_convertvector(bits, UintVec); }
PAGEDATTN_INLINE ShortVec narrow(UintVec bits) { return __builtin_convertvector(bits, ShortVec); }
#endif

PAGEDATTN_INLINE Vec bfloat16_to_float(ShortVec bits) { return (Vec)(widen(bits) << 16); }

// In integers on every capability: vcvtneps2bf16 would flush denormals, and the capabilities must agree.
PAGEDATTN_INLINE ShortVec float_to_bfloat16(Vec value) {
  const UintVec bits = (UintVec)value;
  const UintVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const UintVec quiet_nan = (bits >> 16) | 0x40;
  return narrow(value == value ? rounded : quiet_nan);
}

#if defined(__AVX512F__)
PAGEDATTN_INLINE Vec float16_to_float(ShortVec bits) { return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits); }
PAGEDATTN_INLINE ShortVec float_to_float16(Vec value) {
  return (ShortVec)_mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__)
PAGEDATTN_INLINE Vec float16_to_float(ShortVec bits) { return (Vec)_mm256_cvtph_ps((__m128i)bits); }
PAGEDATTN_INLINE ShortVec float_to_float16(Vec value) {
  return (ShortVec)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// Source of both: F. Giesen, "half<->float conversions" (public domain): rebias the exponent; denormals go through a
// float addition, which does the normalisation or the rounding.
PAGEDATTN_INLINE Vec float16_to_float(ShortVec bits) {
  const UintVec half = widen(bits);
  const UintVec magnitude = half & 0x7fff;
  const UintVec rebiased = (magnitude << 13) + (112u << 23);
  const Vec denormal = (Vec)(rebiased + (1u << 23)) - 0x1p-14f;
  UintVec result = magnitude < 0x400 ? (UintVec)denormal : rebiased;
  result = magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000 : result;
  return (Vec)(result | (half & 0x8000) << 16);
}
PAGEDATTN_INLINE ShortVec float_to_float16(Vec value) {
  const UintVec bits = (UintVec)value;
  const UintVec magnitude = bits & 0x7fffffff;
  const UintVec normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const UintVec denormal = (UintVec)((Vec)magnitude + 0.5f) - 0x3f000000;
  const UintVec overflow = magnitude > 0x7f800000 ? UintVec{} + 0x7e00 : UintVec{} + 0x7c00;
  UintVec result = magnitude < 0x38800000 ? denormal : normal;
  result = magnitude >= 0x47800000 ? overflow : result;
  return narrow(result | ((bits >> 16) & 0x8000));
}
#endif

// ---- conversions: 8-bit storage

// Intrinsics for the same reason as above.
#if defined(__AVX512F__)
PAGEDATTN_INLINE ShortVec widen(ByteVec bytes) { return (ShortVec)_mm256_cvtepu8_epi16((__m128i)bytes); }
#elif defined(__AVX2__)
PAGEDATTN_INLINE ShortVec widen(ByteVec bytes) {
  return (ShortVec)_mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)bytes));
}
#else
PAGEDATTN_INLINE ShortVec widen(ByteVec bytes) { return __builtin_convertvector(bytes, ShortVec); }
#endif

PAGEDATTN_INLINE Vec float8_to_float(ShortVec bits, float8_e5m2) { return float16_to_float(bits << 8); }

PAGEDATTN_INLINE Vec float8_to_float(ShortVec bits, float8_e4m3) {
  // Exponent and mantissa where float16 has them; the biases differ by 8. The NaN becomes one of float16.
  const ShortVec magnitude = (bits & 0x7f) == 0x7f ? ShortVec{} + 0x7e00 : (bits & 0x7f) << 7;
  return float16_to_float((bits & 0x80) << 8 | magnitude) * 256.0f;
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
typedef __m512bh Bfloat16Vec;

// The bytes of the bfloat16 of every 8-bit float without its sign; each is exact.
template <int MANTISSA_BITS, int BIAS>
struct Float8Table {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];

  constexpr Float8Table() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> MANTISSA_BITS;
      int mantissa = (code & ((1 << MANTISSA_BITS) - 1)) << (7 - MANTISSA_BITS);
      if (exponent == 0) {  // denormal: shifted until its first bit is the implicit one
        for (exponent = 1; mantissa != 0 && mantissa < 128; --exponent) mantissa *= 2;
        mantissa &= 127;
      }
      int bits = code == 0 ? 0 : (exponent + 127 - BIAS) << 7 | mantissa;
      if (BIAS == 15 && code >= 0x7c) bits = code == 0x7c ? 0x7f80 : 0x7fc0;
      if (BIAS == 7 && code == 0x7f) bits = 0x7fc0;
      low[code] = static_cast<uint8_t>(bits);
      high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
inline constexpr Float8Table<3, 7> E4M3_TABLE;
inline constexpr Float8Table<2, 15> E5M2_TABLE;

// The low and the high bytes of 64 bfloat16.
struct Float8AsBfloat16 {
  __m512i low;
  __m512i high;
};

template <typename Table>
PAGEDATTN_INLINE Float8AsBfloat16 look_up_float8(UintVec bytes, const Table& table) {
  const auto look_up = [bytes](const uint8_t* half_table) PAGEDATTN_ALWAYS_INLINE {
    return _mm512_permutex2var_epi8(load_as<__m512i>(half_table), (__m512i)bytes, load_as<__m512i>(half_table + 64));
  };
  return {look_up(table.low), (__m512i)((UintVec)look_up(table.high) | (bytes & 0x80808080))};
}
PAGEDATTN_INLINE Float8AsBfloat16 float8_to_bfloat16(UintVec bytes, float8_e4m3) {
  return look_up_float8(bytes, E4M3_TABLE);
}
PAGEDATTN_INLINE Float8AsBfloat16 float8_to_bfloat16(UintVec bytes, float8_e5m2) {
  return look_up_float8(bytes, E5M2_TABLE);
}
#endif

// Round to nearest even, saturating; NaN gives NaN. The steps are those of float_to_float16.
template <int MANTISSA_BITS, int BIAS>
PAGEDATTN_INLINE UintVec float_to_float8(Vec value, float largest) {
  constexpr int DROPPED_BITS = 23 - MANTISSA_BITS;
  constexpr uint32_t SMALLEST_NORMAL = (127u + 1 - BIAS) << 23;
  // Adding a power of two whose last bit is the denormals' step rounds to it.
  constexpr uint32_t ROUND_DENORMAL = (127u + 24 - BIAS - MANTISSA_BITS) << 23;
  const UintVec sign = (UintVec)value >> 24 & 0x80;
  const Vec magnitude = min((Vec)((UintVec)value & 0x7fffffff), broadcast(largest));
  const UintVec bits = (UintVec)magnitude;
  const UintVec half = UintVec{} + ((1u << (DROPPED_BITS - 1)) - 1);
  const UintVec normal =
      ((bits + half + (bits >> DROPPED_BITS & 1)) >> DROPPED_BITS) - ((127u - BIAS) << MANTISSA_BITS);
  const Vec round_denormal = (Vec)(UintVec{} + ROUND_DENORMAL);
  const UintVec denormal = (UintVec)(magnitude + round_denormal) - ROUND_DENORMAL;
  UintVec result = bits < SMALLEST_NORMAL ? denormal : normal;
  result = value == value ? result : UintVec{} + 0x7f;
  return result | sign;
}

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

PAGEDATTN_INLINE void store(float* target, Vec value) { __builtin_memcpy(target, &value, sizeof value); }
PAGEDATTN_INLINE void store(float16* target, Vec value) {
  const ShortVec bits = float_to_float16(value);
  __builtin_memcpy(target, &bits, sizeof bits);
}
PAGEDATTN_INLINE void store(bfloat16* target, Vec value) {
  const ShortVec bits = float_to_bfloat16(value);
  __builtin_memcpy(target, &bits, sizeof bits);
}

PAGEDATTN_INLINE void store_bytes(void* target, UintVec values) {
  const ByteVec bytes = __builtin_convertvector(values, ByteVec);
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

// Calls body(i, load, store) over [0, size) in steps of VEC_SIZE: `load(pointer)` and `store(pointer, vector)` touch a
// whole vector, or, in the last step, only what is left of the row.
template <typename Body>
PAGEDATTN_INLINE void for_each_vector(int64_t size, Body&& body) {
  int64_t i = 0;
  for (; i + VEC_SIZE <= size; i += VEC_SIZE) {
    body(i, [](const auto* source) { return load(source); }, [](auto* target, Vec value) { store(target, value); });
  }
  if (const int64_t rest = size - i; rest > 0) {
    body(
        i, [rest](const auto* source) { return load_first(source, rest); },
        [rest](auto* target, Vec value) { store_first(target, value, rest); });
  }
}

// ---- functions

// c[0] + c[1] x + c[2] x^2 + ...
template <int N>
PAGEDATTN_INLINE Vec polynomial(Vec x, const float (&c)[N]) {
  Vec sum = broadcast(c[N - 1]);
  PAGEDATTN_UNROLL
  for (int i = N - 2; i >= 0; --i) sum = fma(sum, x, broadcast(c[i]));
  return sum;
}

// e^x within 2 ulp; 0 below -87.3, infinity above 88.7. Cephes expf: x = n ln 2 + r, a polynomial in r, times 2^n.
PAGEDATTN_INLINE Vec exp(Vec x) {
  const Vec round_to_int = broadcast(0x1.8p23f);
  const Vec shifted = fma(x, broadcast(1.44269504f), round_to_int);
  const Vec n = shifted - round_to_int;
  const Vec r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
  const Vec p = polynomial(
      r, {5.0000001201e-1f, 1.6666665459e-1f, 4.1665795894e-2f, 8.3334519073e-3f, 1.3981999507e-3f, 1.9875691500e-4f});
  const Vec mantissa = fma(p, r * r, r) + 1.0f;
  // The last bits of `shifted` are the integer n. Added to the exponent they multiply by 2^n, up to 2^128: for that n,
  // the mantissa is below 1.
  const Vec result = (Vec)((UintVec)mantissa + ((UintVec)shifted << 23));
  const Vec small_or_nan = max(Vec{}, x);  // in this order, NaN stays NaN
  return select(x > 88.72283f, broadcast(__builtin_inff()), select(x >= -87.33654f, result, small_or_nan));
}

PAGEDATTN_INLINE float exp(float x) { return exp(broadcast(x))[0]; }

// 1 - erf(x) for x >= 0, to 2e-7 of itself: the Chebyshev fit in Press et al., Numerical Recipes, section 6.2.
PAGEDATTN_INLINE Vec erfc(Vec x) {
  const Vec t = 1.0f / fma(x, broadcast(0.5f), broadcast(1.0f));
  const Vec p = polynomial(t, {-1.26551223f, 1.00002368f, 0.37409196f, 0.09678418f, -0.18628806f, 0.27886807f,
                               -1.13520398f, 1.48851587f, -0.82215223f, 0.17087277f});
  return t * exp(fma(-x, x, p));
}

PAGEDATTN_INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

// Cephes tanhf: near 0, where the quotient would lose digits, a polynomial.
PAGEDATTN_INLINE Vec tanh(Vec x) {
  const Vec square = x * x;
  const Vec p = polynomial(
      square, {-3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f, 2.06390887954e-2f, -5.70498872745e-3f});
  const Vec near_zero = fma(p * square, x, x);
  const Vec quotient = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return select(square < 0.625f * 0.625f, near_zero, quotient);
}

// ---- reductions

PAGEDATTN_INLINE float reduce_max(Vec v) {
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
PAGEDATTN_INLINE Vec add_neighbours(Vec a, Vec b) {
  const Vec even = shuffle(a, b, [](int i) { return i / 4 * 4 + i % 2 * 2 + (i % 4 < 2 ? 0 : VEC_SIZE); });
  const Vec odd = shuffle(a, b, [](int i) { return i / 4 * 4 + i % 2 * 2 + (i % 4 < 2 ? 0 : VEC_SIZE) + 1; });
  return even + odd;
}

// In every 128-bit lane: the sums of that lane of a, b, c and d.
PAGEDATTN_INLINE Vec sum_lanes(Vec a, Vec b, Vec c, Vec d) {
  return add_neighbours(add_neighbours(a, b), add_neighbours(c, d));
}

// Of the 128-bit lanes of concat(a, b): the even ones plus the odd ones.
PAGEDATTN_INLINE Vec add_neighbour_lanes(Vec a, Vec b) {
  const Vec even = shuffle(a, b, [](int i) { return i / 4 * 8 + i % 4; });
  const Vec odd = shuffle(a, b, [](int i) { return i / 4 * 8 + 4 + i % 4; });
  return even + odd;
}

// result[i] = the sum of v[i]; every sum adds in the same order.
PAGEDATTN_INLINE Vec sum_each(const Vec (&v)[VEC_SIZE]) {
  Vec sums[NUM_LANES];
  for (int i = 0; i < NUM_LANES; ++i) sums[i] = sum_lanes(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  for (int n = NUM_LANES; n > 1; n /= 2) {
    for (int i = 0; i < n / 2; ++i) sums[i] = add_neighbour_lanes(sums[2 * i], sums[2 * i + 1]);
  }
  return sums[0];
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
