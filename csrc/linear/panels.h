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

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
