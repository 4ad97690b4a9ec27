// copy_blocks and swap_blocks: parameters and kernel.
#pragma once

#include <vector>

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

// Copies block mapping[i][0] of `src` to block mapping[i][1] of `dst`, which may be the same pool. A block that is not
// one piece of memory takes a transfer for each of its pieces.
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

namespace cuda {
// Transfers of the same pairs share a launch. `mapping` and every pool are memory that the GPU reads and writes: its
// own memory, or pinned host memory. `over_the_bus` says that a pool is host memory.
void transfer_blocks(const std::vector<BlockTransferParams>& transfers, bool over_the_bus, cudaStream_t stream);
// Copies through the driver, one copy for each run of adjacent blocks: for host memory that is not pinned. `mapping` is
// on the host.
void copy_block_runs(const BlockTransferParams& transfer, cudaStream_t stream);
// Whether kernels can read and write host memory at this address: pinned memory, not pageable memory.
bool is_reachable(const void* host_pointer);
// Whether `stream` is being captured: what is launched goes into a CUDA graph, and runs later.
bool is_capturing(cudaStream_t stream);
}  // namespace cuda

}  // namespace pagedattn
