#include "linear/linear_packed.h"

#include <memory>

#include "linear/linear_op.h"
#include "ops.h"

namespace pagedattn {
namespace {

class Packed {
 public:
  using Params = LinearPackedParams;

  static int64_t chunk_rows(const Params& params) { return params.on_tiles ? TILE_CHUNK_ROWS : LINEAR_CHUNK_ROWS; }
  static LinearKernels<Params> kernels(const Params&) {
    return {PAGEDATTN_CPU_KERNEL(convert_rows), PAGEDATTN_CPU_KERNEL(linear_packed)};
  }
  static int64_t scratch_rows(int64_t num_rows) { return num_rows; }

  Packed(const Params& params, int64_t scratch_rows)
      : row_size_(ceil_div(params.in_features, MAX_PACKED_BLOCK) * MAX_PACKED_BLOCK),
        rows_(std::make_unique_for_overwrite<float[]>(scratch_rows * row_size_)) {}
  void give_scratch(Params& chunk, int64_t scratch_row) { chunk.rows = rows_.get() + scratch_row * row_size_; }

  static void select_expert(Params& params, int64_t expert, int64_t weight_bytes) {
    params.packed_weight = static_cast<const char*>(params.packed_weight) + expert * weight_bytes;
    if (params.bias != nullptr) params.bias += expert * params.out_features;
  }

 private:
  int64_t row_size_;
  std::unique_ptr<float[]> rows_;
};

void set_weight(const Door& door, LinearPackedParams& params, const Tensor& packed_weight, int64_t out_features,
                std::optional<int64_t> num_experts = {}) {
  set_out_features(door, params, out_features);
  params.weight_dtype = door.float_dtype("packed_weight", packed_weight);
  check_sizes(door, "packed_weight", packed_weight,
              for_experts(num_experts, {num_panels_of(out_features), params.in_features, LINEAR_PANEL}));
  door.contiguous("packed_weight", packed_weight);
  params.packed_weight = packed_weight.const_data_ptr();
}

// When the op runs, as a CPU graph may run it with another capability.
LinearPackedParams choose_tiles(LinearPackedParams params) {
  params.on_tiles = cpu_capability() == CpuCapability::AMX && params.dtype == DType::BFLOAT16 &&
                    params.weight_dtype == DType::BFLOAT16;
  return params;
}

void run(const LinearPackedParams& params) { run_linear<Packed>(choose_tiles(params)); }

void run_grouped(const GroupedLinearParams<LinearPackedParams>& op_params) {
  auto params = op_params;
  params.linear = choose_tiles(params.linear);
  run_grouped_linear<Packed>(params);
}

}  // namespace

Tensor linear_packed(const Tensor& input, const Tensor& packed_weight, int64_t out_features,
                     const std::optional<Tensor>& bias) {
  const Door door("linear_packed", input);
  LinearPackedParams params{};
  set_input(door, params, input);
  set_weight(door, params, packed_weight, out_features);
  set_bias(door, params, bias);
  Tensor out = new_out(params, input);
  CpuGraph::run_or_capture(AnyValues{}, run, params);
  return out;
}

Tensor grouped_linear_packed(const Tensor& input, const Tensor& offsets, const Tensor& packed_weight,
                             int64_t out_features, const std::optional<Tensor>& bias) {
  const Door door("grouped_linear_packed", input);
  GroupedLinearParams<LinearPackedParams> params{};
  set_input(door, params.linear, input);
  const OffsetsCheck check = set_offsets(door, params, input, offsets);
  set_weight(door, params.linear, packed_weight, out_features, params.num_experts);
  set_weight_bytes(params, packed_weight, element_size(params.linear.weight_dtype));
  set_bias(door, params.linear, bias, params.num_experts);
  Tensor out = new_out(params.linear, input);
  CpuGraph::run_or_capture(check, run_grouped, params);
  return out;
}

}  // namespace pagedattn
