// What the linear ops share: the arguments `input`, `out_features` and `bias`, the tensor that is returned, and the
// loop over chunks of rows.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu_graph.h"
#include "door.h"
#include "linear/linear.h"
#include "parallel.h"

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

// params.out_features is set already.
inline void set_bias(const Door& door, LinearParams& params, const std::optional<Tensor>& bias) {
  if (!bias.has_value()) return;
  door.dtype("bias", *bias, ScalarType::Float);
  door.shape("bias", *bias, {params.out_features});
  door.contiguous("bias", *bias);
  params.bias = bias->const_data_ptr<float>();
}

// The tensor that the op returns, [..., out_features] of input's dtype. To be called after all checks.
inline Tensor new_out(LinearParams& params, const Tensor& input) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = params.out_features;
  Tensor out = torch::stable::new_empty(input, IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
  params.out = out.mutable_data_ptr();
  return out;
}

template <typename Params>
using LinearKernel = void (*)(const Params& params, int64_t begin, int64_t end);

// For each chunk of at most chunk_rows rows: prepare_rows takes ranges of its rows, then multiply takes ranges of
// panels.
template <typename Params>
void run_linear(Params params, LinearKernel<Params> prepare_rows, LinearKernel<Params> multiply,
                int64_t chunk_rows = LINEAR_CHUNK_ROWS) {
  constexpr int64_t PANELS_PER_ITEM = 4;  // as many as a kernel takes at once
  if (params.out_features == 0) return;   // however many rows an expanded input has
  const int64_t num_rows = params.num_rows, num_panels = num_panels_of(params.out_features);
  const int64_t num_items = ceil_div(num_panels, PANELS_PER_ITEM);
  const int64_t row_bytes = params.input_stride * element_size(params.dtype);
  const int64_t out_bytes = params.out_features * element_size(params.dtype);
  for (int64_t row = 0; row < num_rows; row += chunk_rows) {
    params.num_rows = std::min(num_rows - row, chunk_rows);
    parallel_for_rows(params.num_rows, params.in_features, [&](int64_t begin, int64_t end) {
      const FlushedFloats flushed;
      prepare_rows(params, begin, end);
    });
    const int64_t multiply_adds = params.num_rows * params.in_features * params.out_features;
    parallel_for_items(num_items, num_workers_for(multiply_adds, num_items), [&](int64_t item, int64_t) {
      multiply(params, item * PANELS_PER_ITEM, std::min((item + 1) * PANELS_PER_ITEM, num_panels));
    });
    params.input = static_cast<const char*>(params.input) + params.num_rows * row_bytes;
    params.out = static_cast<char*>(params.out) + params.num_rows * out_bytes;
  }
}

}  // namespace pagedattn
