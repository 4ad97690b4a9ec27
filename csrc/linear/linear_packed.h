// linear_packed: parameters and kernels. It has no CUDA kernel.
#pragma once

#include "cpu_dispatch.h"
#include "linear/linear.h"

namespace pagedattn {

// Rows that share a pass over the weights, at most: beside these, reading the weights again costs nothing.
constexpr int64_t LINEAR_ROWS_AT_ONCE = 128;

struct LinearPackedParams : LinearParams {
  DType weight_dtype;
  const void* packed_weight;  // [num_panels, in_features, LINEAR_PANEL]
};

// The elements [begin, end) of the rows [begin_row, end_row) of `input` as linear_packed reads them: in fp32, block by
// block along in_features, in a block tile by tile, the rows of a tile side by side. `interleaved`
// [end_row - begin_row, in_features] is that of all elements.
PAGEDATTN_DECLARE_CPU_KERNEL(interleave_rows, const LinearPackedParams& params, int64_t begin_row, int64_t end_row,
                             int64_t begin, int64_t end, float* interleaved)
// The rows [begin_row, end_row), LINEAR_ROWS_AT_ONCE or fewer, of the panels [begin_panel, end_panel) of `out`.
PAGEDATTN_DECLARE_CPU_KERNEL(linear_packed, const LinearPackedParams& params, int64_t begin_row, int64_t end_row,
                             const float* interleaved, int64_t begin_panel, int64_t end_panel)

}  // namespace pagedattn
