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

// Fetches one of num_parts parts of a block of each panel into the second-level cache: what a tile does for the block
// after its own, which all tiles need next.
template <int PANELS, int64_t BLOCK_BYTES>
PAGEDATTN_INLINE void prefetch_part(const void* block, int64_t panel_bytes, int64_t part, int64_t num_parts) {
  constexpr int64_t LINE_BYTES = 64, NUM_LINES = BLOCK_BYTES / LINE_BYTES;
  for (int64_t line = part * NUM_LINES / num_parts; line < (part + 1) * NUM_LINES / num_parts; ++line) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < PANELS; ++i) {
      prefetch_line(static_cast<const char*>(block) + i * panel_bytes + line * LINE_BYTES);
    }
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
