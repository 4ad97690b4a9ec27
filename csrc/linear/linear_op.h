// What the linear ops do at their doors: their arguments `input`, `out_features` and `bias`, and what they return.
#pragma once

#include <vector>

#include "linear/linear.h"
#include "torch_utils.h"

namespace pagedattn {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t num_panels_of(int64_t out_features) { return ceil_div(out_features, LINEAR_PANEL); }

inline void set_input(const Door& door, LinearParams& params, const Tensor& input) {
  params.dtype = door.float_dtype("input", input);
  const RowView rows = door.rows("input", input);
  params.num_rows = 1;
  for (int64_t dim = 0; dim < input.dim() - 1; ++dim) params.num_rows *= input.size(dim);
  params.in_features = rows.width;
  params.input = input.const_data_ptr();
  params.input_stride = rows.stride;
}

inline void set_out_features(const Door& door, LinearParams& params, int64_t out_features) {
  door.check(out_features >= 0, "out_features", "expected a number that is not negative, got ", out_features);
  params.out_features = out_features;
}

// For params.out_features.
inline void set_bias(const Door& door, LinearParams& params, const std::optional<Tensor>& bias) {
  if (!bias.has_value()) return;
  door.dtype("bias", *bias, ScalarType::Float);
  door.shape("bias", *bias, {params.out_features});
  door.contiguous("bias", *bias);
  params.bias = bias->const_data_ptr<float>();
}

// The tensor that the op returns, [..., out_features] of input's dtype: after all checks.
inline Tensor new_out(LinearParams& params, const Tensor& input) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = params.out_features;
  Tensor out = torch::stable::new_empty(input, IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
  params.out = out.mutable_data_ptr();
  return out;
}

}  // namespace pagedattn
