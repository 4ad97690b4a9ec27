// all_reduce_shared and all_gather_shared: parameters and the kernel.
#pragma once

#include "collectives/shared_group.h"
#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

struct AllReduceParams {
  int64_t group;  // a handle
  DType dtype;
  int64_t num_elements;
  void* input;  // [num_elements], becomes the sum
};

struct AllGatherParams {
  int64_t group;  // a handle
  DType dtype;
  int64_t num_rows;
  int64_t width;
  const void* input;  // [num_rows, width]
  void* out;          // [num_rows, world_size, width]
};

struct RankSumParams {
  DType dtype;
  int64_t world_size;
  const void* of_rank[MAX_RANKS];  // [num_elements], of each rank
  void* out;                       // [num_elements]; may be the memory of a rank
  void* copy;                      // gets the same as out; may be nullptr
};

// Elements [begin, end). The ranks are added in their order.
PAGEDATTN_DECLARE_CPU_KERNEL(sum_ranks, const RankSumParams& params, int64_t begin, int64_t end)

}  // namespace pagedattn
