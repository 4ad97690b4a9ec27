// How a ragged batch is divided into items for the CPU's threads. No torch.
#pragma once

#include <vector>

#include "attention/paged_attention.h"

namespace pagedattn {

struct AttentionPlan {
  std::vector<AttentionRow> rows;
  std::vector<AttentionItem> items;
  std::vector<MergeItem> merges;
  int64_t num_partials = 0;
  int64_t scratch_floats = 0;  // of each thread
  int64_t multiply_adds = 0;   // of the whole batch, approximately
};

// Reads the lengths and the block tables of `params`, and no other tensor data. An item of prefill has up to
// `prefill_results` (row, head) pairs. The results of attention depend neither on `prefill_results`, nor on the number
// of threads, nor on which sequences share blocks.
AttentionPlan plan_attention(const PagedAttentionParams& params, int64_t num_threads, int64_t prefill_results);

}  // namespace pagedattn
