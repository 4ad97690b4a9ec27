// Turns squares of 32-bit words in registers, for the CPU kernels: where rows lie one after the other, words of
// VEC_SIZE rows come to lie side by side.
#pragma once

#include "cpu_vec.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Swaps the words whose row has the bit D and whose column has not with the words at the mirrored places.
template <int D>
PAGEDATTN_INLINE void swap_across_diagonal(Vec (&rows)[VEC_SIZE]) {
  PAGEDATTN_UNROLL
  for (int i = 0; i < VEC_SIZE; ++i) {
    if (i & D) continue;
    const Vec upper = rows[i], lower = rows[i + D];
    rows[i] = shuffle(upper, lower, [](int k) { return k & D ? VEC_SIZE + k - D : k; });
    rows[i + D] = shuffle(upper, lower, [](int k) { return k & D ? VEC_SIZE + k : k + D; });
  }
}

PAGEDATTN_INLINE void transpose(Vec (&rows)[VEC_SIZE]) {
  swap_across_diagonal<1>(rows);
  swap_across_diagonal<2>(rows);
  if constexpr (VEC_SIZE > 4) swap_across_diagonal<4>(rows);
  if constexpr (VEC_SIZE > 8) swap_across_diagonal<8>(rows);
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
