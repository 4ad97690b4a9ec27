// One pass in fp32, rounded once at the store. A thread has one column of several rows, so that several loads are under
// way, and the formulas hide behind the loads.
#include "activation/activation.h"
#include "cuda_vec.cuh"

namespace pagedattn::cuda {
namespace {

constexpr int ACTIVATION_ROWS_PER_THREAD = 4;

// The arithmetic of an activation of T. Rounded to 16 bits, a result shows nothing of the approximations' errors; an
// exact division would be a branch and a call for each element.
template <typename T>
struct Arithmetic {
  __device__ static float exp(float x) {
    constexpr float LOG2_E = 1.4426950408889634f;
    return ptx::exp2_approx(x * LOG2_E);
  }
  __device__ static float reciprocal(float x) { return ptx::reciprocal_approx(x); }
};
template <>
struct Arithmetic<float> {
  __device__ static float exp(float x) { return expf(x); }
  __device__ static float reciprocal(float x) { return 1.0f / x; }
};

template <typename T>
__device__ float sigmoid(float x) {
  return Arithmetic<T>::reciprocal(1.0f + Arithmetic<T>::exp(-x));
}

struct Silu {
  template <typename T>
  __device__ static float apply(float x) {
    return x * sigmoid<T>(x);
  }
};

struct Gelu {
  template <typename T>
  __device__ static float apply(float x) {
    // The normal distribution's tail, exact on the side where it is small: erfc(y) / 2 for y >= 0, by Numerical
    // Recipes' Chebyshev polynomial (relative error 1.2e-7), at half the instructions of erfcf.
    constexpr float SQRT_HALF = 0.7071067811865476f;
    constexpr float COEFFICIENTS[] = {-1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f,
                                      0.37409196f,  1.00002368f, -1.26551223f};
    const float y = fabsf(x) * SQRT_HALF;
    const float t = Arithmetic<T>::reciprocal(fmaf(y, 0.5f, 1.0f));
    float p = fmaf(fmaf(t, 0.17087277f, -0.82215223f), t, 1.48851587f);
#pragma unroll
    for (const float c : COEFFICIENTS) p = fmaf(p, t, c);
    const float tail = 0.5f * t * Arithmetic<T>::exp(fmaf(-y, y, p));
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
};

struct GeluTanh {
  template <typename T>
  __device__ static float apply(float x) {
    // 0.5 x (1 + tanh(u)) is x sigmoid(2u), which loses no digits where tanh is close to -1.
    constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
    const float u = SQRT_2_OVER_PI * x * fmaf(x * x, 0.044715f, 1.0f);
    return x * sigmoid<T>(2.0f * u);
  }
};

struct GeluQuick {
  template <typename T>
  __device__ static float apply(float x) {
    return x * sigmoid<T>(1.702f * x);
  }
};

// out = Activation(input), or Activation(input from column `gate` on) * input from column `factor` on.
// Grid: rows x columns (RowGrid).
template <typename T, int N, bool IS_GATED, typename Activation>
__global__ void __launch_bounds__(RowGrid::NUM_THREADS)
    activation_kernel(ActivationParams p, RowGrid row_grid, int64_t gate, int64_t factor) {
  const ThreadRows rows = thread_rows(row_grid, p.num_rows, ceil_div<int64_t>(p.width, N));
  const T* input = static_cast<const T*>(p.input) + rows.column * N;
  T* out = static_cast<T*>(p.out) + rows.column * N;

  Packed<T, N> gates[ACTIVATION_ROWS_PER_THREAD] = {}, factors[ACTIVATION_ROWS_PER_THREAD] = {};
#pragma unroll
  for (int r = 0; r < ACTIVATION_ROWS_PER_THREAD; ++r) {
    if (r >= rows.num_rows) break;
    const T* row = input + rows.row(r) * p.input_stride;
    gates[r] = load<N>(row + gate);
    if constexpr (IS_GATED) factors[r] = load<N>(row + factor);
  }
#pragma unroll
  for (int r = 0; r < ACTIVATION_ROWS_PER_THREAD; ++r) {
    if (r >= rows.num_rows) break;
    Floats<N> x = to_floats(gates[r]);
    const Floats<N> y = to_floats(factors[r]);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float activated = Activation::template apply<T>(x[e]);
      x[e] = IS_GATED ? activated * y[e] : activated;
    }
    store(out + rows.row(r) * p.out_stride, x);
  }
}

template <bool IS_GATED, typename Activation>
void run(const ActivationParams& params, int64_t gate, int64_t factor, cudaStream_t stream) {
  const auto launch_with = [&]<typename T, int N>() {
    const RowGrid row_grid =
        make_row_grid(params.num_rows, ceil_div<int64_t>(params.width, N), ACTIVATION_ROWS_PER_THREAD);
    launch(activation_kernel<T, N, IS_GATED, Activation>, row_grid.grid, row_grid.block, 0, stream, params, row_grid,
           gate, factor);
  };
  const int64_t bytes = element_size(params.dtype);
  const bool is_aligned = is_aligned_16({params.input, params.out},
                                        {params.width * bytes, params.input_stride * bytes, params.out_stride * bytes});
  dispatch_access(params.dtype, is_aligned, launch_with);
}

}  // namespace

void silu_and_mul(const ActivationParams& params, cudaStream_t stream) {
  run<true, Silu>(params, 0, params.width, stream);
}

void mul_and_silu(const ActivationParams& params, cudaStream_t stream) {
  run<true, Silu>(params, params.width, 0, stream);
}

void gelu_and_mul(const ActivationParams& params, cudaStream_t stream) {
  run<true, Gelu>(params, 0, params.width, stream);
}

void gelu_tanh_and_mul(const ActivationParams& params, cudaStream_t stream) {
  run<true, GeluTanh>(params, 0, params.width, stream);
}

void gelu_tanh(const ActivationParams& params, cudaStream_t stream) { run<false, GeluTanh>(params, 0, 0, stream); }

void gelu_quick(const ActivationParams& params, cudaStream_t stream) { run<false, GeluQuick>(params, 0, 0, stream); }

}  // namespace pagedattn::cuda
