// linear_packed: parameters and kernels. It has no CUDA kernel.
#pragma once

#include "cpu_dispatch.h"
#include "linear/linear.h"

namespace pagedattn {

constexpr int64_t MAX_PACKED_BLOCK = 256;  // elements along in_features; a multiple of each kernel's block

// On tiles, LINEAR_CHUNK_ROWS are multiplied in less time than their weights are read. More than TILE_CHUNK_ROWS would
// leave the second-level cache.
constexpr int64_t TILE_CHUNK_ROWS = 256;

struct LinearPackedParams : LinearParams {
  DType weight_dtype;
  const void* packed_weight;  // [num_panels, in_features, LINEAR_PANEL]
  bool on_tiles;              // of AMX: rows and weights are bf16

  // Scratch: the rows as they are multiplied, in fp32 or in pairs of bf16, [blocks of in_features, num_rows, steps of a
  // block], or as tiles. Its size is num_rows times in_features floats, with in_features rounded up to a multiple of
  // MAX_PACKED_BLOCK.
  void* rows;
};

// Rows [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(convert_rows, const LinearPackedParams& params, int64_t begin, int64_t end)
// Panels [begin, end). The rows are converted already.
PAGEDATTN_DECLARE_CPU_KERNEL(linear_packed, const LinearPackedParams& params, int64_t begin, int64_t end)

}  // namespace pagedattn
