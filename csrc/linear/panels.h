// What the kernels of the linear layers share: tiles of rows by panels.
//
// Many rows are bound by multiply-adds, and next to that by loads: with 4 vectors of weights for each element of a row,
// a tile of 6 rows takes 10 loads for 24 multiply-adds.
#pragma once

#include "cpu_vec.h"
#include "linear/linear.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int PANEL_VECS = LINEAR_PANEL / VEC_SIZE;
constexpr int TILE_PANELS = PANEL_VECS == 1 ? 4 : 1;  // where there are several tiles of rows

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body.operator()<PANELS>(panel) for so many panels at a time, and <1> for those that are left.
template <int PANELS, typename Body>
PAGEDATTN_INLINE void for_each_panels(int64_t begin, int64_t end, const Body& body) {
  int64_t panel = begin;
  for (; panel + PANELS <= end; panel += PANELS) body.template operator()<PANELS>(panel);
  if constexpr (PANELS > 1) {
    for (; panel < end; ++panel) body.template operator()<1>(panel);
  }
}

// Calls body.operator()<ROWS>() for the rows of a tile.
template <int ROWS, typename Body>
PAGEDATTN_INLINE void dispatch_tile_rows(int64_t tile_rows, const Body& body) {
  if constexpr (ROWS > 1) {
    if (tile_rows < ROWS) return dispatch_tile_rows<ROWS - 1>(tile_rows, body);
  }
  body.template operator()<ROWS>();
}

// Calls one_tile.operator()<ROWS, PANELS>(panel) for these panels where the rows are a single tile, which meets
// PANELS_AT_ONCE(ROWS) of them; else several_tiles.operator()<PANELS>(panel).
template <int MAX_SINGLE_TILE_ROWS, auto PANELS_AT_ONCE, typename OneTile, typename SeveralTiles>
PAGEDATTN_INLINE void dispatch_tiles(int64_t num_rows, int64_t begin, int64_t end, const OneTile& one_tile,
                                     const SeveralTiles& several_tiles) {
  if (num_rows > MAX_SINGLE_TILE_ROWS) return for_each_panels<TILE_PANELS>(begin, end, several_tiles);
  dispatch_tile_rows<MAX_SINGLE_TILE_ROWS>(num_rows, [&]<int ROWS>() {
    for_each_panels<PANELS_AT_ONCE(ROWS)>(
        begin, end, [&]<int PANELS>(int64_t panel) { one_tile.template operator()<ROWS, PANELS>(panel); });
  });
}

// Calls add(prefetch), with prefetch(step) for each step of a block, for a tile of several: each of the first ones
// fetches the next block of one panel, as all at once would wait for memory. A step has STEP_SIZE weights.
template <int PANELS, int STEP_SIZE, typename W, typename Add>
PAGEDATTN_INLINE void fetch_next_block(int64_t tile, const W* next_block, int64_t panel_size, const Add& add) {
  if (tile < PANELS) {
    const W* next = next_block + tile * panel_size;
    add([next](int64_t step) PAGEDATTN_ALWAYS_INLINE { prefetch_line(next + step * STEP_SIZE); });
  } else {
    add([](int64_t) {});
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
