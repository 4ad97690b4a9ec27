// What linear_int8 writes: sums of products become elements of out.
#pragma once

#include "cpu_rows.h"
#include "linear/linear_quantized.h"
#include "linear/panels.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Writes PANELS panels, or what of them the weight has. sums: [num_rows][PANELS * LINEAR_PANEL]. The weights were
// multiplied EXCESS too large; EXCESS times the sum of a row's codes is taken off here.
template <int PANELS, typename T, uint32_t EXCESS = 128>
void write_out(const LinearInt8Params& p, int64_t first_feature, const int32_t* sums) {
  constexpr int64_t FEATURES = PANELS * LINEAR_PANEL;
  const int64_t count = smaller(p.out_features - first_feature, FEATURES);
  float scales[FEATURES] = {}, bias[FEATURES] = {};
  __builtin_memcpy(scales, p.weight_scales + first_feature, count * sizeof(float));
  if (p.bias != nullptr) __builtin_memcpy(bias, p.bias + first_feature, count * sizeof(float));
  for (int64_t row = 0; row < p.num_rows; ++row) {
    const uint32_t excess = EXCESS * static_cast<uint32_t>(p.code_sums[row]);
    const Vec row_scale = broadcast(p.row_scales[row]);
    T* out = static_cast<T*>(p.out) + row * p.out_features + first_feature;
    for_each_vector(count, [&](int64_t i, auto, auto store) PAGEDATTN_ALWAYS_INLINE {
      const UintVec sum = load_as<UintVec>(sums + row * FEATURES + i) - excess;
      store(out + i, fma(__builtin_convertvector((IntVec)sum, Vec), load(scales + i) * row_scale, load(bias + i)));
    });
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
