// What the linear ops share: the arguments `input`, `offsets`, `out_features` and `bias`, the tensor that is returned,
// and the loop over chunks of rows.
//
// A format of weights is a class with
//   using Params = ...;                                        // of a chunk, and of all rows
//   static int64_t chunk_rows(const Params& params);           // at most so many rows are multiplied at once
//   static LinearKernels<Params> kernels(const Params& chunk);
//   static int64_t scratch_rows(int64_t num_rows);             // that a chunk of so many rows takes
//   Format(const Params& params, int64_t scratch_rows);        // allocates the scratch
//   void give_scratch(Params& chunk, int64_t scratch_row);     // from this row on
//   static void select_expert(Params& params, int64_t expert, int64_t weight_bytes);
#pragma once

#include <algorithm>
#include <vector>

#include "cpu_graph.h"
#include "door.h"
#include "flushed_floats.h"
#include "index_checks.h"
#include "linear/linear.h"
#include "parallel.h"

namespace pagedattn {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t num_panels_of(int64_t out_features) { return ceil_div(out_features, LINEAR_PANEL); }

inline void set_input(const Door& door, LinearParams& params, const Tensor& input) {
  params.dtype = door.float_dtype("input", input);
  const RowView rows = door.rows("input", input);
  params.num_rows = 1;  // rows without elements count, too: their results are the bias
  for (int64_t dim = 0; dim < input.dim() - 1; ++dim) params.num_rows *= input.size(dim);
  params.in_features = rows.width;
  params.input = input.const_data_ptr();
  params.input_stride = rows.stride;
}

inline void set_out_features(const Door& door, LinearParams& params, int64_t out_features) {
  door.check(out_features >= 0, "out_features", "expected a number that is not negative, got ", out_features);
  params.out_features = out_features;
}

// The sizes of a tensor that a linear op has once, and a grouped op once for each expert.
inline std::vector<int64_t> for_experts(std::optional<int64_t> num_experts, std::initializer_list<int64_t> sizes) {
  std::vector<int64_t> all(sizes);
  if (num_experts.has_value()) all.insert(all.begin(), *num_experts);
  return all;
}

inline void check_sizes(const Door& door, const char* argument, const Tensor& tensor,
                        const std::vector<int64_t>& sizes) {
  door.rank(argument, tensor, static_cast<int64_t>(sizes.size()));
  door.shape(argument, tensor, IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
}

// params.out_features is set already.
inline void set_bias(const Door& door, LinearParams& params, const std::optional<Tensor>& bias,
                     std::optional<int64_t> num_experts = {}) {
  if (!bias.has_value()) return;
  door.dtype("bias", *bias, ScalarType::Float);
  check_sizes(door, "bias", *bias, for_experts(num_experts, {params.out_features}));
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

// prepare_rows takes ranges of a chunk's rows, then multiply takes ranges of panels.
template <typename Params>
struct LinearKernels {
  LinearKernel<Params> prepare_rows;
  LinearKernel<Params> multiply;
};

// Rows that are multiplied with one weight, and have scratch of their own.
template <typename Params>
struct LinearChunk {
  Params params;
  LinearKernels<Params> kernels;
};

// Rows [row, row + num_rows) of `params`.
template <typename Params>
Params rows_of(Params params, int64_t row, int64_t num_rows) {
  params.num_rows = num_rows;
  const int64_t size = element_size(params.dtype);
  params.input = static_cast<const char*>(params.input) + row * params.input_stride * size;
  params.out = static_cast<char*>(params.out) + row * params.out_features * size;
  return params;
}

// Chunks of one input, one or more, and weights of one size. The items of work are a few panels of one chunk each, so
// that the threads share few chunks with many features as well as many chunks with few features.
template <typename Params>
void run_chunks(const std::vector<LinearChunk<Params>>& chunks) {
  constexpr int64_t PANELS_PER_ITEM = 4;  // as many as a kernel takes at once
  const int64_t in_features = chunks[0].params.in_features, out_features = chunks[0].params.out_features;
  const int64_t num_panels = num_panels_of(out_features), items_per_chunk = ceil_div(num_panels, PANELS_PER_ITEM);
  int64_t num_rows = 0;
  for (const auto& chunk : chunks) num_rows += chunk.params.num_rows;
  parallel_for_rows(num_rows, in_features, [&](int64_t begin, int64_t end) {
    const FlushedFloats flushed;
    int64_t first_row = 0;
    for (const auto& [params, kernels] : chunks) {
      const int64_t chunk_begin = std::max(begin - first_row, int64_t{0});
      const int64_t chunk_end = std::min(end - first_row, params.num_rows);
      if (chunk_begin < chunk_end) kernels.prepare_rows(params, chunk_begin, chunk_end);
      first_row += params.num_rows;
    }
  });
  const int64_t num_items = static_cast<int64_t>(chunks.size()) * items_per_chunk;
  parallel_for_items(num_items, num_workers_for(num_rows * in_features * out_features, num_items),
                     [&](int64_t item, int64_t) {
                       const auto& [params, kernels] = chunks[item / items_per_chunk];
                       const int64_t panel = item % items_per_chunk * PANELS_PER_ITEM;
                       kernels.multiply(params, panel, std::min(panel + PANELS_PER_ITEM, num_panels));
                     });
}

// All rows with one weight, chunk by chunk: the rows of a chunk stay in a cache.
template <typename Format>
void run_linear(const typename Format::Params& params) {
  if (params.out_features == 0) return;  // however many rows an expanded input has
  const int64_t chunk_rows = Format::chunk_rows(params);
  Format format(params, Format::scratch_rows(std::min(params.num_rows, chunk_rows)));
  for (int64_t row = 0; row < params.num_rows; row += chunk_rows) {
    auto chunk = rows_of(params, row, std::min(params.num_rows - row, chunk_rows));
    format.give_scratch(chunk, 0);
    run_chunks<typename Format::Params>({{chunk, Format::kernels(chunk)}});
  }
}

// ---- a weight for each expert ----

// The rows of expert e are [offsets[e], offsets[e + 1]).
template <typename Params>
struct GroupedLinearParams {
  Params linear;  // all rows; weight, scales and bias of expert 0
  Indices offsets;
  int64_t num_experts;
  int64_t weight_bytes;  // of an expert
};

// Offsets that give each row to one expert.
struct OffsetsCheck {
  Door door;
  Indices offsets;
  int64_t num_experts;
  int64_t num_rows;
  HostValues values;

  void operator()() const { check_offsets_to(door, "offsets", offsets, num_experts, num_rows, "rows", "expert"); }
};

template <typename Params>
OffsetsCheck set_offsets(const Door& door, GroupedLinearParams<Params>& params, const Tensor& input,
                         const Tensor& offsets) {
  door.rank("input", input, 2);
  params.offsets = check_indices(door, "offsets", offsets, ANY);
  door.check(offsets.size(0) >= 1, "offsets", "expected at least 1 element, got 0");
  params.num_experts = offsets.size(0) - 1;
  return {door, params.offsets, params.num_experts, input.size(0), door.values(offsets)};
}

template <typename Params>
void set_weight_bytes(GroupedLinearParams<Params>& params, const Tensor& packed_weight, int64_t size_of_element) {
  params.weight_bytes = packed_weight.numel() / std::max(params.num_experts, int64_t{1}) * size_of_element;
}

// The chunks of some experts go together, so that threads do not wait for each other after each expert. Together they
// have at most so many rows of scratch, which is more than a chunk has.
constexpr int64_t GROUPED_ROWS = 512;

template <typename Format>
void run_grouped_linear(const GroupedLinearParams<typename Format::Params>& params) {
  using Params = typename Format::Params;
  if (params.linear.out_features == 0 || params.linear.num_rows == 0) return;
  const int64_t chunk_rows = Format::chunk_rows(params.linear);
  // A chunk takes less than twice as many rows of scratch as it has rows.
  Format format(params.linear, std::min(GROUPED_ROWS, 2 * params.linear.num_rows));
  std::vector<LinearChunk<Params>> chunks;
  int64_t used_rows = 0;  // of the scratch
  for (int64_t expert = 0; expert < params.num_experts; ++expert) {
    Params of_expert = params.linear;
    Format::select_expert(of_expert, expert, params.weight_bytes);
    for (int64_t row = params.offsets[expert]; row < params.offsets[expert + 1]; row += chunk_rows) {
      Params chunk = rows_of(of_expert, row, std::min(params.offsets[expert + 1] - row, chunk_rows));
      const int64_t scratch_rows = Format::scratch_rows(chunk.num_rows);
      if (used_rows + scratch_rows > GROUPED_ROWS) {
        run_chunks(chunks);
        chunks.clear();
        used_rows = 0;
      }
      format.give_scratch(chunk, used_rows);
      chunks.push_back({chunk, Format::kernels(chunk)});
      used_rows += scratch_rows;
    }
  }
  run_chunks(chunks);
}

}  // namespace pagedattn
