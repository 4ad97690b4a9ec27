// Attention on the CPU: the choice of the code for the type of the cache, and the merge of partial results.
#include "attention/paged_attention.h"

#include "attention/cpu/attend_item.h"
#include "attention/cpu/attention_results.h"
#include "cpu_float8.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Puts the scales of keys and values into the units in which the kernel reads the cache. The scales are read here, as a
// CPU graph calls this later.
PagedAttentionParams in_loaded_units(PagedAttentionParams params) {
  if (params.key_scale_on_device != nullptr) params.logit_scale *= *params.key_scale_on_device;
  if (params.value_scale_on_device != nullptr) params.value_scale *= *params.value_scale_on_device;
  if (params.cache_dtype == DType::FLOAT8_E4M3) {
    params.logit_scale *= E4M3_UNIT;
    params.value_scale *= E4M3_UNIT;
  }
  return params;
}

}  // namespace

void attend(const PagedAttentionParams& op_params, const AttentionRow* rows, const AttentionItem& item,
            const AttentionItem* next_item, float* scratch, float* partials) {
  const PagedAttentionParams params = in_loaded_units(op_params);
  dispatch_cache_dtype(params.cache_dtype,
                       [&]<typename T>() { attend_item<T>(params, rows, item, next_item, scratch, partials); });
}

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
