#include "activation/activation.h"

#include "ops.h"
#include "parallel.h"
#include "torch_utils.h"

namespace pagedattn {
namespace {

// `input_widths` is how many times wider than `out` the rows of `input` are.
ActivationParams check_activation(const Door& door, const Tensor& out, const Tensor& input, int64_t input_widths) {
  ActivationParams params{};
  params.dtype = door.float_dtype("input", input);
  const RowView input_rows = door.rows("input", input);
  door.check(input_rows.width % input_widths == 0, "input", "expected an even last dimension, got shape ",
             input.sizes());
  params.width = input_rows.width / input_widths;

  std::vector<int64_t> out_sizes(input.sizes().begin(), input.sizes().end());
  out_sizes.back() = params.width;
  door.dtype("out", out, input.scalar_type());
  door.shape("out", out, out_sizes);

  params.num_rows = input_rows.num_rows;
  params.input = input.const_data_ptr();
  params.input_stride = input_rows.stride;
  params.out = out.mutable_data_ptr();
  params.out_stride = door.rows("out", out).stride;
  return params;
}

}  // namespace

void silu_and_mul(Tensor& out, const Tensor& input) {
  const ActivationParams params = check_activation(Door("silu_and_mul"), out, input, 2);
  const auto kernel = PAGEDATTN_CPU_KERNEL(silu_and_mul);
  parallel_for_rows(params.num_rows, params.width, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

void gelu_new(Tensor& out, const Tensor& input) {
  const ActivationParams params = check_activation(Door("gelu_new"), out, input, 1);
  const auto kernel = PAGEDATTN_CPU_KERNEL(gelu_new);
  parallel_for_rows(params.num_rows, params.width, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

}  // namespace pagedattn
