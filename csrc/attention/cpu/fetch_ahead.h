// What the walk of an item fetches, and when; for item_walk.h.
#pragma once

#include "attention/cpu/fetch_order.h"
#include "attention/cpu/nhd_prefetcher.h"
#include "attention/cpu/prefetcher.h"
#include "attention/cpu/tile.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// (row, head) pairs that go over a tile of the NHD layout together.
constexpr int64_t NHD_RESULTS = 64;

// How many KV heads a walk takes together. Where the heads of a token are adjacent, few rows take all of them, so that
// memory is read front to back. Where the tokens of a head are adjacent, or where many rows make arithmetic the limit,
// the walk goes head by head.
inline int64_t nhd_heads_at_once(const PagedAttentionParams& p, int64_t of_head) {
  return p.key_strides.token < p.key_strides.kv_head || are_many(of_head) ? 1 : NHD_RESULTS / of_head;
}

// How many of `num_heads` KV heads make a part, if `most` of them should. A part is fetched while the part before it is
// computed, so all parts should be of one size: where the heads are a multiple of it, a part may have half as many
// heads again, or fewer.
inline int64_t heads_of_a_part(int64_t num_heads, int64_t most) {
  const int64_t num_parts = (num_heads + most - 1) / most;
  for (int64_t parts = (2 * num_parts + 2) / 3; parts < 2 * num_parts; ++parts) {
    if (num_heads % parts == 0) return num_heads / parts;
  }
  return (num_heads + num_parts - 1) / num_parts;
}

// Fetches some KV heads of a tile while the walk is at work on the heads before them.
template <typename T, CacheLayout LAYOUT = CacheLayout::CHUNKED>
class FetchAhead {
 public:
  FetchAhead(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
             const AttentionItem* next_item)
      : p_(params), rows_(rows), item_(item), next_item_(next_item) {
    const int64_t num_heads = item.head_end - item.head_begin;
    const int64_t of_head = results_of_head(params, item);
    are_many_ = are_many(of_head);
    if constexpr (LAYOUT == CacheLayout::NHD) {
      const int64_t most = nhd_heads_at_once(params, of_head), num_parts = (num_heads + most - 1) / most;
      heads_at_once_ = (num_heads + num_parts - 1) / num_parts;
    } else {
      const int64_t head_bytes = params.head_size * params.block_size * static_cast<int64_t>(sizeof(T));
      const int64_t run_bytes = fetch_order().run_bytes;
      heads_at_once_ = heads_of_a_part(num_heads, head_bytes < run_bytes ? run_bytes / head_bytes : 1);
    }
  }

  // Whether the walk, at `head` of a tile, comes to heads that were fetched together.
  bool is_due(int64_t head) const { return (head - item_.head_begin) % heads_at_once_ == 0; }

  // How many heads, from `head` on, were fetched together.
  int64_t num_heads_until_due(int64_t head) const {
    return heads_at_once_ - (head - item_.head_begin) % heads_at_once_;
  }

  // The end of the heads, from `head` on, that are fetched together.
  int64_t end_of_part(int64_t head) const {
    return head + heads_at_once_ < item_.head_end ? head + heads_at_once_ : item_.head_end;
  }

  // Starts to fetch what the walk comes to after the heads of `tile` that were fetched together, from `head` on: more
  // heads of the tile, or the first heads of the next tile, of the next partition, or of the next item. The walk reads
  // copies of small blocks, which are made when it comes to a head.
  void start_after(const Tile<T, LAYOUT>& tile, int64_t head, const Tile<T, LAYOUT>& next_tile, int64_t partition,
                   Prefetcher<T, LAYOUT>& prefetcher) const {
    if (has_small_blocks(p_)) return;
    // Many rows convert a tile before they multiply it.
    if constexpr (LAYOUT == CacheLayout::NHD) prefetcher.start(p_, tile, head, end_of_part(head) - head, are_many_);
    const auto fetch = [&](const AttentionItem& item, const Tile<T, LAYOUT>& from, int64_t first_head) {
      const int64_t heads_left = item.head_end - first_head;
      if constexpr (LAYOUT == CacheLayout::NHD) {
        prefetcher.start_next(p_, from, first_head);
      } else {
        prefetcher.start(p_, from, first_head, heads_left < heads_at_once_ ? heads_left : heads_at_once_);
      }
    };
    const auto fetch_first = [&](const AttentionItem& item, int64_t of_partition) {
      fetch(item, find_first_tile_rows<T, LAYOUT>(p_, rows_, item, of_partition).tile, item.head_begin);
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
  int64_t heads_at_once_;
  bool are_many_;
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
