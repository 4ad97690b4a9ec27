// (row, head) pairs of one KV head, side by side, for many_rows.h.
//
// A pair is a column here. A vector has the same number of VEC_SIZE columns: a word of their queries, an element of
// their values, their maxima. Some vectors make a group, which goes over a tile together. A word is a float, or a pair
// of bfloat16 or of 16-bit integers.
//
// Elsewhere, results lie row by row (attention_results.h). The columns of a prompt keep their results over all
// partitions, and give the total back. Where sequences share blocks, columns take the results of a partition over as
// long as the same rows go over the tiles together, and then give them back.
#pragma once

#include "attention/cpu/attention_results.h"
#include "attention/cpu/item_scratch.h"
#include "attention/cpu/row_logits.h"
#include "cpu_memory.h"
#include "cpu_transpose.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

static_assert(MOST_IN_VECTOR % VEC_SIZE == 0);

// Vectors of a group, at most. Four words are multiplied with a group at once (chain_sums.h). Sums of 3 vectors would
// fill 16 registers, and each chain that ends would have to store them before the next can begin.
constexpr int GROUP_VECS = VEC_SIZE == 16 || NUM_REGISTERS == 16 ? 2 : 4;

// Calls body.operator()<NUM_VECS>(first) for each group of `num_columns` columns, with its first column.
template <typename Body>
PAGEDATTN_INLINE void for_each_group(int64_t num_columns, const Body& body) {
  int64_t num_left = (num_columns + VEC_SIZE - 1) / VEC_SIZE;
  int64_t first = 0;
  const auto take = [&]<int NUM_VECS>() PAGEDATTN_ALWAYS_INLINE {
    body.template operator()<NUM_VECS>(first);
    first += NUM_VECS * VEC_SIZE;
    num_left -= NUM_VECS;
  };
  while (num_left >= GROUP_VECS) take.template operator()<GROUP_VECS>();
  while (num_left >= 2) take.template operator()<2>();
  if (num_left == 1) take.template operator()<1>();
}

// Word w of VEC_SIZE rows, which begin at row_at(i), comes to columns + w * stride.
template <typename RowAt>
PAGEDATTN_INLINE void to_columns(const RowAt& row_at, int64_t num_words, float* columns, int64_t stride) {
  for (int64_t w = 0; w < num_words; w += VEC_SIZE) {
    const int64_t count = num_words - w < VEC_SIZE ? num_words - w : VEC_SIZE;
    Vec v[VEC_SIZE];
    for (int i = 0; i < VEC_SIZE; ++i) {
      v[i] = count == VEC_SIZE ? load(row_at(i) + w) : load_first(row_at(i) + w, count);
    }
    transpose(v);
    for (int i = 0; i < count; ++i) store(columns + (w + i) * stride, v[i]);
  }
}

// The other way, for the first `num_rows` rows.
inline void from_columns(const float* columns, int64_t stride, int64_t num_words, float* rows, int64_t row_stride,
                         int64_t num_rows) {
  for (int64_t w = 0; w < num_words; w += VEC_SIZE) {
    const int64_t count = num_words - w < VEC_SIZE ? num_words - w : VEC_SIZE;
    Vec v[VEC_SIZE];
    for (int i = 0; i < VEC_SIZE; ++i) v[i] = load(columns + (w + (i < count ? i : 0)) * stride);
    transpose(v);
    for (int64_t i = 0; i < num_rows && i < VEC_SIZE; ++i) {
      count == VEC_SIZE ? store(rows + i * row_stride + w, v[i]) : store_first(rows + i * row_stride + w, v[i], count);
    }
  }
}

// The words of a query, with each word once.
template <typename Dot>
void copy_query(const float* query, int64_t num_words, float* words) {
  constexpr int AT_ONCE = 4;
  for (int64_t w = 0; w < num_words; w += AT_ONCE) {
    __builtin_memcpy(words + w, query + w * Dot::COPIES, AT_ONCE * sizeof(float));
  }
}

// A group of NUM_VECS vectors.
template <int NUM_VECS>
struct Group {
  static constexpr int64_t SIZE = NUM_VECS * VEC_SIZE;

  const float* queries;      // [words of a query, SIZE]
  float* values;             // [head_size, SIZE]
  float* max;                // [SIZE]
  float* sum;                // [SIZE]
  const int32_t* begin;      // [SIZE], what a column sees of its sequence
  const int32_t* end;        // [SIZE]
  const int32_t* positions;  // [SIZE]
  const float* slopes;       // [SIZE]
  const float* scales;       // [SIZE]; of queries that are integers
};

// The (row, head) pairs of one KV head that are columns.
class Columns {
 public:
  // `memory` has room for a ColumnScratch of so many results.
  Columns(const PagedAttentionParams& p, int64_t num_results, float* memory)
      : p_(p), layout_(num_results, p.head_size), memory_(memory), held_(reinterpret_cast<Held*>(memory)) {}

  void hold_nothing() const { *held_ = {}; }
  void clear_partition() const {
    clear(partition(), layout_.num_columns, p_.head_size);
    held_->has_partition = true;
  }
  void clear_total() const { clear(total(), layout_.num_columns, p_.head_size); }

  int64_t size() const { return held_->end - held_->begin; }

  template <int NUM_VECS>
  Group<NUM_VECS> group_at(int64_t first) const {
    return {memory_ + layout_.queries + first * p_.head_size,
            memory_ + layout_.values + first * p_.head_size,
            memory_ + layout_.max + first,
            memory_ + layout_.sum + first,
            integers(layout_.begin) + first,
            integers(layout_.end) + first,
            integers(layout_.positions) + first,
            memory_ + layout_.slopes + first,
            memory_ + layout_.scales + first};
  }

  // Makes (row, head) pairs [begin, end) columns. locate(first, count, rows) sets `rows` to some of the pairs.
  template <typename Dot, typename Locate>
  void take(int64_t begin, int64_t end, const Locate& locate) const {
    *held_ = {begin, end, false};
    const int64_t num_words = p_.head_size / Dot::RUN * 4 * Dot::SUMS;
    for_each_vector_of_columns([&](int64_t first, int64_t at, int64_t stride) {
      const int64_t left = size() - first;
      const int64_t count = left < VEC_SIZE ? left : VEC_SIZE;
      Row rows[VEC_SIZE];
      locate(begin + first, count, rows);
      float queries[VEC_SIZE][MAX_HEAD_SIZE];
      for (int64_t i = 0; i < VEC_SIZE; ++i) {
        if (i < count) {
          copy_query<Dot>(rows[i].query, num_words, queries[i]);
          set_column<Dot>(first + i, rows[i]);
        } else {
          __builtin_memset(queries[i], 0, sizeof queries[i]);
          set_empty_column(first + i);
        }
      }
      to_columns([&](int64_t i) { return queries[i]; }, num_words, memory_ + layout_.queries + at, stride);
    });
  }

  // The same, if they are not, and takes their results of a partition over.
  template <typename Dot, typename Locate>
  void take_with_partition(const Results& results, int64_t begin, int64_t end, const Locate& locate) const {
    if (held_->begin != begin || held_->end != end) {
      give_partition_back(results);
      take<Dot>(begin, end, locate);
    }
    if (held_->has_partition) return;
    held_->has_partition = true;
    const auto copy = [&](float* to, const float* from, float of_empty) {
      for (int64_t i = 0; i < layout_.num_columns; ++i) to[i] = i < size() ? from[begin + i] : of_empty;
    };
    copy(partition().max, results.max, -__builtin_inff());
    copy(partition().sum, results.sum, 0.0f);
    const float zeros[MAX_HEAD_SIZE] = {};
    for_each_vector_of_columns([&](int64_t first, int64_t at, int64_t stride) {
      const auto row_at = [&](int64_t i) {
        return first + i < size() ? results.values + (begin + first + i) * p_.head_size : zeros;
      };
      to_columns(row_at, p_.head_size, partition().values + at, stride);
    });
  }

  // Puts the results of a partition into `results`, if they are here.
  void give_partition_back(const Results& results) const {
    if (held_->has_partition) copy_back(partition(), results);
    held_->has_partition = false;
  }
  void give_total_back(const Results& results) const { copy_back(total(), results); }

  // Merges the results of a partition into the total, as merge of attention_results.h.
  void merge_partition() const {
    const Results from = partition();
    const Results to = total();
    for_each_vector_of_columns([&](int64_t first, int64_t at, int64_t stride) {
      const Vec old_max = load(to.max + first);
      const Vec from_max = load(from.max + first);
      const Vec new_max = select(from_max > old_max, from_max, old_max);
      const Vec base = softmax_base(new_max);
      const Vec weight = exp(old_max - base);
      const Vec from_weight = exp(from_max - base);
      store(to.max + first, new_max);
      store(to.sum + first, load(to.sum + first) * weight + load(from.sum + first) * from_weight);
      for (int64_t d = 0; d < p_.head_size; ++d) {
        float* const values = to.values + at + d * stride;
        store(values, fma(load(values), weight, load(from.values + at + d * stride) * from_weight));
      }
    });
  }

 private:
  // Which (row, head) pairs are columns, and whether their results of a partition are.
  struct Held {
    int64_t begin, end;
    bool has_partition;
  };

  int32_t* integers(int64_t at) const { return reinterpret_cast<int32_t*>(memory_ + at); }

  Results partition() const { return {memory_ + layout_.max, memory_ + layout_.sum, memory_ + layout_.values}; }
  Results total() const {
    return {memory_ + layout_.total_max, memory_ + layout_.total_sum, memory_ + layout_.total_values};
  }

  // Calls function(first, at, stride) for each vector: its first column, where its first word or element lies among
  // those of all columns, and how far the next one is.
  template <typename Function>
  void for_each_vector_of_columns(const Function& function) const {
    for_each_group(size(), [&]<int NUM_VECS>(int64_t first) {
      constexpr int64_t SIZE = NUM_VECS * VEC_SIZE;
      for (int64_t i = 0; i < SIZE; i += VEC_SIZE) function(first + i, first * p_.head_size + i, SIZE);
    });
  }

  void copy_back(const Results& columns, const Results& results) const {
    __builtin_memcpy(results.max + held_->begin, columns.max, size() * sizeof(float));
    __builtin_memcpy(results.sum + held_->begin, columns.sum, size() * sizeof(float));
    for_each_vector_of_columns([&](int64_t first, int64_t at, int64_t stride) {
      float* const rows = results.values + (held_->begin + first) * p_.head_size;
      from_columns(columns.values + at, stride, p_.head_size, rows, p_.head_size, size() - first);
    });
  }

  template <typename Dot>
  void set_column(int64_t i, const Row& row) const {
    const auto in_32_bits = [](int64_t token) { return static_cast<int32_t>(token < INT32_MAX ? token : INT32_MAX); };
    integers(layout_.begin)[i] = in_32_bits(p_.first_visible(row.position));
    integers(layout_.end)[i] = in_32_bits(p_.end_of_window(row.position));
    integers(layout_.positions)[i] = in_32_bits(row.position);
    memory_[layout_.slopes + i] = row.alibi_slope;
    if constexpr (INTEGER_SUMS<Dot>) memory_[layout_.scales + i] = Dot::row_scale(row.query, p_.head_size);
  }

  // Its query is 0, and it may see all.
  void set_empty_column(int64_t i) const {
    integers(layout_.begin)[i] = 0;
    integers(layout_.end)[i] = INT32_MAX;
    integers(layout_.positions)[i] = 0;
    memory_[layout_.slopes + i] = 0.0f;
    memory_[layout_.scales + i] = 0.0f;
  }

  const PagedAttentionParams& p_;
  ColumnScratch layout_;
  float* memory_;
  Held* held_;
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
