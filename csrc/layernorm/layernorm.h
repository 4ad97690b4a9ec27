// rms_norm and fused_add_rms_norm: parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

struct RmsNormParams {
  DType dtype;
  int64_t num_rows;
  int64_t hidden_size;
  float epsilon;
  const void* input;     // [num_rows, hidden_size]
  int64_t input_stride;  // elements between rows
  const void* weight;    // [hidden_size]
  void* out;             // [num_rows, hidden_size]; may be input
  int64_t out_stride;
  void* residual;  // [num_rows, hidden_size], updated; nullptr for plain rms_norm
  int64_t residual_stride;
};

// Rows [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(rms_norm, const RmsNormParams& params, int64_t begin, int64_t end)

namespace cuda {
void rms_norm(const RmsNormParams& params, cudaStream_t stream);
}

}  // namespace pagedattn
