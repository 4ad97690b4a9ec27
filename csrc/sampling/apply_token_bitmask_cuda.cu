// A warp has a word of a mask, a lane a token: those that are not allowed are written side by side, whatever the rows
// are aligned to, and nothing is read but the masks.
#include "cuda_vec.cuh"
#include "sampling/apply_token_bitmask.h"

namespace pagedattn::cuda {
namespace {

constexpr int MASKS_PER_THREAD = 4;

// Grid: tiles of masks x tokens (TileGrid).
template <typename T>
__global__ void __launch_bounds__(TileGrid::NUM_THREADS)
    apply_token_bitmask_kernel(ApplyTokenBitmaskParams p, TileGrid tiles) {
  const ThreadTile tile = thread_tile(tiles, p.num_masks, p.vocab_size);
  const int32_t* bitmask = p.bitmask + tile.column / TOKENS_PER_WORD;
  T* logits = static_cast<T*>(p.logits) + tile.column;
  const T not_allowed = from_float<T>(-INFINITY);

  int32_t words[MASKS_PER_THREAD] = {};
#pragma unroll
  for (int i = 0; i < MASKS_PER_THREAD; ++i) {
    if (i >= tile.num_rows) break;
    words[i] = bitmask[tile.row(i) * p.bitmask_stride];
  }
#pragma unroll
  for (int i = 0; i < MASKS_PER_THREAD; ++i) {
    if (i >= tile.num_rows) break;
    if (words[i] >> tile.column % TOKENS_PER_WORD & 1) continue;
    const int64_t row = p.indices == nullptr ? tile.row(i) : p.indices[tile.row(i)];
    logits[row * p.logits_stride] = not_allowed;
  }
}

}  // namespace

void apply_token_bitmask(const ApplyTokenBitmaskParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    const TileGrid tiles = make_tile_grid(params.num_masks, params.vocab_size, MASKS_PER_THREAD);
    launch(apply_token_bitmask_kernel<T>, tiles.grid, tiles.block, 0, stream, params, tiles);
  });
}

}  // namespace pagedattn::cuda
