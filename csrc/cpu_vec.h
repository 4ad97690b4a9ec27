// Vectors of fp32 for the CPU kernels, as wide as the capability that the file is compiled for, on the vector
// extensions of GCC and Clang. Intrinsics appear only where the extensions cannot say it or GCC 12 makes much less of
// it.
//
// Everything is in an anonymous namespace: the copies of a kernel must not share symbols, or the linker may keep the
// AVX512 copy of a helper for all of them.
#pragma once

#include <type_traits>
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

// N floats, 1, 4 or 8, repeated. Intrinsics: GCC 12 would go through memory, and stall on it.
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

// For a loaded vector with several uses, where loads are the bottleneck: GCC would make the load an operand of each.
PAGEDATTN_INLINE Vec in_register(Vec loaded) {
#if defined(__x86_64__)
  asm("" : "+v"(loaded));
#endif
  return loaded;
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

// Of two that are not ordered, `b`. Intrinsics, as GCC 12 compares and blends.
#if defined(__AVX2__) && !defined(__AVX512F__)
PAGEDATTN_INLINE Vec max(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
PAGEDATTN_INLINE Vec min(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
PAGEDATTN_INLINE IntVec min(IntVec a, IntVec b) { return (IntVec)_mm256_min_epi32((__m256i)a, (__m256i)b); }
#else
PAGEDATTN_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
PAGEDATTN_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
PAGEDATTN_INLINE IntVec min(IntVec a, IntVec b) { return a < b ? a : b; }
#endif

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

PAGEDATTN_INLINE Vec bfloat16_to_float(ShortVec bits) {
#if defined(__AVX512F__)
  // One shuffle rather than a conversion and a shift.
  const UintVec place = (UintVec)iota() << 16;
  return (Vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, (__m512i)place, _mm512_castsi256_si512((__m256i)bits));
#else
  return (Vec)(widen(bits) << 16);
#endif
}

// The upper half of every element. In one shuffle (AVX2: two) rather than a shift and a conversion.
PAGEDATTN_INLINE ShortVec narrow_upper(UintVec bits) {
#if defined(__AVX512F__)
  const IntVec odd_elements = iota() * 0x40004 + 0x30001;  // 1, 3, 5, ... in 16 bits each
  const IntVec upper = (IntVec)_mm512_maskz_permutexvar_epi16(0xffffffff, (__m512i)odd_elements, (__m512i)bits);
  return (ShortVec)__builtin_shufflevector(upper, upper, 0, 1, 2, 3, 4, 5, 6, 7);
#elif defined(__AVX2__)
  const __m256i upper_bytes = _mm256_set1_epi64x(0x0f0e0b0a07060302);
  const __m256i of_lanes = _mm256_shuffle_epi8((__m256i)bits, upper_bytes);
  return (ShortVec)_mm256_castsi256_si128(_mm256_permute4x64_epi64(of_lanes, 0b1000));
#else
  return narrow(bits >> 16);
#endif
}

// In integers on every capability: vcvtneps2bf16 would flush denormals, and the capabilities must agree. A NaN keeps
// its upper bits and becomes quiet.
#if defined(__AVX512F__)
PAGEDATTN_INLINE ShortVec float_to_bfloat16(Vec value) {
  const UintVec bits = (UintVec)value;
  const UintVec rounded = bits + 0x7fff + ((bits >> 16) & 1);
  // One instruction makes NaN quiet: 2, for classes 0 and 1, says so; 0 keeps the rounded value of the others.
  const __m512i by_class = _mm512_set1_epi32(0x22);
  return narrow_upper((UintVec)_mm512_fixupimm_ps((__m512)rounded, (__m512)value, by_class, 0));
}
#else
// In the upper halves.
PAGEDATTN_INLINE UintVec round_to_bfloat16(Vec value) {
  const UintVec bits = (UintVec)value;
  return value == value ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
}
PAGEDATTN_INLINE ShortVec float_to_bfloat16(Vec value) { return narrow_upper(round_to_bfloat16(value)); }

// a[0], b[0], a[1], b[1], ... with the bits of float_to_bfloat16.
PAGEDATTN_INLINE UintVec float_to_bfloat16_pairs(Vec a, Vec b) {
#if defined(__AVX2__)
  // Halves of both side by side: one step rounds twice as many.
  constexpr int ODD_ELEMENTS = 0xaa;
  const __m256i upper = _mm256_blend_epi16((__m256i)((UintVec)a >> 16), (__m256i)b, ODD_ELEMENTS);
  const __m256i lower = _mm256_blend_epi16((__m256i)a, (__m256i)((UintVec)b << 16), ODD_ELEMENTS);
  // Up if the lower half is more than 0x8000, or just that beside an odd upper half.
  const __m256i if_even = _mm256_andnot_si256(upper, _mm256_set1_epi16(1));
  const __m256i up = _mm256_srli_epi16(_mm256_subs_epu16(lower, if_even), 15);
  if (_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q)) == 0) [[likely]] {
    return (UintVec)_mm256_add_epi16(upper, up);
  }
#endif
  return round_to_bfloat16(a) >> 16 | (round_to_bfloat16(b) & 0xffff0000);
}
#endif

#if defined(__AVX512BF16__)
// Those of `a`, then those of `b`, with the bits of float_to_bfloat16 in half its time: the instruction differs from it
// only for denormals.
PAGEDATTN_INLINE UintVec float_to_bfloat16(Vec a, Vec b) {
  constexpr int DENORMAL = 0x20;
  if ((_mm512_fpclass_ps_mask((__m512)a, DENORMAL) | _mm512_fpclass_ps_mask((__m512)b, DENORMAL)) == 0) [[likely]] {
    return (UintVec)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
  }
  const ShortVec halves[2] = {float_to_bfloat16(a), float_to_bfloat16(b)};
  return load_as<UintVec>(halves);
}
#endif

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

// What e4m3 values that come several at a time are in units of.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr float E4M3_UNIT = 256.0f;
#else
constexpr float E4M3_UNIT = 1.0f;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// The upper byte of each 16-bit element as float16: e5m2 as it is, e4m3 in units of E4M3_UNIT, as the biases of the
// exponents differ by 8. What becomes of the NaN of e4m3 without NAN_TOO is a number.
template <bool NAN_TOO>
PAGEDATTN_INLINE __m256i upper_bytes_to_float16(__m256i bytes, float8_e5m2) {
  return _mm256_and_si256(bytes, _mm256_set1_epi16(static_cast<short>(0xff00)));
}
template <bool NAN_TOO>
PAGEDATTN_INLINE __m256i upper_bytes_to_float16(__m256i bytes, float8_e4m3) {
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(bytes, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  if constexpr (!NAN_TOO) return half;
  // Only the NaN carries to the first bit of the exponent, which is what it lacks to be one of float16.
  const __m256i carry = _mm256_add_epi16(half, _mm256_set1_epi16(0x0080));
  return _mm256_or_si256(half, _mm256_and_si256(carry, _mm256_set1_epi16(0x4000)));
}

// Finds out whether one of many values needs NAN_TOO, in fewer instructions than that takes. e5m2 never does.
template <typename Float8>
struct NanFinder {
  PAGEDATTN_INLINE void add(__m256i) {}
  PAGEDATTN_INLINE bool found() const { return false; }
};
template <>
struct NanFinder<float8_e4m3> {
  __m256i greatest = _mm256_setzero_si256();  // of the magnitudes

  PAGEDATTN_INLINE void add(__m256i bytes) {
    greatest = _mm256_max_epu8(greatest, _mm256_and_si256(bytes, _mm256_set1_epi8(0x7f)));
  }
  PAGEDATTN_INLINE bool found() const {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(greatest, _mm256_set1_epi8(0x7f))) != 0;
  }
};

// 16 float16 in memory, to be converted 8 at a time: to take the halves of a register apart costs as much again.
struct Float16Halves {
  alignas(32) uint16_t memory[16];

  PAGEDATTN_INLINE void store(__m256i halves) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(memory), halves);
    asm("" : "+m"(memory));
  }
  PAGEDATTN_INLINE Vec first() const { return float16_to_float(load_as<ShortVec>(memory)); }
  PAGEDATTN_INLINE Vec last() const { return float16_to_float(load_as<ShortVec>(memory + 8)); }
};

// Of two runs of 16 float8 the elements at even places, of both, and those at odd places.
struct Float16Pairs {
  Float16Halves even;
  Float16Halves odd;

  template <bool NAN_TOO, typename Float8>
  PAGEDATTN_INLINE void store(const Float8* source, NanFinder<Float8>& nans) {
    const __m256i bytes = load_as<__m256i>(source);
    nans.add(bytes);
    even.store(upper_bytes_to_float16<NAN_TOO>(_mm256_slli_epi16(bytes, 8), Float8{}));
    odd.store(upper_bytes_to_float16<NAN_TOO>(bytes, Float8{}));
  }
};

// Of 16 float8 the elements at even places, then those at odd places.
template <bool NAN_TOO, typename Float8>
PAGEDATTN_INLINE void store_pairs(Float16Halves& target, const Float8* source, NanFinder<Float8>& nans) {
  const __m256i twice = _mm256_broadcastsi128_si256(load_as<__m128i>(source));
  nans.add(twice);
  const __m256i even_then_odd_as_upper = _mm256_setr_epi8(-1, 0, -1, 2, -1, 4, -1, 6, -1, 8, -1, 10, -1, 12, -1, 14,  //
                                                          -1, 1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11, -1, 13, -1, 15);
  target.store(upper_bytes_to_float16<NAN_TOO>(_mm256_shuffle_epi8(twice, even_then_odd_as_upper), Float8{}));
}
#elif !defined(__AVX512VBMI__)
// Of every 4 bytes the first, the second, the third and the last.
template <typename Float8>
PAGEDATTN_INLINE Vecs<4> float8_to_floats(UintVec bytes, Float8 type) {
  Vecs<4> result;
  for (int i = 0; i < 4; ++i) result.of[i] = float8_to_float(narrow(bytes >> (8 * i) & 0xff), type);
  return result;
}
#else
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

template <typename Float8>
PAGEDATTN_INLINE Vecs<4> float8_to_floats(UintVec bytes, Float8 type) {
  const Float8AsBfloat16 apart = float8_to_bfloat16(bytes, type);
  const UintVec low = (UintVec)apart.low;
  const UintVec high = (UintVec)apart.high;
  const UintVec even = (low & 0x00ff00ff) | (high << 8 & 0xff00ff00);
  const UintVec odd = (low >> 8 & 0x00ff00ff) | (high & 0xff00ff00);
  return {{(Vec)(even << 16), (Vec)(odd << 16), (Vec)(even & 0xffff0000), (Vec)(odd & 0xffff0000)}};
}

#if defined(__AVX512BF16__)
typedef __m512bh Bfloat16Vec;

// Of every 128-bit lane of 16 bytes, the first 8 and the last 8.
struct Bfloat16Halves {
  Bfloat16Vec lower;
  Bfloat16Vec upper;
};

template <typename Float8>
PAGEDATTN_INLINE Bfloat16Halves float8_to_bfloat16_halves(UintVec bytes, Float8 type) {
  const Float8AsBfloat16 apart = float8_to_bfloat16(bytes, type);
  return {(Bfloat16Vec)_mm512_maskz_unpacklo_epi8(~0ull, apart.low, apart.high),
          (Bfloat16Vec)_mm512_maskz_unpackhi_epi8(~0ull, apart.low, apart.high)};
}
#endif
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

PAGEDATTN_INLINE Vec to_stored(Vec value, float) { return value; }
PAGEDATTN_INLINE ShortVec to_stored(Vec value, float16) { return float_to_float16(value); }
PAGEDATTN_INLINE ShortVec to_stored(Vec value, bfloat16) { return float_to_bfloat16(value); }

template <typename T>
PAGEDATTN_INLINE void store(T* target, Vec value) {
  const auto stored = to_stored(value, T{});
  __builtin_memcpy(target, &stored, sizeof stored);
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

// With STREAM past the caches, to a target that is aligned to V. Intrinsics: GCC 12 has no other name for it.
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

// Two vectors of T, that is 2 * VEC_SIZE adjacent elements, are those at even and at odd places: a shift and a mask
// take bf16 apart that way, where putting them in order takes several shuffles on AVX2. Otherwise they are in order.
template <typename T>
constexpr bool EVEN_AND_ODD = std::is_same_v<T, bfloat16> && VEC_SIZE <= 8;

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
#if !defined(__AVX512F__)
  if constexpr (EVEN_AND_ODD<T>) return store_bits<STREAM>(target, float_to_bfloat16_pairs(a, b));
#elif defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bfloat16>) return store_bits<STREAM>(target, float_to_bfloat16(a, b));
#endif
  store_bits<STREAM>(target, to_stored(a, T{}));
  store_bits<STREAM>(target + VEC_SIZE, to_stored(b, T{}));
}

// Other threads see the stores past the caches before whatever says that they are done.
PAGEDATTN_INLINE void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Fetches the cache line of `address` into the second-level cache. Asked for more than once where it is worth it:
// beside a kernel's own loads and stores the CPU drops a part of what it is asked to fetch, and waits for it later.
template <int TRIES = 1>
PAGEDATTN_INLINE void prefetch_line(const void* address) {
  PAGEDATTN_UNROLL
  for (int i = 0; i < TRIES; ++i) __builtin_prefetch(address, 0, 2);
}

// Fetches the cache line of `address`, which is read once. With AVX512 into the second-level cache, as few lines at a
// time may be on their way into the first; without it into the first alone, and what other code has behind it stays.
PAGEDATTN_INLINE void prefetch_once(const void* address) { __builtin_prefetch(address, 0, VEC_BYTES == 64 ? 2 : 0); }

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

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
