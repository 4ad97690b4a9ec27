// Weighted sums of values in the NHD layout, for attend_rows.h and many_rows.h.
//
// The elements of a token's value are adjacent. Vectors of elements are multiplied with the weight of their token, and
// their sums stay in registers over a tile. A sum is added up token by token, whatever rows and elements are summed
// beside it, so an element has the same bits with few rows and with many.
#pragma once

#include "attention/cpu/row_logits.h"
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

// VEC_SIZE elements in order.
template <typename T>
PAGEDATTN_INLINE Vec load_nhd_values(const T* values) {
  if constexpr (std::is_same_v<T, float8_e4m3> && E4M3_UNIT != 1.0f) return load(values) * (1.0f / E4M3_UNIT);
  return load(values);
}

// A pair of sums, in the order of the elements.
template <typename T>
PAGEDATTN_INLINE Vecs<2> in_element_order(Vec first, Vec second) {
  if constexpr (!NHD_EVEN_AND_ODD<T>) return {{first, second}};
  return {{shuffle(first, second, [](int i) { return i % 2 * VEC_SIZE + i / 2; }),
           shuffle(first, second, [](int i) { return i % 2 * VEC_SIZE + i / 2 + VEC_SIZE / 2; })}};
}

// Floats of the sums of a row: whole pairs.
constexpr int64_t nhd_sums_stride(int64_t head_size) { return (head_size + NHD_PAIR - 1) / NHD_PAIR * NHD_PAIR; }

// Adds the tokens' values, weighted, to the sums of NUM_PAIRS * NHD_PAIR elements of NUM_ROWS rows. Sums begin at 0
// with the first visible token of a tile, and go through memory between calls. load_pair(value, i) loads pair i of the
// elements from the value of a token.
template <int NUM_PAIRS, int NUM_ROWS, typename T, typename LoadPair>
PAGEDATTN_INLINE void add_nhd_pairs(const HeadTile<T, CacheLayout::NHD>& h, TileTokens tokens,
                                    const TileLogits* weights, const LoadPair& load_pair, float* of_rows,
                                    int64_t stride) {
  constexpr int64_t NUM_BYTES = NUM_PAIRS * NHD_PAIR * TILE_TOKENS * sizeof(T);
  constexpr int NUM_FETCHES = static_cast<int>(Pace<T, NUM_ROWS>::num_value_fetches(NUM_BYTES));
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
    for (int t = begin; t < end; ++t) {
      const T* const value = h.values + h.tile.value_offset[t];
      Vec values[2 * NUM_PAIRS];
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_PAIRS; ++i) {
        const Vecs<2> pair = load_pair(value, i);
        values[2 * i] = pair.of[0];
        values[2 * i + 1] = pair.of[1];
      }
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        const Vec weight = load_repeated<1>(weights[r].at + t);
        PAGEDATTN_UNROLL
        for (int i = 0; i < 2 * NUM_PAIRS; ++i) sums[r][i] = fma(values[i], weight, sums[r][i]);
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

// Adds to the sums of the elements from `d` on, NUM_PAIRS pairs at a time, then half as many at a time. Returns the
// first element that is left.
template <int NUM_PAIRS, int NUM_ROWS, typename T>
PAGEDATTN_INLINE int64_t add_all_nhd_pairs(const HeadTile<T, CacheLayout::NHD>& h, TileTokens tokens,
                                           const TileLogits* weights, float* sums, int64_t stride, int64_t d) {
  for (; d + NUM_PAIRS * NHD_PAIR <= h.params.head_size; d += NUM_PAIRS * NHD_PAIR) {
    const auto load_pair = [&](const T* value, int i)
                               PAGEDATTN_ALWAYS_INLINE { return load_nhd_pair(value + d + i * NHD_PAIR); };
    add_nhd_pairs<NUM_PAIRS, NUM_ROWS>(h, tokens, weights, load_pair, sums + d, stride);
  }
  if constexpr (NUM_PAIRS > 1) d = add_all_nhd_pairs<NUM_PAIRS / 2, NUM_ROWS>(h, tokens, weights, sums, stride, d);
  return d;
}

// The pair of sums behind the last whole pair begins at this element. A head of less than a pair is padded.
constexpr int64_t last_nhd_pair(int64_t head_size) { return head_size < NHD_PAIR ? 0 : head_size - NHD_PAIR; }

template <int NUM_ROWS, typename T>
__attribute__((noinline)) void add_last_nhd_pair(const HeadTile<T, CacheLayout::NHD>& h, TileTokens tokens,
                                                 const TileLogits* weights, float* sums, int64_t stride) {
  const int64_t head_size = h.params.head_size;
  if (head_size >= NHD_PAIR) {
    const int64_t first = last_nhd_pair(head_size);
    const auto load_pair = [&](const T* value, int) PAGEDATTN_ALWAYS_INLINE { return load_nhd_pair(value + first); };
    return add_nhd_pairs<1, NUM_ROWS>(h, tokens, weights, load_pair, sums, stride);
  }
  const auto load_padded = [&](const T* value, int) PAGEDATTN_ALWAYS_INLINE {
    T padded[NHD_PAIR] = {};
    __builtin_memcpy(padded, value, head_size * sizeof(T));
    return load_nhd_pair(padded);
  };
  add_nhd_pairs<1, NUM_ROWS>(h, tokens, weights, load_padded, sums, stride);
}

// Adds the values of the tokens, weighted, to the sums of NUM_ROWS rows, [NUM_ROWS, stride], as pairs are loaded.
template <int NUM_ROWS, typename T>
__attribute__((noinline)) void accumulate_nhd_values(const HeadTile<T, CacheLayout::NHD>& h, TileTokens tokens,
                                                     const TileLogits* weights, float* sums, int64_t stride) {
  constexpr int MOST_PAIRS = MAX_SUMS / NUM_ROWS / 2 < 4 ? MAX_SUMS / NUM_ROWS / 2 : 4;
  const int64_t d = add_all_nhd_pairs<MOST_PAIRS, NUM_ROWS>(h, tokens, weights, sums, stride, 0);
  if (d < h.params.head_size) add_last_nhd_pair<NUM_ROWS>(h, tokens, weights, sums + d, stride);
}

// Adds the sums of a row over a tile to its values.
template <typename T>
void add_nhd_sums(int64_t head_size, const float* sums, float* values) {
  int64_t d = 0;
  for (; d + NHD_PAIR <= head_size; d += NHD_PAIR) {
    const Vecs<2> pair = in_element_order<T>(load(sums + d), load(sums + d + VEC_SIZE));
    store(values + d, load(values + d) + pair.of[0]);
    store(values + d + VEC_SIZE, load(values + d + VEC_SIZE) + pair.of[1]);
  }
  if (d == head_size) return;
  float last[NHD_PAIR];
  const Vecs<2> pair = in_element_order<T>(load(sums + d), load(sums + d + VEC_SIZE));
  store(last, pair.of[0]);
  store(last + VEC_SIZE, pair.of[1]);
  for (int64_t i = d; i < head_size; ++i) values[i] += last[i - last_nhd_pair(head_size)];
}

// ---- many rows

// So many vectors of elements are multiplied at once, so that what is converted of a tile stays in the first-level
// cache.
constexpr int NHD_COLUMNS = VEC_SIZE == 16 ? 2 : 4;

// Converts `num_columns` vectors of elements of the visible tokens, from element `d` on, to [tokens, NHD_COLUMNS]
// vectors.
template <typename T>
__attribute__((noinline)) void convert_nhd_values(const HeadTile<T, CacheLayout::NHD>& h, int64_t d, int num_columns,
                                                  float* converted) {
  for (int t = h.tile.begin; t < h.tile.end; ++t) {
    const T* const value = h.values + h.tile.value_offset[t] + d;
    for (int i = 0; i < NHD_COLUMNS; ++i) {
      store(converted + i * VEC_SIZE, i < num_columns ? load_nhd_values(value + i * VEC_SIZE) : Vec{});
    }
    converted += NHD_COLUMNS * VEC_SIZE;
  }
}

// The sums of sum_nhd_values over `num_tokens` converted tokens, the first of which is `first_token` of the tile.
template <int NUM_ROWS>
PAGEDATTN_INLINE void multiply_nhd_values(const TileLogits* weights, int first_token, int64_t num_tokens,
                                          const float* converted, Vec (&sums)[NUM_ROWS][NHD_COLUMNS]) {
  PAGEDATTN_UNROLL
  for (int r = 0; r < NUM_ROWS; ++r) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < NHD_COLUMNS; ++i) sums[r][i] = Vec{};
  }
  const float* of_token = weights[0].at + first_token;
  for (int64_t t = 0; t < num_tokens; ++t) {
    Vec weight[NUM_ROWS];
    PAGEDATTN_UNROLL
    for (int r = 0; r < NUM_ROWS; ++r) weight[r] = in_register(load_repeated<1>(of_token + r * TILE_TOKENS));
    PAGEDATTN_UNROLL
    for (int i = 0; i < NHD_COLUMNS; ++i) {
      const Vec values = in_register(load(converted + i * VEC_SIZE));
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) sums[r][i] = fma(values, weight[r], sums[r][i]);
    }
    ++of_token;
    converted += NHD_COLUMNS * VEC_SIZE;
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
