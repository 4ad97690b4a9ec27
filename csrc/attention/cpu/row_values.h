// The values of one tile of tokens, weighted and summed for the query rows that share one KV head: the sums of VEC_SIZE
// strips (value_strip.h) stay in registers over the tile; then their lanes are added.
#pragma once

#include "attention/cpu/row_logits.h"
#include "attention/cpu/value_strip.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Four rows have as many weights as strips, or more: the strips are then held in registers, and every weight is loaded
// once. Of fp8 as floats the registers would not hold them.
template <typename Strip, int NUM_ROWS>
constexpr bool STRIPS_FIRST = NUM_ROWS == 4 && Strip::PARTS <= 2;

// How many times as many sums of values as registers hold are reduced together. Without AVX512 it pays: reductions for
// each few elements would hold up the multiplications that follow.
template <int NUM_ROWS>
constexpr int SUM_PASSES = VEC_SIZE == 16 ? 1 : NUM_ROWS;

// The sums of NUM_STRIPS strips of NUM_ROWS rows, one below the other; values[s] is strip s of the first element.
// WHOLE: the head does not end within them, else after num_strips. Sum i of row r goes to sums[r * row_stride + i].
template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS, bool WHOLE>
PAGEDATTN_INLINE void sum_strips(const HeadTile<T>& h, const float* weights, const T* const* values,
                                 int64_t first_offset, int num_strips, Vec* to, int row_stride) {
  constexpr int PARTS = Strip::PARTS;
  constexpr int TOKENS = Strip::SIZE / ELEMENTS;   // of a strip
  constexpr int NUM_STRIPS = VEC_SIZE / NUM_ROWS;  // one below the other
  constexpr int STEP = NUM_STRIPS * ELEMENTS;
  const int64_t strip_stride = ELEMENTS == 1 ? h.params.block_size : Strip::SIZE;
  constexpr int TILE_STRIPS = TILE_TOKENS / TOKENS;
  Vec sums[VEC_SIZE] = {};  // [NUM_ROWS][NUM_STRIPS]
  const auto strip_at = [&](int s, int i) PAGEDATTN_ALWAYS_INLINE {
    // Past the end of the head, its last strip is read again; that sum is dropped.
    const int64_t below = (WHOLE || i < num_strips ? i : num_strips - 1) * strip_stride;
    return values[s] + first_offset + below;
  };
  [[maybe_unused]] ConvertedFirst<Strip, TILE_STRIPS * NUM_STRIPS> converted;
  if constexpr (CONVERTS_FIRST<Strip>) {
    convert_with_nan_if_any<Strip, T>([&](const auto& convert) PAGEDATTN_ALWAYS_INLINE {
      for (int s = h.tile.begin / TOKENS; s * TOKENS < h.tile.end; ++s) {
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_STRIPS; ++i) convert(strip_at(s, i), converted.at[s * NUM_STRIPS + i]);
      }
    });
  }
  const auto load_strip = [&](int s, int i) PAGEDATTN_ALWAYS_INLINE {
    if constexpr (CONVERTS_FIRST<Strip>) {
      return Strip::load_converted(converted.at[s * NUM_STRIPS + i]);
    } else {
      return Strip::template load_from<ELEMENTS>(strip_at(s, i));
    }
  };
  const auto load_weight = [&](int s, int part, int r) PAGEDATTN_ALWAYS_INLINE {
    return load(weights + r * TILE_TOKENS * ELEMENTS + (s * PARTS + part) * VEC_SIZE);
  };
  const auto add_strip = [&](int s, int i, auto mask) PAGEDATTN_ALWAYS_INLINE {
    const Strip strip = load_strip(s, i);
    PAGEDATTN_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      const auto value = mask(strip.part[part], part);
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        Vec& sum = sums[r * NUM_STRIPS + i];
        sum = Strip::multiply_add(sum, value, load_weight(s, part, r));
      }
    }
  };
  const auto add_strips = [&](int s) PAGEDATTN_ALWAYS_INLINE {
    Strip strips[NUM_STRIPS];
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_STRIPS; ++i) strips[i] = load_strip(s, i);
    PAGEDATTN_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        const Vec weight = in_register(load_weight(s, part, r));
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_STRIPS; ++i) {
          Vec& sum = sums[r * NUM_STRIPS + i];
          sum = Strip::multiply_add(sum, strips[i].part[part], weight);
        }
      }
    }
  };
  constexpr int64_t NUM_BYTES = STEP * TILE_TOKENS * sizeof(T);
  constexpr int64_t NUM_FETCHES = NUM_BYTES / FETCH_BYTES * (LIGHT_KEYS<T, NUM_ROWS> ? 3 : 2) / 2;
  const auto prefetch = [&](int64_t i, int64_t n) PAGEDATTN_ALWAYS_INLINE {  // part i of n
    if (h.prefetcher == nullptr) return;
    for (int64_t fetch = i * NUM_FETCHES / n; fetch < (i + 1) * NUM_FETCHES / n; ++fetch) h.prefetcher->fetch();
  };
  const auto whole = [](auto value, int) { return value; };
  if (!h.tile.all_visible(0, TILE_TOKENS)) {
    for (int s = h.tile.begin / TOKENS; s * TOKENS < h.tile.end; ++s) {
      prefetch(s, TILE_STRIPS);
      if (h.tile.all_visible(s * TOKENS, TOKENS)) {
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_STRIPS; ++i) add_strip(s, i, whole);
        continue;
      }
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_STRIPS; ++i) {
        // A slot that no row sees may hold NaN, which a weight of 0 would not silence.
        add_strip(s, i, [&h, s](auto value, int part) {
          return Strip::template mask<ELEMENTS>(value, s, part, h.tile.begin, h.tile.end);
        });
      }
    }
  } else if constexpr (ACROSS_BLOCKS<NUM_ROWS>) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_STRIPS; ++i) {
      prefetch(i, NUM_STRIPS);
      PAGEDATTN_UNROLL_BY_2
      for (int s = 0; s < TILE_STRIPS; ++s) add_strip(s, i, whole);
    }
  } else {
    constexpr int STRIPS_PER_FETCH = NUM_FETCHES <= TILE_STRIPS / 4 ? 4 : 1;
    for (int first = 0; first < TILE_STRIPS; first += STRIPS_PER_FETCH) {
      prefetch(first / STRIPS_PER_FETCH, TILE_STRIPS / STRIPS_PER_FETCH);
      for (int s = first; s < first + STRIPS_PER_FETCH; ++s) {
        if constexpr (STRIPS_FIRST<Strip, NUM_ROWS>) {
          add_strips(s);
        } else {
          PAGEDATTN_UNROLL
          for (int i = 0; i < NUM_STRIPS; ++i) add_strip(s, i, whole);
        }
      }
    }
  }
  PAGEDATTN_UNROLL
  for (int r = 0; r < NUM_ROWS; ++r) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_STRIPS; ++i) to[r * row_stride + i] = sums[r * NUM_STRIPS + i];
  }
}

// Elements of the values of NUM_ROWS rows, from `d` on: SUM_PASSES * VEC_SIZE / NUM_ROWS strips of ELEMENTS elements.
template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS, bool WHOLE>
PAGEDATTN_INLINE void accumulate_elements(const HeadTile<T>& h, const Row* rows, const float* weights,
                                          const T* const* values, int64_t d) {
  constexpr int NUM_PASSES = SUM_PASSES<NUM_ROWS>;
  constexpr int NUM_STRIPS = VEC_SIZE / NUM_ROWS;  // in a pass
  constexpr int ROW_STRIPS = NUM_PASSES * NUM_STRIPS;
  constexpr int STEP = ROW_STRIPS * ELEMENTS;
  const int num_strips = WHOLE ? ROW_STRIPS : static_cast<int>(h.params.head_size - d) / ELEMENTS;
  Vec sums[NUM_PASSES][VEC_SIZE];  // of [NUM_ROWS][ROW_STRIPS]
  for (int first = 0; first < num_strips; first += NUM_STRIPS) {
    const int64_t offset = (d + first * ELEMENTS) * h.params.block_size;
    sum_strips<T, Strip, NUM_ROWS, ELEMENTS, WHOLE>(h, weights, values, offset, num_strips - first, sums[0] + first,
                                                    ROW_STRIPS);
  }
  float totals[NUM_PASSES * VEC_SIZE * ELEMENTS];
  for (int i = 0; i < NUM_PASSES; ++i) sum_runs<ELEMENTS>(sums[i], totals + i * VEC_SIZE * ELEMENTS);
  for (int r = 0; r < NUM_ROWS; ++r) {
    float* row = rows[r].values + d;
    const float* row_totals = totals + r * STEP;
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

template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS>
void accumulate_values(const HeadTile<T>& h, const Row* rows, const TileLogits* weights) {
  constexpr int STEP = SUM_PASSES<NUM_ROWS> * VEC_SIZE / NUM_ROWS * ELEMENTS;
  alignas(64) float arranged[NUM_ROWS][TILE_TOKENS * ELEMENTS];
  for (int r = 0; r < NUM_ROWS; ++r) {
    Strip::template arrange_weights<ELEMENTS>(weights[r].at, arranged[r]);
  }
  constexpr int TOKENS = Strip::SIZE / ELEMENTS;
  const T* values[TILE_TOKENS / TOKENS];
  for (int64_t s = 0; s < TILE_TOKENS / TOKENS; ++s) {
    values[s] = h.values + h.tile.value_at(static_cast<int>(s) * TOKENS);
  }
  int64_t d = 0;
  for (; d + STEP <= h.params.head_size; d += STEP) {
    accumulate_elements<T, Strip, NUM_ROWS, ELEMENTS, true>(h, rows, arranged[0], values, d);
  }
  if (d < h.params.head_size) {
    accumulate_elements<T, Strip, NUM_ROWS, ELEMENTS, false>(h, rows, arranged[0], values, d);
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
