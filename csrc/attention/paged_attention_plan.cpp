// Sequences with few rows (decode) read far more than they compute: an item is one partition with all KV heads, so
// that blocks are read front to back, and long sequences spread over the threads. Sequences with many rows (prefill)
// compute more than they read: an item is a tile of rows and one KV head with all partitions, so that its state stays
// in cache and nothing needs merging. On one thread, an item of decode has all partitions as well.
#include "attention/paged_attention_plan.h"

#include <algorithm>

namespace pagedattn {
namespace {

constexpr int64_t MAX_DECODE_ROWS = 8;
constexpr int64_t PREFILL_RESULTS = 64;  // (row, head) pairs of a prefill item

struct PartitionRange {
  int64_t begin, end;
};

// The partitions with tokens that some row of [row_begin, row_end) sees; empty if there is none.
PartitionRange visible_partitions(const PagedAttentionParams& p, int64_t seq, int64_t row_begin, int64_t row_end) {
  const int64_t visible_end = p.position(seq, row_end - 1) + 1;
  if (visible_end <= 0) return {0, 0};
  return {p.first_visible(p.position(seq, row_begin)) / PARTITION_TOKENS,
          (visible_end + PARTITION_TOKENS - 1) / PARTITION_TOKENS};
}

}  // namespace

AttentionPlan plan_attention(const PagedAttentionParams& p, int64_t num_threads) {
  AttentionPlan plan;
  int64_t max_results = 0;
  for (int32_t seq = 0; seq < p.num_seqs; ++seq) {
    const int64_t row_begin = p.row_begin(seq);
    const int64_t row_end = p.row_end(seq);
    const int64_t num_rows = row_end - row_begin;
    if (num_rows == 0) continue;
    plan.multiply_adds += 2 * num_rows * p.num_heads * p.head_size * p.seq_lens[seq];

    if (num_rows <= MAX_DECODE_ROWS) {
      const PartitionRange partitions = visible_partitions(p, seq, row_begin, row_end);
      max_results = std::max(max_results, num_rows * p.num_heads);
      AttentionItem item{seq, row_begin, row_end, 0, p.num_kv_heads, partitions.begin, partitions.end, -1};
      const int64_t num_partitions = partitions.end - partitions.begin;
      if (num_partitions <= 1 || num_threads == 1) {
        plan.items.push_back(item);
        continue;
      }
      plan.merges.push_back({seq, row_begin, row_end, plan.num_partials, num_partitions});
      for (int64_t partition = partitions.begin; partition < partitions.end; ++partition) {
        item.partition_begin = partition;
        item.partition_end = partition + 1;
        item.partial = plan.num_partials++;
        plan.items.push_back(item);
      }
    } else {
      const int64_t group_size = p.num_heads / p.num_kv_heads;
      const int64_t tile_rows = std::max<int64_t>(1, PREFILL_RESULTS / group_size);
      max_results = std::max(max_results, tile_rows * group_size);
      for (int64_t begin = row_begin; begin < row_end; begin += tile_rows) {
        const int64_t end = std::min(begin + tile_rows, row_end);
        const PartitionRange partitions = visible_partitions(p, seq, begin, end);
        for (int64_t head = 0; head < p.num_kv_heads; ++head) {
          plan.items.push_back({seq, begin, end, head, head + 1, partitions.begin, partitions.end, -1});
        }
      }
    }
  }
  plan.partial_stride = partial_floats(max_results, p.head_size);
  plan.scratch_floats = query_floats(max_results, p.head_size) + 2 * plan.partial_stride;
  return plan;
}

}  // namespace pagedattn
