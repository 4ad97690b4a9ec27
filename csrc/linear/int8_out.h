// What linear_int8 writes: sums of products become elements of out.
#pragma once

#include "cpu_rows.h"
#include "linear/byte_products.h"
#include "linear/linear_quantized.h"
#include "linear/panels.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Adds the products of some extra quads with PANELS panels to sums [PANELS * PANEL_VECS].
template <int PANELS>
PAGEDATTN_INLINE void add_extra(const ExtraQuad* extra, int32_t count, const uint8_t* weights, int64_t panel_bytes,
                                UintVec* sums) {
  for (int32_t i = 0; i < count; ++i) {
    const UintVec x = broadcast_quad(extra[i].codes);
    const uint8_t* weight = weights + extra[i].quad * BYTES_PER_QUAD;
    PAGEDATTN_UNROLL
    for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
      const uint8_t* w = weight + v / PANEL_VECS * panel_bytes + v % PANEL_VECS * VEC_BYTES;
      sums[v] = add_products(sums[v], load_weights(w), x);
    }
  }
}

// Writes PANELS panels. Each row has PANELS * LINEAR_PANEL sums, `row_sums` after those of the row before. The products
// of high_codes are added here. The weights were multiplied WEIGHT_EXCESS too large: so many times the sum of a row's
// codes is taken off.
template <int PANELS, typename T>
void write_out(const LinearInt8Params& p, int64_t panel, int32_t* sums, int64_t row_sums) {
  constexpr int64_t FEATURES = PANELS * LINEAR_PANEL;
  const int64_t first_feature = panel * LINEAR_PANEL, count = smaller(p.out_features - first_feature, FEATURES);
  const int64_t panel_bytes = p.num_quads() * BYTES_PER_QUAD;
  const uint8_t* weights = p.weight + panel * panel_bytes;
  float scales[FEATURES] = {}, bias[FEATURES] = {};
  __builtin_memcpy(scales, p.weight_scales + first_feature, count * sizeof(float));
  if (p.bias != nullptr) __builtin_memcpy(bias, p.bias + first_feature, count * sizeof(float));
  for (int64_t row = 0; row < p.num_rows; ++row, sums += row_sums) {
    if (const int32_t num_high = p.num_high[row]; num_high > 0) {
      UintVec high[PANELS * PANEL_VECS] = {};
      add_extra<PANELS>(p.high_codes + row * p.num_quads(), num_high, weights, panel_bytes, high);
      PAGEDATTN_UNROLL
      for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
        const UintVec sum = load_as<UintVec>(sums + v * VEC_SIZE) + (high[v] << 8);
        __builtin_memcpy(sums + v * VEC_SIZE, &sum, sizeof sum);
      }
    }
    const uint32_t excess = WEIGHT_EXCESS * static_cast<uint32_t>(p.code_sums[row]);
    const Vec row_scale = broadcast(p.row_scales[row]);
    T* out = static_cast<T*>(p.out) + row * p.out_features + first_feature;
    for_each_vector(count, [&](int64_t i, auto, auto store) PAGEDATTN_ALWAYS_INLINE {
      const UintVec sum = load_as<UintVec>(sums + i) - excess;
      store(out + i, fma(__builtin_convertvector((IntVec)sum, Vec), load(scales + i) * row_scale, load(bias + i)));
    });
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
