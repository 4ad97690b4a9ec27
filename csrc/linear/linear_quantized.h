// linear_int8 and linear_int4: parameters and kernels. They have no CUDA kernels.
//
// Rows of input are converted to 8-bit integers first, in chunks that stay in a cache while the panels are read.
#pragma once

#include "cpu_dispatch.h"
#include "linear/linear.h"

namespace pagedattn {

constexpr int QUAD = 4;            // adjacent elements of a row, multiplied with adjacent weights
constexpr int CODE_MULTIPLE = 64;  // codes of a row in one step, at most

// A CPU with tiles (AMX) multiplies more rows than this with them. Scratch for the rows has room for whole tiles.
constexpr int64_t MAX_ROWS_WITHOUT_TILES = 12;
constexpr int64_t ROWS_PER_TILE = 16;

// A chunk of more rows reads the weights less often, but its codes must stay in the second-level cache.
constexpr int64_t MAX_TILE_CHUNK_ROWS = 2 * LINEAR_CHUNK_ROWS;
constexpr int64_t TILE_CHUNK_CODES = 1 << 20;
constexpr int64_t INT4_CHUNK_CODES = 1 << 18;  // without tiles: half of a second-level cache of 512 KiB

constexpr int64_t MAX_INT8_FEATURES = 1 << 17;  // the sum of so many products of at most 128 * 127 is below 2^31

// More codes of a quad, which are multiplied separately.
struct ExtraQuad {
  int32_t quad;
  int8_t codes[QUAD];
};

struct LinearInt8Params : LinearParams {
  const uint8_t* weight;       // [num_panels, num_quads(), 16, 4], each stored 128 too large
  const float* weight_scales;  // [out_features]

  // Scratch: the quantized rows.
  int8_t* codes;          // tiles of [code_stride / 4, rows of the tile, 4], or [code_stride / 64, 16, 64]
  int64_t code_stride;    // in_features, rounded up to a multiple of CODE_MULTIPLE
  float* row_scales;      // [num_rows]
  int32_t* code_sums;     // [num_rows]
  ExtraQuad* high_codes;  // [num_rows, num_quads()], each counts 256 times
  int32_t* num_high;      // [num_rows]
  ExtraQuad* excess;      // [num_rows, num_quads()], what some pairs of codes are beyond their limit
  int32_t* num_excesses;  // [num_rows]

  constexpr int64_t num_quads() const { return (in_features + QUAD - 1) / QUAD; }
};

constexpr int INT4_STEP = 32;    // a group of a weight is some steps
constexpr int INT4_BLOCK = 128;  // at most so many adjacent elements of a row, beside one group, have one scale

// Of elements 0 and 1 of some quads, and of elements 2 and 3.
struct CodeSums {
  int16_t halves[2];
};

// In a packed weight, a group of a panel consists of its steps, then 16 scales in float16 or float32, then 16 zeros of
// a byte each. A step is [4, 16, 4] bytes for 4 pairs of quads. The low bits of a byte are from the first quad of a
// pair, the high bits from the second quad.
constexpr int64_t int4_scale_bytes(DType scale_dtype) { return LINEAR_PANEL * (element_size(scale_dtype) + 1); }
constexpr int64_t int4_group_bytes(int64_t group_size, DType scale_dtype) {
  return LINEAR_PANEL * group_size / 2 + int4_scale_bytes(scale_dtype);
}

struct LinearInt4Params : LinearParams {
  const uint8_t* weight;  // [num_panels, num_groups, bytes of a group]
  int64_t num_groups;
  int64_t group_size;
  DType scale_dtype;  // of the weight's scales

  // Scratch: the quantized rows.
  int8_t* codes;        // tiles of [code_stride / 4, rows of the tile, 4], or [code_stride / 64, 16, 64]
  int64_t code_stride;  // in_features, rounded up to a multiple of CODE_MULTIPLE
  float* block_scales;  // tiles of [num_blocks(), rows of the tile], or [num_blocks(), 16]
  CodeSums* code_sums;  // tiles of [num_blocks() or num_steps(), rows of the tile]

  constexpr int64_t num_steps() const { return in_features / INT4_STEP; }
  constexpr int64_t blocks_per_group() const { return (group_size + INT4_BLOCK - 1) / INT4_BLOCK; }
  constexpr int64_t num_blocks() const { return num_groups * blocks_per_group(); }
};

// Rows [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(quantize_rows_int8, const LinearInt8Params& params, int64_t begin, int64_t end)
// Panels [begin, end). The rows are quantized already.
PAGEDATTN_DECLARE_CPU_KERNEL(linear_int8, const LinearInt8Params& params, int64_t begin, int64_t end)

// The same with tiles. Both kernels of a pair, or none, are called for a chunk of rows.
PAGEDATTN_DECLARE_CPU_KERNEL(quantize_rows_int8_tiles, const LinearInt8Params& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(linear_int8_tiles, const LinearInt8Params& params, int64_t begin, int64_t end)

PAGEDATTN_DECLARE_CPU_KERNEL(quantize_rows_int4, const LinearInt4Params& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(linear_int4, const LinearInt4Params& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(quantize_rows_int4_tiles, const LinearInt4Params& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(linear_int4_tiles, const LinearInt4Params& params, int64_t begin, int64_t end)

}  // namespace pagedattn
