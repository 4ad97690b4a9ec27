// Rows of linear_int8 become codes. A row has one scale, so that the products of all its codes are added as integers.
//
// In the rows of language models, a few elements are many times as large as the others (Dettmers et al. 2022,
// "LLM.int8()"). If the largest element had a code of 8 bits, few codes would be left for the others. So a code may
// have more bits: its low 8 bits are multiplied together with those of all other codes of the row, the rest separately.
// The error of a row is then 0.8% of the row's norm, and hardly more than 1.6%, however large its largest elements are.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu_quantize.h"
#include "linear/linear_quantized.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// MAX_CODE is at least so many times the root mean square of the codes, if codes are larger. With 3.5, two small
// language models (SmolLM2 135M, Gemma 3 270M) lose no more than by a scale for each 32 elements, and 2% of the quads
// have such codes. Rows of normally distributed elements have none.
constexpr double MAX_CODE_PER_RMS = 3.5;

// The largest code of a row becomes so many times MAX_CODE. squares: the sum of the squares of the codes if it is once.
inline int times_max_code(float largest, int64_t squares, int64_t size) {
  constexpr float MORE_TIMES = 128;  // than sqrt(MAX_INT8_FEATURES) / 3.5: so scales are normal numbers
  if (!(largest >= MIN_LARGEST<MAX_CODE> * MORE_TIMES)) return 1;
  const double rms = std::sqrt(static_cast<double>(squares) / static_cast<double>(size));
  return std::max(1, static_cast<int>(MAX_CODE / (MAX_CODE_PER_RMS * rms)));
}

// Calls store(i, codes), which stores the low 8 bits of each. What these leave becomes the row's high_codes.
template <typename T, typename Store>
PAGEDATTN_INLINE void quantize_row(const LinearInt8Params& p, int64_t row, const Store& store) {
  const T* input = static_cast<const T*>(p.input) + row * p.input_stride;
  const float largest = largest_magnitude(input, p.in_features);
  IntVec squares{};
  quantize_to(MAX_CODE, largest, input, p.in_features,
              [&](int64_t, IntVec codes) PAGEDATTN_ALWAYS_INLINE { squares += codes * codes; });
  int64_t sum_of_squares = 0;
  for (int i = 0; i < VEC_SIZE; ++i) sum_of_squares += squares[i];
  const int times = times_max_code(largest, sum_of_squares, p.in_features);

  ExtraQuad* high = p.high_codes + row * p.num_quads();
  const auto store_and_split = [&](int64_t i, IntVec codes) PAGEDATTN_ALWAYS_INLINE {
    store(i, codes);
    const IntVec high_codes = (codes + 128) >> 8;
    if (!any_bit(high_codes)) [[likely]]
      return;
    for (int j = 0; j < VEC_SIZE; j += QUAD) {
      ExtraQuad extra{static_cast<int32_t>((i + j) / QUAD), {}};
      int any = 0;
      for (int k = 0; k < QUAD; ++k) {
        extra.codes[k] = static_cast<int8_t>(high_codes[j + k]);
        any |= extra.codes[k];
      }
      if (any != 0) *high++ = extra;
    }
  };
  const Quantized quantized = quantize_to(times * MAX_CODE, largest, input, p.in_features, store_and_split);
  p.row_scales[row] = quantized.scale;
  p.code_sums[row] = quantized.sum_of_codes();
  p.num_high[row] = static_cast<int32_t>(high - (p.high_codes + row * p.num_quads()));
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
