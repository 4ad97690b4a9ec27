// One kernel copies the blocks of many pools, also over PCIe from and to pinned host memory. A thread copies 16 bytes
// at a time and has several copies under way. Memory that a kernel cannot reach is copied by the driver, run by run.
#include <algorithm>

#include "cache/block_transfer.h"
#include "cuda_vec.cuh"

namespace pagedattn::cuda {
namespace {

constexpr int TRANSFER_THREADS = 256;
constexpr int UNITS_PER_THREAD = 4;
// Enough thread blocks to fill the bus. More would wait for the bus, and keep other streams off the GPU.
constexpr unsigned MAX_BLOCKS_OVER_THE_BUS = 64;

struct Pool {
  const char* src;
  char* dst;
  int64_t src_stride;
  int64_t dst_stride;
  int64_t block_bytes;
};

// The pools of one launch. Kernel parameters are at most 4 KiB.
struct Pools {
  static constexpr int CAPACITY = 96;
  const int64_t* mapping;  // [num_pairs, 2]
  unsigned pieces_per_block;
  unsigned num_pieces;  // of all pairs
  Pool pools[CAPACITY];
};
static_assert(sizeof(Pools) <= 4096);

template <typename Unit>
__device__ void copy_bytes(const char* source, char* target, int64_t begin, int64_t end) {
  constexpr int64_t UNIT_BYTES = sizeof(Unit);
  const int64_t step = static_cast<int64_t>(blockDim.x) * UNIT_BYTES;
  for (int64_t first = begin + static_cast<int64_t>(threadIdx.x) * UNIT_BYTES; first < end;
       first += UNITS_PER_THREAD * step) {
    Unit units[UNITS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
      if (first + i * step < end) units[i] = *reinterpret_cast<const Unit*>(source + first + i * step);
    }
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
      if (first + i * step < end) __stwb(reinterpret_cast<Unit*>(target + first + i * step), units[i]);
    }
  }
}

// Grid: x shares out the pieces of all pairs, y is the pool.
__global__ void __launch_bounds__(TRANSFER_THREADS) transfer_blocks_kernel(const __grid_constant__ Pools p) {
  const Pool& pool = p.pools[blockIdx.y];
  const int64_t piece_bytes = static_cast<int64_t>(blockDim.x) * UNITS_PER_THREAD * 16;
  const auto misalignment = reinterpret_cast<uintptr_t>(pool.src) | reinterpret_cast<uintptr_t>(pool.dst) |
                            static_cast<uintptr_t>(pool.src_stride | pool.dst_stride | pool.block_bytes);
  for (unsigned index = blockIdx.x; index < p.num_pieces; index += gridDim.x) {
    const int64_t pair = index / p.pieces_per_block;
    const int64_t begin = index % p.pieces_per_block * piece_bytes;
    const int64_t end = min(begin + piece_bytes, pool.block_bytes);
    const char* source = pool.src + p.mapping[2 * pair] * pool.src_stride;
    char* target = pool.dst + p.mapping[2 * pair + 1] * pool.dst_stride;
    if (misalignment % 16 == 0) {
      copy_bytes<uint4>(source, target, begin, end);
    } else if (misalignment % 4 == 0) {
      copy_bytes<unsigned>(source, target, begin, end);
    } else {
      copy_bytes<unsigned char>(source, target, begin, end);
    }
  }
}

// Launches transfers of the same pairs, at most Pools::CAPACITY of them.
void launch_transfers(const BlockTransferParams* transfers, size_t num_transfers, bool over_the_bus,
                      cudaStream_t stream) {
  Pools pools{};
  int64_t max_block_bytes = 0;
  for (size_t i = 0; i < num_transfers; ++i) {
    const BlockTransferParams& t = transfers[i];
    pools.pools[i] = {t.src, t.dst, t.src_stride, t.dst_stride, t.block_bytes};
    max_block_bytes = std::max(max_block_bytes, t.block_bytes);
  }
  if (max_block_bytes == 0) return;
  pools.mapping = transfers[0].mapping;
  // Small blocks get fewer threads, so that no warp is idle.
  const int64_t threads_of_block = ceil_div<int64_t>(max_block_bytes, UNITS_PER_THREAD * 16);
  const int64_t num_threads =
      std::min<int64_t>(ceil_div<int64_t>(threads_of_block, WARP_SIZE) * WARP_SIZE, TRANSFER_THREADS);
  pools.pieces_per_block = static_cast<unsigned>(ceil_div<int64_t>(threads_of_block, num_threads));
  pools.num_pieces = grid_size(transfers[0].num_pairs * pools.pieces_per_block);
  const unsigned num_blocks = over_the_bus ? std::min(pools.num_pieces, MAX_BLOCKS_OVER_THE_BUS) : pools.num_pieces;
  launch(transfer_blocks_kernel, dim3(num_blocks, static_cast<unsigned>(num_transfers)),
         dim3(static_cast<unsigned>(num_threads)), 0, stream, pools);
}

}  // namespace

void transfer_blocks(const std::vector<BlockTransferParams>& transfers, bool over_the_bus, cudaStream_t stream) {
  for (size_t first = 0; first < transfers.size();) {
    const auto has_same_pairs = [&](const BlockTransferParams& t) {
      return t.mapping == transfers[first].mapping && t.num_pairs == transfers[first].num_pairs;
    };
    size_t end = first + 1;
    while (end < transfers.size() && end - first < Pools::CAPACITY && has_same_pairs(transfers[end])) ++end;
    launch_transfers(&transfers[first], end - first, over_the_bus, stream);
    first = end;
  }
}

void copy_block_runs(const BlockTransferParams& t, cudaStream_t stream) {
  const bool are_adjacent = t.block_bytes == t.src_stride && t.block_bytes == t.dst_stride;
  for (int64_t first = 0; first < t.num_pairs;) {
    const int64_t src = t.mapping[2 * first];
    const int64_t dst = t.mapping[2 * first + 1];
    int64_t length = 1;
    while (are_adjacent && first + length < t.num_pairs && t.mapping[2 * (first + length)] == src + length &&
           t.mapping[2 * (first + length) + 1] == dst + length) {
      ++length;
    }
    PAGEDATTN_CUDA_CHECK(cudaMemcpyAsync(t.dst + dst * t.dst_stride, t.src + src * t.src_stride,
                                         static_cast<size_t>(length * t.block_bytes), cudaMemcpyDefault, stream));
    first += length;
  }
}

bool is_reachable(const void* host_pointer) {
  cudaPointerAttributes attributes{};
  PAGEDATTN_CUDA_CHECK(cudaPointerGetAttributes(&attributes, host_pointer));
  return attributes.type != cudaMemoryTypeUnregistered && attributes.devicePointer == host_pointer;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  PAGEDATTN_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace pagedattn::cuda
