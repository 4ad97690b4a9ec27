// A weighted mean of two outputs. An output's weight is its share of the sum of exponentials.
#include "attention/merge_attn_states.h"

#include "cpu_math.h"
#include "cpu_memory.h"
#include "cpu_rows.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// An infinity of either sign says that an output is of no tokens. Such an output may hold anything.
float lse_of(float lse) { return lse == __builtin_inff() ? -lse : lse; }

template <typename T>
void merge_row(const MergeAttnStatesParams& p, int64_t row) {
  const float prefix_lse = lse_of(p.prefix_lse[row]);
  const float suffix_lse = lse_of(p.suffix_lse[row]);
  const float largest = prefix_lse > suffix_lse ? prefix_lse : suffix_lse;
  const float base = softmax_base(largest);
  const float prefix_sum = exp((prefix_lse - base) * p.ln_base);
  const float suffix_sum = exp((suffix_lse - base) * p.ln_base);
  const float sum = prefix_sum + suffix_sum;
  const Vec prefix_weight = broadcast(sum == 0.0f ? 0.0f : prefix_sum / sum);
  const Vec suffix_weight = broadcast(sum == 0.0f ? 0.0f : suffix_sum / sum);

  const T* prefix = static_cast<const T*>(p.prefix_output) + row * p.head_size;
  const T* suffix = static_cast<const T*>(p.suffix_output) + row * p.head_size;
  T* output = static_cast<T*>(p.output) + row * p.head_size;
  write_vectors<false>(p.head_size, {output}, [&](int64_t d, auto load) {
    const Vec of_prefix = prefix_lse == -__builtin_inff() ? Vec{} : load(prefix + d);
    const Vec of_suffix = suffix_lse == -__builtin_inff() ? Vec{} : load(suffix + d);
    return Vecs<1>{{fma(of_prefix, prefix_weight, of_suffix * suffix_weight)}};
  });
  if (p.output_lse != nullptr) p.output_lse[row] = sum == 0.0f ? largest : base + __builtin_logf(sum) / p.ln_base;
}

}  // namespace

void merge_attn_states(const MergeAttnStatesParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) merge_row<T>(params, row);
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
