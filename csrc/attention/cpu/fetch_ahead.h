// What the walk of an item fetches, and when; for item_walk.h and amx_walk.h.
#pragma once

#include "attention/cpu/prefetcher.h"
#include "attention/cpu/tile.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Fetches some KV heads of a tile while the walk is at work on the heads before them.
template <typename T>
class FetchAhead {
 public:
  FetchAhead(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
             const AttentionItem* next_item)
      : p_(params), rows_(rows), item_(item), next_item_(next_item) {
    const int64_t head_bytes = params.head_size * params.block_size * static_cast<int64_t>(sizeof(T));
    const int64_t num_heads = item.head_end - item.head_begin;
    const int64_t most_heads = head_bytes < FETCH_RUN_BYTES ? FETCH_RUN_BYTES / head_bytes : 1;
    const int64_t num_parts = (num_heads + most_heads - 1) / most_heads;
    heads_at_once_ = (num_heads + num_parts - 1) / num_parts;
  }

  // Whether the walk, at `head` of a tile, comes to heads that were fetched together.
  bool is_due(int64_t head) const { return (head - item_.head_begin) % heads_at_once_ == 0; }

  // How many heads, from `head` on, were fetched together.
  int64_t num_heads_until_due(int64_t head) const {
    return heads_at_once_ - (head - item_.head_begin) % heads_at_once_;
  }

  // Starts to fetch what the walk comes to after the heads of `tile` that were fetched together, from `head` on: more
  // heads of the tile, or the first heads of the next tile, of the next partition, or of the next item.
  void start_after(const Tile<T>& tile, int64_t head, const Tile<T>& next_tile, int64_t partition,
                   Prefetcher<T>& prefetcher) const {
    const auto fetch = [&](const AttentionItem& item, const Tile<T>& from, int64_t first_head) {
      const int64_t heads_left = item.head_end - first_head;
      prefetcher.start(p_, from, first_head, heads_left < heads_at_once_ ? heads_left : heads_at_once_);
    };
    const auto fetch_first = [&](const AttentionItem& item, int64_t of_partition) {
      fetch(item, find_first_tile_rows<T>(p_, rows_, item, of_partition).tile, item.head_begin);
    };
    if (head + heads_at_once_ < item_.head_end) {
      fetch(item_, tile, head + heads_at_once_);
    } else if (next_tile.end > 0) {
      fetch(item_, next_tile, item_.head_begin);
    } else if (partition + 1 < item_.partition_end) {
      fetch_first(item_, partition + 1);
    } else if (next_item_ != nullptr) {
      fetch_first(*next_item_, next_item_->partition_begin);
    }
  }

 private:
  const PagedAttentionParams& p_;
  const AttentionRow* rows_;
  const AttentionItem& item_;
  const AttentionItem* next_item_;
  int64_t heads_at_once_;  // about as many in each part, as one is fetched while another is computed
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
