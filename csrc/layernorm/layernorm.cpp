#include "layernorm/layernorm.h"

#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

RmsNormParams check_rms_norm(const Door& door, const Tensor& input, const Tensor& weight, double epsilon) {
  RmsNormParams params{};
  params.dtype = door.float_dtype("input", input);
  const RowView rows = door.rows("input", input);
  door.dtype("weight", weight, input.scalar_type());
  door.shape("weight", weight, {rows.width});
  door.contiguous("weight", weight);
  door.check(epsilon >= 0, "epsilon", "expected a number that is not negative, got ", epsilon);
  params.num_rows = rows.num_rows;
  params.hidden_size = rows.width;
  params.epsilon = door.finite("epsilon", epsilon);
  params.input = input.const_data_ptr();
  params.input_stride = rows.stride;
  params.weight = weight.const_data_ptr();
  return params;
}

// The stride between rows of an output or residual that must look like `input`.
int64_t check_like(const Door& door, const char* argument, const Tensor& tensor, const Tensor& input) {
  door.dtype(argument, tensor, input.scalar_type());
  door.shape(argument, tensor, input.sizes());
  return door.written_rows(argument, tensor).stride;
}

void run(const Door& door, const RmsNormParams& params) {
  run_rows(door, PAGEDATTN_ROW_KERNELS(rms_norm), params, params.num_rows, params.hidden_size);
}

}  // namespace

void rms_norm(Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  const Door door("rms_norm", input);
  RmsNormParams params = check_rms_norm(door, input, weight, epsilon);
  params.out_stride = check_like(door, "out", out, input);
  params.out = out.mutable_data_ptr();
  run(door, params);
}

void fused_add_rms_norm(Tensor& input, Tensor& residual, const Tensor& weight, double epsilon) {
  const Door door("fused_add_rms_norm", input);
  RmsNormParams params = check_rms_norm(door, input, weight, epsilon);
  params.residual_stride = check_like(door, "residual", residual, input);
  door.other_memory("residual", residual, "input", input);
  params.residual = residual.mutable_data_ptr();
  params.out_stride = door.written_rows("input", input).stride;
  params.out = input.mutable_data_ptr();
  run(door, params);
}

}  // namespace pagedattn
