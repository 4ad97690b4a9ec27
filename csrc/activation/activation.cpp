#include "activation/activation.h"

#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

// `input_sizes`, but for the last dimension.
void check_out_shape(const Door& door, const Tensor& out, IntHeaderOnlyArrayRef input_sizes, int64_t width) {
  const auto sizes = out.sizes();
  const size_t num_leading = input_sizes.size() - 1;
  if (sizes.size() == input_sizes.size() && sizes[num_leading] == width &&
      std::equal(sizes.begin(), sizes.end() - 1, input_sizes.begin())) {
    return;
  }
  std::vector<int64_t> expected(input_sizes.begin(), input_sizes.end());
  expected.back() = width;
  door.shape("out", out, expected);
}

// `input_widths` is how many times wider than `out` the rows of `input` are.
ActivationParams check_activation(const Door& door, const Tensor& out, const Tensor& input, int64_t input_widths) {
  ActivationParams params{};
  params.dtype = door.float_dtype("input", input);
  const RowView input_rows = door.rows("input", input);
  door.check(input_rows.width % input_widths == 0, "input", "expected an even last dimension, got shape ",
             input.sizes());
  params.width = input_rows.width / input_widths;

  door.dtype("out", out, dtype_of(input));
  check_out_shape(door, out, input.sizes(), params.width);

  params.num_rows = input_rows.num_rows;
  params.input = input.const_data_ptr();
  params.input_stride = input_rows.stride;
  params.out = out.mutable_data_ptr();
  params.out_stride = door.written_rows("out", out).stride;
  return params;
}

void run(const Door& door, const Tensor& out, const Tensor& input, int64_t input_widths,
         const RowKernels<ActivationParams>& kernels) {
  const ActivationParams params = check_activation(door, out, input, input_widths);
  run_rows(door, AnyValues{}, kernels, params, params.num_rows, params.width);
}

}  // namespace

void silu_and_mul(Tensor& out, const Tensor& input) {
  run(Door("silu_and_mul", input), out, input, 2, PAGEDATTN_ROW_KERNELS(silu_and_mul));
}

void mul_and_silu(Tensor& out, const Tensor& input) {
  run(Door("mul_and_silu", input), out, input, 2, PAGEDATTN_ROW_KERNELS(mul_and_silu));
}

void gelu_and_mul(Tensor& out, const Tensor& input) {
  run(Door("gelu_and_mul", input), out, input, 2, PAGEDATTN_ROW_KERNELS(gelu_and_mul));
}

void gelu_tanh_and_mul(Tensor& out, const Tensor& input) {
  run(Door("gelu_tanh_and_mul", input), out, input, 2, PAGEDATTN_ROW_KERNELS(gelu_tanh_and_mul));
}

void gelu_new(Tensor& out, const Tensor& input) {
  run(Door("gelu_new", input), out, input, 1, PAGEDATTN_ROW_KERNELS(gelu_tanh));
}

// The same function as gelu_new, factored otherwise.
void gelu_fast(Tensor& out, const Tensor& input) {
  run(Door("gelu_fast", input), out, input, 1, PAGEDATTN_ROW_KERNELS(gelu_tanh));
}

void gelu_quick(Tensor& out, const Tensor& input) {
  run(Door("gelu_quick", input), out, input, 1, PAGEDATTN_ROW_KERNELS(gelu_quick));
}

}  // namespace pagedattn
