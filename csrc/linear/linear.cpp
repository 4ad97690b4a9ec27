#include "linear/linear.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "ops.h"
#include "parallel.h"
#include "torch_utils.h"

namespace pagedattn {
namespace {

constexpr int64_t PANELS_PER_ITEM = 4;

void run(const LinearParams& params) {
  const int64_t num_panels = (params.out_features + PANEL_FEATURES - 1) / PANEL_FEATURES;
  const int64_t num_items = (num_panels + PANELS_PER_ITEM - 1) / PANELS_PER_ITEM;
  const int64_t rows_at_once = std::min(params.num_rows, LINEAR_ROWS_AT_ONCE);
  const auto interleaved = std::make_unique_for_overwrite<float[]>(rows_at_once * params.in_features);
  const int64_t num_threads = torch::stable::get_num_threads();
  const auto interleave_rows = PAGEDATTN_CPU_KERNEL(interleave_rows);
  const auto linear_packed = PAGEDATTN_CPU_KERNEL(linear_packed);
  for (int64_t row = 0; row < params.num_rows; row += rows_at_once) {
    const int64_t end_row = std::min(row + rows_at_once, params.num_rows);
    parallel_for_rows(params.in_features, end_row - row, [&](int64_t begin, int64_t end) {
      interleave_rows(params, row, end_row, begin, end, interleaved.get());
    });
    const int64_t multiply_adds = (end_row - row) * params.in_features * params.out_features;
    const int64_t num_workers =
        std::clamp<int64_t>(multiply_adds / MULTIPLY_ADDS_PER_THREAD, 1, std::min(num_items, num_threads));
    parallel_for_items(num_items, num_workers, [&](int64_t item, int64_t) {
      linear_packed(params, row, end_row, interleaved.get(), item * PANELS_PER_ITEM,
                    std::min((item + 1) * PANELS_PER_ITEM, num_panels));
    });
  }
}

}  // namespace

Tensor linear_packed(const Tensor& input, const Tensor& packed_weight, int64_t out_features,
                     const std::optional<Tensor>& bias) {
  const Door door("linear_packed", input);
  LinearParams params{};
  params.dtype = door.float_dtype("input", input);
  const RowView rows = door.rows("input", input);
  door.check(out_features >= 0, "out_features", "expected a number that is not negative, got ", out_features);
  params.weight_dtype = door.float_dtype("packed_weight", packed_weight);
  const int64_t num_panels = (out_features + PANEL_FEATURES - 1) / PANEL_FEATURES;
  door.shape("packed_weight", packed_weight, {num_panels, rows.width, PANEL_FEATURES});
  door.contiguous("packed_weight", packed_weight);
  if (bias.has_value()) {
    door.dtype("bias", *bias, ScalarType::Float);
    door.shape("bias", *bias, {out_features});
    door.contiguous("bias", *bias);
    params.bias = bias->const_data_ptr<float>();
  }

  std::vector<int64_t> out_shape(input.sizes().begin(), input.sizes().end());
  out_shape.back() = out_features;
  Tensor out = torch::stable::new_empty(input, {out_shape.data(), out_shape.size()});
  if (out.numel() == 0) return out;
  params.num_rows = out.numel() / out_features;
  params.in_features = rows.width;
  params.out_features = out_features;
  params.input = input.const_data_ptr();
  params.input_stride = rows.stride;
  params.packed_weight = packed_weight.const_data_ptr();
  params.out = out.mutable_data_ptr();
  run(params);
  return out;
}

}  // namespace pagedattn
