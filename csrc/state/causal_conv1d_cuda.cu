// A thread has one channel of one sequence, and goes through the sequence's rows with the window in registers. The
// threads of a block have adjacent channels, so that rows are read and written in whole lines.
#include "cuda_vec.cuh"
#include "state/causal_conv1d.h"

namespace pagedattn::cuda {
namespace {

constexpr int CONV_THREADS = 128;

// The row `i` of the window before the sequence's first row, of width - 1 rows.
template <typename T>
__device__ float history(const CausalConv1dParams& p, const T* states, bool is_zero, int64_t i) {
  if (is_zero) return 0.0f;
  return to_float(states[(p.state_len - (p.width - 1) + i) * p.state_strides[2]]);
}

// Grid: sequences x tiles of channels, those of a sequence side by side.
template <typename T, typename W, int WIDTH>
__global__ void __launch_bounds__(CONV_THREADS) causal_conv1d_kernel(CausalConv1dParams p) {
  const unsigned num_tiles = gridDim.x / static_cast<unsigned>(p.sequences.num_seqs);
  const int64_t seq = blockIdx.x / num_tiles;
  const int64_t channel = static_cast<int64_t>(blockIdx.x % num_tiles) * CONV_THREADS + threadIdx.x;
  if (channel >= p.dim) return;
  const int64_t first_row = p.sequences.first_row(seq);
  const int64_t num_rows = p.sequences.first_row(seq + 1) - first_row;
  const int64_t slot = p.sequences.slot(seq);
  const T* input = static_cast<const T*>(p.input) + first_row * p.input_stride + channel;
  T* out = static_cast<T*>(p.out) + first_row * p.out_stride + channel;
  if (slot < 0) {
    for (int64_t row = 0; row < num_rows; ++row) out[row * p.out_stride] = from_float<T>(0.0f);
  }
  if (slot < 0 || num_rows <= 0) return;

  T* states = static_cast<T*>(p.conv_states) + slot * p.state_strides[0] + channel * p.state_strides[1];
  const bool begins = p.sequences.begins(seq);
  const W* weight = static_cast<const W*>(p.weight) + channel * WIDTH;
  float weights[WIDTH], window[WIDTH];
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) weights[j] = to_float(weight[j]);
#pragma unroll
  for (int j = 0; j < WIDTH - 1; ++j) window[j + 1] = history(p, states, begins, j);
  const float bias = p.bias == nullptr ? 0.0f : to_float(static_cast<const W*>(p.bias)[channel]);
  for (int64_t row = 0; row < num_rows; ++row) {
#pragma unroll
    for (int j = 0; j < WIDTH - 1; ++j) window[j] = window[j + 1];
    window[WIDTH - 1] = to_float(input[row * p.input_stride]);
    float sum = bias;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) sum = fmaf(weights[j], window[j], sum);
    out[row * p.out_stride] = from_float<T>(p.silu ? sum / (1.0f + expf(-sum)) : sum);
  }
  // From the oldest on, so that rows of the old state that move are read before they are written. Unrolled, it spills.
#pragma unroll 1
  for (int64_t i = 0; i < p.state_len; ++i) {
    const int64_t row = num_rows - p.state_len + i;
    const T old = begins || row >= 0 ? T{} : states[(i + num_rows) * p.state_strides[2]];
    states[i * p.state_strides[2]] = row >= 0 ? input[row * p.input_stride] : old;
  }
}

template <typename T, typename W, int... I>
void launch_any_width(const CausalConv1dParams& params, cudaStream_t stream, std::integer_sequence<int, I...>) {
  const dim3 grid(grid_size(params.sequences.num_seqs * ceil_div<int64_t>(params.dim, CONV_THREADS)));
  const auto launch_width = [&]<int WIDTH>() {
    launch(causal_conv1d_kernel<T, W, WIDTH>, grid, dim3(CONV_THREADS), 0, stream, params);
  };
  ((params.width == I + 1 ? launch_width.template operator()<I + 1>() : void()), ...);
}

}  // namespace

void causal_conv1d(const CausalConv1dParams& params, cudaStream_t stream) {
  constexpr auto WIDTHS = std::make_integer_sequence<int, MAX_CONV_WIDTH>{};
  dispatch_dtype(params.dtype, [&]<typename T>() {
    if (params.weight_dtype == DType::FLOAT32) {
      launch_any_width<T, float>(params, stream, WIDTHS);
    } else {
      launch_any_width<T, T>(params, stream, WIDTHS);
    }
  });
}

}  // namespace pagedattn::cuda
