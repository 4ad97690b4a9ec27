// The values of one tile of tokens, weighted and summed for the query rows that share one KV head. The sums of VEC_SIZE
// strips (value_strip.h) stay in registers over the tile. Then the lanes of each sum are added.
#pragma once

#include "attention/cpu/row_logits.h"
#include "attention/cpu/value_strip.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Four rows have as many weights as strips, or more. So the strips are held in registers, and every weight is loaded
// once. The registers would not hold strips of fp8 as floats.
template <typename Strip, int NUM_ROWS>
constexpr bool STRIPS_FIRST = NUM_ROWS == 4 && Strip::PARTS <= 2;

// How many times the sums of values that registers hold are reduced together. More than once pays without AVX512:
// reductions for every few elements would hold up the multiplications that follow.
template <int NUM_ROWS>
constexpr int SUM_PASSES = VEC_SIZE == 16 ? 1 : NUM_ROWS;

// The sums of NUM_STRIPS strips of NUM_ROWS rows, one strip below the other, over a tile.
template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS, bool WHOLE>
struct StripSums {
  static constexpr int TOKENS = Strip::SIZE / ELEMENTS;     // of a strip
  static constexpr int NUM_STRIPS = VEC_SIZE / NUM_ROWS;    // one below the other
  static constexpr int TILE_STRIPS = TILE_TOKENS / TOKENS;  // side by side

  static constexpr int64_t NUM_BYTES = NUM_STRIPS * ELEMENTS * TILE_TOKENS * sizeof(T);
  static constexpr int64_t NUM_FETCHES = Pace<T, NUM_ROWS>::num_value_fetches(NUM_BYTES);
  static constexpr int STRIPS_PER_FETCH = NUM_FETCHES <= TILE_STRIPS / 4 ? 4 : 1;

  using Converted = ConvertedFirst<Strip, TILE_STRIPS * NUM_STRIPS>;
  using Sums = Vec[VEC_SIZE];  // [NUM_ROWS][NUM_STRIPS]

  const HeadTile<T>& h;
  const float* weights;
  const T* const* values;  // values[s] is strip s of the first element
  int64_t first_offset;
  int num_strips;  // read only without WHOLE
  int64_t strip_stride;

  PAGEDATTN_INLINE const T* strip_at(int s, int i) const {
    // Past the end of the head, its last strip is read again, and the sum is dropped.
    const int64_t below = (WHOLE || i < num_strips ? i : num_strips - 1) * strip_stride;
    return values[s] + first_offset + below;
  }

  PAGEDATTN_INLINE void convert_first([[maybe_unused]] Converted& converted) const {
    if constexpr (CONVERTS_FIRST<Strip>) {
      convert_with_nan_if_any<Strip, T>([&](const auto& convert) PAGEDATTN_ALWAYS_INLINE {
        for (int s = h.tile.begin / TOKENS; s * TOKENS < h.tile.end; ++s) {
          PAGEDATTN_UNROLL
          for (int i = 0; i < NUM_STRIPS; ++i) convert(strip_at(s, i), converted.at[s * NUM_STRIPS + i]);
        }
      });
    }
  }

  PAGEDATTN_INLINE Strip load_strip(int s, int i, [[maybe_unused]] const Converted& converted) const {
    if constexpr (CONVERTS_FIRST<Strip>) {
      return Strip::load_converted(converted.at[s * NUM_STRIPS + i]);
    } else {
      return Strip::template load_from<ELEMENTS>(strip_at(s, i));
    }
  }

  PAGEDATTN_INLINE Vec load_weight(int s, int part, int r) const {
    return load(weights + r * TILE_TOKENS * ELEMENTS + (s * Strip::PARTS + part) * VEC_SIZE);
  }

  // mask(values, part) gives the values that count.
  template <typename Mask>
  PAGEDATTN_INLINE void add_strip(int s, int i, const Converted& converted, Sums& sums, const Mask& mask) const {
    const Strip strip = load_strip(s, i, converted);
    PAGEDATTN_UNROLL
    for (int part = 0; part < Strip::PARTS; ++part) {
      const auto value = mask(strip.part[part], part);
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        Vec& sum = sums[r * NUM_STRIPS + i];
        sum = Strip::multiply_add(sum, value, load_weight(s, part, r));
      }
    }
  }

  PAGEDATTN_INLINE void add_strip(int s, int i, const Converted& converted, Sums& sums) const {
    add_strip(s, i, converted, sums, [](auto value, int) { return value; });
  }

  // All strips are held in registers, so that each weight is loaded once.
  PAGEDATTN_INLINE void add_strips_first(int s, const Converted& converted, Sums& sums) const {
    Strip strips[NUM_STRIPS];
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_STRIPS; ++i) strips[i] = load_strip(s, i, converted);
    PAGEDATTN_UNROLL
    for (int part = 0; part < Strip::PARTS; ++part) {
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
  }

  PAGEDATTN_INLINE void add_strips(int s, const Converted& converted, Sums& sums) const {
    if constexpr (STRIPS_FIRST<Strip, NUM_ROWS>) {
      add_strips_first(s, converted, sums);
    } else {
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_STRIPS; ++i) add_strip(s, i, converted, sums);
    }
  }

  // Fetches part i of n of what is fetched beside these sums.
  PAGEDATTN_INLINE void fetch_beside(int64_t i, int64_t n) const {
    if (h.prefetcher == nullptr) return;
    for (int64_t fetch = i * NUM_FETCHES / n; fetch < (i + 1) * NUM_FETCHES / n; ++fetch) h.prefetcher->fetch();
  }

  PAGEDATTN_INLINE void walk_partly_visible(const Converted& converted, Sums& sums) const {
    for (int s = h.tile.begin / TOKENS; s * TOKENS < h.tile.end; ++s) {
      fetch_beside(s, TILE_STRIPS);
      if (h.tile.all_visible(s * TOKENS, TOKENS)) {
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_STRIPS; ++i) add_strip(s, i, converted, sums);
        continue;
      }
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_STRIPS; ++i) {
        // A slot that no row sees may hold NaN, which a weight of 0 would not silence.
        add_strip(s, i, converted, sums, [this, s](auto value, int part) {
          return Strip::template mask<ELEMENTS>(value, s, part, h.tile.begin, h.tile.end);
        });
      }
    }
  }

  PAGEDATTN_INLINE void walk_across_blocks(const Converted& converted, Sums& sums) const {
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_STRIPS; ++i) {
      fetch_beside(i, NUM_STRIPS);
      PAGEDATTN_UNROLL_BY_2
      for (int s = 0; s < TILE_STRIPS; ++s) add_strip(s, i, converted, sums);
    }
  }

  PAGEDATTN_INLINE void walk_strip_by_strip(const Converted& converted, Sums& sums) const {
    for (int first = 0; first < TILE_STRIPS; first += STRIPS_PER_FETCH) {
      fetch_beside(first / STRIPS_PER_FETCH, TILE_STRIPS / STRIPS_PER_FETCH);
      for (int s = first; s < first + STRIPS_PER_FETCH; ++s) add_strips(s, converted, sums);
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

// Computes the sums of the strips from `first_offset` on. WHOLE: the head does not end within the strips. Otherwise it
// ends after num_strips. Sum i of row r goes to to[r * row_stride + i].
template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS, bool WHOLE>
PAGEDATTN_INLINE void sum_strips(const HeadTile<T>& h, const float* weights, const T* const* values,
                                 int64_t first_offset, int num_strips, Vec* to, int row_stride) {
  using Strips = StripSums<T, Strip, NUM_ROWS, ELEMENTS, WHOLE>;
  const int64_t strip_stride = ELEMENTS == 1 ? h.params.block_size : Strip::SIZE;
  const Strips strips{h, weights, values, first_offset, num_strips, strip_stride};
  typename Strips::Sums sums = {};
  typename Strips::Converted converted;
  strips.convert_first(converted);
  if (!h.tile.all_visible(0, TILE_TOKENS)) {
    strips.walk_partly_visible(converted, sums);
  } else if constexpr (ACROSS_BLOCKS<NUM_ROWS>) {
    strips.walk_across_blocks(converted, sums);
  } else {
    strips.walk_strip_by_strip(converted, sums);
  }
  Strips::store_sums(sums, to, row_stride);
}

// Adds to the elements of the values of NUM_ROWS rows, from `d` on: SUM_PASSES * VEC_SIZE / NUM_ROWS strips of ELEMENTS
// elements.
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
