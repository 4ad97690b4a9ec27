// The values of one tile of tokens, weighted and summed for the query rows that share one KV head. The sums of VEC_SIZE
// strips (value_strip.h) stay in registers over the tile. Then the lanes of each sum are added.
#pragma once

#include "attention/cpu/row_logits.h"
#include "attention/cpu/tile_strips.h"
#include "attention/cpu/value_strip.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Four rows have as many weights as strips, or more. So the strips are held in registers, and every weight is loaded
// once. The registers would not hold strips of fp8 as floats.
template <typename Strip, int NUM_ROWS>
constexpr bool STRIPS_FIRST = NUM_ROWS == 4 && Strip::PARTS <= 2;

// The strips, one below the other, whose sums are held in registers for NUM_ROWS rows.
constexpr int MAX_STRIPS = NUM_REGISTERS == 32 ? 16 : VEC_SIZE;
template <int NUM_ROWS>
constexpr int STRIPS_BELOW = NUM_ROWS == 3 ? MAX_STRIPS / 2 : MAX_STRIPS / NUM_ROWS;

// How many times the sums of values that registers hold are reduced together. More than once pays without AVX512:
// reductions for every few elements would hold up the multiplications that follow.
template <int NUM_ROWS>
constexpr int SUM_PASSES = NUM_ROWS == 3      ? 2
                           : MAX_STRIPS == 16 ? 1
                                              : NUM_ROWS;

// The sums of NUM_STRIPS strips of NUM_ROWS rows, one strip below the other, over a tile.
template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS, bool WHOLE>
struct StripSums {
  using Strips = TileStrips<T, Strip, ELEMENTS>;
  static constexpr int NUM_STRIPS = STRIPS_BELOW<NUM_ROWS>;
  static constexpr int TILE_STRIPS = Strips::COUNT;  // side by side

  static constexpr int64_t NUM_BYTES = NUM_STRIPS * ELEMENTS * TILE_TOKENS * sizeof(T);
  static constexpr int64_t NUM_FETCHES = Pace<T, NUM_ROWS>::num_value_fetches(NUM_BYTES);
  static constexpr int STRIPS_PER_FETCH = NUM_FETCHES <= TILE_STRIPS / 4 ? 4 : 1;

  using Converted = ConvertedFirst<Strip, TILE_STRIPS * NUM_STRIPS>;
  using Sums = Vec[NUM_ROWS * NUM_STRIPS];

  const HeadTile<T>& h;
  const float* weights;
  const Strips& strips;
  int64_t first_strip;  // of a column of strips
  int num_strips;       // read only without WHOLE

  // Strip i of those whose first is `first`, `stride` elements apart.
  PAGEDATTN_INLINE const T* strip_at(const T* first, int64_t stride, int i) const {
    // Past the end of the head, its last strip is read again, and the sum is dropped.
    return first + (WHOLE || i < num_strips ? i : num_strips - 1) * stride;
  }

  PAGEDATTN_INLINE const T* first_of(int s, int64_t stride) const {
    return as_base(strips.of[s].first + first_strip * stride);
  }
  PAGEDATTN_INLINE const float* weights_of(int s) const { return as_base(weights + s * Strip::PARTS * VEC_SIZE); }

  PAGEDATTN_INLINE void convert_first([[maybe_unused]] Converted& converted) const {
    if constexpr (CONVERTS_FIRST<Strip>) {
      convert_with_nan_if_any<Strip>([&](const auto& convert) PAGEDATTN_ALWAYS_INLINE {
        for (int s = strips.begin; s < strips.end; ++s) {
          const int64_t stride = strips.of[s].stride();
          const T* const first = first_of(s, stride);
          PAGEDATTN_UNROLL
          for (int i = 0; i < NUM_STRIPS; ++i) convert(strip_at(first, stride, i), converted.at[s * NUM_STRIPS + i]);
        }
      });
    }
  }

  PAGEDATTN_INLINE Strip load_strip(int s, const T* first, int64_t stride, int i,
                                    [[maybe_unused]] const Converted& converted) const {
    if constexpr (CONVERTS_FIRST<Strip>) {
      return Strip::load_converted(converted.at[s * NUM_STRIPS + i]);
    } else {
      return Strip::template load_from<ELEMENTS>(strip_at(first, stride, i));
    }
  }

  static PAGEDATTN_INLINE Vec load_weight(const float* of_strip, int part, int r) {
    return load(of_strip + r * TILE_TOKENS * ELEMENTS + part * VEC_SIZE);
  }

  // All strips are held in registers, so that each weight is loaded once.
  PAGEDATTN_INLINE void add_strips_first(int s, int64_t stride, const Converted& converted, Sums& sums) const {
    const T* const first = first_of(s, stride);
    const float* const of_strip = weights_of(s);
    Strip below[NUM_STRIPS];
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_STRIPS; ++i) below[i] = load_strip(s, first, stride, i, converted);
    PAGEDATTN_UNROLL
    for (int part = 0; part < Strip::PARTS; ++part) {
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        const Vec weight = in_register(load_weight(of_strip, part, r));
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_STRIPS; ++i) {
          Vec& sum = sums[r * NUM_STRIPS + i];
          sum = Strip::multiply_add(sum, below[i].part[part], weight);
        }
      }
    }
  }

  PAGEDATTN_INLINE void add_strips(int s, int64_t stride, const Converted& converted, Sums& sums) const {
    const T* const first = first_of(s, stride);
    const float* const of_strip = weights_of(s);
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_STRIPS; ++i) {
      const Strip strip = load_strip(s, first, stride, i, converted);
      PAGEDATTN_UNROLL
      for (int part = 0; part < Strip::PARTS; ++part) {
        PAGEDATTN_UNROLL
        for (int r = 0; r < NUM_ROWS; ++r) {
          Vec& sum = sums[r * NUM_STRIPS + i];
          sum = Strip::multiply_add(sum, strip.part[part], load_weight(of_strip, part, r));
        }
      }
    }
  }

  // Fetches part i of n of what is fetched beside these sums.
  PAGEDATTN_INLINE void fetch_beside(int64_t i, int64_t n) const {
    if (h.prefetcher == nullptr) return;
    for (int64_t fetch = i * NUM_FETCHES / n; fetch < (i + 1) * NUM_FETCHES / n; ++fetch) h.prefetcher->fetch();
  }

  // The sums of one row over a tile that is visible as a whole, one after the other. The loop over the sums stays a
  // loop: unrolled, it would be more code than the first-level cache holds.
  PAGEDATTN_INLINE void sum_across_blocks(Vec* to) const {
    const int end = WHOLE ? NUM_STRIPS : num_strips;
    for (int i = 0; i < end; ++i) {
      fetch_beside(i, NUM_STRIPS);
      Vec sum = {};
      PAGEDATTN_UNROLL
      for (int s = 0; s < TILE_STRIPS; ++s) {
        const Strip strip = Strip::template load_from<ELEMENTS>(strips.of[s].at(first_strip + i));
        const float* const of_strip = weights + s * Strip::PARTS * VEC_SIZE;
        PAGEDATTN_UNROLL
        for (int part = 0; part < Strip::PARTS; ++part) {
          sum = Strip::multiply_add(sum, strip.part[part], load_weight(of_strip, part, 0));
        }
      }
      to[i] = sum;
    }
  }

  // Over a tile that is visible as a whole.
  PAGEDATTN_INLINE void walk_strip_by_strip(const Converted& converted, Sums& sums) const {
    const int64_t stride = strips.of[0].stride();
    for (int first = 0; first < TILE_STRIPS; first += STRIPS_PER_FETCH) {
      fetch_beside(first / STRIPS_PER_FETCH, TILE_STRIPS / STRIPS_PER_FETCH);
      for (int s = first; s < first + STRIPS_PER_FETCH; ++s) {
        if constexpr (STRIPS_FIRST<Strip, NUM_ROWS>) {
          add_strips_first(s, stride, converted, sums);
        } else {
          add_strips(s, stride, converted, sums);
        }
      }
    }
  }

  // Over the strips that have visible tokens.
  PAGEDATTN_INLINE void walk_visible(const Converted& converted, Sums& sums) const {
    for (int s = strips.begin; s < strips.end; ++s) {
      fetch_beside(s, TILE_STRIPS);
      add_strips(s, strips.of[s].stride(), converted, sums);
    }
  }

  PAGEDATTN_INLINE void walk_tile(bool all_visible, const Converted& converted, Sums& sums) const {
    if (WHOLE && !ACROSS_BLOCKS<NUM_ROWS> && all_visible) {
      walk_strip_by_strip(converted, sums);
    } else {
      walk_visible(converted, sums);
    }
  }

  static PAGEDATTN_INLINE void store_sums(const Sums& sums, Vec* to, int row_stride) {
    PAGEDATTN_UNROLL
    for (int r = 0; r < NUM_ROWS; ++r) {
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_STRIPS; ++i) to[r * row_stride + i] = sums[r * NUM_STRIPS + i];
    }
  }
};

// Computes the sums of the strips from `first_strip` of each column on. WHOLE: the head does not end within the strips.
// Otherwise it ends after num_strips. Sum i of row r goes to to[r * row_stride + i].
template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS, bool WHOLE>
PAGEDATTN_INLINE void sum_strips(const HeadTile<T>& h, const float* weights,
                                 const TileStrips<T, Strip, ELEMENTS>& strips, int64_t first_strip, int num_strips,
                                 Vec* to, int row_stride) {
  using Walk = StripSums<T, Strip, NUM_ROWS, ELEMENTS, WHOLE>;
  const Walk walk{h, weights, strips, first_strip, num_strips};
  const bool all_visible = h.tile.all_visible(0, TILE_TOKENS);
  if (ACROSS_BLOCKS<NUM_ROWS> && all_visible) return walk.sum_across_blocks(to);
  typename Walk::Sums sums = {};
  typename Walk::Converted converted;
  walk.convert_first(converted);
  walk.walk_tile(all_visible, converted, sums);
  if constexpr (INTEGER_SUMS<Strip> && BY_DIGITS) {
    // The low digits, while the values are in the first-level cache.
    HeadTile<T> fetched = h;
    fetched.prefetcher = nullptr;
    for (Vec& sum : sums) sum = (Vec)((IntVec)sum * 256);
    const float* const low_digits = weights + Walk::TILE_STRIPS * VEC_SIZE;
    Walk{fetched, low_digits, strips, first_strip, num_strips}.walk_tile(all_visible, converted, sums);
  }
  Walk::store_sums(sums, to, row_stride);
}

template <int SIZE>
PAGEDATTN_INLINE bool has_nan(const float (&values)[SIZE]) {
  Vec zeros_or_nan = {};
  for (int i = 0; i < SIZE; i += VEC_SIZE) zeros_or_nan = fma(load(values + i), Vec{}, zeros_or_nan);
  return reduce_sum(zeros_or_nan) != 0.0f;
}

// Adds to the elements of the values of NUM_ROWS rows, from `d` on: SUM_PASSES * STRIPS_BELOW strips of ELEMENTS
// elements.
//
// weight_scales: of each row, if the sums are integers.
template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS, bool WHOLE>
PAGEDATTN_INLINE void accumulate_elements(const HeadTile<T>& h, const Row* rows, const float* weights,
                                          [[maybe_unused]] const float* weight_scales,
                                          TileStrips<T, Strip, ELEMENTS>& strips, int64_t d) {
  constexpr int NUM_STRIPS = STRIPS_BELOW<NUM_ROWS>;  // in a pass
  constexpr int ROW_STRIPS = SUM_PASSES<NUM_ROWS> * NUM_STRIPS;
  constexpr int NUM_VECS = NUM_ROWS * ROW_STRIPS / VEC_SIZE;
  constexpr int STEP = ROW_STRIPS * ELEMENTS;
  const int num_strips = WHOLE ? ROW_STRIPS : static_cast<int>(h.params.head_size - d) / ELEMENTS;
  Vec sums[NUM_VECS][VEC_SIZE];  // of [NUM_ROWS][ROW_STRIPS]
  if constexpr (!WHOLE) __builtin_memset(sums, 0, sizeof sums);
  float totals[NUM_VECS * VEC_SIZE * ELEMENTS];
  while (true) {
    for (int first = 0; first < num_strips; first += NUM_STRIPS) {
      sum_strips<T, Strip, NUM_ROWS, ELEMENTS, WHOLE>(h, weights, strips, d / ELEMENTS + first, num_strips - first,
                                                      sums[0] + first, ROW_STRIPS);
    }
    for (int i = 0; i < NUM_VECS; ++i) sum_runs<ELEMENTS, SumVec<Strip>>(sums[i], totals + i * VEC_SIZE * ELEMENTS);
    if (INTEGER_SUMS<Strip> || !strips.has_hidden_tokens || !has_nan(totals)) [[likely]]
      break;
    strips.hide_tokens(h);
  }
  if constexpr (INTEGER_SUMS<Strip>) {
    for (float* at = totals; at < totals + NUM_VECS * VEC_SIZE * ELEMENTS; at += VEC_SIZE) {
      store(at, __builtin_convertvector(load_as<IntVec>(at), Vec));
    }
  }
  for (int r = 0; r < NUM_ROWS; ++r) {
    float* row = rows[r].values + d;
    float* row_totals = totals + r * STEP;
    if constexpr (INTEGER_SUMS<Strip>) {
      for (int i = 0; i < STEP; ++i) row_totals[i] *= weight_scales[r];
    }
    if constexpr (WHOLE) {
      constexpr int SIZE = STEP < VEC_SIZE ? STEP : VEC_SIZE;
      typedef float Some __attribute__((vector_size(SIZE * sizeof(float))));
      for (int i = 0; i < STEP; i += SIZE) {
        Some sum;
        Some addition;
        __builtin_memcpy(&sum, row + i, sizeof sum);
        __builtin_memcpy(&addition, row_totals + i, sizeof addition);
        sum += addition;
        __builtin_memcpy(row + i, &sum, sizeof sum);
      }
    } else {
      for (int i = 0; i < num_strips * ELEMENTS; ++i) row[i] += row_totals[i];
    }
  }
}

// Lays out the weights of a tile as the strips want them. Returns the scale of the weights, if they are integers.
template <typename Strip, int ELEMENTS, typename T>
float arrange_weights([[maybe_unused]] const HeadTile<T>& h, const float* by_token, float* arranged) {
  if constexpr (INTEGER_SUMS<Strip>) {
    return Strip::template arrange_weights<ELEMENTS>(h, by_token, arranged);
  } else {
    Strip::template arrange_weights<ELEMENTS>(by_token, arranged);
    return 1.0f;
  }
}

template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS>
void accumulate_values(const HeadTile<T>& h, const Row* rows, const TileLogits* weights) {
  constexpr int STEP = SUM_PASSES<NUM_ROWS> * STRIPS_BELOW<NUM_ROWS> * ELEMENTS;
  alignas(64) float arranged[NUM_ROWS][TILE_TOKENS * ELEMENTS];
  float scales[NUM_ROWS];
  for (int r = 0; r < NUM_ROWS; ++r) scales[r] = arrange_weights<Strip, ELEMENTS>(h, weights[r].at, arranged[r]);
  TileStrips<T, Strip, ELEMENTS> strips(h);
  int64_t d = 0;
  for (; d + STEP <= h.params.head_size; d += STEP) {
    accumulate_elements<T, Strip, NUM_ROWS, ELEMENTS, true>(h, rows, arranged[0], scales, strips, d);
  }
  // A head has whole chunks.
  if constexpr (STEP > ELEMENTS_PER_CHUNK<T>) {
    if (d < h.params.head_size) {
      accumulate_elements<T, Strip, NUM_ROWS, ELEMENTS, false>(h, rows, arranged[0], scales, strips, d);
    }
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
