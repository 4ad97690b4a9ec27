#include "linear/quantize_weight.h"

#include <vector>

#include "cpu_graph.h"
#include "door.h"
#include "linear/linear_quantized.h"
#include "ops.h"
#include "parallel.h"

namespace pagedattn {
namespace {

void set_weight(const Door& door, QuantizeWeightParams& params, const Tensor& weight) {
  params.dtype = door.float_dtype("weight", weight);
  door.rank("weight", weight, 2);
  params.out_features = weight.size(0);
  params.in_features = weight.size(1);
  params.weight_stride = door.rows("weight", weight).stride;
  params.weight = weight.const_data_ptr();
}

void check_out(const Door& door, const char* argument, const Tensor& out, ScalarType dtype,
               std::initializer_list<int64_t> shape) {
  door.dtype(argument, out, dtype);
  door.shape(argument, out, shape);
  door.contiguous(argument, out);
}

template <typename Params>
void quantize(const char* op, const Params& op_params, void (*kernel)(const Params&, int64_t, int64_t)) {
  Params params = op_params;
  std::vector<float> refused(params.out_features);
  params.refused = refused.data();
  parallel_for_rows(params.out_features, std::max<int64_t>(params.in_features, 1),  // an empty row has a scale, too
                    [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
  for (const float element : refused) {
    if (element == 0.0f) continue;
    std::ostringstream message;
    message << op << ": weight: expected elements between " << -MAX_WEIGHT << " and " << MAX_WEIGHT << ", got "
            << element;
    throw ValueError(message.str());
  }
}

void run_int8(const QuantizeWeightInt8Params& params) {
  quantize("quantize_weight_int8", params, PAGEDATTN_CPU_KERNEL(quantize_weight_int8));
}

void run_int4(const QuantizeWeightInt4Params& params) {
  quantize("quantize_weight_int4", params, PAGEDATTN_CPU_KERNEL(quantize_weight_int4));
}

}  // namespace

void quantize_weight_int8(Tensor& codes, Tensor& scales, const Tensor& weight) {
  const Door door("quantize_weight_int8", weight);
  QuantizeWeightInt8Params params{};
  set_weight(door, params, weight);
  check_out(door, "codes", codes, ScalarType::Char, {params.out_features, params.in_features});
  params.codes = codes.mutable_data_ptr<int8_t>();
  check_out(door, "scales", scales, ScalarType::Float, {params.out_features});
  door.other_memory("scales", scales, "codes", codes);
  params.scales = scales.mutable_data_ptr<float>();
  CpuGraph::run_or_capture(AnyValues{}, run_int8, params);
}

void quantize_weight_int4(Tensor& codes, Tensor& scales, Tensor& zeros, const Tensor& weight) {
  const Door door("quantize_weight_int4", weight);
  QuantizeWeightInt4Params params{};
  set_weight(door, params, weight);
  door.check(params.in_features % INT4_STEP == 0, "weight", "expected in_features that are a multiple of ", INT4_STEP,
             ", got ", params.in_features);
  const int64_t num_groups = params.in_features / INT4_STEP;
  check_out(door, "codes", codes, ScalarType::Byte, {params.out_features, params.in_features});
  params.codes = codes.mutable_data_ptr<uint8_t>();
  check_out(door, "scales", scales, ScalarType::Float, {params.out_features, num_groups});
  door.other_memory("scales", scales, "codes", codes);
  params.scales = scales.mutable_data_ptr<float>();
  check_out(door, "zeros", zeros, ScalarType::Byte, {params.out_features, num_groups});
  door.other_memory("zeros", zeros, "codes", codes);
  door.other_memory("zeros", zeros, "scales", scales);
  params.zeros = zeros.mutable_data_ptr<uint8_t>();
  CpuGraph::run_or_capture(AnyValues{}, run_int4, params);
}

}  // namespace pagedattn
