// Which elements of a row top_k, top_p and min_p keep, for the CUDA kernels: those from a threshold on. A thread block
// has a row, and reads the row once for each bit of a threshold. Sums are of doubles, in the same order each time.
#pragma once

#include <bit>

#include "cuda_vec.cuh"
#include "sampling/sampling.h"

namespace pagedattn::cuda {
namespace {

constexpr int ROW_THREADS = 256;
constexpr int ROW_WARPS = ROW_THREADS / WARP_SIZE;
constexpr size_t ROW_SHARED_BYTES = ROW_WARPS * sizeof(double);

// Folds the values of all threads of the block, for each of them.
template <typename Fold>
__device__ double fold_block(double value, const Fold& fold) {
  auto* of_warps = reinterpret_cast<double*>(shared_memory);  // [ROW_WARPS]
  for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) {
    value = fold(value, __shfl_xor_sync(ALL_LANES, value, lanes));
  }
  __syncthreads();  // all have read what was there before
  if (threadIdx.x % WARP_SIZE == 0) of_warps[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  value = of_warps[0];
  for (int warp = 1; warp < ROW_WARPS; ++warp) value = fold(value, of_warps[warp]);
  return value;
}

// The sum of term(i), doubles, over [0, size).
template <typename Term>
__device__ double sum_of_row(int64_t size, const Term& term) {
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < size; i += ROW_THREADS) sum += term(i);
  return fold_block(sum, [](double a, double b) { return a + b; });
}

// The greatest of term(i); -infinity without any. NaN are left out.
template <typename Term>
__device__ float max_of_row(int64_t size, const Term& term) {
  double greatest = -INFINITY;
  for (int64_t i = threadIdx.x; i < size; i += ROW_THREADS) greatest = fmax(greatest, static_cast<double>(term(i)));
  return static_cast<float>(fold_block(greatest, [](double a, double b) { return fmax(a, b); }));
}

// Unsigned integers in the order of the floats.
__device__ inline uint32_t order_of(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ inline float in_order(uint32_t order) {
  return std::bit_cast<float>(order >> 31 ? order & 0x7fffffffu : ~order);
}

// The greatest x for which the weights of all elements from x on reach `target`, and are not 0; -infinity without any.
template <typename Element, typename Weight>
__device__ float reach(int64_t size, double target, const Element& element, const Weight& weight) {
  uint32_t order = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    const double sum = sum_of_row(size, [&](int64_t i) {
      const float x = element(i);
      return x <= INFINITY && order_of(x) >= (order | bit) ? weight(x) : 0.0;  // not NaN
    });
    if (sum > 0.0 && sum >= target) order |= bit;
  }
  return order == 0 ? -INFINITY : in_order(order);
}

template <typename Element>
__device__ float kth_greatest(int64_t size, int64_t k, const Element& element) {
  return reach(size, static_cast<double>(k), element, [](float) { return 1.0; });
}

struct RowFacts {
  float max;
  float min;
  double sum;
};

template <typename Element>
__device__ RowFacts summarise(int64_t size, const Element& element) {
  return {max_of_row(size, element), -max_of_row(size, [&](int64_t i) { return -element(i); }),
          sum_of_row(size, [&](int64_t i) { return static_cast<double>(element(i)); })};
}

__device__ inline bool is_distribution(const RowFacts& facts) {
  return facts.sum > 0.0 && facts.sum < INFINITY && facts.min >= 0.0f;
}

struct Kept {
  float threshold;
  double sum;  // of the elements from the threshold on
};

template <typename Element>
__device__ Kept keep(int64_t size, const Element& element, const RowFacts& facts, const Filters& filters,
                     int64_t filter_row) {
  Kept kept{-INFINITY, facts.sum};
  const auto raise = [&](float threshold) {
    if (threshold <= kept.threshold) return;
    kept = {threshold, sum_of_row(size, [&](int64_t i) {
              const float x = element(i);
              return x >= threshold ? static_cast<double>(x) : 0.0;
            })};
  };
  if (filters.top_k.are_given && filters.top_k[filter_row] < size) {
    raise(kth_greatest(size, filters.top_k[filter_row], element));
  }
  if (filters.top_p.are_given && filters.top_p[filter_row] < 1.0f) {
    const bool is_first = filters.top_k.are_given && filters.top_k_first;
    const float least = is_first ? kept.threshold : -INFINITY;
    const float scale = is_first ? static_cast<float>(kept.sum) : 1.0f;
    raise(reach(size, filters.top_p[filter_row], element,
                [&](float x) { return x >= least ? static_cast<double>(x / scale) : 0.0; }));
  }
  if (filters.min_p.are_given) raise(filters.min_p[filter_row] * facts.max);
  return kept;
}

}  // namespace
}  // namespace pagedattn::cuda
