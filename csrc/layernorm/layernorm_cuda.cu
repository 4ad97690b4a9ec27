// rms_norm: a row is read once. Its sums with the residual stay in registers, in fp32, until the sum of their squares
// is known and they are stored. The threads of a row take its vectors in turns. Rows of one warp or less share a block
// and need no barrier. The part of a row that does not fit into the registers of 1024 threads is read again. layer_norm
// has the same blocks and reads a row three times, from the caches after the first.
#include <algorithm>

#include "cuda_vec.cuh"
#include "layernorm/layernorm.h"

namespace pagedattn::cuda {
namespace {

constexpr int NORM_THREADS = 1024;
constexpr int VECTORS_PER_THREAD = 4;

// The sum over the threads of a row, for each of these threads. They are a power of two within a warp, or whole warps
// that are alone in the block.
__device__ float row_sum(float value) {
  const int num_threads = static_cast<int>(blockDim.x);
  for (int lanes = min(num_threads, WARP_SIZE) / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(ALL_LANES, value, lanes);
  }
  if (num_threads <= WARP_SIZE) return value;

  float* warp_sums = reinterpret_cast<float*>(shared_memory);  // [num_threads / WARP_SIZE]
  const int lane = static_cast<int>(threadIdx.x) % WARP_SIZE;
  if (lane == 0) warp_sums[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  return warp_sum(lane < num_threads / WARP_SIZE ? warp_sums[lane] : 0.0f);
}

// Grid: ceil(num_rows / blockDim.y) blocks; threadIdx.y is the row in the block.
template <typename T, int N, bool HAS_RESIDUAL, bool ADDS_ONE>
__global__ void __launch_bounds__(NORM_THREADS) rms_norm_kernel(RmsNormParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  // Past the last row, threads have nothing to load or store, but their lanes take part in the sum.
  const int64_t width = row < p.num_rows ? p.hidden_size : 0;
  const T* input = static_cast<const T*>(p.input) + p.input_rows[row];
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out) + p.out_rows[row];
  T* residual = HAS_RESIDUAL ? static_cast<T*>(p.residual) + p.residual_rows[row] : nullptr;

  const int64_t begin = static_cast<int64_t>(threadIdx.x) * N;
  const int64_t step = static_cast<int64_t>(blockDim.x) * N;
  const auto sum = [](const Packed<T, N>& x, const Packed<T, N>& y) {
    Floats<N> result = to_floats(x);
    if constexpr (HAS_RESIDUAL) {
      const Floats<N> other = to_floats(y);
#pragma unroll
      for (int e = 0; e < N; ++e) result[e] += other[e];
    }
    return result;
  };
  const auto load_residual = [&](int64_t i) { return HAS_RESIDUAL ? load<N>(residual + i) : Packed<T, N>{}; };
  float squares = 0.0f;
  const auto add_squares = [&](const Floats<N>& x) {
#pragma unroll
    for (int e = 0; e < N; ++e) squares = fmaf(x[e], x[e], squares);
  };

  Packed<T, N> inputs[VECTORS_PER_THREAD] = {}, residuals[VECTORS_PER_THREAD] = {};
#pragma unroll
  for (int v = 0; v < VECTORS_PER_THREAD; ++v) {
    const int64_t i = begin + v * step;
    if (i < width) inputs[v] = load<N>(input + i);
    if (i < width) residuals[v] = load_residual(i);
  }
  Floats<N> held[VECTORS_PER_THREAD];
#pragma unroll
  for (int v = 0; v < VECTORS_PER_THREAD; ++v) {
    held[v] = sum(inputs[v], residuals[v]);
    add_squares(held[v]);
  }
  const int64_t held_end = begin + VECTORS_PER_THREAD * step;
  for (int64_t i = held_end; i < width; i += step) add_squares(sum(load<N>(input + i), load_residual(i)));

  const float mean = row_sum(squares) / static_cast<float>(p.hidden_size);
  const float inverse_rms = 1.0f / sqrtf(mean + p.epsilon);

  const auto write = [&](int64_t i, Floats<N> x) {
    const Floats<N> w = to_floats(load<N>(weight + i));
    if constexpr (HAS_RESIDUAL) store(residual + i, x);
#pragma unroll
    for (int e = 0; e < N; ++e) x[e] = x[e] * inverse_rms * (ADDS_ONE ? w[e] + 1.0f : w[e]);
    store(out + i, x);
  };
#pragma unroll
  for (int v = 0; v < VECTORS_PER_THREAD; ++v) {
    if (begin + v * step < width) write(begin + v * step, held[v]);
  }
  for (int64_t i = held_end; i < width; i += step) write(i, sum(load<N>(input + i), load_residual(i)));
}

// Grid and block as for rms_norm.
template <typename T, typename W, int N>
__global__ void __launch_bounds__(NORM_THREADS) layer_norm_kernel(LayerNormParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t width = row < p.num_rows ? p.hidden_size : 0;
  const T* input = static_cast<const T*>(p.input) + p.input_rows[row];
  const W* weight = static_cast<const W*>(p.weight);
  const W* bias = static_cast<const W*>(p.bias);
  T* out = static_cast<T*>(p.out) + p.out_rows[row];
  const float size = static_cast<float>(p.hidden_size);
  const auto for_each_access = [&](const auto& body) {
    const int64_t step = static_cast<int64_t>(blockDim.x) * N;
    for (int64_t i = static_cast<int64_t>(threadIdx.x) * N; i < width; i += step) body(i, load_floats<N>(input + i));
  };

  float sum = 0.0f;
  for_each_access([&](int64_t, const Floats<N>& x) {
#pragma unroll
    for (int e = 0; e < N; ++e) sum += x[e];
  });
  const float mean = row_sum(sum) / size;
  __syncthreads();  // the sums of the warps have been read

  float squares = 0.0f;
  for_each_access([&](int64_t, const Floats<N>& x) {
#pragma unroll
    for (int e = 0; e < N; ++e) squares = fmaf(x[e] - mean, x[e] - mean, squares);
  });
  const float inverse_deviation = 1.0f / sqrtf(row_sum(squares) / size + p.epsilon);

  for_each_access([&](int64_t i, Floats<N> x) {
    const Floats<N> w = load_floats<N>(weight + i), b = load_floats<N>(bias + i);
#pragma unroll
    for (int e = 0; e < N; ++e) x[e] = fmaf((x[e] - mean) * inverse_deviation, w[e], b[e]);
    store(out + i, x);
  });
}

// Threads of a row, and rows of a block.
dim3 block_shape(int64_t num_rows, int64_t num_vectors) {
  constexpr int64_t MIN_THREADS_OF_BLOCK = 128;
  constexpr int64_t MIN_THREADS_OF_ROW = 8;  // 128 bytes side by side
  constexpr int64_t ENOUGH_ROWS_OF_MULTIPROCESSOR = 8;
  // Rows that do not fill the GPU get more threads each.
  const bool is_enough = num_rows >= ENOUGH_ROWS_OF_MULTIPROCESSOR * num_multiprocessors();
  const int64_t vectors_per_thread = is_enough ? VECTORS_PER_THREAD : 1;
  const int64_t num_threads =
      std::max(ceil_div(num_vectors, vectors_per_thread), std::min(num_vectors, MIN_THREADS_OF_ROW));
  if (num_threads > WARP_SIZE) {
    return dim3(static_cast<unsigned>(std::min<int64_t>(ceil_div<int64_t>(num_threads, WARP_SIZE) * WARP_SIZE,  //
                                                        NORM_THREADS)));
  }
  const unsigned power_of_two = std::bit_ceil(static_cast<unsigned>(num_threads));
  return dim3(power_of_two, MIN_THREADS_OF_BLOCK / power_of_two);
}

template <int N, typename Params>
void launch_norm(void (*kernel)(Params), const Params& params, cudaStream_t stream) {
  const dim3 block = block_shape(params.num_rows, ceil_div<int64_t>(params.hidden_size, N));
  const unsigned grid = grid_size(ceil_div<int64_t>(params.num_rows, block.y));
  const size_t shared_bytes = block.x / WARP_SIZE * sizeof(float);
  launch(kernel, dim3(grid), block, shared_bytes, stream, params);
}

// The distance of rows in bytes, for is_aligned_16.
int64_t distances(const NormParams& params, const RowPlaces& rows) {
  return (rows.stride | rows.group_stride) * element_size(params.dtype);
}

}  // namespace

void rms_norm(const RmsNormParams& params, cudaStream_t stream) {
  if (params.hidden_size == 0) return;
  const bool is_aligned =
      is_aligned_16({params.input, params.weight, params.out, params.residual},
                    {params.hidden_size * element_size(params.dtype), distances(params, params.input_rows),
                     distances(params, params.out_rows), distances(params, params.residual_rows)});
  dispatch_access(params.dtype, is_aligned, [&]<typename T, int N>() {
    if (params.residual != nullptr) {
      launch_norm<N>(params.adds_one ? rms_norm_kernel<T, N, true, true> : rms_norm_kernel<T, N, true, false>, params,
                     stream);
    } else {
      launch_norm<N>(params.adds_one ? rms_norm_kernel<T, N, false, true> : rms_norm_kernel<T, N, false, false>, params,
                     stream);
    }
  });
}

void layer_norm(const LayerNormParams& params, cudaStream_t stream) {
  if (params.hidden_size == 0) return;
  const bool is_aligned = is_aligned_16({params.input, params.weight, params.bias, params.out},
                                        {params.hidden_size * element_size(params.dtype),
                                         distances(params, params.input_rows), distances(params, params.out_rows)});
  dispatch_access(params.dtype, is_aligned, [&]<typename T, int N>() {
    const bool is_like_input = params.weight_dtype == params.dtype;
    launch_norm<N>(is_like_input ? layer_norm_kernel<T, T, N> : layer_norm_kernel<T, float, N>, params, stream);
  });
}

}  // namespace pagedattn::cuda
