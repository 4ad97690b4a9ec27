// A thread for each index. Where indices come in rows, a block has a row, and its threads take turns.
#include "cache/slot_mapping.h"
#include "cuda_utils.cuh"

namespace pagedattn::cuda {
namespace {

constexpr int SLOT_MAPPING_THREADS = 128;

// Grid: rows.
__global__ void __launch_bounds__(SLOT_MAPPING_THREADS) batch_positions_kernel(BatchPositionsParams p) {
  const int64_t row = blockIdx.x;
  for (int64_t token = p.start(row) + threadIdx.x; token < p.end(row); token += SLOT_MAPPING_THREADS)
    p.write(row, token);
}

// Grid: tokens / SLOT_MAPPING_THREADS.
__global__ void __launch_bounds__(SLOT_MAPPING_THREADS) compute_slot_mapping_kernel(SlotMappingParams p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * SLOT_MAPPING_THREADS + threadIdx.x;
  if (token < p.num_tokens) p.write(token);
}

// Grid: rows.
__global__ void __launch_bounds__(SLOT_MAPPING_THREADS) appended_slots_kernel(AppendedSlotsParams p) {
  const int64_t row = blockIdx.x;
  for (int64_t token = p.start(row) + threadIdx.x; token < p.end(row); token += SLOT_MAPPING_THREADS)
    p.write(row, token);
  if (threadIdx.x == 0 && row < p.num_seqs) p.seq_lens[row] = p.seq_len(row);
}

// Grid: sequences.
__global__ void __launch_bounds__(SLOT_MAPPING_THREADS)
    consecutive_block_tables_kernel(ConsecutiveBlockTablesParams p) {
  for (int64_t i = threadIdx.x; i < p.max_num_blocks_per_seq; i += SLOT_MAPPING_THREADS) p.write(blockIdx.x, i);
}

}  // namespace

void batch_positions(const BatchPositionsParams& params, cudaStream_t stream) {
  launch(batch_positions_kernel, dim3(grid_size(params.num_rows())), SLOT_MAPPING_THREADS, 0, stream, params);
}

void compute_slot_mapping(const SlotMappingParams& params, cudaStream_t stream) {
  const unsigned num_blocks = grid_size(ceil_div<int64_t>(params.num_tokens, SLOT_MAPPING_THREADS));
  launch(compute_slot_mapping_kernel, dim3(num_blocks), SLOT_MAPPING_THREADS, 0, stream, params);
}

void appended_slots(const AppendedSlotsParams& params, cudaStream_t stream) {
  launch(appended_slots_kernel, dim3(grid_size(params.num_rows())), SLOT_MAPPING_THREADS, 0, stream, params);
}

void consecutive_block_tables(const ConsecutiveBlockTablesParams& params, cudaStream_t stream) {
  launch(consecutive_block_tables_kernel, dim3(grid_size(params.num_seqs)), SLOT_MAPPING_THREADS, 0, stream, params);
}

}  // namespace pagedattn::cuda
