// float8 <-> fp32, and to the 16-bit types in which it is exact, for the CPU kernels.
#pragma once

#include "cpu_float16.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Intrinsics for the same reason as in cpu_float16.h.
#if defined(__AVX512F__)
PAGEDATTN_INLINE ShortVec widen(ByteVec bytes) { return (ShortVec)_mm256_cvtepu8_epi16((__m128i)bytes); }
PAGEDATTN_INLINE ByteVec low_bytes(UintVec values) {
  return (ByteVec)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)values);
}
#elif defined(__AVX2__)
PAGEDATTN_INLINE ShortVec widen(ByteVec bytes) {
  return (ShortVec)_mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)bytes));
}
PAGEDATTN_INLINE ByteVec low_bytes(UintVec values) {
  const __m256i of_lanes = _mm256_shuffle_epi8((__m256i)values, _mm256_set1_epi32(0x0c080400));
  const __m128i upper = _mm256_extracti128_si256(of_lanes, 1);
  return (ByteVec)_mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(of_lanes), upper));
}
#elif defined(__ARM_FEATURE_DOTPROD)
PAGEDATTN_INLINE ShortVec widen(ByteVec bytes) { return (ShortVec)vget_low_u16(vmovl_u8(vcreate_u8((uint32_t)bytes))); }
PAGEDATTN_INLINE ByteVec low_bytes(UintVec values) {
  const uint8x16_t bytes = (uint8x16_t)values;
  const uint8x16_t of_pairs = vuzp1q_u8(bytes, bytes);
  return (ByteVec)vgetq_lane_u32((uint32x4_t)vuzp1q_u8(of_pairs, of_pairs), 0);
}
#else
PAGEDATTN_INLINE ShortVec widen(ByteVec bytes) { return __builtin_convertvector(bytes, ShortVec); }
PAGEDATTN_INLINE ByteVec low_bytes(UintVec values) { return __builtin_convertvector(values, ByteVec); }
#endif

PAGEDATTN_INLINE Vec float8_to_float(ShortVec bits, float8_e5m2) { return float16_to_float(bits << 8); }

PAGEDATTN_INLINE Vec float8_to_float(ShortVec bits, float8_e4m3) {
  // Exponent and mantissa where float16 has them; the biases differ by 8. The NaN becomes one of float16.
  const ShortVec magnitude = (bits & 0x7f) == 0x7f ? ShortVec{} + 0x7e00 : (bits & 0x7f) << 7;
  return float16_to_float((bits & 0x80) << 8 | magnitude) * 256.0f;
}

// The unit of e4m3 values that are converted several at a time.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr float E4M3_UNIT = 256.0f;
#else
constexpr float E4M3_UNIT = 1.0f;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// The upper byte of each 16-bit element as float16. e5m2 stays as it is. e4m3 is in units of E4M3_UNIT, as the biases
// of the exponents differ by 8. Without NAN_TOO, the NaN of e4m3 becomes a number.
template <bool NAN_TOO>
PAGEDATTN_INLINE __m256i upper_bytes_to_float16(__m256i bytes, float8_e5m2) {
  return _mm256_and_si256(bytes, _mm256_set1_epi16(static_cast<short>(0xff00)));
}
template <bool NAN_TOO>
PAGEDATTN_INLINE __m256i upper_bytes_to_float16(__m256i bytes, float8_e4m3) {
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(bytes, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  if constexpr (!NAN_TOO) return half;
  // Only the NaN carries into the first bit of the exponent. With this bit it is a NaN of float16.
  const __m256i carry = _mm256_add_epi16(half, _mm256_set1_epi16(0x0080));
  return _mm256_or_si256(half, _mm256_and_si256(carry, _mm256_set1_epi16(0x4000)));
}

// Finds out whether one of many values is NaN, in fewer instructions than NAN_TOO takes. e5m2 never needs NAN_TOO.
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

// 16 float16 in memory, from where they are converted 8 at a time. To take the halves of a register apart would cost as
// much again.
struct Float16Halves {
  alignas(32) uint16_t memory[16];

  PAGEDATTN_INLINE void store(__m256i halves) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(memory), halves);
    asm("" : "+m"(memory));
  }
  PAGEDATTN_INLINE Vec first() const { return float16_to_float(load_as<ShortVec>(memory)); }
  PAGEDATTN_INLINE Vec last() const { return float16_to_float(load_as<ShortVec>(memory + 8)); }
};

// Two runs of 16 float8: the elements of both runs at even places, and the elements of both runs at odd places.
struct Float16Pairs {
  Float16Halves even;
  Float16Halves odd;

  template <bool NAN_TOO, typename Float8>
  PAGEDATTN_INLINE void store(__m256i bytes, NanFinder<Float8>& nans) {
    nans.add(bytes);
    even.store(upper_bytes_to_float16<NAN_TOO>(_mm256_slli_epi16(bytes, 8), Float8{}));
    odd.store(upper_bytes_to_float16<NAN_TOO>(bytes, Float8{}));
  }
};

// Stores 16 float8 as float16: first the elements at even places, then the elements at odd places.
template <bool NAN_TOO, typename Float8>
PAGEDATTN_INLINE void store_pairs(Float16Halves& target, const Float8* source, NanFinder<Float8>& nans) {
  const __m256i twice = _mm256_broadcastsi128_si256(load_as<__m128i>(source));
  nans.add(twice);
  const __m256i even_then_odd_as_upper = _mm256_setr_epi8(-1, 0, -1, 2, -1, 4, -1, 6, -1, 8, -1, 10, -1, 12, -1, 14,  //
                                                          -1, 1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11, -1, 13, -1, 15);
  target.store(upper_bytes_to_float16<NAN_TOO>(_mm256_shuffle_epi8(twice, even_then_odd_as_upper), Float8{}));
}
#elif defined(__ARM_FEATURE_DOTPROD)
// The upper byte of each 16-bit element as float16.
PAGEDATTN_INLINE uint16x8_t upper_bytes_to_float16(uint16x8_t bytes, float8_e5m2) { return bytes & 0xff00; }
PAGEDATTN_INLINE uint16x8_t upper_bytes_to_float16(uint16x8_t bytes, float8_e4m3) {
  // The biases of the exponents differ by 8. Only the NaN carries into the first bit of the exponent, which makes it a
  // NaN of float16.
  const uint16x8_t half = (uint16x8_t)((int16x8_t)bytes >> 1) & 0xbf80;
  const uint16x8_t with_nan = half | ((half + 0x0080) & 0x4000);
  return (uint16x8_t)vmulq_n_f16((float16x8_t)with_nan, 256.0f);
}

// Four vectors: the first, the second, the third and the last of every 4 bytes.
template <typename Float8>
PAGEDATTN_INLINE Vecs<4> float8_to_floats(UintVec bytes, Float8 type) {
  const uint16x8_t even = upper_bytes_to_float16((uint16x8_t)bytes << 8, type);
  const uint16x8_t odd = upper_bytes_to_float16((uint16x8_t)bytes, type);
  const auto first = (float16x8_t)vuzp1q_u16(even, odd), last = (float16x8_t)vuzp2q_u16(even, odd);
  return {{(Vec)vcvt_f32_f16(vget_low_f16(first)), (Vec)vcvt_high_f32_f16(first), (Vec)vcvt_f32_f16(vget_low_f16(last)),
           (Vec)vcvt_high_f32_f16(last)}};
}
#elif !defined(__AVX512VBMI__)
// Four vectors: the first, the second, the third and the last of every 4 bytes.
template <typename Float8>
PAGEDATTN_INLINE Vecs<4> float8_to_floats(UintVec bytes, Float8 type) {
  Vecs<4> result;
  for (int i = 0; i < 4; ++i) result.of[i] = float8_to_float(narrow(bytes >> (8 * i) & 0xff), type);
  return result;
}
#else
// For every 8-bit float without its sign: the low and the high byte of its bfloat16, which is exact.
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
// In pairs: the first 8 and the last 8 of the 16 bytes in every 128-bit lane.
template <typename Float8>
PAGEDATTN_INLINE Vecs<2> float8_to_bfloat16_halves(UintVec bytes, Float8 type) {
  const Float8AsBfloat16 apart = float8_to_bfloat16(bytes, type);
  return {{(Vec)_mm512_maskz_unpacklo_epi8(~0ull, apart.low, apart.high),
           (Vec)_mm512_maskz_unpackhi_epi8(~0ull, apart.low, apart.high)}};
}
#endif
#endif

// Round to nearest even, saturating; NaN gives NaN. The steps are the same as in float_to_float16.
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

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
