// Which elements of a row top_k, top_p and min_p keep, for the CPU kernels: those from a threshold on.
//
// A first pass has the maximum and the sum of each block of a row. For top_k, the k-th greatest maximum is a bound: k
// elements at least are no less. For top_p, all elements below a share of the row's mean are less than what top_p may
// leave out. So only the elements from a bound on are looked at one by one, which are few unless the row is flat.
#pragma once

#include "cpu_memory.h"
#include "sampling/sampling.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr float INFINITE = __builtin_inff();
constexpr int VECS_PER_BLOCK = ROW_BLOCK / VEC_SIZE;

// A row, its blocks, and what is known of them.
template <typename T>
struct Row {
  const T* elements;
  int64_t size;
  T fill;             // behind the last element; no greater than the last block's maximum
  double* block_end;  // [num_blocks], the sum of all kept elements up to the end of a block
  float* block_max;   // [num_blocks]
  float* candidates;  // [num_blocks * ROW_BLOCK]

  Row(const T* row, int64_t width, T last, void* scratch)
      : elements(row),
        size(width),
        fill(last),
        block_end(static_cast<double*>(scratch)),
        block_max(reinterpret_cast<float*>(block_end + num_row_blocks(width))),
        candidates(block_max + num_row_blocks(width)) {}

  int64_t num_blocks() const { return num_row_blocks(size); }
};

// Calls body(i, x) for the vectors x of a block, i from 0 to VECS_PER_BLOCK.
template <typename T, typename Body>
PAGEDATTN_INLINE void for_vectors_of_block(const Row<T>& row, int64_t block, Body&& body) {
  const T* source = row.elements + block * ROW_BLOCK;
  T last[ROW_BLOCK];
  if (const int64_t rest = row.size - block * ROW_BLOCK; rest < ROW_BLOCK) {
    for (int64_t i = 0; i < ROW_BLOCK; ++i) last[i] = i < rest ? source[i] : row.fill;
    source = last;
  }
  PAGEDATTN_UNROLL
  for (int i = 0; i < VECS_PER_BLOCK; ++i) body(i, load(source + i * VEC_SIZE));
}

// Sums of 16 lanes, whatever the width of a vector is: a block has the same sum on every instruction set.
struct LaneSums {
  static constexpr int NUM_VECS = 16 / VEC_SIZE;
  Vec of[NUM_VECS] = {};

  PAGEDATTN_INLINE void add(int i, Vec x) { of[i % NUM_VECS] = of[i % NUM_VECS] + x; }
  PAGEDATTN_INLINE float total() {
    PAGEDATTN_UNROLL
    for (int half = NUM_VECS / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) of[i] = of[i] + of[i + half];
    }
    return reduce_sum(of[0]);
  }
};

struct RowFacts {
  float max;
  float min;
  double sum;
};

// Fills block_max, and block_end with all elements kept.
template <typename T>
RowFacts summarise(const Row<T>& row) {
  RowFacts facts{-INFINITE, INFINITE, 0.0};
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    LaneSums sums;
    Vec maximum = broadcast(-INFINITE), minimum = broadcast(INFINITE);
    for_vectors_of_block(row, block, [&](int i, Vec x) PAGEDATTN_ALWAYS_INLINE {
      sums.add(i, x);
      maximum = max(x, maximum);
      minimum = min(x, minimum);
    });
    row.block_max[block] = reduce_max(maximum);
    facts.max = facts.max > row.block_max[block] ? facts.max : row.block_max[block];
    const float block_min = -reduce_max(-minimum);
    facts.min = facts.min < block_min ? facts.min : block_min;
    facts.sum += sums.total();
    row.block_end[block] = facts.sum;
  }
  return facts;
}

// Fills block_end with the elements from `threshold` on, and returns their sum.
template <typename T>
double sum_from(const Row<T>& row, float threshold) {
  double sum = 0.0;
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    if (row.block_max[block] >= threshold) {
      LaneSums sums;
      for_vectors_of_block(
          row, block, [&](int i, Vec x) PAGEDATTN_ALWAYS_INLINE { sums.add(i, select(x >= threshold, x, Vec{})); });
      sum += sums.total();
    }
    row.block_end[block] = sum;
  }
  return sum;
}

// Unsigned integers in the order of the floats.
PAGEDATTN_INLINE uint32_t order_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

PAGEDATTN_INLINE float in_order(uint32_t order) {
  const uint32_t bits = order >> 31 ? order & 0x7fffffffu : ~order;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// The greatest x of values[0, size) for which the weights of all values from x on reach `target`; the least value if
// all weights together do not. Values that are not NaN, one at least. Their order is lost, and their number.
//
// A histogram of the weights over the range of the values finds the bin of x, then a histogram over this bin alone, and
// so on until the bin has one value.
template <typename Weight>
float reach(float* values, int64_t size, double target, const Weight& weight) {
  constexpr int LOG_NUM_BINS = 11;
  uint32_t low = ~0u, high = 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t order = order_of(values[i]);
    low = low < order ? low : order;
    high = high > order ? high : order;
  }
  double above = 0.0;
  while (low != high) {
    const int num_bits = 32 - __builtin_clz(high - low);
    const int shift = num_bits > LOG_NUM_BINS ? num_bits - LOG_NUM_BINS : 0;
    double bins[1 << LOG_NUM_BINS];
    uint32_t bin = (high - low) >> shift;
    for (uint32_t i = 0; i <= bin; ++i) bins[i] = 0.0;
    for (int64_t i = 0; i < size; ++i) bins[(order_of(values[i]) - low) >> shift] += weight(values[i]);
    for (; bin > 0 && above + bins[bin] < target; --bin) above += bins[bin];

    const uint32_t base = low;
    low = ~0u;
    high = 0;
    int64_t num_left = 0;
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t order = order_of(values[i]);
      if ((order - base) >> shift != bin) continue;
      values[num_left++] = values[i];
      low = low < order ? low : order;
      high = high > order ? high : order;
    }
    size = num_left;
  }
  return in_order(low);
}

// Writes the elements from `bound` on to row.candidates.
template <typename T>
int64_t gather_candidates(const Row<T>& row, float bound) {
  int64_t num_candidates = 0;
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    if (!(row.block_max[block] >= bound)) continue;
    float x[ROW_BLOCK];
    for_vectors_of_block(
        row, block, [&](int i, Vec v) PAGEDATTN_ALWAYS_INLINE { __builtin_memcpy(x + i * VEC_SIZE, &v, sizeof v); });
    const int64_t rest = row.size - block * ROW_BLOCK;
    for (int64_t i = 0; i < (rest < ROW_BLOCK ? rest : ROW_BLOCK); ++i) {
      row.candidates[num_candidates] = x[i];
      num_candidates += x[i] >= bound;
    }
  }
  return num_candidates;
}

// The k-th greatest element, k from 1 to the size of the row; -infinity if NaN leave too few.
template <typename T>
float kth_greatest(const Row<T>& row, int64_t k) {
  const auto one = [](float) { return 1.0; };
  const auto target = static_cast<double>(k);
  float bound = -INFINITE;
  if (k <= row.num_blocks()) {
    for (int64_t block = 0; block < row.num_blocks(); ++block) row.candidates[block] = row.block_max[block];
    bound = reach(row.candidates, row.num_blocks(), target, one);
  }
  const int64_t num_candidates = gather_candidates(row, bound);
  return num_candidates < k ? -INFINITE : reach(row.candidates, num_candidates, target, one);
}

// The greatest threshold from which on the elements from `least` on, divided by `scale`, sum to `top_p` at least.
// `sum` is that of the elements from `least` on, undivided.
template <typename T>
float top_p_threshold(const Row<T>& row, float top_p, float least, double sum, float scale) {
  constexpr double MARGIN = 0.999;  // for sums that are rounded
  const auto share_left_out =
      static_cast<float>(MARGIN * (sum - top_p * double{scale}) / static_cast<double>(row.size));
  const float bound = least > share_left_out ? least : share_left_out;
  const int64_t num_candidates = gather_candidates(row, bound);
  return num_candidates == 0 ? least : reach(row.candidates, num_candidates, top_p, [scale](float x) {
    return static_cast<double>(x / scale);
  });
}

struct Kept {
  float threshold;
  double sum;  // of the elements from the threshold on, as block_end has them
};

// What the filters of `filter_row` keep of a row of probabilities, whose facts are those of `summarise`.
template <typename T>
Kept keep(const Row<T>& row, const RowFacts& facts, const Filters& filters, int64_t filter_row) {
  Kept kept{-INFINITE, facts.sum};
  const auto raise = [&](float threshold) {
    if (threshold <= kept.threshold) return;
    kept = {threshold, sum_from(row, threshold)};
  };
  if (filters.top_k.are_given && filters.top_k[filter_row] < row.size) {
    raise(kth_greatest(row, filters.top_k[filter_row]));
  }
  if (filters.top_p.are_given && filters.top_p[filter_row] < 1.0f) {
    const bool is_first = filters.top_k.are_given && filters.top_k_first;
    raise(is_first
              ? top_p_threshold(row, filters.top_p[filter_row], kept.threshold, kept.sum, static_cast<float>(kept.sum))
              : top_p_threshold(row, filters.top_p[filter_row], 0.0f, facts.sum, 1.0f));
  }
  if (filters.min_p.are_given) raise(filters.min_p[filter_row] * facts.max);
  return kept;
}

// Whether a row is a distribution, normalised or not: finite, not negative, and not all zero. Probabilities that are
// NaN or infinite have such a sum.
PAGEDATTN_INLINE bool is_distribution(const RowFacts& facts) {
  return facts.sum > 0.0 && facts.sum < __builtin_inf() && facts.min >= 0.0f;
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
