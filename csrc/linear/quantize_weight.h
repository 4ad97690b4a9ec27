// quantize_weight_int8 and quantize_weight_int4: parameters and kernels. They have no CUDA kernels.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

constexpr float MAX_WEIGHT = 1e30f;  // sums of products with codes stay finite

struct QuantizeWeightParams {
  DType dtype;  // of weight
  int64_t out_features;
  int64_t in_features;
  const void* weight;     // [out_features, in_features]
  int64_t weight_stride;  // elements between rows
  float* refused;         // [out_features]: an element of the row that is beyond MAX_WEIGHT, or NaN; 0 if there is none
};

struct QuantizeWeightInt8Params : QuantizeWeightParams {
  int8_t* codes;  // [out_features, in_features]
  float* scales;  // [out_features]
};

struct QuantizeWeightInt4Params : QuantizeWeightParams {
  uint8_t* codes;  // [out_features, in_features]
  float* scales;   // [out_features, in_features / INT4_STEP]
  uint8_t* zeros;  // like scales
};

// Rows [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(quantize_weight_int8, const QuantizeWeightInt8Params& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(quantize_weight_int4, const QuantizeWeightInt4Params& params, int64_t begin, int64_t end)

}  // namespace pagedattn
