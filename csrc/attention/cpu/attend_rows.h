// Attends to one tile of tokens with the query rows that share one KV head; for row_walk.h.
#pragma once

#include <type_traits>

#include "attention/cpu/attend_kernels.h"
#include "attention/cpu/int8_products.h"
#include "attention/cpu/nhd_values.h"
#include "attention/cpu/row_logits.h"
#include "attention/cpu/row_values.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

template <typename Multiply, int NUM_ROWS, typename T, CacheLayout LAYOUT>
void attend_rows(const HeadTile<T, LAYOUT>& h, const Row* rows) {
  TileLogits logits[NUM_ROWS];
  if (!h.tile.all_visible(0, TILE_TOKENS)) __builtin_memset(logits, 0, sizeof logits);
  const TileTokens visible{h.tile.begin, h.tile.end};
  compute_logits<typename Multiply::Dot, NUM_ROWS>(h, visible, rows, logits);
  update_softmax<NUM_ROWS>(h.params, h.tile, rows, logits);
  if constexpr (LAYOUT == CacheLayout::NHD) {
    using Values = typename Multiply::NhdValues;
    alignas(64) float sums[NUM_ROWS * MAX_HEAD_SIZE];
    const int64_t stride = nhd_sums_stride(h.params.head_size);
    for (TileLogits& weights : logits) Values::round_weights(weights);
    accumulate_nhd_values<Values, NUM_ROWS>(h, visible, logits, sums, stride);
    for (int r = 0; r < NUM_ROWS; ++r) add_nhd_sums<Values>(h.params.head_size, sums + r * stride, rows[r].values);
  } else {
    using Strip = typename Multiply::Strip;
    dispatch_strip_elements<Strip>(
        h.params.block_size, [&]<int ELEMENTS>() { accumulate_values<T, Strip, NUM_ROWS, ELEMENTS>(h, rows, logits); });
  }
}

// How the rows are multiplied with keys and values.
template <Arithmetic ARITHMETIC, typename T>
struct RowArithmetic;

template <typename T>
struct RowArithmetic<Arithmetic::FLOATS, T> {
  static constexpr bool MANY_ROWS = true;  // many_rows.h takes many rows together
#if defined(__AVX2__) && !defined(__AVX512F__)
  using Dot = std::conditional_t<sizeof(T) == 1, Float8KeyDot<T>, KeyDot<T>>;
#else
  using Dot = KeyDot<T>;
#endif
  using Strip = ValueStrip<T>;
  using NhdValues = NhdFloats<T>;
};

template <>
struct RowArithmetic<Arithmetic::INT8, int8> {
  static constexpr bool MANY_ROWS = !BY_DIGITS;
  using Dot = Int8Dot;
  using Strip = Int8Strip;
};

#if defined(PAGEDATTN_BFLOAT16_DOTS)
template <typename T>
struct RowArithmetic<Arithmetic::PAIRS, T> {
  static constexpr bool MANY_ROWS = HAS_PAIR_STRIPS;
  using Dot = PairDot<T>;
#if defined(__AVX512BF16__)
  using Strip = PairStrip<T>;
  // 8-bit values would have to be converted before they are put into pairs of tokens.
  using NhdValues = std::conditional_t<sizeof(T) == 1, NhdFloats<T>, NhdTokenPairs>;
#else
  using Strip = ValueStrip<T>;
  using NhdValues = NhdFloats<T>;
#endif
};
#endif

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
