// plan_items for plan.py, which compiles this file and csrc/attention/cpu/plan_items.cpp.
#include "attention/cpu/plan_items.h"

#include <algorithm>
#include <cstdint>

// Plans one row for each sequence. `items` gets the first `max_items` of the plan, as many rows of [rows, KV heads,
// partitions]; returns how many there are.
extern "C" int64_t plan_decode(int64_t num_seqs, const int32_t* seq_lens, const int32_t* block_tables,
                               int64_t block_table_stride, int64_t block_size, int64_t num_heads, int64_t num_kv_heads,
                               int64_t num_threads, int64_t max_items, int64_t* items) {
  pagedattn::PagedAttentionParams params{};
  params.num_seqs = params.num_tokens = num_seqs;
  params.num_heads = num_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_size = 128;
  params.block_size = block_size;
  params.sliding_window = pagedattn::NO_SLIDING_WINDOW;
  params.block_tables = {block_tables, false};
  params.block_table_stride = block_table_stride;
  params.max_seq_len = block_table_stride * block_size;
  params.seq_lens = {seq_lens, false};
  const pagedattn::ItemPlan plan = pagedattn::plan_items(params, num_threads, /*prefill_results=*/64);
  const auto num_items = static_cast<int64_t>(plan.items.size());
  for (int64_t i = 0; i < std::min(num_items, max_items); ++i) {
    const pagedattn::AttentionItem& item = plan.items[i];
    *items++ = item.row_end - item.row_begin;
    *items++ = item.head_end - item.head_begin;
    *items++ = item.partition_end - item.partition_begin;
  }
  return num_items;
}
