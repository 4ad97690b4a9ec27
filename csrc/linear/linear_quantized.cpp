#include "linear/linear_quantized.h"

#include <memory>

#include "ops.h"
#include "parallel.h"
#include "torch_utils.h"

namespace pagedattn {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sets what the parameters have of input, bias and out; of out and bias the number of features is known.
template <typename Params>
void set_rows(const Door& door, Params& params, const Tensor& input, const std::optional<Tensor>& bias, Tensor& out,
              int64_t out_features) {
  if (bias.has_value()) {
    door.dtype("bias", *bias, ScalarType::Float);
    door.shape("bias", *bias, {out_features});
    door.contiguous("bias", *bias);
    params.bias = bias->const_data_ptr<float>();
  }
  std::vector<int64_t> out_sizes(input.sizes().begin(), input.sizes().end());
  out_sizes.back() = out_features;
  door.dtype("out", out, input.scalar_type());
  door.rank("out", out, input.dim());
  door.shape("out", out, IntHeaderOnlyArrayRef(out_sizes.data(), out_sizes.size()));
  params.out_stride = door.written_rows("out", out).stride;
  params.out_features = out_features;
  params.input = input.const_data_ptr();
  params.out = out.mutable_data_ptr();
}

// A stride for `size` bytes a row: whole vectors, and an odd number of cache lines, so that the rows of a tile, of
// which the same elements are loaded together, do not all fall into the same few places of the nearest cache.
int64_t scratch_stride(int64_t size) {
  constexpr int64_t LINE_BYTES = 64;
  return (ceil_div(size, LINE_BYTES) | 1) * LINE_BYTES;
}

// Calls run(params) for chunks of at most MAX_QUANTIZED_ROWS rows.
template <typename Params, typename Run>
void for_each_chunk(Params params, int64_t num_rows, const Run& run) {
  const int64_t input_bytes = params.input_stride * element_size(params.dtype);
  const int64_t out_bytes = params.out_stride * element_size(params.dtype);
  for (int64_t row = 0; row < num_rows; row += MAX_QUANTIZED_ROWS) {
    params.num_rows = std::min<int64_t>(num_rows - row, MAX_QUANTIZED_ROWS);
    run(params);
    params.input = static_cast<const char*>(params.input) + params.num_rows * input_bytes;
    params.out = static_cast<char*>(params.out) + params.num_rows * out_bytes;
  }
}

}  // namespace

void linear_int8(Tensor& out, const Tensor& input, const Tensor& packed_weight, const Tensor& weight_scales,
                 const std::optional<Tensor>& bias) {
  const Door door("linear_int8", input);
  LinearInt8Params params{};
  params.dtype = door.float_dtype("input", input);
  const RowView rows = door.rows("input", input);
  door.check(1 <= rows.width && rows.width <= MAX_INT8_FEATURES, "input", "expected rows of 1 to ", MAX_INT8_FEATURES,
             " elements, got ", rows.width);
  params.in_features = rows.width;
  params.input_stride = rows.stride;
  door.dtype("weight_scales", weight_scales, ScalarType::Float);
  door.rank("weight_scales", weight_scales, 1);
  door.contiguous("weight_scales", weight_scales);
  params.weight_scales = weight_scales.const_data_ptr<float>();
  const int64_t num_panels = ceil_div(weight_scales.size(0), LINEAR_PANEL);
  const int64_t num_quads = ceil_div(rows.width, QUAD);
  door.dtype("packed_weight", packed_weight, ScalarType::Byte);
  door.rank("packed_weight", packed_weight, 4);
  door.shape("packed_weight", packed_weight, {num_panels, num_quads, LINEAR_PANEL, QUAD});
  door.contiguous("packed_weight", packed_weight);
  params.weight = packed_weight.const_data_ptr<uint8_t>();
  set_rows(door, params, input, bias, out, weight_scales.size(0));

  const int64_t chunk_rows = std::min<int64_t>(rows.num_rows, MAX_QUANTIZED_ROWS);
  params.code_stride = scratch_stride(rows.width);
  const auto codes = std::make_unique_for_overwrite<int8_t[]>(chunk_rows * params.code_stride);
  const auto excess = std::make_unique_for_overwrite<ExcessQuad[]>(chunk_rows * num_quads);
  float row_scales[MAX_QUANTIZED_ROWS];
  int32_t code_sums[MAX_QUANTIZED_ROWS], num_excesses[MAX_QUANTIZED_ROWS];
  params.codes = codes.get();
  params.excess = excess.get();
  params.row_scales = row_scales;
  params.code_sums = code_sums;
  params.num_excesses = num_excesses;

  const auto quantize_rows = PAGEDATTN_CPU_KERNEL(quantize_rows_int8);
  const auto multiply_panels = PAGEDATTN_CPU_KERNEL(linear_int8);
  for_each_chunk(params, rows.num_rows, [&](const LinearInt8Params& chunk) {
    parallel_for_rows(chunk.num_rows, chunk.in_features,
                      [&](int64_t begin, int64_t end) { quantize_rows(chunk, begin, end); });
    // 16 multiply-adds, of the panel's columns, for an element.
    parallel_for_rows(num_panels, chunk.in_features * chunk.num_rows,
                      [&](int64_t begin, int64_t end) { multiply_panels(chunk, begin, end); });
  });
}

}  // namespace pagedattn
