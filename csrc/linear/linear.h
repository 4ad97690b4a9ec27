// What the linear ops share: rows of input, rows of output, and a packed weight. A packed weight consists of panels of
// LINEAR_PANEL output features. A panel is read from front to back, a step along in_features at a time. Where the last
// panel has more features than the weight, they are zero.
#pragma once

#include <cstdint>

#include "types.h"

namespace pagedattn {

constexpr int LINEAR_PANEL = 16;  // output features

// At most so many rows share a pass over the weights. Beside the work for so many rows, reading the weights again costs
// nothing.
constexpr int64_t LINEAR_CHUNK_ROWS = 128;

// A kernel gets one chunk of the op's rows.
struct LinearParams {
  DType dtype;  // of input and out
  int64_t num_rows;
  int64_t in_features;
  int64_t out_features;
  const void* input;     // [num_rows, in_features]
  int64_t input_stride;  // elements between rows
  const float* bias;     // [out_features], or nullptr
  void* out;             // [num_rows, out_features]
};

}  // namespace pagedattn
