// Rounding to float8: since sm_89 two numbers by one instruction, before sm_89 each number by itself.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "cuda_utils.cuh"

namespace pagedattn::cuda {

// To the nearest element of T (float8_e4m3 or float8_e5m2), ties to even. Numbers beyond the largest element become the
// largest element. Not for NaN.
template <typename T>
__device__ inline uint32_t to_float8(float value) {
  constexpr bool IS_E4M3 = std::is_same_v<T, float8_e4m3>;
  constexpr int MANTISSA_BITS = IS_E4M3 ? 3 : 2;
  constexpr int DROPPED_BITS = 23 - MANTISSA_BITS;
  constexpr uint32_t BIAS = IS_E4M3 ? 7 : 15;
  constexpr float LARGEST = IS_E4M3 ? 448.0f : 57344.0f;
  constexpr uint32_t SMALLEST_NORMAL = (127 + 1 - BIAS) << 23;
  // Adding a power of two whose last bit is the denormals' step rounds to it.
  constexpr uint32_t ROUND_DENORMAL = (127 + 24 - BIAS - MANTISSA_BITS) << 23;

  const uint32_t sign = std::bit_cast<uint32_t>(value) >> 24 & 0x80;
  const float magnitude = fminf(fabsf(value), LARGEST);
  const auto bits = std::bit_cast<uint32_t>(magnitude);
  const uint32_t to_nearest = ((1u << (DROPPED_BITS - 1)) - 1) + (bits >> DROPPED_BITS & 1);
  const uint32_t normal = ((bits + to_nearest) >> DROPPED_BITS) - ((127 - BIAS) << MANTISSA_BITS);
  const float denormal = magnitude + std::bit_cast<float>(ROUND_DENORMAL);
  return (bits < SMALLEST_NORMAL ? std::bit_cast<uint32_t>(denormal) - ROUND_DENORMAL : normal) | sign;
}

// Two numbers, `low` in the low byte. NaN becomes NaN with the sign that is in bit 7 (low) or 15 (high) of `nan_signs`,
// because a GPU's arithmetic does not keep the sign of a NaN.
template <typename T>
__device__ inline uint32_t to_float8x2(float low, float high, uint32_t nan_signs) {
#if __CUDA_ARCH__ >= 890 || defined(PAGEDATTN_SIMT)
  const uint32_t rounded = ptx::to_float8x2<T>(low, high);
#else
  const uint32_t rounded = to_float8<T>(low) | to_float8<T>(high) << 8;
#endif
  const uint32_t nans = (low == low ? 0 : 0xff) | (high == high ? 0 : 0xff00);
  return (rounded & ~nans) | (((nan_signs & 0x8080) | 0x7f7f) & nans);
}

}  // namespace pagedattn::cuda
