#include "linear/pack_weight.h"

#include <algorithm>

#include "linear/linear_op.h"
#include "linear/linear_quantized.h"
#include "ops.h"

namespace pagedattn {
namespace {

constexpr int64_t CODES_PER_INT32 = 8;

// Elements between the rows of a tensor of two dimensions.
int64_t row_stride(const Door& door, const char* argument, const Tensor& tensor) {
  door.rank(argument, tensor, 2);
  return door.rows(argument, tensor).stride;
}

template <typename Params>
void pack(const Params& params, void (*kernel)(const Params&, int64_t, int64_t)) {
  parallel_for_rows(num_panels_of(params.out_features), params.in_features * LINEAR_PANEL,
                    [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

// Codes and zeros of 4 bits that have a byte each.
struct Int4Check {
  Door door;
  PackLinearWeightInt4Params params;
  struct {
    bool are_given = true;
  } values;

  void operator()() const {
    if (!params.codes_are_nibbles) check("codes", params.codes, params.codes_stride, params.in_features);
    check("zeros", params.zeros, params.zeros_stride, params.num_groups);
  }
  void check(const char* argument, const uint8_t* codes, int64_t stride, int64_t num_columns) const {
    constexpr uint8_t MAX_INT4_CODE = 15;
    for (int64_t row = 0; row < params.out_features; ++row, codes += stride) {
      uint8_t largest = 0;
      for (int64_t i = 0; i < num_columns; ++i) largest = std::max(largest, codes[i]);
      door.check(largest <= MAX_INT4_CODE, argument, "expected values up to ", int{MAX_INT4_CODE}, ", got ",
                 int{largest});
    }
  }
};

void run_float(const PackLinearWeightParams& params) { pack(params, PAGEDATTN_CPU_KERNEL(pack_linear_weight)); }

void run_int8(const PackLinearWeightInt8Params& params) { pack(params, PAGEDATTN_CPU_KERNEL(pack_linear_weight_int8)); }

void run_int4(const PackLinearWeightInt4Params& params) { pack(params, PAGEDATTN_CPU_KERNEL(pack_linear_weight_int4)); }

}  // namespace

void pack_linear_weight(Tensor& out, const Tensor& weight) {
  const Door door("pack_linear_weight", weight);
  PackLinearWeightParams params{};
  params.dtype = door.float_dtype("weight", weight);
  params.weight_stride = row_stride(door, "weight", weight);
  params.weight = weight.const_data_ptr();
  params.out_features = weight.size(0);
  params.in_features = weight.size(1);
  door.dtype("out", out, dtype_of(weight));
  door.shape("out", out, {num_panels_of(params.out_features), params.in_features, LINEAR_PANEL});
  door.contiguous("out", out);
  params.out = out.mutable_data_ptr();
  CpuGraph::run_or_capture(AnyValues{}, run_float, params);
}

void pack_linear_weight_int8(Tensor& out, const Tensor& weight) {
  const Door door("pack_linear_weight_int8", weight);
  PackLinearWeightInt8Params params{};
  door.dtype("weight", weight, ScalarType::Char);
  params.weight_stride = row_stride(door, "weight", weight);
  params.weight = weight.const_data_ptr<int8_t>();
  params.out_features = weight.size(0);
  params.in_features = weight.size(1);
  door.dtype("out", out, ScalarType::Byte);
  door.shape("out", out, {num_panels_of(params.out_features), ceil_div(params.in_features, QUAD), LINEAR_PANEL, QUAD});
  door.contiguous("out", out);
  params.out = out.mutable_data_ptr<uint8_t>();
  CpuGraph::run_or_capture(AnyValues{}, run_int8, params);
}

void pack_linear_weight_int4(Tensor& out, const Tensor& codes, const Tensor& scales, const Tensor& zeros) {
  const Door door("pack_linear_weight_int4", codes);
  PackLinearWeightInt4Params params{};
  params.codes_are_nibbles = dtype_of(codes) == ScalarType::Int;
  door.check_type(params.codes_are_nibbles || dtype_of(codes) == ScalarType::Byte, "codes",
                  "expected dtype uint8 or int32, got ", dtype_of(codes));
  params.codes_stride = row_stride(door, "codes", codes) * (params.codes_are_nibbles ? sizeof(int32_t) : 1);
  params.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  params.out_features = codes.size(0);
  params.in_features = codes.size(1) * (params.codes_are_nibbles ? CODES_PER_INT32 : 1);
  params.scale_dtype = door.float_dtype("scales", scales);
  door.check_type(params.scale_dtype != DType::BFLOAT16, "scales", "expected dtype float32 or float16, got bfloat16");
  params.scales_stride = row_stride(door, "scales", scales);
  params.scales = scales.const_data_ptr();
  params.num_groups = scales.size(1);
  const int64_t group_size = params.num_groups == 0 ? 0 : params.in_features / params.num_groups;
  door.check(scales.size(0) == params.out_features && group_size > 0 && group_size % INT4_STEP == 0 &&
                 group_size * params.num_groups == params.in_features,
             "scales", "expected shape [", params.out_features, ", ", params.in_features, " / a multiple of ",
             INT4_STEP, "], got ", scales.sizes());
  door.dtype("zeros", zeros, ScalarType::Byte);
  door.shape("zeros", zeros, {params.out_features, params.num_groups});
  params.zeros_stride = row_stride(door, "zeros", zeros);
  params.zeros = zeros.const_data_ptr<uint8_t>();
  const int64_t group_bytes = int4_group_bytes(group_size, params.scale_dtype);
  door.dtype("out", out, ScalarType::Byte);
  door.shape("out", out, {num_panels_of(params.out_features), params.num_groups, group_bytes});
  door.contiguous("out", out);
  params.out = out.mutable_data_ptr<uint8_t>();
  CpuGraph::run_or_capture(Int4Check{door, params, {}}, run_int4, params);
}

}  // namespace pagedattn
