// What the CPU's threads do for a call of attention: a plan of items, and the kernels that take them. No torch.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/paged_attention.h"

namespace pagedattn {

// A query row, as the plan lists it.
struct AttentionRow {
  int32_t seq;
  int64_t row;            // of query and out
  int64_t position;       // of its token
  int64_t first_partial;  // plus a partition: the index of the row's partial result
};

// Some rows, some KV heads, some partitions. The rows of a sequence are adjacent. Several sequences are in one item
// where they share blocks.
struct AttentionItem {
  int64_t row_begin, row_end;    // of the plan's rows
  int64_t head_begin, head_end;  // KV heads
  int64_t partition_begin, partition_end;
  bool is_partial;  // writes a partial result for each row and partition, instead of `out`
};

// A row whose partitions were computed one by one. They are merged for all heads.
struct MergeItem {
  int64_t row;
  int64_t first_partial, num_partials;
};

// Attends to an item, whose rows are counted in `rows`. `scratch` has room for any item of the plan. `partials` holds
// sets of partial results, one after the other; a set is of all heads of a row. Towards the end, the start of what
// `next_item` (may be nullptr) reads is fetched.
using AttendKernel = void(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
                          const AttentionItem* next_item, float* scratch, float* partials);
// Merges a row's partial results. `scratch` has room as above.
using MergeKernel = void(const PagedAttentionParams& params, const MergeItem& item, const float* partials,
                         float* scratch);

struct AttentionPlan {
  AttendKernel* attend;
  MergeKernel* merge;
  std::vector<AttentionRow> rows;
  std::vector<AttentionItem> items;
  std::vector<MergeItem> merges;  // after all items
  int64_t partial_floats;         // of the partial results of all items
  int64_t scratch_floats;         // of each thread
  int64_t multiply_adds;          // of the whole batch, approximately
};

// Chooses the kernels for a call, and divides the call among up to `num_threads` threads. Reads the lengths and the
// block tables of `params`, and no other tensor data. The results of attention depend neither on the number of threads,
// nor on which sequences share blocks.
AttentionPlan plan_attention(const PagedAttentionParams& params, int64_t num_threads);

}  // namespace pagedattn
