// What the linear ops share: panels, and their arguments `input`, `bias` and `out`.
#pragma once

#include <vector>

#include "linear/panel.h"
#include "torch_utils.h"

namespace pagedattn {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t num_panels_of(int64_t out_features) { return ceil_div(out_features, LINEAR_PANEL); }

// Checks input, for its rows and dtype.
template <typename Params>
RowView set_input(const Door& door, Params& params, const Tensor& input) {
  params.dtype = door.float_dtype("input", input);
  const RowView rows = door.rows("input", input);
  params.in_features = rows.width;
  params.input = input.const_data_ptr();
  params.input_stride = rows.stride;
  return rows;
}

// Checks bias and out against the number of features. Returns the rows of out.
template <typename Params>
RowView set_output(const Door& door, Params& params, const Tensor& input, const std::optional<Tensor>& bias,
                   Tensor& out, int64_t out_features) {
  if (bias.has_value()) {
    door.dtype("bias", *bias, ScalarType::Float);
    door.shape("bias", *bias, {out_features});
    door.contiguous("bias", *bias);
    params.bias = bias->const_data_ptr<float>();
  }
  std::vector<int64_t> out_sizes(input.sizes().begin(), input.sizes().end());
  out_sizes.back() = out_features;
  door.dtype("out", out, input.scalar_type());
  door.rank("out", out, input.dim());
  door.shape("out", out, IntHeaderOnlyArrayRef(out_sizes.data(), out_sizes.size()));
  const RowView rows = door.written_rows("out", out);
  params.out_features = out_features;
  params.out = out.mutable_data_ptr();
  params.out_stride = rows.stride;
  return rows;
}

}  // namespace pagedattn
