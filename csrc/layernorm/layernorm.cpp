#include "layernorm/layernorm.h"

#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

// The dimensions before the last as rows of one stride, or of two.
RowPlaces check_rows(const Door& door, const char* argument, const Tensor& tensor) {
  door.check(tensor.dim() >= 1, argument, "expected at least 1 dimension, got 0");
  const int64_t last = tensor.dim() - 1;
  door.contiguous_from(argument, tensor, last);
  RowPlaces rows{1, tensor.size(last), 0};
  int64_t num_groups = 1;
  for (int64_t dim = last - 1; dim >= 0; --dim) {
    const int64_t size = tensor.size(dim);
    const int64_t stride = tensor.stride(dim);
    if (size == 1) continue;
    if (rows.num_adjacent == 1) {
      rows.num_adjacent = size;
      rows.stride = stride;
    } else if (num_groups == 1 && stride == rows.stride * rows.num_adjacent) {
      rows.num_adjacent *= size;
    } else {
      if (num_groups == 1) rows.group_stride = stride;
      door.check(tensor.numel() == 0 || stride == rows.group_stride * num_groups, argument,
                 "expected rows of one stride or of two, got shape ", tensor.sizes(), " with strides ",
                 tensor.strides());
      num_groups *= size;
    }
  }
  return rows;
}

RmsNormParams check_rms_norm(const Door& door, const Tensor& input, const Tensor& weight, double epsilon) {
  RmsNormParams params{};
  params.dtype = door.float_dtype("input", input);
  params.input_rows = check_rows(door, "input", input);
  params.hidden_size = input.size(input.dim() - 1);
  params.num_rows = input.numel() == 0 ? 0 : input.numel() / params.hidden_size;
  door.dtype("weight", weight, input.scalar_type());
  door.shape("weight", weight, {params.hidden_size});
  door.contiguous("weight", weight);
  door.check(epsilon >= 0, "epsilon", "expected a number that is not negative, got ", epsilon);
  params.epsilon = door.finite("epsilon", epsilon);
  params.input = input.const_data_ptr();
  params.weight = weight.const_data_ptr();
  return params;
}

// The rows of an output or residual that must look like `input`.
RowPlaces check_like(const Door& door, const char* argument, const Tensor& tensor, const Tensor& input) {
  door.dtype(argument, tensor, input.scalar_type());
  door.shape(argument, tensor, input.sizes());
  door.written_elements(argument, tensor);
  return check_rows(door, argument, tensor);
}

void run(const Door& door, const RmsNormParams& params) {
  run_rows(door, AnyValues{}, PAGEDATTN_ROW_KERNELS(rms_norm), params, params.num_rows, params.hidden_size);
}

}  // namespace

void rms_norm(Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  const Door door("rms_norm", input);
  RmsNormParams params = check_rms_norm(door, input, weight, epsilon);
  params.out_rows = check_like(door, "out", out, input);
  params.out = out.mutable_data_ptr();
  run(door, params);
}

void fused_add_rms_norm(Tensor& input, Tensor& residual, const Tensor& weight, double epsilon) {
  const Door door("fused_add_rms_norm", input);
  RmsNormParams params = check_rms_norm(door, input, weight, epsilon);
  params.residual_rows = check_like(door, "residual", residual, input);
  door.other_memory("residual", residual, "input", input);
  params.residual = residual.mutable_data_ptr();
  door.written_elements("input", input);
  params.out_rows = params.input_rows;
  params.out = input.mutable_data_ptr();
  run(door, params);
}

}  // namespace pagedattn
