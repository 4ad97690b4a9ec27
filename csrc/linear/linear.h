// What the linear ops share: rows that go in and come out, and panels of output features between them. A packed weight
// consists of panels, each read from front to back, a step along in_features at a time. What the last panel has too
// many is zero.
#pragma once

#include <cstdint>

#include "types.h"

namespace pagedattn {

constexpr int LINEAR_PANEL = 16;  // output features

// Rows that share a pass over the weights, at most: beside these, reading the weights again costs nothing.
constexpr int64_t LINEAR_CHUNK_ROWS = 128;

// What a kernel takes is a chunk of rows.
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
