// A warp has one channel of one sequence, its state in registers, and goes through the sequence's rows.
#include "cuda_vec.cuh"
#include "state/head_numbers.cuh"
#include "state/selective_scan.h"

namespace pagedattn::cuda {
namespace {

constexpr int NUM_WARPS = 8;
constexpr int STATES_PER_LANE = MAX_STATE_SIZE / WARP_SIZE;

// log(1 + e^x)
__device__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

template <typename T>
__device__ float step_at(const SelectiveScanParams& p, int64_t row, int64_t head) {
  float step = number_at<T>(p.dt, row, head);
  if (p.dt_bias != nullptr) step += p.dt_bias[head];
  if (p.dt_softplus) step = softplus(step);
  return step < p.least_step ? p.least_step : step > p.greatest_step ? p.greatest_step : step;  // NaN stays NaN
}

// Grid: sequences x tiles of NUM_WARPS channels, those of a sequence side by side.
template <typename T>
__global__ void __launch_bounds__(NUM_WARPS* WARP_SIZE) selective_scan_kernel(SelectiveScanParams p) {
  const int lane = static_cast<int>(threadIdx.x) % WARP_SIZE;
  const unsigned num_tiles = gridDim.x / static_cast<unsigned>(p.sequences.num_seqs);
  const int64_t seq = blockIdx.x / num_tiles;
  const int64_t channel = static_cast<int64_t>(blockIdx.x % num_tiles) * NUM_WARPS + threadIdx.x / WARP_SIZE;
  if (channel >= p.num_heads * p.head_dim) return;
  const int64_t head = channel / p.head_dim;
  const int64_t group = head / (p.num_heads / p.num_groups);
  const float d = p.d == nullptr ? 0.0f : p.d[head];
  const T* input = static_cast<const T*>(p.input) + channel;
  T* out = static_cast<T*>(p.out) + channel;
  const int64_t first = p.sequences.first_row(seq);
  const int64_t end = p.sequences.first_row(seq + 1);
  const int64_t slot = p.sequences.slot(seq);
  if (slot < 0 && lane == 0) {
    for (int64_t row = first; row < end; ++row) out[row * p.out_stride] = from_float<T>(0.0f);
  }
  if (slot < 0 || first >= end) return;

  float* states = p.states + slot * p.state_stride + channel * p.state_size;
  const bool begins = p.sequences.begins(seq);
  float state[STATES_PER_LANE];
#pragma unroll
  for (int j = 0; j < STATES_PER_LANE; ++j) {
    const int i = lane + j * WARP_SIZE;
    state[j] = begins || i >= p.state_size ? 0.0f : states[i];
  }
  for (int64_t row = first; row < end; ++row) {
    const T* b = static_cast<const T*>(p.b) + row * p.b_stride + group * p.state_size;
    const T* c = static_cast<const T*>(p.c) + row * p.c_stride + group * p.state_size;
    const float step = step_at<T>(p, row, head);
    const float x = to_float(input[row * p.input_stride]);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < STATES_PER_LANE; ++j) {
      const int i = lane + j * WARP_SIZE;
      if (i >= p.state_size) break;
      const float a = p.a_is_by_state ? p.a[head * p.state_size + i] : p.a[head];
      state[j] = fmaf(state[j], expf(step * a), to_float(b[i]) * (step * x));
      sum = fmaf(state[j], to_float(c[i]), sum);
    }
    float y = fmaf(d, x, warp_sum(sum));
    if (p.z != nullptr) {
      const float gate = to_float(static_cast<const T*>(p.z)[row * p.z_stride + channel]);
      y *= gate / (1.0f + expf(-gate));
    }
    if (lane == 0) out[row * p.out_stride] = from_float<T>(y);
  }
#pragma unroll
  for (int j = 0; j < STATES_PER_LANE; ++j) {
    const int i = lane + j * WARP_SIZE;
    if (i < p.state_size) states[i] = state[j];
  }
}

}  // namespace

void selective_scan(const SelectiveScanParams& params, cudaStream_t stream) {
  const int64_t num_tiles = ceil_div<int64_t>(params.num_heads * params.head_dim, NUM_WARPS);
  const dim3 grid(grid_size(params.sequences.num_seqs * num_tiles));
  dispatch_dtype(params.dtype, [&]<typename T>() {
    launch(selective_scan_kernel<T>, grid, dim3(NUM_WARPS * WARP_SIZE), 0, stream, params);
  });
}

}  // namespace pagedattn::cuda
