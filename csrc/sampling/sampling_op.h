// What the sampling ops share: rows of logits and probabilities, numbers of rows, and threads with memory of their own.
#pragma once

#include <memory>

#include "run.h"
#include "sampling/sampling.h"

namespace pagedattn {

// The last dimension of probabilities or logits.
inline void check_vocab_size(const Door& door, const char* argument, const Tensor& tensor, int64_t vocab_size) {
  door.check(vocab_size >= 1 && vocab_size <= std::numeric_limits<int32_t>::max(), argument,
             "expected from 1 to 2147483647 tokens, got shape ", tensor.sizes());
}

// [num_rows, vocab_size] with any stride in dimension 0.
inline DType check_rows_of_tokens(const Door& door, const char* argument, const Tensor& tensor) {
  const DType dtype = door.float_dtype(argument, tensor);
  door.rank(argument, tensor, 2);
  door.contiguous_from(argument, tensor, 1);
  check_vocab_size(door, argument, tensor, tensor.size(1));
  return dtype;
}

// One number for each of num_rows, or one for all.
inline int64_t check_step(const Door& door, const char* argument, const Tensor& tensor, int64_t num_rows) {
  door.rank(argument, tensor, 1);
  door.contiguous(argument, tensor);
  door.check(tensor.size(0) == num_rows || tensor.size(0) == 1, argument, "expected shape [", num_rows,
             "] or [1], got ", tensor.sizes());
  return tensor.size(0) == 1 ? 0 : 1;
}

inline OfRows<const float*> check_floats(const Door& door, const char* argument, const std::optional<Tensor>& tensor,
                                         int64_t num_rows) {
  if (!tensor.has_value()) return {};
  door.dtype(argument, *tensor, ScalarType::Float);
  const int64_t step = check_step(door, argument, *tensor, num_rows);
  return {tensor->const_data_ptr<float>(), step, true};
}

inline OfRows<Indices> check_ints(const Door& door, const char* argument, const std::optional<Tensor>& tensor,
                                  int64_t num_rows) {
  if (!tensor.has_value()) return {};
  door.present(argument, *tensor);
  const Indices ints = door.indices(argument, *tensor);
  return {ints, check_step(door, argument, *tensor, num_rows), true};
}

inline OfRows<const int64_t*> check_seeds(const Door& door, const char* argument, const Tensor& tensor,
                                          int64_t num_rows) {
  door.dtype(argument, tensor, ScalarType::Long);
  const int64_t step = check_step(door, argument, tensor, num_rows);
  return {tensor.const_data_ptr<int64_t>(), step, true};
}

// Numbers of rows, for a check of what they are. Those that are not given, or lie on a GPU, have no values.
struct RowValues {
  HostValues values;
  int64_t size = 0;
  bool are_int64 = false;

  RowValues() = default;
  RowValues(const Door& door, const std::optional<Tensor>& tensor) {
    if (!tensor.has_value()) return;
    values = door.values(*tensor);
    size = values.are_given ? tensor->numel() : 0;
    are_int64 = dtype_of(*tensor) == ScalarType::Long;
  }

  void expect_floats(const Door& door, const char* argument, float least, float most, const char* expected) const {
    const auto* numbers = static_cast<const float*>(values.data);
    for (int64_t i = 0; i < size; ++i) {
      door.check(numbers[i] >= least && numbers[i] <= most, argument, "expected ", expected, ", got ", numbers[i],
                 " at ", i);
    }
  }

  void expect_ints(const Door& door, const char* argument, int64_t least, int64_t most, const char* expected) const {
    const Indices numbers{values.data, are_int64};
    for (int64_t i = 0; i < size; ++i) {
      door.check(numbers[i] >= least && numbers[i] <= most, argument, "expected ", expected, ", got ", numbers[i],
                 " at ", i);
    }
  }
};

// As run_loop, with memory for each thread that the kernel finds in the parameters.
template <typename Params>
struct ScratchLoop {
  RowLoop<Params> rows;
  int64_t scratch_bytes;  // of a thread
};

template <typename Params>
void run_scratch_loop(const ScratchLoop<Params>& loop) {
  const int64_t num_rows = loop.rows.num_rows;
  const int64_t most_threads = std::clamp<int64_t>(num_rows, 1, torch::stable::get_num_threads());
  const int64_t num_threads =
      std::clamp<int64_t>(num_rows * loop.rows.elements_per_row / PARALLEL_GRAIN, 1, most_threads);
  const auto scratch = std::make_unique_for_overwrite<double[]>(num_threads * loop.scratch_bytes / sizeof(double));
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Params params = loop.rows.params;
      params.scratch = scratch.get() + i * loop.scratch_bytes / sizeof(double);
      loop.rows.kernel(params, num_rows * i / num_threads, num_rows * (i + 1) / num_threads);
    }
  };
  if (num_threads == 1) {
    work(0, 1);
  } else {
    parallel_for(num_threads, 1, work);
  }
}

template <ValueCheck Check, typename Params>
void run_rows_with_scratch(const Door& door, const Check& check, const RowKernels<Params>& kernels,
                           const Params& params, int64_t elements_per_row, int64_t scratch_bytes) {
  const ScratchLoop<Params> loop{{kernels.cpu, params, params.num_rows, elements_per_row}, scratch_bytes};
  run_on<run_scratch_loop<Params>>(door, check, loop, [&](cudaStream_t stream) { kernels.cuda(params, stream); });
}

}  // namespace pagedattn
