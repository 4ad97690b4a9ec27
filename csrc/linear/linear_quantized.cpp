#include "linear/linear_quantized.h"

#include <memory>

#include "linear/linear_op.h"
#include "ops.h"

namespace pagedattn {
namespace {

// Rows of scratch for a chunk.
int64_t rows_of_scratch(int64_t num_rows, int64_t chunk_rows) {
  return ceil_div(std::min(num_rows, chunk_rows), ROWS_PER_TILE) * ROWS_PER_TILE;
}

void run(const LinearInt8Params& op_params) {
  LinearInt8Params params = op_params;
  params.code_stride = ceil_div(params.in_features, CODE_MULTIPLE) * CODE_MULTIPLE;
  const auto linear_tiles = PAGEDATTN_CPU_KERNEL(linear_int8_tiles);
  const bool on_tiles = linear_tiles != nullptr && params.num_rows > MAX_ROWS_WITHOUT_TILES;
  const bool large_chunks = on_tiles && MAX_TILE_CHUNK_ROWS * params.code_stride <= TILE_CHUNK_CODES;
  const int64_t chunk_rows = large_chunks ? MAX_TILE_CHUNK_ROWS : LINEAR_CHUNK_ROWS;
  const int64_t scratch_rows = rows_of_scratch(params.num_rows, chunk_rows);
  const auto codes = std::make_unique_for_overwrite<int8_t[]>(scratch_rows * params.code_stride);
  const auto excess = std::make_unique_for_overwrite<ExcessQuad[]>(scratch_rows * ceil_div(params.in_features, QUAD));
  float row_scales[MAX_TILE_CHUNK_ROWS];
  int32_t code_sums[MAX_TILE_CHUNK_ROWS], num_excesses[MAX_TILE_CHUNK_ROWS];
  params.codes = codes.get();
  params.excess = excess.get();
  params.row_scales = row_scales;
  params.code_sums = code_sums;
  params.num_excesses = num_excesses;
  if (on_tiles) {
    run_linear(params, PAGEDATTN_CPU_KERNEL(quantize_rows_int8_tiles), linear_tiles, chunk_rows);
  } else {
    run_linear(params, PAGEDATTN_CPU_KERNEL(quantize_rows_int8), PAGEDATTN_CPU_KERNEL(linear_int8));
  }
}

void run(const LinearInt4Params& op_params) {
  LinearInt4Params params = op_params;
  const auto linear_tiles = PAGEDATTN_CPU_KERNEL(linear_int4_tiles);
  const bool on_tiles = linear_tiles != nullptr && params.num_rows > MAX_ROWS_WITHOUT_TILES;
  // Each panel passes over the codes of all rows block by block, a few bytes of each tile at a time.
  const bool small_chunks = !on_tiles && LINEAR_CHUNK_ROWS * params.in_features > INT4_CHUNK_CODES;
  const int64_t chunk_rows = small_chunks ? LINEAR_CHUNK_ROWS / 2 : LINEAR_CHUNK_ROWS;
  const int64_t scratch_rows = rows_of_scratch(params.num_rows, chunk_rows);
  params.code_stride = params.in_features;
  const auto codes = std::make_unique_for_overwrite<int8_t[]>(scratch_rows * params.code_stride);
  const auto blocks = std::make_unique_for_overwrite<QuantizedBlock[]>(scratch_rows * params.in_features / INT4_BLOCK);
  params.codes = codes.get();
  params.blocks = blocks.get();
  if (on_tiles) {
    run_linear(params, PAGEDATTN_CPU_KERNEL(quantize_rows_int4_tiles), linear_tiles, chunk_rows);
  } else {
    run_linear(params, PAGEDATTN_CPU_KERNEL(quantize_rows_int4), PAGEDATTN_CPU_KERNEL(linear_int4), chunk_rows);
  }
}

}  // namespace

Tensor linear_int8(const Tensor& input, const Tensor& packed_weight, const Tensor& weight_scales,
                   const std::optional<Tensor>& bias) {
  const Door door("linear_int8", input);
  LinearInt8Params params{};
  set_input(door, params, input);
  door.check(1 <= params.in_features && params.in_features <= MAX_INT8_FEATURES, "input", "expected rows of 1 to ",
             MAX_INT8_FEATURES, " elements, got ", params.in_features);
  door.dtype("weight_scales", weight_scales, ScalarType::Float);
  door.rank("weight_scales", weight_scales, 1);
  door.contiguous("weight_scales", weight_scales);
  params.weight_scales = weight_scales.const_data_ptr<float>();
  params.out_features = weight_scales.size(0);
  const int64_t num_panels = num_panels_of(params.out_features);
  const int64_t num_quads = ceil_div(params.in_features, QUAD);
  door.dtype("packed_weight", packed_weight, ScalarType::Byte);
  door.rank("packed_weight", packed_weight, 4);
  door.shape("packed_weight", packed_weight, {num_panels, num_quads, LINEAR_PANEL, QUAD});
  door.contiguous("packed_weight", packed_weight);
  params.weight = packed_weight.const_data_ptr<uint8_t>();
  set_bias(door, params, bias);
  Tensor out = new_out(params, input);
  CpuGraph::run_or_capture(AnyValues{}, run, params);
  return out;
}

Tensor linear_int4(const Tensor& input, const Tensor& packed_weight, int64_t group_size, int64_t out_features,
                   const std::optional<Tensor>& bias, std::optional<ScalarType> scale_dtype) {
  const Door door("linear_int4", input);
  LinearInt4Params params{};
  set_input(door, params, input);
  door.check(group_size >= INT4_BLOCK && group_size % INT4_BLOCK == 0, "group_size", "expected a multiple of ",
             INT4_BLOCK, ", got ", group_size);
  door.check(params.in_features >= group_size && params.in_features % group_size == 0, "input",
             "expected rows of a whole number of groups of ", group_size, " elements, got ", params.in_features);
  params.num_groups = params.in_features / group_size;
  params.blocks_per_group = group_size / INT4_BLOCK;
  set_out_features(door, params, out_features);
  const int64_t num_panels = num_panels_of(out_features);
  door.dtype("packed_weight", packed_weight, ScalarType::Byte);
  door.rank("packed_weight", packed_weight, 3);
  const ScalarType packed_scales = scale_dtype.value_or(ScalarType::Float);
  const bool is_half = packed_scales == ScalarType::Half;
  door.check(is_half || packed_scales == ScalarType::Float || packed_scales == ScalarType::BFloat16, "scale_dtype",
             "expected float32, float16 or bfloat16, got ", packed_scales);
  params.scale_dtype = is_half ? DType::FLOAT16 : DType::FLOAT32;  // bf16 scales are stored in fp32
  const int64_t group_bytes = LINEAR_PANEL * (group_size / 2 + element_size(params.scale_dtype) + 1);
  door.shape("packed_weight", packed_weight, {num_panels, params.num_groups, group_bytes});
  door.contiguous("packed_weight", packed_weight);
  params.weight = packed_weight.const_data_ptr<uint8_t>();
  set_bias(door, params, bias);
  Tensor out = new_out(params, input);
  CpuGraph::run_or_capture(AnyValues{}, run, params);
  return out;
}

}  // namespace pagedattn
