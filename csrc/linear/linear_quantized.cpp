#include "linear/linear_quantized.h"

#include <memory>

#include "linear/linear_op.h"
#include "ops.h"

namespace pagedattn {
namespace {

// Tiles of AMX take whole tiles of rows.
int64_t scratch_rows_of(int64_t num_rows) {
  return num_rows <= MAX_ROWS_WITHOUT_TILES ? num_rows : ceil_div(num_rows, ROWS_PER_TILE) * ROWS_PER_TILE;
}

int64_t code_stride_of(const LinearParams& params) {
  return ceil_div(params.in_features, CODE_MULTIPLE) * CODE_MULTIPLE;
}

class Int8 {
 public:
  using Params = LinearInt8Params;

  static int64_t chunk_rows(const Params& params) {
    const bool has_tiles = PAGEDATTN_CPU_KERNEL(linear_int8_tiles) != nullptr;
    return has_tiles && MAX_TILE_CHUNK_ROWS * code_stride_of(params) <= TILE_CHUNK_CODES ? MAX_TILE_CHUNK_ROWS
                                                                                         : LINEAR_CHUNK_ROWS;
  }
  static LinearKernels<Params> kernels(const Params& chunk) {
    const auto on_tiles = PAGEDATTN_CPU_KERNEL(linear_int8_tiles);
    if (on_tiles != nullptr && chunk.num_rows > MAX_ROWS_WITHOUT_TILES) {
      return {PAGEDATTN_CPU_KERNEL(quantize_rows_int8_tiles), on_tiles};
    }
    return {PAGEDATTN_CPU_KERNEL(quantize_rows_int8), PAGEDATTN_CPU_KERNEL(linear_int8)};
  }
  static int64_t scratch_rows(int64_t num_rows) { return scratch_rows_of(num_rows); }

  Int8(const Params& params, int64_t scratch_rows)
      : code_stride_(code_stride_of(params)),
        num_quads_(params.num_quads()),
        codes_(std::make_unique_for_overwrite<int8_t[]>(scratch_rows * code_stride_)),
        high_codes_(std::make_unique_for_overwrite<ExtraQuad[]>(scratch_rows * num_quads_)),
        excess_(std::make_unique_for_overwrite<ExtraQuad[]>(scratch_rows * num_quads_)),
        row_scales_(std::make_unique_for_overwrite<float[]>(scratch_rows)),
        code_sums_(std::make_unique_for_overwrite<int32_t[]>(scratch_rows)),
        num_high_(std::make_unique_for_overwrite<int32_t[]>(scratch_rows)),
        num_excesses_(std::make_unique_for_overwrite<int32_t[]>(scratch_rows)) {}
  void give_scratch(Params& chunk, int64_t scratch_row) {
    chunk.code_stride = code_stride_;
    chunk.codes = codes_.get() + scratch_row * code_stride_;
    chunk.high_codes = high_codes_.get() + scratch_row * num_quads_;
    chunk.excess = excess_.get() + scratch_row * num_quads_;
    chunk.row_scales = row_scales_.get() + scratch_row;
    chunk.code_sums = code_sums_.get() + scratch_row;
    chunk.num_high = num_high_.get() + scratch_row;
    chunk.num_excesses = num_excesses_.get() + scratch_row;
  }

  static void select_expert(Params& params, int64_t expert, int64_t weight_bytes) {
    params.weight += expert * weight_bytes;
    params.weight_scales += expert * params.out_features;
    if (params.bias != nullptr) params.bias += expert * params.out_features;
  }

 private:
  int64_t code_stride_;
  int64_t num_quads_;
  std::unique_ptr<int8_t[]> codes_;
  std::unique_ptr<ExtraQuad[]> high_codes_;
  std::unique_ptr<ExtraQuad[]> excess_;
  std::unique_ptr<float[]> row_scales_;
  std::unique_ptr<int32_t[]> code_sums_;
  std::unique_ptr<int32_t[]> num_high_;
  std::unique_ptr<int32_t[]> num_excesses_;
};

class Int4 {
 public:
  using Params = LinearInt4Params;

  static int64_t chunk_rows(const Params& params) {
    // Without tiles, each panel passes over the codes of all rows block by block, a few bytes of each tile at a time.
    const bool has_tiles = PAGEDATTN_CPU_KERNEL(linear_int4_tiles) != nullptr;
    const bool small_chunks = !has_tiles && LINEAR_CHUNK_ROWS * params.in_features > INT4_CHUNK_CODES;
    return small_chunks ? LINEAR_CHUNK_ROWS / 2 : LINEAR_CHUNK_ROWS;
  }
  static LinearKernels<Params> kernels(const Params& chunk) {
    const auto on_tiles = PAGEDATTN_CPU_KERNEL(linear_int4_tiles);
    if (on_tiles != nullptr && chunk.num_rows > MAX_ROWS_WITHOUT_TILES) {
      return {PAGEDATTN_CPU_KERNEL(quantize_rows_int4_tiles), on_tiles};
    }
    return {PAGEDATTN_CPU_KERNEL(quantize_rows_int4), PAGEDATTN_CPU_KERNEL(linear_int4)};
  }
  static int64_t scratch_rows(int64_t num_rows) { return scratch_rows_of(num_rows); }

  Int4(const Params& params, int64_t scratch_rows)
      : code_stride_(code_stride_of(params)),
        codes_(std::make_unique_for_overwrite<int8_t[]>(scratch_rows * code_stride_)),
        block_scales_(std::make_unique_for_overwrite<float[]>(scratch_rows * params.num_blocks())),
        code_sums_(std::make_unique_for_overwrite<CodeSums[]>(scratch_rows * params.num_steps())) {}
  void give_scratch(Params& chunk, int64_t scratch_row) {
    chunk.code_stride = code_stride_;
    chunk.codes = codes_.get() + scratch_row * code_stride_;
    chunk.block_scales = block_scales_.get() + scratch_row * chunk.num_blocks();
    chunk.code_sums = code_sums_.get() + scratch_row * chunk.num_steps();
  }

  static void select_expert(Params& params, int64_t expert, int64_t weight_bytes) {
    params.weight += expert * weight_bytes;
    if (params.bias != nullptr) params.bias += expert * params.out_features;
  }

 private:
  int64_t code_stride_;
  std::unique_ptr<int8_t[]> codes_;
  std::unique_ptr<float[]> block_scales_;
  std::unique_ptr<CodeSums[]> code_sums_;
};

void set_weight(const Door& door, LinearInt8Params& params, const Tensor& packed_weight, const Tensor& weight_scales,
                std::optional<int64_t> num_experts = {}) {
  door.check(1 <= params.in_features && params.in_features <= MAX_INT8_FEATURES, "input", "expected rows of 1 to ",
             MAX_INT8_FEATURES, " elements, got ", params.in_features);
  door.dtype("weight_scales", weight_scales, ScalarType::Float);
  check_sizes(door, "weight_scales", weight_scales, for_experts(num_experts, {ANY}));
  door.contiguous("weight_scales", weight_scales);
  params.weight_scales = weight_scales.const_data_ptr<float>();
  params.out_features = weight_scales.size(weight_scales.dim() - 1);
  const int64_t num_panels = num_panels_of(params.out_features);
  door.dtype("packed_weight", packed_weight, ScalarType::Byte);
  check_sizes(door, "packed_weight", packed_weight,
              for_experts(num_experts, {num_panels, params.num_quads(), LINEAR_PANEL, QUAD}));
  door.contiguous("packed_weight", packed_weight);
  params.weight = packed_weight.const_data_ptr<uint8_t>();
}

void set_weight(const Door& door, LinearInt4Params& params, const Tensor& packed_weight, int64_t group_size,
                int64_t out_features, std::optional<ScalarType> scale_dtype, std::optional<int64_t> num_experts = {}) {
  door.check(group_size >= INT4_STEP && group_size % INT4_STEP == 0, "group_size", "expected a multiple of ", INT4_STEP,
             ", got ", group_size);
  door.check(params.in_features >= group_size && params.in_features % group_size == 0, "input",
             "expected rows of a whole number of groups of ", group_size, " elements, got ", params.in_features);
  params.num_groups = params.in_features / group_size;
  params.group_size = group_size;
  set_out_features(door, params, out_features);
  const ScalarType packed_scales = scale_dtype.value_or(ScalarType::Float);
  const bool is_half = packed_scales == ScalarType::Half;
  door.dtype("packed_weight", packed_weight, ScalarType::Byte);
  door.check(is_half || packed_scales == ScalarType::Float || packed_scales == ScalarType::BFloat16, "scale_dtype",
             "expected float32, float16 or bfloat16, got ", packed_scales);
  params.scale_dtype = is_half ? DType::FLOAT16 : DType::FLOAT32;  // bf16 scales are stored in fp32
  const int64_t group_bytes = int4_group_bytes(group_size, params.scale_dtype);
  check_sizes(door, "packed_weight", packed_weight,
              for_experts(num_experts, {num_panels_of(out_features), params.num_groups, group_bytes}));
  door.contiguous("packed_weight", packed_weight);
  params.weight = packed_weight.const_data_ptr<uint8_t>();
}

}  // namespace

Tensor linear_int8(const Tensor& input, const Tensor& packed_weight, const Tensor& weight_scales,
                   const std::optional<Tensor>& bias) {
  const Door door("linear_int8", input);
  LinearInt8Params params{};
  set_input(door, params, input);
  set_weight(door, params, packed_weight, weight_scales);
  set_bias(door, params, bias);
  Tensor out = new_out(params, input);
  CpuGraph::run_or_capture(AnyValues{}, run_linear<Int8>, params);
  return out;
}

Tensor grouped_linear_int8(const Tensor& input, const Tensor& offsets, const Tensor& packed_weight,
                           const Tensor& weight_scales, const std::optional<Tensor>& bias) {
  const Door door("grouped_linear_int8", input);
  GroupedLinearParams<LinearInt8Params> params{};
  set_input(door, params.linear, input);
  const OffsetsCheck check = set_offsets(door, params, input, offsets);
  set_weight(door, params.linear, packed_weight, weight_scales, params.num_experts);
  set_weight_bytes(params, packed_weight, 1);
  set_bias(door, params.linear, bias, params.num_experts);
  Tensor out = new_out(params.linear, input);
  CpuGraph::run_or_capture(check, run_grouped_linear<Int8>, params);
  return out;
}

Tensor linear_int4(const Tensor& input, const Tensor& packed_weight, int64_t group_size, int64_t out_features,
                   const std::optional<Tensor>& bias, std::optional<ScalarType> scale_dtype) {
  const Door door("linear_int4", input);
  LinearInt4Params params{};
  set_input(door, params, input);
  set_weight(door, params, packed_weight, group_size, out_features, scale_dtype);
  set_bias(door, params, bias);
  Tensor out = new_out(params, input);
  CpuGraph::run_or_capture(AnyValues{}, run_linear<Int4>, params);
  return out;
}

Tensor grouped_linear_int4(const Tensor& input, const Tensor& offsets, const Tensor& packed_weight, int64_t group_size,
                           int64_t out_features, const std::optional<Tensor>& bias,
                           std::optional<ScalarType> scale_dtype) {
  const Door door("grouped_linear_int4", input);
  GroupedLinearParams<LinearInt4Params> params{};
  set_input(door, params.linear, input);
  const OffsetsCheck check = set_offsets(door, params, input, offsets);
  set_weight(door, params.linear, packed_weight, group_size, out_features, scale_dtype, params.num_experts);
  set_weight_bytes(params, packed_weight, 1);
  set_bias(door, params.linear, bias, params.num_experts);
  Tensor out = new_out(params.linear, input);
  CpuGraph::run_or_capture(check, run_grouped_linear<Int4>, params);
  return out;
}

}  // namespace pagedattn
