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
  params.out_stride = door.written_rows("out", out).stride;
  return params;
}

using Kernel = void(const ActivationParams&, int64_t, int64_t);

void run(const ActivationParams& params, Kernel* kernel) {
  parallel_for_rows(params.num_rows, params.width, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

}  // namespace

void silu_and_mul(Tensor& out, const Tensor& input) {
  run(check_activation(Door("silu_and_mul"), out, input, 2), PAGEDATTN_CPU_KERNEL(silu_and_mul));
}

void mul_and_silu(Tensor& out, const Tensor& input) {
  run(check_activation(Door("mul_and_silu"), out, input, 2), PAGEDATTN_CPU_KERNEL(mul_and_silu));
}

void gelu_and_mul(Tensor& out, const Tensor& input) {
  run(check_activation(Door("gelu_and_mul"), out, input, 2), PAGEDATTN_CPU_KERNEL(gelu_and_mul));
}

void gelu_tanh_and_mul(Tensor& out, const Tensor& input) {
  run(check_activation(Door("gelu_tanh_and_mul"), out, input, 2), PAGEDATTN_CPU_KERNEL(gelu_tanh_and_mul));
}

void gelu_new(Tensor& out, const Tensor& input) {
  run(check_activation(Door("gelu_new"), out, input, 1), PAGEDATTN_CPU_KERNEL(gelu_tanh));
}

// The same function as gelu_new, factored otherwise.
void gelu_fast(Tensor& out, const Tensor& input) {
  run(check_activation(Door("gelu_fast"), out, input, 1), PAGEDATTN_CPU_KERNEL(gelu_tanh));
}

void gelu_quick(Tensor& out, const Tensor& input) {
  run(check_activation(Door("gelu_quick"), out, input, 1), PAGEDATTN_CPU_KERNEL(gelu_quick));
}

}  // namespace pagedattn
