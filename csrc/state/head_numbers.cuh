#pragma once

#include "cuda_vec.cuh"
#include "state/sequences.h"

namespace pagedattn::cuda {

// The number of a head at a row. T is the dtype of the rows.
template <typename T>
__device__ float number_at(const HeadNumbers& numbers, int64_t row, int64_t head) {
  const int64_t i = row * numbers.stride + head;
  if (numbers.dtype == DType::FLOAT32) return static_cast<const float*>(numbers.data)[i];
  return to_float(static_cast<const T*>(numbers.data)[i]);
}

}  // namespace pagedattn::cuda
