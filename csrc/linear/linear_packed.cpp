#include "linear/linear_packed.h"

#include <algorithm>
#include <memory>

#include "linear/linear_op.h"
#include "ops.h"
#include "parallel.h"

namespace pagedattn {
namespace {

constexpr int64_t PANELS_PER_ITEM = 4;  // as many as a kernel takes at once

void run(const LinearPackedParams& params) {
  const int64_t num_panels = num_panels_of(params.out_features);
  const int64_t num_items = ceil_div(num_panels, PANELS_PER_ITEM);
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
  LinearPackedParams params{};
  set_input(door, params, input);
  set_out_features(door, params, out_features);
  params.weight_dtype = door.float_dtype("packed_weight", packed_weight);
  door.rank("packed_weight", packed_weight, 3);
  door.shape("packed_weight", packed_weight, {num_panels_of(out_features), params.in_features, LINEAR_PANEL});
  door.contiguous("packed_weight", packed_weight);
  params.packed_weight = packed_weight.const_data_ptr();
  set_bias(door, params, bias);
  Tensor out = new_out(params, input);
  if (out.numel() > 0) run(params);
  return out;
}

}  // namespace pagedattn
