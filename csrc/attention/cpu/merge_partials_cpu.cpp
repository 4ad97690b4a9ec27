// The merge of partial results of attention.
#include "attention/cpu/attend_kernels.h"
#include "attention/cpu/attention_results.h"
#include "attention/cpu/loaded_units.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {

void merge_partials(const PagedAttentionParams& op_params, const MergeItem& item, const float* partials,
                    float* scratch) {
  const PagedAttentionParams params = in_loaded_units(op_params);
  const Results results(scratch, params.num_heads);
  clear(results, params.num_heads, params.head_size);
  for (int64_t partial = item.first_partial; partial < item.first_partial + item.num_partials; ++partial) {
    const Results from(const_cast<float*>(partials) + partial * partial_floats(params.num_heads, params.head_size),
                       params.num_heads);
    for (int64_t head = 0; head < params.num_heads; ++head) merge(results, head, from, head, params.head_size);
  }
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t head = 0; head < params.num_heads; ++head) write_out<T>(params, item.row, head, results, head);
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
