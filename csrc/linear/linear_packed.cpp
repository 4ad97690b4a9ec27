#include "linear/linear_packed.h"

#include <memory>

#include "linear/linear_op.h"
#include "ops.h"

namespace pagedattn {
namespace {

void run(const LinearPackedParams& op_params) {
  LinearPackedParams params = op_params;
  params.on_tiles = cpu_capability() == CpuCapability::AMX && params.dtype == DType::BFLOAT16 &&
                    params.weight_dtype == DType::BFLOAT16;
  const int64_t chunk_rows = params.on_tiles ? TILE_CHUNK_ROWS : LINEAR_CHUNK_ROWS;
  const int64_t row_size = ceil_div(params.in_features, MAX_PACKED_BLOCK) * MAX_PACKED_BLOCK;
  const auto rows = std::make_unique_for_overwrite<float[]>(std::min(params.num_rows, chunk_rows) * row_size);
  params.rows = rows.get();
  run_linear(params, PAGEDATTN_CPU_KERNEL(convert_rows), PAGEDATTN_CPU_KERNEL(linear_packed), chunk_rows);
}

}  // namespace

Tensor linear_packed(const Tensor& input, const Tensor& packed_weight, int64_t out_features,
                     const std::optional<Tensor>& bias) {
  const Door door("linear_packed", input);
  LinearPackedParams params{};
  set_input(door, params, input);
  set_out_features(door, params, out_features);
  params.weight_dtype = door.float_dtype("packed_weight", packed_weight);
  door.rank("packed_weight", packed_weight, 3);
  door.shape("packed_weight", packed_weight, {num_panels_of(out_features), params.in_features, LINEAR_PANEL});
  door.contiguous("packed_weight", packed_weight);
  params.packed_weight = packed_weight.const_data_ptr();
  set_bias(door, params, bias);
  Tensor out = new_out(params, input);
  CpuGraph::run_or_capture(AnyValues{}, run, params);
  return out;
}

}  // namespace pagedattn
