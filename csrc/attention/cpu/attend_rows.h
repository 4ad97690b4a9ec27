// Attends to one tile of tokens with the query rows that share one KV head; for item_walk.h.
#pragma once

#include <type_traits>

#include "attention/cpu/row_logits.h"
#include "attention/cpu/row_values.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

template <typename T, typename Arithmetic, int NUM_ROWS>
void attend_rows(const HeadTile<T>& h, const Row* rows) {
  TileLogits logits[NUM_ROWS];
  if (!h.tile.all_visible(0, TILE_TOKENS)) __builtin_memset(logits, 0, sizeof logits);
  compute_logits<T, typename Arithmetic::Dot, NUM_ROWS>(h, rows, logits);
  update_softmax<T, NUM_ROWS>(h.params, h.tile, rows, logits);
  using Strip = typename Arithmetic::Strip;
  dispatch_strip_elements<Strip>(
      h.params.block_size, [&]<int ELEMENTS>() { accumulate_values<T, Strip, NUM_ROWS, ELEMENTS>(h, rows, logits); });
}

// How the rows are multiplied with keys and values.
template <typename T>
struct FloatArithmetic {
  static constexpr bool MANY_ROWS = true;  // many_rows.h takes many rows together
#if defined(__AVX2__) && !defined(__AVX512F__)
  using Dot = std::conditional_t<sizeof(T) == 1, Float8KeyDot<T>, KeyDot<T>>;
#else
  using Dot = KeyDot<T>;
#endif
  using Strip = ValueStrip<T>;
};
#if defined(__AVX512BF16__)
// For queries in bfloat16. The weights are rounded to bfloat16 only where the cache is in 8 bits.
template <typename T>
struct PairArithmetic {
  static constexpr bool MANY_ROWS = false;
  using Dot = PairDot<T>;
  using Strip = std::conditional_t<sizeof(T) == 1, PairStrip<T>, ValueStrip<T>>;
};
#endif

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
