// Attends to a tile of tokens with many query rows that share one KV head; for row_walk.h.
//
// attend_rows.h loads and converts keys and values anew for every few rows. Here some columns at a time are converted
// once for all rows: to floats, or to pairs of bfloat16 or of 16-bit integers. Columns are the keys of VEC_SIZE tokens,
// or VEC_SIZE elements of the values. What is left is a product of matrices, in which columns are multiplied with the
// rows while the columns are in the first-level cache.
//
// Every sum has the same lanes, order and reduction as in attend_rows.h, so a result is the same to the last bit. Only
// products with a weight of 0 are left out.
#pragma once

#include "attention/cpu/attend_rows.h"
#include "attention/cpu/nhd_values.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// So many columns are multiplied at once, with up to PRODUCT_ROWS rows. Their sums, a vector of each row and a vector
// of a column fill the registers, 16 or 32.
constexpr int PRODUCT_COLUMNS = 4;
constexpr int PRODUCT_ROWS = NUM_REGISTERS == 32 ? 6 : 3;

constexpr int LANE_FLOATS = 4;  // in 128 bits

// At most so many rows have their logits in memory at a time.
constexpr int64_t MOST_ROWS = 128;

// Whether attend_many_rows takes values and heads of this kind: an element of a strip must have whole 128-bit lanes.
template <typename Strip>
bool can_attend_many_rows(const PagedAttentionParams& p) {
  return p.head_size % VEC_SIZE == 0 && (p.layout == CacheLayout::NHD || p.block_size * NUM_LANES >= Strip::SIZE);
}

// A vector of products is of one row with the keys of VEC_SIZE tokens, or with VEC_SIZE elements of the values. It
// comes from four columns. Product p is made in 128-bit lane p / 4 of column p % 4, where sum_lanes leaves it in its
// place. Shuffles across lanes would hold up the products that follow. Where a product has sums in several lanes, each
// of these lanes has a set of columns of its own.
//
// [NUM_SETS, num_steps, PRODUCT_COLUMNS] vectors, in memory that the caller owns.
struct Columns {
  float* memory;
  int64_t num_steps;

  PAGEDATTN_INLINE float* at(int64_t set, int64_t step, int64_t column) const {
    return memory + ((set * num_steps + step) * PRODUCT_COLUMNS + column) * VEC_SIZE;
  }
};

// Lane i of vector j becomes lane j of vector i.
PAGEDATTN_INLINE void transpose_lanes(Vec (&v)[NUM_LANES]) {
  if constexpr (NUM_LANES == 2) {
    const Vec first = shuffle(v[0], v[1], [](int i) { return i < VEC_SIZE / 2 ? i : i + VEC_SIZE / 2; });
    v[1] = shuffle(v[0], v[1], [](int i) { return i < VEC_SIZE / 2 ? i + VEC_SIZE / 2 : i + VEC_SIZE; });
    v[0] = first;
  } else if constexpr (NUM_LANES == 4) {
    // Lanes 0 and 2, or 1 and 3, of two vectors.
    const auto even = [](Vec a, Vec b) { return shuffle(a, b, [](int i) { return i / 4 * 8 + i % 4; }); };
    const auto odd = [](Vec a, Vec b) { return shuffle(a, b, [](int i) { return i / 4 * 8 + 4 + i % 4; }); };
    const Vec evens[] = {even(v[0], v[1]), even(v[2], v[3])};
    const Vec odds[] = {odd(v[0], v[1]), odd(v[2], v[3])};
    v[0] = even(evens[0], evens[1]);
    v[1] = even(odds[0], odds[1]);
    v[2] = odd(evens[0], evens[1]);
    v[3] = odd(odds[0], odds[1]);
  }
}

// Converts the keys of VEC_SIZE tokens, from `token` of the tile on. This function and the next are not inlined: GCC 12
// would keep the constants of the conversion in registers that the sums need.
template <typename Dot, typename T, CacheLayout LAYOUT>
__attribute__((noinline)) void convert_keys(const HeadTile<T, LAYOUT>& h, int token, const Columns& columns) {
  constexpr int GROUPS = PRODUCT_COLUMNS / NUM_LANES;  // of vectors that are transposed together
  Chunks<T, LAYOUT> keys[PRODUCT_COLUMNS];
  for (int i = 0; i < PRODUCT_COLUMNS; ++i) keys[i] = h.key_chunks(token + i * NUM_LANES);
  int64_t offset = 0;
  for (int64_t step = 0; step < columns.num_steps; step += Dot::PARTS / Dot::SUMS) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < GROUPS; ++i) {
      typename Dot::Keys loaded[NUM_LANES];
      PAGEDATTN_UNROLL
      for (int j = 0; j < NUM_LANES; ++j) loaded[j] = Dot::load_keys(keys[i + j * GROUPS] + offset);
      PAGEDATTN_UNROLL
      for (int part = 0; part < Dot::PARTS; ++part) {
        Vec lanes[NUM_LANES];
        PAGEDATTN_UNROLL
        for (int j = 0; j < NUM_LANES; ++j) lanes[j] = loaded[j].part[part];
        transpose_lanes(lanes);
        PAGEDATTN_UNROLL
        for (int lane = 0; lane < NUM_LANES; ++lane) {
          // With two sums, a token has two adjacent lanes, and a part has half of the tokens.
          const int token_of_group = part % Dot::SUMS * (NUM_LANES / Dot::SUMS) + lane / Dot::SUMS;
          store(columns.at(lane % Dot::SUMS, step + part / Dot::SUMS, i * NUM_LANES + token_of_group), lanes[lane]);
        }
      }
    }
    offset += h.chunk_stride();
  }
}

// Converts VEC_SIZE elements of the values, from `d` on, in all strips that have visible tokens.
template <typename T, typename Strip, int ELEMENTS>
__attribute__((noinline)) void convert_values(const TileStrips<T, Strip, ELEMENTS>& strips, int64_t d,
                                              const Columns& columns) {
  constexpr int SETS = NUM_LANES / ELEMENTS;               // lanes of an element
  constexpr int GROUPS = VEC_SIZE / ELEMENTS / NUM_LANES;  // of strips that are transposed together
  for (int s = strips.begin; s < strips.end; ++s) {
    const auto& column = strips.of[s];
    PAGEDATTN_UNROLL
    for (int i = 0; i < GROUPS; ++i) {
      Strip below[NUM_LANES];
      PAGEDATTN_UNROLL
      for (int j = 0; j < NUM_LANES; ++j) {
        below[j] = Strip::template load_from<ELEMENTS>(column.at(d / ELEMENTS + i + j * GROUPS));
      }
      PAGEDATTN_UNROLL
      for (int part = 0; part < Strip::PARTS; ++part) {
        Vec lanes[NUM_LANES];
        PAGEDATTN_UNROLL
        for (int j = 0; j < NUM_LANES; ++j) lanes[j] = below[j].part[part];
        transpose_lanes(lanes);
        PAGEDATTN_UNROLL
        for (int lane = 0; lane < NUM_LANES; ++lane) {
          store(columns.at(lane % SETS, (s - strips.begin) * Strip::PARTS + part, i * ELEMENTS + lane / SETS),
                lanes[lane]);
        }
      }
    }
  }
}

// Multiplies NUM_ROWS rows with the first num_steps steps of the columns. A row has four floats for every step and set,
// COPIES times. Calls finish(r, products).
//
// Products: the Dot or the Strip that multiplies a column with a row.
template <typename Products, int NUM_ROWS, int NUM_SETS, int COPIES, typename Finish>
PAGEDATTN_INLINE void multiply_rows(const float* rows, int64_t row_stride, const Columns& columns, int64_t num_steps,
                                    const Finish& finish) {
  using V = SumVec<Products>;
  V products[NUM_ROWS];
  [[maybe_unused]] V pairs[NUM_ROWS];  // where there are four sets: the sum of the first two
  PAGEDATTN_UNROLL
  for (int set = 0; set < NUM_SETS; ++set) {
    Vec sums[NUM_ROWS][PRODUCT_COLUMNS] = {};
    const float* of_rows = rows + set * LANE_FLOATS;
    const float* of_columns = columns.at(set, 0, 0);
    for (int64_t step = 0; step < num_steps; ++step) {
      Vec of_row[NUM_ROWS];
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) of_row[r] = in_register(load_repeated<LANE_FLOATS>(of_rows + r * row_stride));
      PAGEDATTN_UNROLL
      for (int i = 0; i < PRODUCT_COLUMNS; ++i) {
        const Vec column = in_register(load(of_columns + i * VEC_SIZE));
        PAGEDATTN_UNROLL
        for (int r = 0; r < NUM_ROWS; ++r) {
          sums[r][i] = Products::multiply_add(sums[r][i], column, of_row[r]);
          // GCC 12 would keep half of the sums in memory.
          if constexpr (INTEGER_SUMS<Products>) sums[r][i] = in_register(sums[r][i]);
        }
      }
      of_rows += NUM_SETS * LANE_FLOATS * COPIES;
      of_columns += PRODUCT_COLUMNS * VEC_SIZE;
    }
    PAGEDATTN_UNROLL
    for (int r = 0; r < NUM_ROWS; ++r) {
      const V sum = sum_lanes((V)sums[r][0], (V)sums[r][1], (V)sums[r][2], (V)sums[r][3]);
      if (set == 2) pairs[r] = products[r];
      products[r] = set % 2 == 0 ? sum : products[r] + sum;
      if (set == 3) products[r] = pairs[r] + products[r];
    }
  }
  PAGEDATTN_UNROLL
  for (int r = 0; r < NUM_ROWS; ++r) finish(r, products[r]);
}

// Takes all rows, a few at a time. Rows up to `last` need at most steps_of(last) steps. Calls
// multiply_some.operator()<NUM_ROWS>(row, num_steps) for rows that need any, and after() after every few rows.
template <typename StepsOf, typename MultiplySome, typename After>
PAGEDATTN_INLINE void for_rows(int64_t num_rows, const StepsOf& steps_of, const MultiplySome& multiply_some,
                               const After& after) {
  int64_t row = 0;
  const auto multiply_next = [&]<int NUM_ROWS>() PAGEDATTN_ALWAYS_INLINE {
    const int64_t num_steps = steps_of(row + NUM_ROWS - 1);
    if (num_steps > 0) multiply_some.template operator()<NUM_ROWS>(row, num_steps);
    row += NUM_ROWS;
    after();
  };
  // The fewer rows at once, the slower each row. 4 rows are better taken as 2 and 2 than as 3 and 1.
  while (num_rows - row >= PRODUCT_ROWS && num_rows - row != 4) multiply_next.template operator()<PRODUCT_ROWS>();
  if constexpr (PRODUCT_ROWS > 4) {
    if (num_rows - row >= 4) multiply_next.template operator()<4>();
  }
  while (num_rows - row >= 2) multiply_next.template operator()<2>();
  if (num_rows - row >= 1) multiply_next.template operator()<1>();
}

// Multiplies all rows with the columns. Calls finish(row, products) for every row that needs any step.
template <typename Products, int NUM_SETS, int COPIES, typename StepsOf, typename Finish, typename After>
PAGEDATTN_INLINE void multiply(const float* rows, int64_t row_stride, int64_t num_rows, const Columns& columns,
                               const StepsOf& steps_of, const Finish& finish, const After& after) {
  const auto multiply_some = [&]<int NUM_ROWS>(int64_t row, int64_t num_steps) PAGEDATTN_ALWAYS_INLINE {
    multiply_rows<Products, NUM_ROWS, NUM_SETS, COPIES>(rows + row * row_stride, row_stride, columns, num_steps,
                                                        [&](int r, auto products)
                                                            PAGEDATTN_ALWAYS_INLINE { finish(row + r, products); });
  };
  for_rows(num_rows, steps_of, multiply_some, after);
}

// Up to MOST_ROWS rows, and what they see of a tile.
struct ManyRows {
  const Row* rows;
  int64_t num_rows;
  int64_t query_stride;  // floats between the rows' queries
  int ends[MOST_ROWS];   // the end of the tile's tokens that a row, or a row before it, sees
  bool all_see_all;

  template <typename T, CacheLayout LAYOUT>
  ManyRows(const PagedAttentionParams& p, const Tile<T, LAYOUT>& tile, const Row* rows, int64_t num_rows,
           int64_t query_stride)
      : rows(rows), num_rows(num_rows), query_stride(query_stride), all_see_all(tile.all_visible(0, TILE_TOKENS)) {
    int64_t end = 0;
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t row_end = p.end_of_window(rows[r].position) - tile.token;
      all_see_all &= row_end >= TILE_TOKENS;
      end = row_end > end ? row_end : end;
      ends[r] = static_cast<int>(end < tile.end ? end : tile.end);
    }
  }
};

template <typename Multiply, typename T, CacheLayout LAYOUT, typename After>
__attribute__((noinline)) void compute_many_logits(const HeadTile<T, LAYOUT>& h, const ManyRows& many,
                                                   TileLogits* logits, const After& after) {
  using Dot = typename Multiply::Dot;
  alignas(64) float memory[VEC_SIZE * MAX_HEAD_SIZE];
  const Columns keys{memory, h.params.head_size / Dot::RUN};
  for (int token = first_vec_token(h.tile); token < h.tile.end; token += VEC_SIZE) {
    convert_keys<Dot>(h, token, keys);
    multiply<Dot, Dot::SUMS, Dot::COPIES>(
        many.rows[0].query, many.query_stride, many.num_rows, keys,
        [&](int64_t last) PAGEDATTN_ALWAYS_INLINE { return many.ends[last] > token ? keys.num_steps : 0; },
        [&](int64_t r, auto products) PAGEDATTN_ALWAYS_INLINE {
          store(logits[r].at + token, logits_from<Dot>(h, many.rows[r], token, products));
        },
        after);
  }
}

// As arrange_weights, but with each weight once, not once for each element of a strip.
template <typename Strip, int ELEMENTS, typename T>
float arrange_weights_once(const HeadTile<T>& h, TileLogits& weights) {
  constexpr int RUN = VEC_SIZE / ELEMENTS;
  constexpr int NUM_RUNS = TILE_TOKENS * ELEMENTS / Strip::SIZE * Strip::PARTS;
  alignas(64) float arranged[NUM_RUNS * VEC_SIZE];
  const float scale = arrange_weights<Strip, ELEMENTS>(h, weights.at, arranged);
  for (int i = 0; i < NUM_RUNS; ++i)
    __builtin_memcpy(weights.at + i * RUN, arranged + i * VEC_SIZE, RUN * sizeof(float));
  return scale;
}

template <typename Multiply, typename T, int ELEMENTS, typename After>
__attribute__((noinline)) void accumulate_many_values(const HeadTile<T>& h, const ManyRows& many, TileLogits* weights,
                                                      const After& after) {
  using Strip = typename Multiply::Strip;
  [[maybe_unused]] float weight_scales[MOST_ROWS];
  if constexpr (Strip::SIZE > VEC_SIZE) {
    for (int64_t r = 0; r < many.num_rows; ++r) weight_scales[r] = arrange_weights_once<Strip, ELEMENTS>(h, weights[r]);
  }
  alignas(64) float memory[VEC_SIZE * TILE_TOKENS];
  constexpr int TOKENS = Strip::SIZE / ELEMENTS;
  constexpr int WEIGHT_FLOATS = Strip::PARTS * VEC_SIZE / ELEMENTS;  // of a strip
  TileStrips<T, Strip, ELEMENTS> strips(h);
  if (!INTEGER_SUMS<Strip> && strips.has_hidden_tokens) strips.hide_tokens(h);
  const Columns values{memory, (strips.end - strips.begin) * Strip::PARTS};
  for (int64_t d = 0; d < h.params.head_size; d += VEC_SIZE) {
    convert_values(strips, d, values);
    multiply<Strip, NUM_LANES / ELEMENTS, 1>(
        weights[0].at + strips.begin * WEIGHT_FLOATS, TILE_TOKENS, many.num_rows, values,
        [&](int64_t last)
            PAGEDATTN_ALWAYS_INLINE { return ((many.ends[last] + TOKENS - 1) / TOKENS - strips.begin) * Strip::PARTS; },
        [&](int64_t r, auto products) PAGEDATTN_ALWAYS_INLINE {
          float* values_of_row = many.rows[r].values + d;
          if constexpr (INTEGER_SUMS<Strip>) {
            store(values_of_row, load(values_of_row) + __builtin_convertvector(products, Vec) * weight_scales[r]);
          } else {
            store(values_of_row, load(values_of_row) + products);
          }
        },
        after);
  }
}

template <typename Values, typename T, typename After>
__attribute__((noinline)) void accumulate_many_nhd_values(const HeadTile<T, CacheLayout::NHD>& h, const ManyRows& many,
                                                          const TileLogits* weights, const After& after) {
  const auto step_of = [](int64_t token) PAGEDATTN_ALWAYS_INLINE { return token / Values::TOKENS; };
  alignas(64) float values[TILE_TOKENS * NHD_COLUMNS * VEC_SIZE];
  for (int64_t d = 0; d < h.params.head_size; d += NHD_COLUMNS * VEC_SIZE) {
    const int64_t num_left = (h.params.head_size - d) / VEC_SIZE;
    const int num_columns = static_cast<int>(num_left < NHD_COLUMNS ? num_left : NHD_COLUMNS);
    convert_nhd_values<Values>(h, d, num_columns, values);
    const auto multiply_some = [&]<int NUM_ROWS>(int64_t row, int64_t num_steps) PAGEDATTN_ALWAYS_INLINE {
      Vec sums[NUM_ROWS][NHD_COLUMNS];
      multiply_nhd_values<Values>(weights + row, step_of(h.tile.begin), num_steps, values, sums);
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        float* const values_of_row = many.rows[row + r].values + d;
        Values::put_converted_in_order(sums[r]);
        PAGEDATTN_UNROLL
        for (int i = 0; i < NHD_COLUMNS; ++i) {
          if (i >= num_columns) break;
          store(values_of_row + i * VEC_SIZE, load(values_of_row + i * VEC_SIZE) + sums[r][i]);
        }
      }
    };
    const auto steps_of = [&](int64_t last) PAGEDATTN_ALWAYS_INLINE {
      return step_of(many.ends[last] + Values::TOKENS - 1) - step_of(h.tile.begin);
    };
    for_rows(many.num_rows, steps_of, multiply_some, after);
  }
}

// Attends to a tile with up to MOST_ROWS rows, whose queries lie `query_stride` floats apart. Calls after() after every
// few rows of a product.
template <typename Multiply, typename T, CacheLayout LAYOUT, typename After>
void attend_many_rows(const HeadTile<T, LAYOUT>& h, const Row* rows, int64_t num_rows, int64_t query_stride,
                      const After& after) {
  TileLogits logits[MOST_ROWS];
  const ManyRows many(h.params, h.tile, rows, num_rows, query_stride);
  if (!many.all_see_all) __builtin_memset(logits, 0, num_rows * sizeof logits[0]);
  compute_many_logits<Multiply>(h, many, logits, after);
  int64_t first = 0;
  for (; first + MAX_ROWS <= num_rows; first += MAX_ROWS) {
    update_softmax<MAX_ROWS>(h.params, h.tile, rows + first, logits + first);
  }
  for (; first < num_rows; ++first) update_softmax<1>(h.params, h.tile, rows + first, logits + first);
  if constexpr (LAYOUT == CacheLayout::NHD) {
    using Values = typename Multiply::NhdValues;
    for (int64_t r = 0; r < num_rows; ++r) Values::round_weights(logits[r]);
    accumulate_many_nhd_values<Values>(h, many, logits, after);
  } else {
    using Strip = typename Multiply::Strip;
    dispatch_strip_elements<Strip>(h.params.block_size, [&]<int ELEMENTS>() {
      if constexpr (ELEMENTS <= NUM_LANES) accumulate_many_values<Multiply, T, ELEMENTS>(h, many, logits, after);
    });
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
