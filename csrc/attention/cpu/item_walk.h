// The walk of an item (docs/cpu-kernels.md draws it). An item's tokens are taken tile by tile, and a tile is taken KV
// head by KV head. In a physical block, the part of one head is contiguous, and the next head's part follows. So every
// block is read front to back, once for all query heads that share a KV head (attend_rows.h).
//
// T is the type of the cache. Queries and outputs are read and written once, in their own type.
#pragma once

#include "attention/cpu/attend_rows.h"
#include "attention/cpu/attention_results.h"
#include "attention/cpu/fetch_ahead.h"
#include "attention/cpu/loaded_units.h"
#include "attention/cpu/many_rows.h"
#include "attention/cpu/prefetcher.h"
#include "attention/cpu/small_blocks.h"
#include "attention/cpu/tile.h"
#include "cpu_memory.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// The index of a (row, head) pair among the pairs of `num_rows` rows and some KV heads. The pairs are in order of KV
// head, then of row, so that the query heads of adjacent rows that share a KV head are adjacent.
struct ResultIndex {
  int64_t num_rows;
  int64_t group_size;

  int64_t of(int64_t kv_head, int64_t row) const { return (kv_head * num_rows + row) * group_size; }
};

// The walk of one item.
template <typename T, CacheLayout LAYOUT, typename Arithmetic>
class ItemWalk {
 public:
  ItemWalk(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
           const AttentionItem* next_item, float* copies, float* queries)
      : p_(params),
        rows_(rows),
        item_(item),
        ahead_(params, rows, item, next_item),
        small_blocks_(params, copies),
        queries_(queries),
        index_{item.row_end - item.row_begin, params.num_heads / params.num_kv_heads},
        row_floats_(Arithmetic::Dot::row_floats(params.head_size)) {
    dispatch_dtype(p_.dtype, [&]<typename QueryT>() {
      const QueryT* query_rows = static_cast<const QueryT*>(p_.query);
      for_each_result([&](int64_t i, int64_t row, int64_t head) {
        const QueryT* query = query_rows + row * p_.query_stride + head * p_.head_size;
        Arithmetic::Dot::unpack_query(query, p_.head_size, queries_ + i * row_floats_);
      });
    });
  }

  const ResultIndex& index() const { return index_; }
  int64_t num_results() const { return index_.of(item_.head_end - item_.head_begin, 0); }

  // Calls function(i, row, head), with the row and the head of query and out.
  template <typename Function>
  void for_each_result(const Function& function) const {
    int64_t i = 0;
    for (int64_t kv_head = item_.head_begin; kv_head < item_.head_end; ++kv_head) {
      for (int64_t row = item_.row_begin; row < item_.row_end; ++row) {
        for (int64_t g = 0; g < index_.group_size; ++g) function(i++, rows_[row].row, kv_head * index_.group_size + g);
      }
    }
  }

  void attend_partition(int64_t partition, const Results& results) const {
    clear(results, num_results(), p_.head_size);
    Prefetcher<T, LAYOUT> prefetcher;
    TileRows<T, LAYOUT> at = find_first_tile_rows<T, LAYOUT>(p_, rows_, item_, partition);
    while (at.tile.end > 0) {
      const TileRows<T, LAYOUT> next = find_next_tile_rows(p_, rows_, item_, partition, at);
      for (int64_t head = item_.head_begin; head < item_.head_end; ++head) {
        if (ahead_.is_due(head)) ahead_.start_after(at.tile, head, next.tile, partition, prefetcher);
        if constexpr (LAYOUT == CacheLayout::NHD) {
          if (const int64_t end = ahead_.end_of_part(head); end - head > 1) {
            attend_heads(at, head, end, prefetcher, results);
            head = end - 1;
            continue;
          }
        }
        attend_head(at, head, prefetcher, results);
      }
      at = next;
    }
  }

 private:
  using Head = HeadTile<T, LAYOUT>;

  Head head_of(const TileRows<T, LAYOUT>& at, int64_t kv_head, Prefetcher<T, LAYOUT>& prefetcher) const {
    if constexpr (LAYOUT == CacheLayout::CHUNKED) {
      if (has_small_blocks(p_)) return small_blocks_.copy(at.tile, rows_[at.begin].seq, kv_head, &prefetcher);
    }
    return {p_, at.tile, static_cast<const T*>(p_.key_cache) + kv_head * p_.key_strides.kv_head,
            static_cast<const T*>(p_.value_cache) + kv_head * p_.value_strides.kv_head, &prefetcher};
  }

  // Calls function.operator()<NUM_ROWS>(i) for rows [i, i + NUM_ROWS) of [begin, end).
  template <typename Function>
  static PAGEDATTN_INLINE void for_few_rows(int64_t begin, int64_t end, const Function& function) {
    int64_t i = begin;
    for (; i + MAX_ROWS <= end; i += MAX_ROWS) function.template operator()<MAX_ROWS>(i);
    if constexpr (MAX_ROWS > 2) {
      if (i + 3 == end) return function.template operator()<3>(i);
      for (; i + 2 <= end; i += 2) function.template operator()<2>(i);
    }
    if (i < end) function.template operator()<1>(i);
  }

  // Some tokens of a tile, all heads, in the order of memory: so that of a token everything is read while it is near.
  // Calls function.operator()<NUM_ROWS>(head, tokens, i) for rows [i, i + NUM_ROWS) of these heads.
  template <typename Function>
  PAGEDATTN_INLINE void for_tokens(const TileRows<T, LAYOUT>& at, int64_t head_begin, int64_t head_end,
                                   Prefetcher<T, LAYOUT>& prefetcher, const Function& function) const {
    const int64_t token_bytes = (head_end - head_begin) * p_.head_size * static_cast<int64_t>(sizeof(T));
    const int64_t rows_of_head = index_.group_size * (at.end - at.begin);
    int at_once = TILE_TOKENS;
    while (at_once > VEC_SIZE && at_once * token_bytes > NHD_LEAD_BYTES / 2) at_once /= 2;
    for (int begin = at.tile.begin; begin < at.tile.end;) {
      const int next = (begin / at_once + 1) * at_once;
      const TileTokens tokens{begin, next < at.tile.end ? next : at.tile.end};
      begin = tokens.end;
      for (int64_t kv_head = head_begin; kv_head < head_end; ++kv_head) {
        Head head = head_of(at, kv_head, prefetcher);
        const int64_t first_row = (kv_head - head_begin) * rows_of_head;
        for_few_rows(first_row, first_row + rows_of_head, [&]<int NUM_ROWS>(int64_t i) {
          function.template operator()<NUM_ROWS>(head, tokens, i);
          head.prefetcher = nullptr;
        });
      }
    }
  }

  // Attends to a tile with few rows of several KV heads, as attend_rows does with those of one.
  void attend_heads(const TileRows<T, LAYOUT>& at, int64_t head_begin, int64_t head_end,
                    Prefetcher<T, LAYOUT>& prefetcher, const Results& results) const {
    TileLogits logits[NHD_RESULTS];
    alignas(64) float sums[NHD_RESULTS * MAX_HEAD_SIZE];
    Row rows[NHD_RESULTS];
    const int64_t sums_stride = nhd_sums_stride(p_.head_size);
    const int64_t rows_of_head = index_.group_size * (at.end - at.begin);
    const int64_t num_rows = rows_of_head * (head_end - head_begin);
    for (int64_t head = head_begin; head < head_end; ++head) {
      const int64_t first = index_.of(head - item_.head_begin, at.begin - item_.row_begin);
      locate_rows(first, rows_of_head, head, results, rows + (head - head_begin) * rows_of_head);
    }
    if (!at.tile.all_visible(0, TILE_TOKENS)) __builtin_memset(logits, 0, num_rows * sizeof logits[0]);
    for_tokens(at, head_begin, head_end, prefetcher, [&]<int NUM_ROWS>(const Head& head, TileTokens tokens, int64_t i) {
      compute_logits<typename Arithmetic::Dot, NUM_ROWS>(head, tokens, rows + i, logits + i);
    });
    for_few_rows(0, num_rows,
                 [&]<int NUM_ROWS>(int64_t i) { update_softmax<NUM_ROWS>(p_, at.tile, rows + i, logits + i); });
    for_tokens(at, head_begin, head_end, prefetcher, [&]<int NUM_ROWS>(const Head& head, TileTokens tokens, int64_t i) {
      accumulate_nhd_values<NUM_ROWS>(head, tokens, logits + i, sums + i * sums_stride, sums_stride);
    });
    for (int64_t i = 0; i < num_rows; ++i) add_nhd_sums<T>(p_.head_size, sums + i * sums_stride, rows[i].values);
  }

  void attend_head(const TileRows<T, LAYOUT>& at, int64_t kv_head, Prefetcher<T, LAYOUT>& prefetcher,
                   const Results& results) const {
    Head head_tile = head_of(at, kv_head, prefetcher);
    const int64_t i = index_.of(kv_head - item_.head_begin, at.begin - item_.row_begin);
    const int64_t end = i + index_.group_size * (at.end - at.begin);
    if constexpr (Arithmetic::MANY_ROWS) {
      if (end - i >= LEAST_ROWS && can_attend_many_rows<typename Arithmetic::Strip>(head_tile.params)) {
        return attend_many(head_tile, i, end, kv_head, results);
      }
    }
    for_few_rows(i, end, [&]<int NUM_ROWS>(int64_t first) {
      attend_results<NUM_ROWS>(head_tile, first, kv_head, results);
      head_tile.prefetcher = nullptr;
    });
  }

  // Sets `rows` to results [first, first + count), which are of KV head `kv_head`.
  void locate_rows(int64_t first, int64_t count, int64_t kv_head, const Results& results, Row* rows) const {
    const auto of_head = static_cast<uint32_t>(first - index_.of(kv_head - item_.head_begin, 0));
    const auto group_size = static_cast<uint32_t>(index_.group_size);
    const AttentionRow* row = rows_ + item_.row_begin + of_head / group_size;
    uint32_t of_group = of_head % group_size;
    for (int64_t i = first; i < first + count; ++i) {
      const int64_t head = kv_head * group_size + of_group;
      *rows++ = {row->position,
                 p_.alibi_slopes == nullptr ? 0.0f : p_.alibi_slopes[head],
                 queries_ + i * row_floats_,
                 results.max + i,
                 results.sum + i,
                 results.values + i * p_.head_size};
      if (++of_group == group_size) {
        of_group = 0;
        ++row;
      }
    }
  }

  template <int NUM_ROWS>
  void attend_results(const Head& head_tile, int64_t first, int64_t kv_head, const Results& results) const {
    Row rows[NUM_ROWS];
    locate_rows(first, NUM_ROWS, kv_head, results, rows);
    attend_rows<Arithmetic, NUM_ROWS>(head_tile, rows);
  }

  // Computes results [begin, end), which are of KV head `kv_head`.
  void attend_many(const Head& head_tile, int64_t begin, int64_t end, int64_t kv_head, const Results& results) const {
    // The next part is fetched evenly beside the products of these heads.
    Prefetcher<T, LAYOUT>& prefetcher = *head_tile.prefetcher;
    const int64_t num_heads = ahead_.num_heads_until_due(kv_head);
    const int64_t num_tokens = head_tile.tile.end - first_vec_token(head_tile.tile);
    const int64_t num_vecs = (num_tokens + VEC_SIZE - 1 + p_.head_size) / VEC_SIZE;
    const int64_t num_products = num_heads * num_vecs * ((end - begin + PRODUCT_ROWS - 1) / PRODUCT_ROWS);
    const int64_t num_fetches = prefetcher.num_left();
    // With many rows, less than one fetch is due for each product. Then arithmetic takes longer than memory, and it is
    // enough to fetch each line once.
    const int64_t fetches_at_once = (num_fetches + num_products - 1) / num_products;
    const auto fetch = [&] {
      if (fetches_at_once == 1) return prefetcher.template fetch<false>();
      for (int64_t i = 0; i < fetches_at_once; ++i) prefetcher.fetch();
    };
    Row rows[MOST_ROWS];
    for (int64_t first = begin; first < end; first += MOST_ROWS) {
      const int64_t num_rows = end - first < MOST_ROWS ? end - first : MOST_ROWS;
      locate_rows(first, num_rows, kv_head, results, rows);
      attend_many_rows<Arithmetic>(head_tile, rows, num_rows, row_floats_, fetch);
    }
  }

  const PagedAttentionParams& p_;
  const AttentionRow* rows_;
  const AttentionItem& item_;
  FetchAhead<T, LAYOUT> ahead_;
  SmallBlocks<T> small_blocks_;
  float* queries_;  // [num_results, row_floats], unpacked
  ResultIndex index_;
  int64_t row_floats_;
};

// Copies each row's results of a partition to their own place.
void store_partials(const PagedAttentionParams& p, const AttentionRow* rows, const AttentionItem& item,
                    int64_t partition, const ResultIndex& index, const Results& results, float* partials) {
  for (int64_t kv_head = item.head_begin; kv_head < item.head_end; ++kv_head) {
    for (int64_t row = 0; row < index.num_rows; ++row) {
      const int64_t partial = rows[item.row_begin + row].first_partial + partition;
      const Results to(partials + partial * partial_floats(p.num_heads, p.head_size), p.num_heads);
      copy(to, kv_head * index.group_size, results, index.of(kv_head - item.head_begin, row), index.group_size,
           p.head_size);
    }
  }
}

template <typename T, typename Arithmetic, CacheLayout LAYOUT = CacheLayout::CHUNKED>
void walk_item(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
               const AttentionItem* next_item, float* scratch, float* partials) {
  const PagedAttentionParams p = in_loaded_units(params);
  const int64_t num_results =
      (item.row_end - item.row_begin) * (item.head_end - item.head_begin) * (p.num_heads / p.num_kv_heads);
  float* const queries = scratch + small_block_floats(p);
  float* const memory = queries + query_floats(num_results, p.head_size);
  const Results partition_results(memory, num_results);
  const ItemWalk<T, LAYOUT, Arithmetic> walk(p, rows, item, next_item, scratch, queries);
  if (item.is_partial) {
    for (int64_t partition = item.partition_begin; partition < item.partition_end; ++partition) {
      walk.attend_partition(partition, partition_results);
      store_partials(p, rows, item, partition, walk.index(), partition_results, partials);
    }
    return;
  }
  const Results results(memory + partial_floats(num_results, p.head_size), num_results);
  clear(results, num_results, p.head_size);
  for (int64_t partition = item.partition_begin; partition < item.partition_end; ++partition) {
    walk.attend_partition(partition, partition_results);
    for (int64_t i = 0; i < num_results; ++i) merge(results, i, partition_results, i, p.head_size);
  }
  dispatch_dtype(p.dtype, [&]<typename OutT>() {
    walk.for_each_result([&](int64_t i, int64_t row, int64_t head) { write_out<OutT>(p, row, head, results, i); });
  });
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
