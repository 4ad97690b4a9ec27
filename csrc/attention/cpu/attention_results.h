// Results of attention: partial, merged, final; for item_walk.h.
#pragma once

#include "attention/cpu/item_scratch.h"
#include "attention/paged_attention.h"
#include "cpu_math.h"
#include "cpu_memory.h"
#include "cpu_rows.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// One result for each (row, head) pair, in memory that the caller owns.
struct Results {
  float* max;     // [num_results]
  float* sum;     // [num_results]
  float* values;  // [num_results, head_size]

  Results(float* max, float* sum, float* values) : max(max), sum(sum), values(values) {}
  Results(float* memory, int64_t num_results) : Results(memory, memory + num_results, memory + 2 * num_results) {}
};

inline void clear(const Results& results, int64_t num_results, int64_t head_size) {
  for (int64_t i = 0; i < num_results; ++i) results.max[i] = -__builtin_inff();
  __builtin_memset(results.sum, 0, num_results * sizeof(float));
  __builtin_memset(results.values, 0, num_results * head_size * sizeof(float));
}

// Copies result `from_index` of `from` to result `index`.
inline void copy(const Results& results, int64_t index, const Results& from, int64_t from_index, int64_t head_size) {
  results.max[index] = from.max[from_index];
  results.sum[index] = from.sum[from_index];
  __builtin_memcpy(results.values + index * head_size, from.values + from_index * head_size, head_size * sizeof(float));
}

// Merges result `from_index` of `from` into result `index`.
inline void merge(const Results& results, int64_t index, const Results& from, int64_t from_index, int64_t head_size) {
  const float old_max = results.max[index];
  const float from_max = from.max[from_index];
  const float new_max = from_max > old_max ? from_max : old_max;
  const float base = softmax_base(new_max);
  const float weight = exp(old_max - base);
  const float from_weight = exp(from_max - base);
  results.max[index] = new_max;
  results.sum[index] = results.sum[index] * weight + from.sum[from_index] * from_weight;
  float* values = results.values + index * head_size;
  const float* from_values = from.values + from_index * head_size;
  for_each_vector(head_size, [&](int64_t d, auto load, auto store) {
    store(values + d, fma(load(values + d), broadcast(weight), load(from_values + d) * from_weight));
  });
}

// Rounds one result to `out`. A row that sees nothing gives zeros. A row whose sum is NaN gives NaN.
template <typename T>
void write_out(const PagedAttentionParams& p, int64_t row, int64_t head, const Results& results, int64_t index) {
  const float max = results.max[index];
  float base = max;
  float sum = results.sum[index];
  float weight = 1.0f;  // of the values, which are relative to `max`
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head];
    base = softmax_base(sink > max ? sink : max);  // both may be -inf
    weight = exp(max - base);
    sum = sum * weight + exp(sink - base);
  }
  const float scale = results.sum[index] == 0.0f ? 0.0f : weight / sum * p.value_scale;
  const float* values = results.values + index * p.head_size;
  T* out = static_cast<T*>(p.out) + row * p.out_stride + head * p.head_size;
  for_each_vector(p.head_size, [&](int64_t d, auto load, auto store) { store(out + d, load(values + d) * scale); });
  if (p.lse != nullptr) {
    p.lse[row * p.num_heads + head] = sum == 0.0f ? -__builtin_inff() : base + __builtin_logf(sum);
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
