// A warp has a word of a mask, and each lane a token of it. Adjacent lanes write adjacent logits, whatever the rows are
// aligned to. Nothing is read but the masks.
#include "cuda_vec.cuh"
#include "sampling/apply_token_bitmask.h"

namespace pagedattn::cuda {
namespace {

constexpr int MASKS_PER_THREAD = 4;

// Grid: masks x tokens (RowGrid).
template <typename T>
__global__ void __launch_bounds__(RowGrid::NUM_THREADS)
    apply_token_bitmask_kernel(ApplyTokenBitmaskParams p, RowGrid row_grid) {
  const ThreadRows rows = thread_rows(row_grid, p.num_masks, p.vocab_size);
  const int32_t* bitmask = p.bitmask + rows.column / TOKENS_PER_WORD;
  T* logits = static_cast<T*>(p.logits) + rows.column;
  const T not_allowed = from_float<T>(-INFINITY);

  int32_t words[MASKS_PER_THREAD] = {};
#pragma unroll
  for (int i = 0; i < MASKS_PER_THREAD; ++i) {
    if (i >= rows.num_rows) break;
    words[i] = bitmask[rows.row(i) * p.bitmask_stride];
  }
#pragma unroll
  for (int i = 0; i < MASKS_PER_THREAD; ++i) {
    if (i >= rows.num_rows) break;
    if (words[i] >> rows.column % TOKENS_PER_WORD & 1) continue;
    const int64_t row = p.indices == nullptr ? rows.row(i) : p.indices[rows.row(i)];
    logits[row * p.logits_stride] = not_allowed;
  }
}

}  // namespace

void apply_token_bitmask(const ApplyTokenBitmaskParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    const RowGrid row_grid = make_row_grid(params.num_masks, params.vocab_size, MASKS_PER_THREAD);
    launch(apply_token_bitmask_kernel<T>, row_grid.grid, row_grid.block, 0, stream, params, row_grid);
  });
}

}  // namespace pagedattn::cuda
