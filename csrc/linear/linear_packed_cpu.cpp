// Few rows read each weight once and are bound by that; many are bound by multiply-adds. So a tile of sums stays in
// registers along in_features: as many rows as there are registers for, by one panel of output features, by several
// where rows are few, so that the additions to one sum hide behind those to others, and by 4 where a panel is one
// vector wide. Several tiles go together, block by block along in_features: each finds the block of weights in the
// nearest cache.
//
// The products of a block are one chain of fused multiply-adds, and the blocks are added in their order, whatever the
// tile: the bits of a row do not depend on the rows beside it.
#include "cpu_rows.h"
#include "cpu_vec.h"
#include "dispatch.h"
#include "linear/linear_packed.h"
#include "linear/panels.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Vectors: what leaves registers for operands.
constexpr int NUM_SUMS = VEC_BYTES == 16 ? 8 : VEC_BYTES == 32 ? 12 : 24;
constexpr int MAX_TILE_ROWS = NUM_SUMS / (TILE_PANELS * PANEL_VECS);
// A single tile is bound by memory: it may have more rows, and read fewer panels side by side.
constexpr int MAX_SINGLE_TILE_ROWS = TILE_PANELS == 1 ? MAX_TILE_ROWS : 2 * MAX_TILE_ROWS;
// Along in_features: 16 KiB of weights as fp32, half of a first-level cache.
constexpr int64_t BLOCK_STEPS = 256 / TILE_PANELS;
// In flight for a single tile, of all panels at once. Where lines are fetched into the first-level cache alone, more
// would push each other out of it.
constexpr int64_t PREFETCH_BYTES = VEC_BYTES == 64 ? 4096 : 1024;

// Tiles of rows, as equal as can be.
struct Tiles {
  int64_t begin_row;
  int64_t num_rows;
  int64_t num_tiles;

  Tiles(int64_t begin, int64_t end) : begin_row(begin), num_rows(end - begin) {
    num_tiles = num_rows <= MAX_SINGLE_TILE_ROWS ? 1 : (num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
  }
  int64_t begin_of(int64_t tile) const { return tile * num_rows / num_tiles; }
  int64_t rows_of(int64_t tile) const { return begin_of(tile + 1) - begin_of(tile); }
};

// Panels that a single tile meets at once, up to 4: each is a stream of memory.
constexpr int panels_at_once(int tile_rows) {
  return tile_rows > MAX_TILE_ROWS ? 2 : static_cast<int>(smaller(NUM_SUMS / (PANEL_VECS * tile_rows), 4));
}

// sums [ROWS][PANELS * LINEAR_PANEL] += rows [num_steps][ROWS] times weights [num_steps][LINEAR_PANEL] of each
// panel. Calls prefetch(step) at each step: the hardware fetches ahead within a page of 4 KiB only. Not inlined, or GCC
// 12 keeps the sums in memory.
template <int ROWS, int PANELS, typename W, typename Prefetch>
__attribute__((noinline)) void add_products(const float* rows, const W* weights, int64_t panel_stride,
                                            int64_t num_steps, const Prefetch& prefetch, float* sums) {
  constexpr int VECS = PANELS * PANEL_VECS;
  Vec sum[ROWS][VECS];
  PAGEDATTN_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) sum[r][v] = Vec{};
  }
  for (int64_t step = 0; step < num_steps; ++step) {
    const W* weight = weights + step * LINEAR_PANEL;
    prefetch(step);
    const auto weight_at = [&](int v) PAGEDATTN_ALWAYS_INLINE {
      return load(weight + v / PANEL_VECS * panel_stride + v % PANEL_VECS * VEC_SIZE);
    };
    if constexpr (ROWS < VECS) {
      Vec x[ROWS];
      PAGEDATTN_UNROLL
      for (int r = 0; r < ROWS; ++r) x[r] = load_repeated<1>(rows + step * ROWS + r);
      PAGEDATTN_UNROLL
      for (int v = 0; v < VECS; ++v) {
        const Vec w = in_register(weight_at(v));
        PAGEDATTN_UNROLL
        for (int r = 0; r < ROWS; ++r) sum[r][v] = fma(x[r], w, sum[r][v]);
      }
    } else {
      Vec w[VECS];
      PAGEDATTN_UNROLL
      for (int v = 0; v < VECS; ++v) w[v] = weight_at(v);
      PAGEDATTN_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const Vec x = load_repeated<1>(rows + step * ROWS + r);
        PAGEDATTN_UNROLL
        for (int v = 0; v < VECS; ++v) sum[r][v] = fma(x, w[v], sum[r][v]);
      }
    }
  }
  PAGEDATTN_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) {
      float* total = sums + (r * VECS + v) * VEC_SIZE;
      store(total, load(total) + sum[r][v]);
    }
  }
}

// Adds the bias to sums [num_rows][num_features] and rounds them: the features of `out` from `feature` on.
template <typename T>
void write_out(const LinearPackedParams& p, int64_t row, int64_t num_rows, int64_t feature, int64_t num_features,
               const float* sums) {
  const int64_t count = smaller(p.out_features - feature, num_features);
  for (int64_t r = 0; r < num_rows; ++r) {
    T* out = static_cast<T*>(p.out) + (row + r) * p.out_features + feature;
    for_each_vector(count, [&](int64_t i, auto load_some, auto store_some) {
      Vec value = load(sums + r * num_features + i);
      if (p.bias != nullptr) value = value + load_some(p.bias + feature + i);
      store_some(out + i, value);
    });
  }
}

template <int ROWS, int PANELS, typename W>
void one_tile(const LinearPackedParams& p, int64_t row, const float* rows, int64_t panel) {
  alignas(64) float sums[ROWS * PANELS * LINEAR_PANEL] = {};
  const int64_t panel_size = p.in_features * LINEAR_PANEL;
  const W* weights = static_cast<const W*>(p.packed_weight) + panel * panel_size;
  for (int64_t step = 0; step < p.in_features; step += BLOCK_STEPS) {
    const W* block = weights + step * LINEAR_PANEL;
    const auto prefetch = [&](int64_t i) PAGEDATTN_ALWAYS_INLINE {
      constexpr int64_t DISTANCE = PREFETCH_BYTES / (PANELS * int64_t{sizeof(W)});
      PAGEDATTN_UNROLL
      for (int j = 0; j < PANELS; ++j) prefetch_once(block + j * panel_size + i * LINEAR_PANEL + DISTANCE);
    };
    add_products<ROWS, PANELS>(rows + step * ROWS, block, panel_size, smaller(p.in_features - step, BLOCK_STEPS),
                               prefetch, sums);
  }
  dispatch_dtype(p.dtype,
                 [&]<typename T>() { write_out<T>(p, row, ROWS, panel * LINEAR_PANEL, PANELS * LINEAR_PANEL, sums); });
}

template <int PANELS, typename W>
void several_tiles(const LinearPackedParams& p, const Tiles& tiles, const float* rows, int64_t panel) {
  constexpr int FEATURES = PANELS * LINEAR_PANEL;
  constexpr int64_t BLOCK_SIZE = BLOCK_STEPS * LINEAR_PANEL;
  alignas(64) float sums[LINEAR_ROWS_AT_ONCE * FEATURES];
  __builtin_memset(sums, 0, tiles.num_rows * FEATURES * sizeof(float));
  const int64_t panel_size = p.in_features * LINEAR_PANEL;
  const W* panels = static_cast<const W*>(p.packed_weight) + panel * panel_size;
  for (int64_t step = 0; step < p.in_features; step += BLOCK_STEPS) {
    const W* block = panels + step * LINEAR_PANEL;
    const bool is_last = step + BLOCK_STEPS >= p.in_features;
    const W* next_block = is_last ? panels + PANELS * panel_size : block + BLOCK_SIZE;
    const int64_t num_steps = smaller(p.in_features - step, BLOCK_STEPS);
    const auto add_tiles = [&](const auto* weights, int64_t panel_stride) {
      for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
        const int64_t first = tiles.begin_of(tile);
        fetch_next_block<PANELS, LINEAR_PANEL>(tile, next_block, panel_size, [&](const auto& prefetch) {
          dispatch_tile_rows<MAX_TILE_ROWS>(tiles.rows_of(tile), [&]<int ROWS>() {
            add_products<ROWS, PANELS>(rows + step * tiles.num_rows + first * num_steps, weights, panel_stride,
                                       num_steps, prefetch, sums + first * FEATURES);
          });
        });
      }
    };
    if constexpr (TILE_PANELS == 1 || std::is_same_v<W, float>) {
      add_tiles(block, panel_size);
    } else {
      // Once for all tiles: beside so few rows each would spend a sixth of its time on it.
      alignas(64) float widened[PANELS * BLOCK_SIZE];
      for (int i = 0; i < PANELS; ++i) {
        for (int64_t j = 0; j < num_steps * LINEAR_PANEL; j += VEC_SIZE) {
          store(widened + i * BLOCK_SIZE + j, load(block + i * panel_size + j));
        }
      }
      add_tiles(widened, BLOCK_SIZE);
    }
  }
  dispatch_dtype(p.dtype, [&]<typename T>() {
    write_out<T>(p, tiles.begin_row, tiles.num_rows, panel * LINEAR_PANEL, FEATURES, sums);
  });
}

}  // namespace

void interleave_rows(const LinearPackedParams& params, int64_t begin_row, int64_t end_row, int64_t begin, int64_t end,
                     float* interleaved) {
  const Tiles tiles(begin_row, end_row);
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t first = begin; first < end;) {
      const int64_t block = first - first % BLOCK_STEPS;
      const int64_t end_of_block = smaller(block + BLOCK_STEPS, end);
      const int64_t num_steps = smaller(params.in_features - block, BLOCK_STEPS);
      for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
        const int64_t num_rows = tiles.rows_of(tile);
        float* tile_rows = interleaved + block * tiles.num_rows + tiles.begin_of(tile) * num_steps;
        for (int64_t r = 0; r < num_rows; ++r) {
          const int64_t row = begin_row + tiles.begin_of(tile) + r;
          const T* source = static_cast<const T*>(params.input) + row * params.input_stride;
          float* target = tile_rows + r;
          for (int64_t i = first; i < end_of_block; i += VEC_SIZE) {
            const int64_t count = smaller(end_of_block - i, VEC_SIZE);
            const Vec x = count == VEC_SIZE ? load(source + i) : load_first(source + i, count);
            for (int64_t j = 0; j < count; ++j) target[(i - block + j) * num_rows] = x[j];
          }
        }
      }
      first = end_of_block;
    }
  });
}

void linear_packed(const LinearPackedParams& params, int64_t begin_row, int64_t end_row, const float* interleaved,
                   int64_t begin_panel, int64_t end_panel) {
  const Tiles tiles(begin_row, end_row);
  dispatch_dtype(params.weight_dtype, [&]<typename W>() {
    dispatch_tiles<MAX_SINGLE_TILE_ROWS, panels_at_once>(
        tiles.num_rows, begin_panel, end_panel,
        [&]<int ROWS, int PANELS>(int64_t panel) { one_tile<ROWS, PANELS, W>(params, begin_row, interleaved, panel); },
        [&]<int PANELS>(int64_t panel) { several_tiles<PANELS, W>(params, tiles, interleaved, panel); });
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
