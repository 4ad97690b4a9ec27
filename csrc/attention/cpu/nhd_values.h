// Weighted sums of values in the NHD layout, for attend_rows.h and many_rows.h.
//
// The elements of a token's value are adjacent. Vectors of elements are multiplied with the weight of their token, or
// of a pair of tokens, and their sums stay in registers over a tile. A sum is added up token by token, or pair by pair,
// whatever rows and elements are summed beside it, so an element has the same bits with few rows and with many.
#pragma once

#include "attention/cpu/row_logits.h"
#include "attention/cpu/value_strip.h"
#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int NHD_PAIR = 2 * VEC_SIZE;  // elements that are loaded at once

// Whether load_nhd_pair has the elements at even places and the elements at odd places, as with load_two.
template <typename T>
constexpr bool NHD_EVEN_AND_ODD = EVEN_AND_ODD<T> || (sizeof(T) == 1 && E4M3_UNIT != 1.0f);

template <typename T>
PAGEDATTN_INLINE Vecs<2> load_nhd_pair(const T* values) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(T) == 1) {
    Float16Halves converted;
    NanFinder<T> nans;
    store_pairs<true>(converted, values, nans);
    return {{converted.first(), converted.last()}};
  }
#endif
  return load_two(values);
}

// Values as floats, token by token.
template <typename T>
struct NhdFloats {
  static constexpr int TOKENS = 1;  // that are multiplied together

  static void round_weights(TileLogits&) {}
  // Two vectors of the NHD_PAIR elements at values[0].
  static PAGEDATTN_INLINE Vecs<2> load(const T* const (&values)[1]) { return load_nhd_pair(values[0]); }
  static PAGEDATTN_INLINE Vec load_weight(const TileLogits& weights, int t) { return load_repeated<1>(weights.at + t); }
  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec values, Vec weight) { return fma(values, weight, sum); }
  // Two sums, in the order of the elements.
  static PAGEDATTN_INLINE Vecs<2> in_element_order(Vec first, Vec second) {
    if constexpr (!NHD_EVEN_AND_ODD<T>) return {{first, second}};
    return {{shuffle(first, second, [](int i) { return i % 2 * VEC_SIZE + i / 2; }),
             shuffle(first, second, [](int i) { return i % 2 * VEC_SIZE + i / 2 + VEC_SIZE / 2; })}};
  }
};

#if defined(__AVX512BF16__)
// Values of bfloat16, each element in pairs of tokens. The first token of a pair is an even one of the tile.
struct NhdTokenPairs : JoinedWeights {
  static constexpr int TOKENS = 2;

  // In place: the bits of two weights in the place of a float.
  static void round_weights(TileLogits& weights) {
    const RoundedWeights rounded(weights.at);
    __builtin_memcpy(weights.at, rounded.at, TILE_TOKENS * sizeof(bfloat16));
  }
  // In each 128-bit lane, of 8 elements the first 4, and the last 4.
  static PAGEDATTN_INLINE Vecs<2> load(const bfloat16* const (&values)[2]) {
    const __m512i a = load_as<__m512i>(values[0]), b = load_as<__m512i>(values[1]);
    return {{(Vec)_mm512_unpacklo_epi16(a, b), (Vec)_mm512_unpackhi_epi16(a, b)}};
  }
  static PAGEDATTN_INLINE Vec load_weight(const TileLogits& weights, int t) {
    return load_repeated<1>(weights.at + t / 2);
  }
  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec values, Vec weight) {
    return add_pair_products(sum, values, weight);
  }
  static PAGEDATTN_INLINE Vecs<2> in_element_order(Vec first, Vec second) {
    return {{shuffle(first, second, [](int i) { return i % 8 / 4 * VEC_SIZE + i / 8 * 4 + i % 4; }),
             shuffle(first, second, [](int i) { return i % 8 / 4 * VEC_SIZE + i / 8 * 4 + i % 4 + VEC_SIZE / 2; })}};
  }
};
#endif

// Floats of the sums of a row: whole pairs.
constexpr int64_t nhd_sums_stride(int64_t head_size) { return (head_size + NHD_PAIR - 1) / NHD_PAIR * NHD_PAIR; }

// Stands for the value of a token that is not visible, beside a visible one.
template <typename T>
alignas(64) constexpr T NHD_ZEROS[MAX_HEAD_SIZE] = {};

template <typename T>
PAGEDATTN_INLINE const T* nhd_value_at(const HeadTile<T, CacheLayout::NHD>& h, int t, int begin, int end) {
  return begin <= t && t < end ? h.values + h.tile.value_offset[t] : NHD_ZEROS<T>;
}

// Adds the tokens' values, weighted, to the sums of NUM_PAIRS * NHD_PAIR elements of NUM_ROWS rows. Sums begin at 0
// with the first visible token of a tile, and go through memory between calls. load_pair(values, i) loads pair i of the
// elements from the values of Values::TOKENS tokens.
template <typename Values, int NUM_PAIRS, int NUM_ROWS, typename T, typename LoadPair>
PAGEDATTN_INLINE void add_nhd_pairs(const HeadTile<T, CacheLayout::NHD>& h, TileTokens tokens,
                                    const TileLogits* weights, const LoadPair& load_pair, float* of_rows,
                                    int64_t stride) {
  constexpr int64_t NUM_BYTES = NUM_PAIRS * NHD_PAIR * TILE_TOKENS * sizeof(T);
  constexpr int NUM_FETCHES = static_cast<int>(Pace<T, NUM_ROWS>::num_value_fetches(NUM_BYTES));
  constexpr int TOKENS = Values::TOKENS;
  constexpr int GROUP = 8;  // tokens between fetches
  constexpr int NUM_GROUPS = TILE_TOKENS / GROUP;
  const auto at = [&](int r, int i) PAGEDATTN_ALWAYS_INLINE { return of_rows + r * stride + i * VEC_SIZE; };
  Vec sums[NUM_ROWS][2 * NUM_PAIRS];
  const bool is_first = tokens.begin == h.tile.begin;
  PAGEDATTN_UNROLL
  for (int r = 0; r < NUM_ROWS; ++r) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < 2 * NUM_PAIRS; ++i) sums[r][i] = is_first ? Vec{} : load(at(r, i));
  }
  for (int begin = tokens.begin; begin < tokens.end;) {
    const int group = begin / GROUP;
    const int end = (group + 1) * GROUP < tokens.end ? (group + 1) * GROUP : tokens.end;
    if (h.prefetcher != nullptr) {
      const int num_fetches = (group + 1) * NUM_FETCHES / NUM_GROUPS - group * NUM_FETCHES / NUM_GROUPS;
      for (int i = 0; i < num_fetches; ++i) h.prefetcher->fetch();
    }
    for (int t = begin / TOKENS * TOKENS; t < end; t += TOKENS) {
      const T* of_tokens[TOKENS];
      PAGEDATTN_UNROLL
      for (int i = 0; i < TOKENS; ++i) of_tokens[i] = nhd_value_at(h, t + i, begin, end);
      Vec values[2 * NUM_PAIRS];
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_PAIRS; ++i) {
        const Vecs<2> pair = load_pair(of_tokens, i);
        values[2 * i] = pair.of[0];
        values[2 * i + 1] = pair.of[1];
      }
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        const Vec weight = Values::load_weight(weights[r], t);
        PAGEDATTN_UNROLL
        for (int i = 0; i < 2 * NUM_PAIRS; ++i) sums[r][i] = Values::multiply_add(sums[r][i], values[i], weight);
      }
    }
    begin = end;
  }
  PAGEDATTN_UNROLL
  for (int r = 0; r < NUM_ROWS; ++r) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < 2 * NUM_PAIRS; ++i) store(at(r, i), sums[r][i]);
  }
}

// The values of the tokens that are multiplied together.
template <typename Values, typename T>
using TokenValues = const T * [Values::TOKENS];

template <typename Values, typename T>
PAGEDATTN_INLINE Vecs<2> load_nhd_at(const T* const (&values)[Values::TOKENS], int64_t d) {
  const T* at[Values::TOKENS];
  PAGEDATTN_UNROLL
  for (int i = 0; i < Values::TOKENS; ++i) at[i] = values[i] + d;
  return Values::load(at);
}

// The same for less than a pair of elements, `count`.
template <typename Values, typename T>
PAGEDATTN_INLINE Vecs<2> load_padded_nhd(const T* const (&values)[Values::TOKENS], int64_t d, int64_t count) {
  T padded[Values::TOKENS][NHD_PAIR] = {};
  const T* at[Values::TOKENS];
  for (int i = 0; i < Values::TOKENS; ++i) {
    __builtin_memcpy(padded[i], values[i] + d, count * sizeof(T));
    at[i] = padded[i];
  }
  return Values::load(at);
}

// Adds to the sums of the elements from `d` on, NUM_PAIRS pairs at a time, then half as many at a time. Returns the
// first element that is left.
template <typename Values, int NUM_PAIRS, int NUM_ROWS, typename T>
PAGEDATTN_INLINE int64_t add_all_nhd_pairs(const HeadTile<T, CacheLayout::NHD>& h, TileTokens tokens,
                                           const TileLogits* weights, float* sums, int64_t stride, int64_t d) {
  for (; d + NUM_PAIRS * NHD_PAIR <= h.params.head_size; d += NUM_PAIRS * NHD_PAIR) {
    const auto load_pair = [&](const TokenValues<Values, T>& values, int i)
                               PAGEDATTN_ALWAYS_INLINE { return load_nhd_at<Values>(values, d + i * NHD_PAIR); };
    add_nhd_pairs<Values, NUM_PAIRS, NUM_ROWS>(h, tokens, weights, load_pair, sums + d, stride);
  }
  if constexpr (NUM_PAIRS > 1) {
    d = add_all_nhd_pairs<Values, NUM_PAIRS / 2, NUM_ROWS>(h, tokens, weights, sums, stride, d);
  }
  return d;
}

// The pair of sums behind the last whole pair begins at this element. A head of less than a pair is padded.
constexpr int64_t last_nhd_pair(int64_t head_size) { return head_size < NHD_PAIR ? 0 : head_size - NHD_PAIR; }

template <typename Values, int NUM_ROWS, typename T>
__attribute__((noinline)) void add_last_nhd_pair(const HeadTile<T, CacheLayout::NHD>& h, TileTokens tokens,
                                                 const TileLogits* weights, float* sums, int64_t stride) {
  const int64_t head_size = h.params.head_size;
  if (head_size >= NHD_PAIR) {
    const int64_t first = last_nhd_pair(head_size);
    const auto load_pair = [&](const TokenValues<Values, T>& values, int)
                               PAGEDATTN_ALWAYS_INLINE { return load_nhd_at<Values>(values, first); };
    return add_nhd_pairs<Values, 1, NUM_ROWS>(h, tokens, weights, load_pair, sums, stride);
  }
  const auto load_padded = [&](const TokenValues<Values, T>& values, int)
                               PAGEDATTN_ALWAYS_INLINE { return load_padded_nhd<Values>(values, 0, head_size); };
  add_nhd_pairs<Values, 1, NUM_ROWS>(h, tokens, weights, load_padded, sums, stride);
}

// Adds the values of the tokens, weighted, to the sums of NUM_ROWS rows, [NUM_ROWS, stride], as pairs are loaded. The
// weights have been through Values::round_weights.
template <typename Values, int NUM_ROWS, typename T>
__attribute__((noinline)) void accumulate_nhd_values(const HeadTile<T, CacheLayout::NHD>& h, TileTokens tokens,
                                                     const TileLogits* weights, float* sums, int64_t stride) {
  constexpr int MOST_PAIRS = MAX_SUMS / NUM_ROWS / 2 < 4 ? MAX_SUMS / NUM_ROWS / 2 : 4;
  const int64_t d = add_all_nhd_pairs<Values, MOST_PAIRS, NUM_ROWS>(h, tokens, weights, sums, stride, 0);
  if (d < h.params.head_size) add_last_nhd_pair<Values, NUM_ROWS>(h, tokens, weights, sums + d, stride);
}

// Adds the sums of a row over a tile to its values.
template <typename Values>
void add_nhd_sums(int64_t head_size, const float* sums, float* values) {
  int64_t d = 0;
  for (; d + NHD_PAIR <= head_size; d += NHD_PAIR) {
    const Vecs<2> pair = Values::in_element_order(load(sums + d), load(sums + d + VEC_SIZE));
    store(values + d, load(values + d) + pair.of[0]);
    store(values + d + VEC_SIZE, load(values + d + VEC_SIZE) + pair.of[1]);
  }
  if (d == head_size) return;
  float last[NHD_PAIR];
  const Vecs<2> pair = Values::in_element_order(load(sums + d), load(sums + d + VEC_SIZE));
  store(last, pair.of[0]);
  store(last + VEC_SIZE, pair.of[1]);
  for (int64_t i = d; i < head_size; ++i) values[i] += last[i - last_nhd_pair(head_size)];
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
