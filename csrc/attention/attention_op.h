// What the ops of attention share: checks of their arguments, memory for the CPU's threads.
#pragma once

#include "index_checks.h"

namespace pagedattn {

// Kernels count rows and tokens in int32 (Indices::low).
inline void check_count(const Door& door, const char* argument, int64_t num_rows, const char* rows) {
  door.check(num_rows <= INT32_MAX, argument, "expected at most ", INT32_MAX, " ", rows, ", got ", num_rows);
}

// `rows` says what there are `num_rows` of.
inline void check_start_loc(const Door& door, const char* argument, const Indices& starts, int64_t num_seqs,
                            int64_t num_rows, const char* rows) {
  check_offsets(door, argument, starts, num_seqs);
  door.check(starts[num_seqs] == num_rows, argument, "expected the number of ", rows, ", ", num_rows, ", last, got ",
             starts[num_seqs]);
}

// A line of the CPU's caches. In memory that is aligned to lines, no vector lies in two lines, and no two threads write
// to the same line.
struct alignas(64) CacheLine {
  float floats[16];
};

}  // namespace pagedattn
