// Activations, plain and gated: parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

struct ActivationParams {
  DType dtype;
  int64_t num_rows;
  int64_t width;         // of out
  const void* input;     // [num_rows, width], or [num_rows, 2 * width] for an op that multiplies two halves
  int64_t input_stride;  // elements between rows
  void* out;             // [num_rows, width]
  int64_t out_stride;
};

// Rows [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(silu_and_mul, const ActivationParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(mul_and_silu, const ActivationParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(gelu_and_mul, const ActivationParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(gelu_tanh_and_mul, const ActivationParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(gelu_tanh, const ActivationParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(gelu_quick, const ActivationParams& params, int64_t begin, int64_t end)

namespace cuda {
void silu_and_mul(const ActivationParams& params, cudaStream_t stream);
void mul_and_silu(const ActivationParams& params, cudaStream_t stream);
void gelu_and_mul(const ActivationParams& params, cudaStream_t stream);
void gelu_tanh_and_mul(const ActivationParams& params, cudaStream_t stream);
void gelu_tanh(const ActivationParams& params, cudaStream_t stream);
void gelu_quick(const ActivationParams& params, cudaStream_t stream);
}  // namespace cuda

}  // namespace pagedattn
