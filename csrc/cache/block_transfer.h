// copy_blocks and swap_blocks: parameters and kernel.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

// Copies block mapping[i][0] of one pool to block mapping[i][1] of another, which may be the same pool.
struct BlockTransferParams {
  int64_t num_pairs;
  int64_t block_bytes;
  const char* src;     // [num_src_blocks, block_bytes]
  int64_t src_stride;  // bytes between blocks
  char* dst;           // [num_dst_blocks, block_bytes]
  int64_t dst_stride;
  const int64_t* mapping;  // [num_pairs, 2]
};

// Pairs [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(transfer_blocks, const BlockTransferParams& params, int64_t begin, int64_t end)

}  // namespace pagedattn
