// The walk of an item (docs/cpu-kernels.md draws it): what RowWalk (row_walk.h) and AmxWalk (amx_walk.h) share. An
// item's tokens are taken partition by partition, a partition is taken tile by tile, and a tile is taken KV head by KV
// head.
#pragma once

#include "attention/cpu/attention_results.h"
#include "attention/cpu/fetch_ahead.h"
#include "attention/cpu/prefetcher.h"
#include "attention/cpu/tile.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Queries and outputs have the type of the cache. Only beside a cache in 8 bits, they have a type of their own.
template <typename T, typename Function>
void dispatch_query_dtype(DType dtype, const Function& function) {
  if constexpr (sizeof(T) == 1) {
    dispatch_dtype(dtype, function);
  } else {
    function.template operator()<T>();
  }
}

template <typename T, CacheLayout LAYOUT = CacheLayout::CHUNKED>
class ItemWalk {
 public:
  ItemWalk(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
           const AttentionItem* next_item)
      : p_(params), rows_(rows), item_(item), ahead_(params, rows, item, next_item) {}

  // Calls attend(at, head, end, prefetcher) for each tile of a partition and KV heads [head, end): as a rule a single
  // head, but all heads that were fetched together in the NHD layout.
  template <typename Attend>
  void attend_partition(int64_t partition, const Attend& attend) const {
    Prefetcher<T, LAYOUT> prefetcher;
    TileRows<T, LAYOUT> at = find_first_tile_rows<T, LAYOUT>(p_, rows_, item_, partition);
    while (at.tile.end > 0) {
      const TileRows<T, LAYOUT> next = find_next_tile_rows(p_, rows_, item_, partition, at);
      for (int64_t head = item_.head_begin; head < item_.head_end;) {
        if (ahead_.is_due(head)) ahead_.start_after(at.tile, head, next.tile, partition, prefetcher);
        const int64_t end = LAYOUT == CacheLayout::NHD ? ahead_.end_of_part(head) : head + 1;
        attend(at, head, end, prefetcher);
        head = end;
      }
      at = next;
    }
  }

 protected:
  const PagedAttentionParams& p_;
  const AttentionRow* rows_;
  const AttentionItem& item_;
  FetchAhead<T, LAYOUT> ahead_;
};

// `walk` has the results of a partition and those of all partitions so far. for_each_partial and for_each_total call
// function(row, head, results, i) with the plan's row, and where its result is.
template <typename T, typename Walk>
void walk_item(const Walk& walk, const PagedAttentionParams& p, const AttentionRow* rows, const AttentionItem& item,
               float* partials) {
  if (!item.is_partial) walk.clear_total();
  for (int64_t partition = item.partition_begin; partition < item.partition_end; ++partition) {
    walk.clear_partition();
    walk.attend_partition(partition, [&](const auto& at, int64_t head, int64_t end, auto& prefetcher) {
      walk.attend(at, head, end, prefetcher);
    });
    if (!item.is_partial) {
      walk.merge_partition();
      continue;
    }
    walk.for_each_partial([&](int64_t row, int64_t head, const Results& results, int64_t i) {
      const int64_t partial = rows[row].first_partial + partition;
      const Results to(partials + partial * partial_floats(p.num_heads, p.head_size), p.num_heads);
      copy(to, head, results, i, p.head_size);
    });
  }
  if (item.is_partial) return;
  dispatch_query_dtype<T>(p.dtype, [&]<typename OutT>() {
    walk.for_each_total([&](int64_t row, int64_t head, const Results& results, int64_t i) {
      write_out<OutT>(p, rows[row].row, head, results, i);
    });
  });
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
