// float16 and bfloat16 <-> fp32, rounded to nearest even, for the CPU kernels.
#pragma once

#include "cpu_vec.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Intrinsics, as GCC 12 takes vectors apart for __builtin_convertvector between these widths. With AVX512 these are the
// masked forms with all bits set: the instructions are the same, and GCC 12 warns inside the plain forms (its bug
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

// The upper half of every element. One shuffle (AVX2: two) rather than a shift and a conversion.
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
  // One instruction makes NaN quiet. In its table, 2 stands for a quiet NaN (classes 0 and 1), and 0 keeps the rounded
  // value (all other classes).
  const __m512i by_class = _mm512_set1_epi32(0x22);
  return narrow_upper((UintVec)_mm512_fixupimm_ps((__m512)rounded, (__m512)value, by_class, 0));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// These instructions do what is meant, with denormals and NaN as well.
PAGEDATTN_INLINE ShortVec float_to_bfloat16(Vec value) { return (ShortVec)vcvt_bf16_f32((float32x4_t)value); }

// The elements of `a`, then the elements of `b`.
PAGEDATTN_INLINE UintVec float_to_bfloat16(Vec a, Vec b) {
  return (UintVec)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)a), (float32x4_t)b);
}
#else
// The results are in the upper halves.
PAGEDATTN_INLINE UintVec round_to_bfloat16(Vec value) {
  const UintVec bits = (UintVec)value;
  return value == value ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
}
PAGEDATTN_INLINE ShortVec float_to_bfloat16(Vec value) { return narrow_upper(round_to_bfloat16(value)); }

// a[0], b[0], a[1], b[1], ... with the bits of float_to_bfloat16.
PAGEDATTN_INLINE UintVec float_to_bfloat16_pairs(Vec a, Vec b) {
#if defined(__AVX2__)
  // The halves of a and b lie side by side, so that one step rounds twice as many elements.
  constexpr int ODD_ELEMENTS = 0xaa;
  const __m256i upper = _mm256_blend_epi16((__m256i)((UintVec)a >> 16), (__m256i)b, ODD_ELEMENTS);
  const __m256i lower = _mm256_blend_epi16((__m256i)a, (__m256i)((UintVec)b << 16), ODD_ELEMENTS);
  // Rounds up if the lower half is more than 0x8000, or is 0x8000 beside an odd upper half.
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
// The elements of `a`, then the elements of `b`, with the bits of float_to_bfloat16 in half its time. The instruction
// gives other bits only for denormals.
PAGEDATTN_INLINE UintVec float_to_bfloat16(Vec a, Vec b) {
  constexpr int DENORMAL = 0x20;
  if ((_mm512_fpclass_ps_mask((__m512)a, DENORMAL) | _mm512_fpclass_ps_mask((__m512)b, DENORMAL)) == 0) [[likely]] {
    return (UintVec)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
  }
  const ShortVec halves[2] = {float_to_bfloat16(a), float_to_bfloat16(b)};
  return load_as<UintVec>(halves);
}
#endif

// sum + a * b, where a and b have the bits of pairs of bfloat16: one instruction adds both products of each element, in
// fp32. Denormals count as zeros.
#if defined(__AVX512BF16__)
#define PAGEDATTN_BFLOAT16_DOTS
PAGEDATTN_INLINE Vec add_pair_products(Vec sum, Vec a, Vec b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAGEDATTN_BFLOAT16_DOTS
PAGEDATTN_INLINE Vec add_pair_products(Vec sum, Vec a, Vec b) {
  return (Vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
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
#elif defined(__ARM_FEATURE_DOTPROD)
PAGEDATTN_INLINE Vec float16_to_float(ShortVec bits) { return (Vec)vcvt_f32_f16((float16x4_t)bits); }
PAGEDATTN_INLINE ShortVec float_to_float16(Vec value) { return (ShortVec)vcvt_f16_f32((float32x4_t)value); }
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

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
