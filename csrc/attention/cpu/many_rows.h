// Many query rows that share one KV head, over a whole tile of tokens; for paged_attention_cpu.cpp.
//
// attend_rows.h loads and converts keys and values anew for every few rows. Here some columns at a time, keys of
// VEC_SIZE tokens or as many elements of the values, are converted for all rows, and what is left is a product of
// matrices, of which a column is multiplied with the rows while it is in the first-level cache.
//
// Every sum has the lanes, the order and the reduction that it has there: a result is the same to the last bit.
#pragma once

#include "attention/cpu/attend_rows.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Columns that are multiplied at once, with up to PRODUCT_ROWS rows: so many sums, a vector of each row and one of a
// column fill 16 registers.
constexpr int PRODUCT_COLUMNS = 4;
constexpr int PRODUCT_ROWS = 3;

// So many rows are worth a conversion for all of them, which saves more where it costs more.
template <typename T>
constexpr int64_t LEAST_ROWS = sizeof(T) == 1 ? 8 : 16;

// As many have their logits in memory at a time.
constexpr int64_t MOST_ROWS = 64;

// Whether the kernel does this for values and heads of this kind. With vectors of 16 the registers hold enough sums for
// attend_rows.h.
template <typename Strip>
bool can_attend_many_rows(const PagedAttentionParams& p) {
  return VEC_SIZE <= 8 && p.head_size % VEC_SIZE == 0 && p.block_size >= Strip::SIZE;
}

// Columns of a product: [NUM_SETS, num_steps, PRODUCT_COLUMNS] vectors, in memory that the caller owns.
struct Columns {
  float* memory;
  int64_t num_steps;

  PAGEDATTN_INLINE float* at(int64_t set, int64_t step, int64_t column) const {
    return memory + ((set * num_steps + step) * PRODUCT_COLUMNS + column) * VEC_SIZE;
  }
};

// The keys of VEC_SIZE tokens, from `token` of the tile on. Not inlined, nor is the next one: GCC 12 would keep the
// constants of the conversion in registers that the sums need.
template <typename T, typename Dot>
__attribute__((noinline)) void convert_keys(const HeadTile<T>& h, int token, const Columns& columns) {
  const T* keys = h.keys + h.tile.key_at(token);
  for (int64_t step = 0; step < columns.num_steps; step += Dot::PARTS / Dot::SUMS) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < PRODUCT_COLUMNS; ++i) {
      const auto loaded = Dot::load_keys(keys + i * NUM_LANES * ELEMENTS_PER_CHUNK<T>);
      PAGEDATTN_UNROLL
      for (int part = 0; part < Dot::PARTS; ++part) {
        store(columns.at(part % Dot::SUMS, step + part / Dot::SUMS, i), loaded.part[part]);
      }
    }
    keys += h.params.block_size * ELEMENTS_PER_CHUNK<T>;
  }
}

// VEC_SIZE elements of the values, from `d` on.
template <typename T, typename Strip>
__attribute__((noinline)) void convert_values(const HeadTile<T>& h, int64_t d, const Columns& columns) {
  for (int s = 0; s < TILE_TOKENS / Strip::SIZE; ++s) {
    const T* values = h.values + h.tile.value_at(s * Strip::SIZE) + d * h.params.block_size;
    PAGEDATTN_UNROLL
    for (int i = 0; i < VEC_SIZE; ++i) {
      const Strip strip = Strip::template load_from<1>(values + i * h.params.block_size);
      PAGEDATTN_UNROLL
      for (int part = 0; part < Strip::PARTS; ++part) {
        store(columns.at(i / PRODUCT_COLUMNS, s * Strip::PARTS + part, i % PRODUCT_COLUMNS), strip.part[part]);
      }
    }
  }
}

// NUM_ROWS rows times columns. A row has RUN floats for every step, which are repeated; there are NUM_SETS sets of
// columns. Calls finish(r, products) with a vector of products, in the order of sum_lanes and add_neighbour_lanes.
template <int NUM_ROWS, int RUN, int NUM_SETS, typename Finish>
PAGEDATTN_INLINE void multiply_rows(const float* rows, int64_t row_stride, const Columns& columns,
                                    const Finish& finish) {
  Vec products[NUM_SETS][NUM_ROWS];
  PAGEDATTN_UNROLL
  for (int set = 0; set < NUM_SETS; ++set) {
    Vec sums[NUM_ROWS][PRODUCT_COLUMNS] = {};
    const float* of_rows = rows;
    const float* of_columns = columns.at(set, 0, 0);
    for (int64_t step = 0; step < columns.num_steps; ++step) {
      Vec of_row[NUM_ROWS];
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) of_row[r] = in_register(load_repeated<RUN>(of_rows + r * row_stride));
      PAGEDATTN_UNROLL
      for (int i = 0; i < PRODUCT_COLUMNS; ++i) {
        const Vec column = in_register(load(of_columns + i * VEC_SIZE));
        PAGEDATTN_UNROLL
        for (int r = 0; r < NUM_ROWS; ++r) sums[r][i] = fma(column, of_row[r], sums[r][i]);
      }
      of_rows += RUN;
      of_columns += PRODUCT_COLUMNS * VEC_SIZE;
    }
    PAGEDATTN_UNROLL
    for (int r = 0; r < NUM_ROWS; ++r) {
      products[set][r] = sum_lanes(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    }
  }
  PAGEDATTN_UNROLL
  for (int r = 0; r < NUM_ROWS; ++r) {
    if constexpr (NUM_SETS == 2) {
      finish(r, add_neighbour_lanes(products[0][r], products[1][r]));
    } else {
      finish(r, products[0][r]);
    }
  }
}

// All rows times columns; calls finish(row, products) for every row, and after() after some.
template <int RUN, int NUM_SETS, typename Finish, typename After>
PAGEDATTN_INLINE void multiply(const float* rows, int64_t row_stride, int64_t num_rows, const Columns& columns,
                               const Finish& finish, const After& after) {
  int64_t row = 0;
  const auto multiply_next = [&]<int NUM_ROWS>() PAGEDATTN_ALWAYS_INLINE {
    multiply_rows<NUM_ROWS, RUN, NUM_SETS>(rows + row * row_stride, row_stride, columns,
                                           [&](int r, Vec products)
                                               PAGEDATTN_ALWAYS_INLINE { finish(row + r, products); });
    row += NUM_ROWS;
    after();
  };
  // The fewer rows, the slower each; 4 are better 2 and 2 than 3 and 1.
  while (num_rows - row >= PRODUCT_ROWS && num_rows - row != 4) multiply_next.template operator()<PRODUCT_ROWS>();
  while (num_rows - row >= 2) multiply_next.template operator()<2>();
  if (num_rows - row >= 1) multiply_next.template operator()<1>();
}

template <typename T, typename Dot, typename After>
__attribute__((noinline)) void compute_many_logits(const HeadTile<T>& h, const Row* rows, int64_t num_rows,
                                                   int64_t query_stride, TileLogits* logits, const After& after) {
  alignas(64) float memory[VEC_SIZE * MAX_HEAD_SIZE];
  const Columns keys{memory, h.params.head_size / Dot::RUN};
  for (int token = 0; token < TILE_TOKENS; token += VEC_SIZE) {
    convert_keys<T, Dot>(h, token, keys);
    multiply<Dot::RUN, Dot::SUMS>(
        rows[0].query, query_stride, num_rows, keys,
        [&](int64_t r, Vec by_lane)
            PAGEDATTN_ALWAYS_INLINE { store(logits[r].at + token, in_token_order(by_lane) * h.params.logit_scale); },
        after);
  }
}

template <typename T, typename Strip, typename After>
__attribute__((noinline)) void accumulate_many_values(const HeadTile<T>& h, const Row* rows, int64_t num_rows,
                                                      const TileLogits* weights, const After& after) {
  alignas(64) float memory[VEC_SIZE * TILE_TOKENS];
  const Columns values{memory, TILE_TOKENS / VEC_SIZE};
  for (int64_t d = 0; d < h.params.head_size; d += VEC_SIZE) {
    convert_values<T, Strip>(h, d, values);
    multiply<VEC_SIZE, NUM_LANES>(
        weights[0].at, TILE_TOKENS, num_rows, values,
        [&](int64_t r, Vec products)
            PAGEDATTN_ALWAYS_INLINE { store(rows[r].values + d, load(rows[r].values + d) + products); },
        after);
  }
}

// Up to MOST_ROWS rows, whose queries lie `query_stride` floats apart, over a tile of which all tokens are visible.
// Calls after() now and then.
template <typename T, typename Arithmetic, typename After>
void attend_many_rows(const HeadTile<T>& h, const Row* rows, int64_t num_rows, int64_t query_stride,
                      const After& after) {
  using Strip = typename Arithmetic::Strip;
  TileLogits logits[MOST_ROWS];
  compute_many_logits<T, typename Arithmetic::Dot>(h, rows, num_rows, query_stride, logits, after);
  int64_t first = 0;
  for (; first + MAX_ROWS <= num_rows; first += MAX_ROWS) {
    update_softmax<T, MAX_ROWS>(h.params, h.tile, rows + first, logits + first);
  }
  for (; first < num_rows; ++first) update_softmax<T, 1>(h.params, h.tile, rows + first, logits + first);
  if constexpr (Strip::PARTS > 1) {
    for (int64_t r = 0; r < num_rows; ++r) {
      const TileLogits by_token = logits[r];
      Strip::template arrange_weights<1>(by_token.at, logits[r].at);
    }
  }
  accumulate_many_values<T, Strip>(h, rows, num_rows, logits, after);
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
