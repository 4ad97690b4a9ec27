// A weighted mean of two outputs. An output's weight is its share of the sum of exponentials. Each thread computes the
// weights of its rows itself, while its loads of the outputs are under way.
#include <cmath>

#include "attention/merge_attn_states.h"
#include "cuda_vec.cuh"

namespace pagedattn::cuda {
namespace {

constexpr int MERGE_ROWS_PER_THREAD = 4;

// An infinity of either sign says that an output is of no tokens. Such an output may hold anything.
__device__ float lse_of(float lse) { return lse == INFINITY ? -INFINITY : lse; }

// Grid: (token, head) pairs x columns (RowGrid).
template <typename T, int N>
__global__ void __launch_bounds__(RowGrid::NUM_THREADS)
    merge_attn_states_kernel(MergeAttnStatesParams p, RowGrid row_grid) {
  const ThreadRows rows = thread_rows(row_grid, p.num_tokens * p.num_heads, ceil_div<int64_t>(p.head_size, N));
  const int64_t column = rows.column * N;

  Packed<T, N> prefixes[MERGE_ROWS_PER_THREAD] = {}, suffixes[MERGE_ROWS_PER_THREAD] = {};
  float prefix_lses[MERGE_ROWS_PER_THREAD] = {}, suffix_lses[MERGE_ROWS_PER_THREAD] = {};
#pragma unroll
  for (int r = 0; r < MERGE_ROWS_PER_THREAD; ++r) {
    if (r >= rows.num_rows) break;
    const int64_t row = rows.row(r);
    prefixes[r] = load<N>(static_cast<const T*>(p.prefix_output) + row * p.head_size + column);
    suffixes[r] = load<N>(static_cast<const T*>(p.suffix_output) + row * p.head_size + column);
    prefix_lses[r] = lse_of(p.prefix_lse[row]);
    suffix_lses[r] = lse_of(p.suffix_lse[row]);
  }
#pragma unroll
  for (int r = 0; r < MERGE_ROWS_PER_THREAD; ++r) {
    if (r >= rows.num_rows) break;
    const int64_t row = rows.row(r);
    // NaN of either output stays.
    const float largest = prefix_lses[r] > suffix_lses[r] ? prefix_lses[r] : suffix_lses[r];
    // Where both saw nothing, exponentials are relative to 0, and both weights are 0.
    const float base = largest == -INFINITY ? 0.0f : largest;
    const float prefix_sum = expf((prefix_lses[r] - base) * p.ln_base);
    const float suffix_sum = expf((suffix_lses[r] - base) * p.ln_base);
    const float sum = prefix_sum + suffix_sum;
    const float prefix_weight = sum == 0.0f ? 0.0f : prefix_sum / sum;
    const float suffix_weight = sum == 0.0f ? 0.0f : suffix_sum / sum;

    const Floats<N> prefix = to_floats(prefixes[r]);
    const Floats<N> suffix = to_floats(suffixes[r]);
    Floats<N> merged;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float of_prefix = prefix_lses[r] == -INFINITY ? 0.0f : prefix[e];
      const float of_suffix = suffix_lses[r] == -INFINITY ? 0.0f : suffix[e];
      merged[e] = fmaf(of_prefix, prefix_weight, of_suffix * suffix_weight);
    }
    store(static_cast<T*>(p.output) + row * p.head_size + column, merged);
    if (p.output_lse != nullptr && rows.column == 0) {
      p.output_lse[row] = sum == 0.0f ? largest : base + logf(sum) / p.ln_base;
    }
  }
}

}  // namespace

void merge_attn_states(const MergeAttnStatesParams& params, cudaStream_t stream) {
  const auto launch_with = [&]<typename T, int N>() {
    const RowGrid row_grid = make_row_grid(params.num_tokens * params.num_heads, ceil_div<int64_t>(params.head_size, N),
                                           MERGE_ROWS_PER_THREAD);
    launch(merge_attn_states_kernel<T, N>, row_grid.grid, row_grid.block, 0, stream, params, row_grid);
  };
  const bool is_aligned = is_aligned_16({params.output, params.prefix_output, params.suffix_output},
                                        {params.head_size * element_size(params.dtype)});
  dispatch_access(params.dtype, is_aligned, launch_with);
}

}  // namespace pagedattn::cuda
