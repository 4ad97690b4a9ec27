// The walk of an item with rows that vectors multiply (docs/cpu-kernels.md draws it). In a physical block, the part of
// one head is contiguous, and the next head's part follows. So every block is read front to back, once for all query
// heads that share a KV head (attend_rows.h).
//
// T is the type of the cache. Queries and outputs are read and written once, in their own type.
#pragma once

#include "attention/cpu/attend_rows.h"
#include "attention/cpu/attention_results.h"
#include "attention/cpu/fetch_order.h"
#include "attention/cpu/item_scratch.h"
#include "attention/cpu/item_walk.h"
#include "attention/cpu/many_rows.h"
#include "attention/cpu/small_blocks.h"
#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// The index of a (row, head) pair among the pairs of `num_rows` rows and some KV heads. The pairs are in order of KV
// head, then of row, so that the query heads of adjacent rows that share a KV head are adjacent.
struct ResultIndex {
  int64_t num_rows;
  int64_t group_size;

  int64_t of(int64_t kv_head, int64_t row) const { return (kv_head * num_rows + row) * group_size; }
};

template <Arithmetic ARITHMETIC, typename T, CacheLayout LAYOUT>
class RowWalk : public ItemWalk<T, LAYOUT> {
  using Walk = ItemWalk<T, LAYOUT>;
  using Walk::ahead_, Walk::item_, Walk::p_, Walk::rows_;
  using Multiply = RowArithmetic<ARITHMETIC, T>;
  using Dot = typename Multiply::Dot;
  static_assert(Dot::row_floats(MAX_HEAD_SIZE) <= query_floats(1, MAX_HEAD_SIZE));

 public:
  RowWalk(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
          const AttentionItem* next_item, float* scratch)
      : Walk(params, rows, item, next_item),
        layout_(params, item),
        scratch_(scratch),
        small_blocks_(params, scratch + layout_.copies),
        queries_(scratch + layout_.queries),
        partition_(scratch + layout_.partition, layout_.num_results),
        total_(scratch + layout_.total, layout_.num_results),
        index_{item.row_end - item.row_begin, params.num_heads / params.num_kv_heads},
        row_floats_(Dot::row_floats(params.head_size)) {
    dispatch_query_dtype<T>(p_.dtype, [&]<typename QueryT>() {
      const QueryT* query_rows = static_cast<const QueryT*>(p_.query);
      for_each_result([&](int64_t i, int64_t row, int64_t head) {
        const QueryT* query = query_rows + rows_[row].row * p_.query_stride + head * p_.head_size;
        Dot::unpack_query(query, p_.head_size, queries_ + i * row_floats_);
      });
    });
    const int64_t of_head = results_of_head(p_, item_);
    are_columns_ = Multiply::MANY_ROWS && !item.is_partial && are_many(of_head);
    for_each_columns([&](int64_t kv_head, const Columns& columns) {
      columns.hold_nothing();
      const int64_t first = index_.of(kv_head - item_.head_begin, 0);
      if (are_columns_) columns.template take<Dot>(first, first + of_head, locate_in(kv_head, partition_));
    });
  }

  void clear_partition() const {
    if (!are_columns_) return clear(partition_, layout_.num_results, p_.head_size);
    for_each_columns([](int64_t, const Columns& columns) { columns.clear_partition(); });
  }
  void clear_total() const {
    if (!are_columns_) return clear(total_, layout_.num_results, p_.head_size);
    for_each_columns([](int64_t, const Columns& columns) { columns.clear_total(); });
  }

  void merge_partition() const {
    if (are_columns_) return for_each_columns([](int64_t, const Columns& columns) { columns.merge_partition(); });
    for (int64_t i = 0; i < layout_.num_results; ++i) merge(total_, i, partition_, i, p_.head_size);
  }

  template <typename Function>
  void for_each_partial(const Function& function) const {
    for_each_columns([&](int64_t, const Columns& columns) { columns.give_partition_back(partition_); });
    for_each_result([&](int64_t i, int64_t row, int64_t head) { function(row, head, partition_, i); });
  }

  template <typename Function>
  void for_each_total(const Function& function) const {
    if (are_columns_) for_each_columns([&](int64_t, const Columns& columns) { columns.give_total_back(total_); });
    for_each_result([&](int64_t i, int64_t row, int64_t head) { function(row, head, total_, i); });
  }

  // Attends to a tile with the rows that see the tile, at KV heads [head, end).
  void attend(const TileRows<T, LAYOUT>& at, int64_t head, int64_t end, Prefetcher<T, LAYOUT>& prefetcher) const {
    if constexpr (LAYOUT == CacheLayout::NHD) {
      if (end - head > 1) return attend_heads(at, head, end, prefetcher, partition_);
    }
    attend_head(at, head, prefetcher, partition_);
  }

 private:
  using Head = HeadTile<T, LAYOUT>;

  // Calls function(i, row, head) with the plan's row.
  template <typename Function>
  void for_each_result(const Function& function) const {
    int64_t i = 0;
    for (int64_t kv_head = item_.head_begin; kv_head < item_.head_end; ++kv_head) {
      for (int64_t row = item_.row_begin; row < item_.row_end; ++row) {
        for (int64_t g = 0; g < index_.group_size; ++g) function(i++, row, kv_head * index_.group_size + g);
      }
    }
  }

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
    const int64_t bytes_at_once = fetch_order().nhd_bytes_at_once;
    int at_once = TILE_TOKENS;
    while (at_once > VEC_SIZE && at_once * token_bytes > bytes_at_once) at_once /= 2;
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
      compute_logits<Dot, NUM_ROWS>(head, tokens, rows + i, logits + i);
    });
    for_few_rows(0, num_rows,
                 [&]<int NUM_ROWS>(int64_t i) { update_softmax<NUM_ROWS>(p_, at.tile, rows + i, logits + i); });
    using Values = typename Multiply::NhdValues;
    for (int64_t i = 0; i < num_rows; ++i) Values::round_weights(logits[i]);
    for_tokens(at, head_begin, head_end, prefetcher, [&]<int NUM_ROWS>(const Head& head, TileTokens tokens, int64_t i) {
      accumulate_nhd_values<Values, NUM_ROWS>(head, tokens, logits + i, sums + i * sums_stride, sums_stride);
    });
    for (int64_t i = 0; i < num_rows; ++i) add_nhd_sums<Values>(p_.head_size, sums + i * sums_stride, rows[i].values);
  }

  void attend_head(const TileRows<T, LAYOUT>& at, int64_t kv_head, Prefetcher<T, LAYOUT>& prefetcher,
                   const Results& results) const {
    Head head_tile = head_of(at, kv_head, prefetcher);
    const int64_t i = index_.of(kv_head - item_.head_begin, at.begin - item_.row_begin);
    const int64_t end = i + index_.group_size * (at.end - at.begin);
    if constexpr (Multiply::MANY_ROWS) {
      if (are_many(end - i)) return attend_many(head_tile, i, end, kv_head, results);
      if (layout_.columns_of_head > 0) columns_at(kv_head).give_partition_back(results);
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
      *rows++ = {row->position,   p_.alibi_slope(row->seq, head),   queries_ + i * row_floats_, results.max + i,
                 results.sum + i, results.values + i * p_.head_size};
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
    attend_rows<Multiply, NUM_ROWS>(head_tile, rows);
  }

  Columns columns_at(int64_t kv_head) const {
    const int64_t of_head = (kv_head - item_.head_begin) * layout_.columns_of_head;
    return Columns(p_, results_of_head(p_, item_), scratch_ + layout_.columns + of_head);
  }

  // Calls function(kv_head, columns) for each KV head, if there are columns.
  template <typename Function>
  void for_each_columns(const Function& function) const {
    if (layout_.columns_of_head == 0) return;
    for (int64_t head = item_.head_begin; head < item_.head_end; ++head) function(head, columns_at(head));
  }

  auto locate_in(int64_t kv_head, const Results& results) const {
    return [this, kv_head, results](int64_t first, int64_t count, Row* rows) {
      locate_rows(first, count, kv_head, results, rows);
    };
  }

  // Computes results [begin, end), which are of KV head `kv_head`, as columns.
  void attend_many(const Head& head_tile, int64_t begin, int64_t end, int64_t kv_head, const Results& results) const {
    const Columns columns = columns_at(kv_head);
    columns.template take_with_partition<Dot>(results, begin, end, locate_in(kv_head, results));
    // The next part is fetched evenly beside the products of these heads.
    Prefetcher<T, LAYOUT>& prefetcher = *head_tile.prefetcher;
    const int64_t num_heads = ahead_.num_heads_until_due(kv_head);
    const int64_t num_tokens = head_tile.tile.end - first_vec_token(head_tile.tile);
    const int64_t num_groups = (end - begin + GROUP_VECS * VEC_SIZE - 1) / (GROUP_VECS * VEC_SIZE);
    const int64_t num_products = num_heads * num_groups * ((num_tokens + p_.head_size + WORDS - 1) / WORDS);
    const int64_t num_fetches = prefetcher.num_left();
    // With very many rows, less than one fetch is due for each product. Then arithmetic takes longer than memory, and
    // it is enough to fetch each line once.
    const int64_t fetches_at_once = (num_fetches + num_products - 1) / num_products;
    const bool asks_again = fetches_at_once > 1 && fetch_order().columns_ask_again;
    const auto fetch = [&] {
      for (int64_t i = 0; i < fetches_at_once; ++i) {
        asks_again ? prefetcher.fetch() : prefetcher.template fetch<false>();
      }
    };
    const ManyRows<Multiply, T, LAYOUT> many(head_tile, scratch_ + layout_.key_words, scratch_ + layout_.value_words);
    for_each_group(columns.size(),
                   [&]<int NUM_VECS>(int64_t first) { many.attend(columns.group_at<NUM_VECS>(first), fetch); });
  }

  RowScratch layout_;
  float* scratch_;
  SmallBlocks<T> small_blocks_;
  float* queries_;  // [num_results, row_floats], unpacked
  Results partition_;
  Results total_;  // of all partitions so far
  ResultIndex index_;
  int64_t row_floats_;
  bool are_columns_;  // all results, over all partitions
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
