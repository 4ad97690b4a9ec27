// Quantizes elements to integers with one scale, for the CPU kernels.
#pragma once

#include "cpu_memory.h"
#include "cpu_rows.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int MAX_CODE = 127;
// If all elements are smaller, they count as zeros.
template <int MAX>
constexpr float MIN_LARGEST = (MAX + 1) * 0x1p-126f;

struct Quantized {
  float scale;           // element = code * scale; NaN if an element is not finite
  IntVec sums_of_codes;  // lane i: of the codes of elements i, i + VEC_SIZE, i + 2 * VEC_SIZE, ...

  // Exact for up to 2^17 codes of 8 bits.
  PAGEDATTN_INLINE int32_t sum_of_codes() const {
    return static_cast<int32_t>(reduce_sum(__builtin_convertvector(sums_of_codes, Vec)));
  }
};

// max|x|; NaN if an element is not finite; 0 if MAX divided by the largest could be infinite.
template <int MAX = MAX_CODE, typename T>
PAGEDATTN_INLINE float largest_magnitude(const T* input, int64_t size) {
  // Ordered as integers, infinity and NaN are larger than any finite magnitude.
  IntVec largest_bits{};
  for_each_vector(size, [&](int64_t i, auto load, auto) {
    largest_bits = max(largest_bits, (IntVec)load(input + i) & 0x7fffffff);
  });
  const int32_t bits = reduce_max(largest_bits);
  constexpr int32_t INFINITE_BITS = 0x7f800000;
  if (bits >= INFINITE_BITS) return __builtin_nanf("");
  const float largest = __builtin_bit_cast(float, bits);
  return largest < MIN_LARGEST<MAX> ? 0.0f : largest;
}

// Calls store(i, codes) with round(x * max_code / largest) for each of `size` elements, and with zeros for the rest of
// the last vector. `largest` is the row's largest_magnitude.
template <typename T, typename Store>
PAGEDATTN_INLINE Quantized quantize_to(int max_code, float largest, const T* input, int64_t size, Store&& store) {
  if (!(largest > 0)) {
    for (int64_t i = 0; i < size; i += VEC_SIZE) store(i, IntVec{});
    return {largest, IntVec{}};
  }
  const Vec inverse_scale = broadcast(max_code / largest);
  const Vec round_to_int = broadcast(0x1.8p23f);
  IntVec sums{};
  for_each_vector(size, [&](int64_t i, auto load, auto) {
    const Vec rounded = (load(input + i) * inverse_scale + round_to_int) - round_to_int;
    const IntVec codes = __builtin_convertvector(rounded, IntVec);
    sums += codes;
    store(i, codes);
  });
  return {largest / max_code, sums};
}

template <int MAX = MAX_CODE, typename T, typename Store>
PAGEDATTN_INLINE Quantized quantize(const T* input, int64_t size, Store&& store) {
  return quantize_to(MAX, largest_magnitude<MAX>(input, size), input, size, store);
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
