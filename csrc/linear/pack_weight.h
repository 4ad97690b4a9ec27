// pack_linear_weight, pack_linear_weight_int8 and pack_linear_weight_int4: parameters and kernels. They have no CUDA
// kernels.
//
// linear/linear_packed.h and linear/linear_quantized.h say in which order the ops read a packed weight.
#pragma once

#include "cpu_dispatch.h"
#include "linear/linear.h"

namespace pagedattn {

struct PackLinearWeightParams {
  DType dtype;
  int64_t out_features;
  int64_t in_features;
  const void* weight;     // [out_features, in_features]
  int64_t weight_stride;  // elements between rows
  void* out;              // [num_panels, in_features, 16]
};

struct PackLinearWeightInt8Params {
  int64_t out_features;
  int64_t in_features;
  const int8_t* weight;   // [out_features, in_features]
  int64_t weight_stride;  // elements between rows
  uint8_t* out;           // [num_panels, ceil(in_features / 4), 16, 4]
};

struct PackLinearWeightInt4Params {
  int64_t out_features;
  int64_t in_features;
  int64_t num_groups;
  DType scale_dtype;       // fp32 or fp16
  const uint8_t* codes;    // rows of in_features codes
  int64_t codes_stride;    // bytes between rows
  bool codes_are_nibbles;  // two in a byte, the first in its lower half; otherwise one in a byte
  const void* scales;      // [out_features, num_groups]
  int64_t scales_stride;   // elements between rows
  const uint8_t* zeros;    // [out_features, num_groups]
  int64_t zeros_stride;    // elements between rows
  uint8_t* out;            // [num_panels, num_groups, bytes of a group]
};

// Panels [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(pack_linear_weight, const PackLinearWeightParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(pack_linear_weight_int8, const PackLinearWeightInt8Params& params, int64_t begin,
                             int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(pack_linear_weight_int4, const PackLinearWeightInt4Params& params, int64_t begin,
                             int64_t end)

}  // namespace pagedattn
