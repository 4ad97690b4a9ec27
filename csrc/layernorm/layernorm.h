// rms_norm, fused_add_rms_norm, both for Gemma, and layer_norm: parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

// Where rows lie: `num_adjacent` rows a stride apart, and such groups a group stride apart, as the heads of tokens are
// in a tensor of queries, keys and values.
struct RowPlaces {
  int64_t num_adjacent;  // all rows, where there is one stride
  int64_t stride;        // elements
  int64_t group_stride;

  constexpr int64_t operator[](int64_t row) const {
    if (row < num_adjacent) return row * stride;
    return row / num_adjacent * group_stride + row % num_adjacent * stride;
  }
};

struct NormParams {
  DType dtype;
  int64_t num_rows;
  int64_t hidden_size;
  float epsilon;
  const void* input;  // [num_rows, hidden_size]
  RowPlaces input_rows;
  const void* weight;  // [hidden_size]
  void* out;           // [num_rows, hidden_size]; may be input
  RowPlaces out_rows;
};

struct RmsNormParams : NormParams {
  bool adds_one;   // to the weight, in fp32, as Gemma's norms do
  void* residual;  // [num_rows, hidden_size], updated; nullptr for plain rms_norm
  RowPlaces residual_rows;
};

struct LayerNormParams : NormParams {
  DType weight_dtype;  // of weight and bias: `dtype` or FLOAT32
  const void* bias;    // [hidden_size]
};

// Rows [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(rms_norm, const RmsNormParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(layer_norm, const LayerNormParams& params, int64_t begin, int64_t end)

namespace cuda {
void rms_norm(const RmsNormParams& params, cudaStream_t stream);
void layer_norm(const LayerNormParams& params, cudaStream_t stream);
}  // namespace cuda

}  // namespace pagedattn
