// Many query rows that share one KV head, over a whole tile of tokens; for paged_attention_cpu.cpp.
//
// attend_rows.h loads and converts keys and values anew for every few rows, and adds up lanes for each of them. Here
// the tile is converted and turned once: the lanes of a vector are tokens for the logits, elements for the values, and
// what is left is a product of matrices.
//
// What are lanes there are partial sums here, one after the other: each adds up the same products in the same order,
// and they are added to each other in the same pairs. So a result is the same to the last bit.
#pragma once

#include "attention/cpu/attend_rows.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// The columns of a product that are computed at once, for up to PANEL_ROWS rows: so many sums fit into 16 registers.
constexpr int PANEL = 2 * VEC_SIZE;
constexpr int PANEL_ROWS = 6;

// As many have their logits in memory at a time.
constexpr int64_t MOST_ROWS = 64;

// The partial sums of a logit.
template <typename Dot>
constexpr int LOGIT_SUMS = 4 * Dot::SUMS;

// Whether keys, values and query rows of this kind can be turned. With vectors of 16 the registers hold enough sums for
// attend_rows.h, and partial sums of dot product instructions cannot be taken apart.
template <typename Strip>
bool can_turn(const PagedAttentionParams& p) {
  return VEC_SIZE <= 8 && p.head_size % PANEL == 0 && p.block_size >= Strip::SIZE;
}

// Within every 128-bit lane: from [4 vectors][4] to [4][4 vectors].
PAGEDATTN_INLINE void transpose_lanes(Vec* v) {
  const auto lower = [](int i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * VEC_SIZE; };
  const auto upper = [](int i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * VEC_SIZE + 2; };
  const auto first_halves = [](int i) { return i / 4 * 4 + i % 2 + i % 4 / 2 * VEC_SIZE; };
  const auto last_halves = [](int i) { return i / 4 * 4 + i % 2 + i % 4 / 2 * VEC_SIZE + 2; };
  const Vec ab[] = {shuffle(v[0], v[1], lower), shuffle(v[0], v[1], upper)};
  const Vec cd[] = {shuffle(v[2], v[3], lower), shuffle(v[2], v[3], upper)};
  for (int i = 0; i < 2; ++i) {
    v[2 * i] = shuffle(ab[i], cd[i], first_halves);
    v[2 * i + 1] = shuffle(ab[i], cd[i], last_halves);
  }
}

PAGEDATTN_INLINE void transpose(Vec (&v)[VEC_SIZE]) {
  transpose_lanes(v);
  if constexpr (VEC_SIZE == 8) {
    transpose_lanes(v + 4);
    for (int i = 0; i < 4; ++i) {
      const Vec first = shuffle(v[i], v[i + 4], [](int t) { return t / 4 * VEC_SIZE + t % 4; });
      v[i + 4] = shuffle(v[i], v[i + 4], [](int t) { return t / 4 * VEC_SIZE + t % 4 + 4; });
      v[i] = first;
    }
  }
}

// The keys of a tile as panels of tokens: [TILE_TOKENS / PANEL, LOGIT_SUMS, head_size / LOGIT_SUMS, PANEL]. The tokens
// of a vector are in the order that in_token_order undoes.
template <typename T, typename Dot>
__attribute__((noinline)) void turn_keys(const HeadTile<T>& h, float* panels) {
  constexpr int SUMS = LOGIT_SUMS<Dot>;
  const int64_t num_chunks = h.params.head_size / ELEMENTS_PER_CHUNK<T>;
  const int64_t num_steps = h.params.head_size / SUMS;
  for (int token = 0; token < TILE_TOKENS; token += VEC_SIZE) {
    float* const panel = panels + token / PANEL * PANEL * h.params.head_size + token % PANEL;
    const T* keys = h.keys + h.tile.key_at(token);
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      typename Dot::Keys loaded[4];
      for (int i = 0; i < 4; ++i) loaded[i] = Dot::load_keys(keys + i * NUM_LANES * ELEMENTS_PER_CHUNK<T>);
      keys += h.params.block_size * ELEMENTS_PER_CHUNK<T>;
      // Each step has one element for every partial sum.
      constexpr int STEPS = Dot::PARTS / Dot::SUMS;
      for (int step = 0; step < STEPS; ++step) {
        Vec v[SUMS];
        for (int i = 0; i < SUMS; ++i) v[i] = loaded[i % 4].part[step * Dot::SUMS + i / 4];
        if constexpr (SUMS == VEC_SIZE) {
          transpose(v);
        } else {
          transpose_lanes(v);
        }
        for (int i = 0; i < SUMS; ++i) store(panel + (i * num_steps + chunk * STEPS + step) * PANEL, v[i]);
      }
    }
  }
}

// The values of a tile as panels of elements: [head_size / PANEL, VEC_SIZE, TILE_TOKENS / VEC_SIZE, PANEL].
template <typename T, typename Strip>
__attribute__((noinline)) void turn_values(const HeadTile<T>& h, float* panels) {
  constexpr int NUM_STEPS = TILE_TOKENS / VEC_SIZE;
  for (int strip = 0; strip < TILE_TOKENS / Strip::SIZE; ++strip) {
    const T* values = h.values + h.tile.value_at(strip * Strip::SIZE);
    for (int64_t d = 0; d < h.params.head_size; d += VEC_SIZE) {
      float* const panel = panels + d / PANEL * PANEL * TILE_TOKENS + d % PANEL;
      Strip strips[VEC_SIZE];
      for (int i = 0; i < VEC_SIZE; ++i) {
        strips[i] = Strip::template load_from<1>(values + (d + i) * h.params.block_size);
      }
      for (int part = 0; part < Strip::PARTS; ++part) {
        Vec v[VEC_SIZE];
        for (int i = 0; i < VEC_SIZE; ++i) v[i] = strips[i].part[part];
        transpose(v);
        for (int i = 0; i < VEC_SIZE; ++i) {
          store(panel + (i * NUM_STEPS + strip * Strip::PARTS + part) * PANEL, v[i]);
        }
      }
    }
  }
}

// Rows times a panel. A row has [num_steps, NUM_SUMS] factors, a panel [NUM_SUMS, num_steps, PANEL]. Partial sum i
// takes the i-th factor of every step.
template <int NUM_SUMS, int NUM_ROWS>
__attribute__((noinline)) void multiply_rows(const float* factors, int64_t row_stride, int64_t num_steps,
                                             const float* panel, float* products, int64_t product_stride) {
  constexpr int LEVELS = __builtin_ctz(NUM_SUMS);
  Vec pending[LEVELS][NUM_ROWS][2];  // sums of 1, 2, 4 partial sums, which wait for as many others
  PAGEDATTN_UNROLL
  for (int i = 0; i < NUM_SUMS; ++i) {
    Vec sums[NUM_ROWS][2] = {};
    const float* factor = factors + i;
    for (int64_t step = 0; step < num_steps; ++step) {
      const Vec columns[] = {load(panel), load(panel + VEC_SIZE)};
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        const Vec of_row = load_repeated<1>(factor + r * row_stride);
        sums[r][0] = fma(columns[0], of_row, sums[r][0]);
        sums[r][1] = fma(columns[1], of_row, sums[r][1]);
      }
      panel += PANEL;
      factor += NUM_SUMS;
    }
    int level = 0;
    PAGEDATTN_UNROLL
    for (; i >> level & 1; ++level) {
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        sums[r][0] = pending[level][r][0] + sums[r][0];
        sums[r][1] = pending[level][r][1] + sums[r][1];
      }
    }
    PAGEDATTN_UNROLL
    for (int r = 0; r < NUM_ROWS; ++r) {
      PAGEDATTN_UNROLL
      for (int c = 0; c < 2; ++c) {
        if (i < NUM_SUMS - 1) {
          pending[level][r][c] = sums[r][c];
        } else {
          store(products + r * product_stride + c * VEC_SIZE, sums[r][c]);
        }
      }
    }
  }
}

// Calls after() after every PANEL_ROWS rows or less.
template <int NUM_SUMS, typename Function>
void multiply(const float* factors, int64_t row_stride, int64_t num_rows, int64_t num_steps, const float* panel,
              float* products, int64_t product_stride, const Function& after) {
  const auto multiply_next = [&]<int NUM_ROWS>() {
    multiply_rows<NUM_SUMS, NUM_ROWS>(factors, row_stride, num_steps, panel, products, product_stride);
    factors += NUM_ROWS * row_stride;
    products += NUM_ROWS * product_stride;
    num_rows -= NUM_ROWS;
    after();
  };
  // The fewer rows, the slower each; 8 are better 4 and 4 than 6 and 2.
  while (num_rows >= PANEL_ROWS && num_rows != 8) multiply_next.template operator()<PANEL_ROWS>();
  while (num_rows >= 4) multiply_next.template operator()<4>();
  if (num_rows >= 2) multiply_next.template operator()<2>();
  if (num_rows >= 1) multiply_next.template operator()<1>();
}

// A tile that was turned, in memory that the caller owns.
struct TurnedTile {
  float* keys;
  float* values;

  TurnedTile(float* memory, int64_t head_size) : keys(memory), values(memory + TILE_TOKENS * head_size) {}
};

// Up to MOST_ROWS rows, whose queries lie `query_stride` floats apart, over a tile of which all tokens are visible.
// Calls after() now and then.
template <typename T, typename Arithmetic, typename Function>
void attend_many_rows(const HeadTile<T>& h, const TurnedTile& turned, const Row* rows, int64_t num_rows,
                      int64_t query_stride, const Function& after) {
  using Dot = typename Arithmetic::Dot;
  using Strip = typename Arithmetic::Strip;
  const int64_t head_size = h.params.head_size;
  TileLogits logits[MOST_ROWS];
  for (int token = 0; token < TILE_TOKENS; token += PANEL) {
    multiply<LOGIT_SUMS<Dot>>(rows[0].query, query_stride, num_rows, head_size / LOGIT_SUMS<Dot>,
                              turned.keys + token * head_size, logits[0].at + token, TILE_TOKENS, after);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int token = 0; token < TILE_TOKENS; token += VEC_SIZE) {
      const Vec by_lane = load(logits[r].at + token);
      store(logits[r].at + token, in_token_order(by_lane) * h.params.logit_scale);
    }
  }
  int64_t first = 0;
  for (; first + MAX_ROWS <= num_rows; first += MAX_ROWS) {
    update_softmax<T, MAX_ROWS>(h.params, h.tile, rows + first, logits + first);
  }
  for (; first < num_rows; ++first) update_softmax<T, 1>(h.params, h.tile, rows + first, logits + first);
  TileLogits arranged[Strip::PARTS == 1 ? 1 : MOST_ROWS];
  if constexpr (Strip::PARTS > 1) {
    for (int64_t r = 0; r < num_rows; ++r) Strip::template arrange_weights<1>(logits[r].at, arranged[r].at);
  }
  const float* weights = Strip::PARTS == 1 ? logits[0].at : arranged[0].at;
  alignas(64) float products[MOST_ROWS][PANEL];
  for (int64_t d = 0; d < head_size; d += PANEL) {
    multiply<VEC_SIZE>(weights, TILE_TOKENS, num_rows, TILE_TOKENS / VEC_SIZE, turned.values + d * TILE_TOKENS,
                       products[0], PANEL, after);
    for (int64_t r = 0; r < num_rows; ++r) {
      for (int i = 0; i < PANEL; i += VEC_SIZE) {
        store(rows[r].values + d + i, load(rows[r].values + d + i) + load(products[r] + i));
      }
    }
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
