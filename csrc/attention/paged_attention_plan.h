// How a ragged batch is divided into items for the CPU's threads. No torch.
#pragma once

#include <vector>

#include "attention/paged_attention.h"

namespace pagedattn {

struct AttentionPlan {
  std::vector<AttentionItem> items;
  std::vector<MergeItem> merges;
  int64_t num_partials = 0;
  int64_t partial_stride = 0;  // floats
  int64_t scratch_floats = 0;  // of each thread
  int64_t multiply_adds = 0;   // of the whole batch, about
};

// Needs the lengths of `params`, no tensor data. The results do not depend on the number of threads.
AttentionPlan plan_attention(const PagedAttentionParams& params, int64_t num_threads);

}  // namespace pagedattn
