// How a ragged batch is divided into items for the CPU's threads.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/paged_attention_plan.h"

namespace pagedattn {

struct ItemPlan {
  std::vector<AttentionRow> rows;
  std::vector<AttentionItem> items;
  std::vector<MergeItem> merges;
  int64_t num_partials = 0;
  int64_t multiply_adds = 0;
};

// Reads the lengths and the block tables of `params`, and no other tensor data. An item of prefill has up to
// `prefill_results` (row, head) pairs. The results of attention depend neither on `prefill_results`, nor on the number
// of threads, nor on which sequences share blocks.
ItemPlan plan_items(const PagedAttentionParams& params, int64_t num_threads, int64_t prefill_results);

}  // namespace pagedattn
