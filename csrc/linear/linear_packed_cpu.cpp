// Few rows read each weight once and are bound by that; many are bound by multiply-adds. So a tile of sums stays in
// registers along in_features: as many rows as there are registers for, by a panel of output features, or by several
// panels where rows are few, so that the additions to one sum hide behind those to others. Several tiles go together,
// block by block along in_features: each finds the block of weights in the nearest cache.
//
// The products of a block are one chain of fused multiply-adds, and the blocks are added in their order, whatever the
// tile: the bits of a row do not depend on the rows beside it.
#include "cpu_rows.h"
#include "cpu_vec.h"
#include "dispatch.h"
#include "linear/linear_packed.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int VECS_PER_PANEL = LINEAR_PANEL / VEC_SIZE;
constexpr int NUM_SUMS = VEC_BYTES == 16 ? 8 : 12;  // vectors: what leaves registers for operands
constexpr int MAX_TILE_ROWS = NUM_SUMS / VECS_PER_PANEL;
// Along in_features: up to 16 KiB of weights, half of a first-level cache.
constexpr int64_t BLOCK_STEPS = 256;
// In flight for a single tile, of all panels at once; more would push each other out of the first-level cache.
constexpr int64_t PREFETCH_BYTES = 1024;

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Tiles of rows, as equal as can be.
struct Tiles {
  int64_t begin_row;
  int64_t num_rows;
  int64_t num_tiles;

  Tiles(int64_t begin, int64_t end)
      : begin_row(begin), num_rows(end - begin), num_tiles((num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS) {}
  int64_t begin_of(int64_t tile) const { return tile * num_rows / num_tiles; }
  int64_t rows_of(int64_t tile) const { return begin_of(tile + 1) - begin_of(tile); }
};

// Panels whose sums fit beside each other, up to 4: each is a stream of memory.
constexpr int panels_at_once(int tile_rows) { return static_cast<int>(smaller(MAX_TILE_ROWS / tile_rows, 4)); }

// sums [ROWS][PANELS * LINEAR_PANEL] += rows [num_steps][ROWS] times weights [num_steps][LINEAR_PANEL] of each
// panel. Calls prefetch(weight) at each step with the first panel's weights: the hardware fetches ahead within a page
// of 4 KiB only.
template <int ROWS, int PANELS, typename W, typename Prefetch>
void add_products(const float* rows, const W* weights, int64_t panel_stride, int64_t num_steps,
                  const Prefetch& prefetch, float* sums) {
  constexpr int VECS = PANELS * VECS_PER_PANEL;
  Vec sum[ROWS][VECS];
  PAGEDATTN_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) sum[r][v] = Vec{};
  }
  for (int64_t step = 0; step < num_steps; ++step) {
    const W* weight = weights + step * LINEAR_PANEL;
    prefetch(weight);
    const auto weight_at = [&](int v) PAGEDATTN_ALWAYS_INLINE {
      return load(weight + v / VECS_PER_PANEL * panel_stride + v % VECS_PER_PANEL * VEC_SIZE);
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

// Calls body.operator()<ROWS>() for the rows of a tile.
template <int ROWS = MAX_TILE_ROWS, typename Body>
PAGEDATTN_INLINE void dispatch_tile_rows(int64_t tile_rows, Body&& body) {
  if constexpr (ROWS > 1) {
    if (tile_rows < ROWS) return dispatch_tile_rows<ROWS - 1>(tile_rows, body);
  }
  body.template operator()<ROWS>();
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

template <int ROWS, typename W>
void one_tile(const LinearPackedParams& p, int64_t row, const float* rows, int64_t begin_panel, int64_t end_panel) {
  const int64_t panel_size = p.in_features * LINEAR_PANEL;
  const auto panels_from = [&]<int PANELS>(int64_t panel) {
    alignas(64) float sums[ROWS * PANELS * LINEAR_PANEL] = {};
    const W* weights = static_cast<const W*>(p.packed_weight) + panel * panel_size;
    const auto prefetch = [&](const W* weight) PAGEDATTN_ALWAYS_INLINE {
      constexpr int64_t DISTANCE = PREFETCH_BYTES / (PANELS * int64_t{sizeof(W)});
      PAGEDATTN_UNROLL
      for (int i = 0; i < PANELS; ++i) prefetch_once(weight + i * panel_size + DISTANCE);
    };
    for (int64_t step = 0; step < p.in_features; step += BLOCK_STEPS) {
      add_products<ROWS, PANELS>(rows + step * ROWS, weights + step * LINEAR_PANEL, panel_size,
                                 smaller(p.in_features - step, BLOCK_STEPS), prefetch, sums);
    }
    dispatch_dtype(
        p.dtype, [&]<typename T>() { write_out<T>(p, row, ROWS, panel * LINEAR_PANEL, PANELS * LINEAR_PANEL, sums); });
  };
  constexpr int PANELS = panels_at_once(ROWS);
  int64_t panel = begin_panel;
  for (; panel + PANELS <= end_panel; panel += PANELS) panels_from.template operator()<PANELS>(panel);
  for (; panel < end_panel; ++panel) panels_from.template operator()<1>(panel);
}

template <typename W>
void several_tiles(const LinearPackedParams& p, const Tiles& tiles, const float* rows, int64_t panel) {
  alignas(64) float sums[LINEAR_ROWS_AT_ONCE * LINEAR_PANEL];
  __builtin_memset(sums, 0, tiles.num_rows * LINEAR_PANEL * sizeof(float));
  const W* weights = static_cast<const W*>(p.packed_weight) + panel * p.in_features * LINEAR_PANEL;
  for (int64_t step = 0; step < p.in_features; step += BLOCK_STEPS) {
    const int64_t num_steps = smaller(p.in_features - step, BLOCK_STEPS);
    for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
      const int64_t first = tiles.begin_of(tile);
      const int64_t distance = tile == 0 ? BLOCK_STEPS * LINEAR_PANEL : 0;
      const auto prefetch_next_block = [&](const W* weight)
                                           PAGEDATTN_ALWAYS_INLINE { prefetch_line(weight + distance); };
      dispatch_tile_rows(tiles.rows_of(tile), [&]<int ROWS>() {
        add_products<ROWS, 1>(rows + first * p.in_features + step * ROWS, weights + step * LINEAR_PANEL, 0, num_steps,
                              prefetch_next_block, sums + first * LINEAR_PANEL);
      });
    }
  }
  dispatch_dtype(p.dtype, [&]<typename T>() {
    write_out<T>(p, tiles.begin_row, tiles.num_rows, panel * LINEAR_PANEL, LINEAR_PANEL, sums);
  });
}

}  // namespace

void interleave_rows(const LinearPackedParams& params, int64_t begin_row, int64_t end_row, int64_t begin, int64_t end,
                     float* interleaved) {
  const Tiles tiles(begin_row, end_row);
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
      const int64_t num_rows = tiles.rows_of(tile);
      for (int64_t r = 0; r < num_rows; ++r) {
        const int64_t row = tiles.begin_of(tile) + r;
        const T* source = static_cast<const T*>(params.input) + (begin_row + row) * params.input_stride;
        float* target = interleaved + tiles.begin_of(tile) * params.in_features + r;
        for (int64_t i = begin; i < end; i += VEC_SIZE) {
          const int64_t count = smaller(end - i, VEC_SIZE);
          const Vec x = count == VEC_SIZE ? load(source + i) : load_first(source + i, count);
          for (int64_t j = 0; j < count; ++j) target[(i + j) * num_rows] = x[j];
        }
      }
    }
  });
}

void linear_packed(const LinearPackedParams& params, int64_t begin_row, int64_t end_row, const float* interleaved,
                   int64_t begin_panel, int64_t end_panel) {
  const Tiles tiles(begin_row, end_row);
  dispatch_dtype(params.weight_dtype, [&]<typename W>() {
    if (tiles.num_tiles > 1) {
      for (int64_t panel = begin_panel; panel < end_panel; ++panel) several_tiles<W>(params, tiles, interleaved, panel);
      return;
    }
    dispatch_tile_rows(tiles.num_rows,
                       [&]<int ROWS>() { one_tile<ROWS, W>(params, begin_row, interleaved, begin_panel, end_panel); });
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
