#include "attention/merge_attn_states.h"

#include <cmath>

#include "ops.h"
#include "run.h"

namespace pagedattn {

void merge_attn_states(Tensor& output, const std::optional<Tensor>& output_lse, const Tensor& prefix_output,
                       const Tensor& prefix_lse, const Tensor& suffix_output, const Tensor& suffix_lse,
                       double lse_base) {
  const Door door("merge_attn_states", prefix_output);
  MergeAttnStatesParams params{};
  params.dtype = door.float_dtype("prefix_output", prefix_output);
  door.rank("prefix_output", prefix_output, 3);
  params.num_tokens = prefix_output.size(0);
  params.num_heads = prefix_output.size(1);
  params.head_size = prefix_output.size(2);
  door.check(params.head_size > 0, "prefix_output", "expected a head size of at least 1, got shape ",
             prefix_output.sizes());
  const auto check_output = [&](const char* argument, const Tensor& tensor) {
    door.dtype(argument, tensor, dtype_of(prefix_output));
    door.shape(argument, tensor, prefix_output.sizes());
    door.contiguous(argument, tensor);
  };
  const auto check_lse = [&](const char* argument, const Tensor& tensor) {
    door.dtype(argument, tensor, ScalarType::Float);
    door.shape(argument, tensor, {params.num_tokens, params.num_heads});
    door.contiguous(argument, tensor);
  };
  check_output("prefix_output", prefix_output);
  check_output("suffix_output", suffix_output);
  check_output("output", output);
  check_lse("prefix_lse", prefix_lse);
  check_lse("suffix_lse", suffix_lse);
  if (output_lse.has_value()) {
    check_lse("output_lse", *output_lse);
    door.other_memory("output_lse", *output_lse, "output", output);
    params.output_lse = output_lse->mutable_data_ptr<float>();
  }
  door.check(lse_base > 1, "lse_base", "expected a number above 1, got ", lse_base);
  door.finite("lse_base", lse_base);
  // The float next to e has another logarithm than 1. The log of double is of glibc 2.29 (old_libraries.cpp).
  params.ln_base = static_cast<float>(std::log(static_cast<long double>(lse_base)));
  params.output = output.mutable_data_ptr();
  params.prefix_output = prefix_output.const_data_ptr();
  params.prefix_lse = prefix_lse.const_data_ptr<float>();
  params.suffix_output = suffix_output.const_data_ptr();
  params.suffix_lse = suffix_lse.const_data_ptr<float>();
  run_rows(door, AnyValues{}, PAGEDATTN_ROW_KERNELS(merge_attn_states), params, params.num_tokens * params.num_heads,
           params.head_size);
}

}  // namespace pagedattn
