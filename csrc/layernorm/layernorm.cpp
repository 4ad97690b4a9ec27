#include "layernorm/layernorm.h"

#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

// The dimensions before the last as rows of one stride, or of two.
RowPlaces check_rows(const Door& door, const char* argument, const Tensor& tensor) {
  door.check(tensor.dim() >= 1, argument, "expected at least 1 dimension, got 0");
  const int64_t last = tensor.dim() - 1;
  RowPlaces rows{1, tensor.size(last), 0};
  if (rows.stride > 0 && tensor.is_contiguous()) return {tensor.numel() / rows.stride, rows.stride, 0};
  door.contiguous_from(argument, tensor, last);
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

// Fills in what all norms have, but for the weight and the output.
void check_norm(const Door& door, NormParams& params, const Tensor& input, double epsilon) {
  params.dtype = door.float_dtype("input", input);
  params.input_rows = check_rows(door, "input", input);
  params.hidden_size = input.size(input.dim() - 1);
  params.num_rows = input.numel() == 0 ? 0 : input.numel() / params.hidden_size;
  door.check(epsilon >= 0, "epsilon", "expected a number that is not negative, got ", epsilon);
  params.epsilon = door.finite("epsilon", epsilon);
  params.input = input.const_data_ptr();
}

// What has an element for each column of a row.
const void* check_columns(const Door& door, const char* argument, const Tensor& tensor, ScalarType dtype,
                          int64_t hidden_size) {
  door.dtype(argument, tensor, dtype);
  door.shape(argument, tensor, {hidden_size});
  door.contiguous(argument, tensor);
  return tensor.const_data_ptr();
}

RmsNormParams check_rms_norm(const Door& door, const Tensor& input, const Tensor& weight, double epsilon,
                             bool adds_one) {
  RmsNormParams params{};
  check_norm(door, params, input, epsilon);
  params.weight = check_columns(door, "weight", weight, dtype_of(input), params.hidden_size);
  params.adds_one = adds_one;
  return params;
}

// The rows of an output or residual that must look like `input`.
RowPlaces check_like(const Door& door, const char* argument, const Tensor& tensor, const Tensor& input) {
  door.dtype(argument, tensor, dtype_of(input));
  door.shape(argument, tensor, input.sizes());
  door.written_elements(argument, tensor);
  return check_rows(door, argument, tensor);
}

void run(const Door& door, const RmsNormParams& params) {
  run_rows(door, AnyValues{}, PAGEDATTN_ROW_KERNELS(rms_norm), params, params.num_rows, params.hidden_size);
}

void norm(const Door& door, Tensor& out, const Tensor& input, const Tensor& weight, double epsilon, bool adds_one) {
  RmsNormParams params = check_rms_norm(door, input, weight, epsilon, adds_one);
  params.out_rows = check_like(door, "out", out, input);
  params.out = out.mutable_data_ptr();
  run(door, params);
}

void add_and_norm(const Door& door, Tensor& input, Tensor& residual, const Tensor& weight, double epsilon,
                  bool adds_one) {
  RmsNormParams params = check_rms_norm(door, input, weight, epsilon, adds_one);
  params.residual_rows = check_like(door, "residual", residual, input);
  door.other_memory("residual", residual, "input", input);
  params.residual = residual.mutable_data_ptr();
  door.written_elements("input", input);
  params.out_rows = params.input_rows;
  params.out = input.mutable_data_ptr();
  run(door, params);
}

}  // namespace

void rms_norm(Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  norm(Door("rms_norm", input), out, input, weight, epsilon, false);
}

void gemma_rms_norm(Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  norm(Door("gemma_rms_norm", input), out, input, weight, epsilon, true);
}

void fused_add_rms_norm(Tensor& input, Tensor& residual, const Tensor& weight, double epsilon) {
  add_and_norm(Door("fused_add_rms_norm", input), input, residual, weight, epsilon, false);
}

void gemma_fused_add_rms_norm(Tensor& input, Tensor& residual, const Tensor& weight, double epsilon) {
  add_and_norm(Door("gemma_fused_add_rms_norm", input), input, residual, weight, epsilon, true);
}

void layer_norm(Tensor& out, const Tensor& input, const Tensor& weight, const Tensor& bias, double epsilon) {
  const Door door("layer_norm", input);
  LayerNormParams params{};
  check_norm(door, params, input, epsilon);
  door.present("weight", weight);
  const ScalarType weight_dtype = dtype_of(weight);
  const bool is_like_input = weight_dtype == dtype_of(input);
  door.check_type(is_like_input || weight_dtype == ScalarType::Float, "weight", "expected dtype ", dtype_of(input),
                  params.dtype == DType::FLOAT32 ? "" : " or float32", ", got ", weight_dtype);
  params.weight_dtype = is_like_input ? params.dtype : DType::FLOAT32;
  params.weight = check_columns(door, "weight", weight, weight_dtype, params.hidden_size);
  params.bias = check_columns(door, "bias", bias, weight_dtype, params.hidden_size);
  params.out_rows = check_like(door, "out", out, input);
  params.out = out.mutable_data_ptr();
  run_rows(door, AnyValues{}, PAGEDATTN_ROW_KERNELS(layer_norm), params, params.num_rows, params.hidden_size);
}

}  // namespace pagedattn
