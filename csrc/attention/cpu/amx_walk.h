// The walk of an item (docs/cpu-kernels.md) with queries and a cache of bfloat16, on the tile registers of AMX.
//
// Both products of attention are taken with tokens or elements as rows and with (query row, head) pairs as columns:
// logits = keys . queries, and values^T . weights. So the keys and the values of a tile are packed once for all columns
// (amx_pack.h), and the softmax of all columns takes whole vectors (amx_softmax.h). A group of columns is what one
// instruction takes: N columns of a KV head.
//
// An instruction adds up 32 products for a row and a column, and the rows and columns share nothing. The 32 are
// adjacent elements, or adjacent tokens from a multiple of 32 on. So a column has the same bits in every group.
#pragma once

#include "attention/cpu/amx_few_columns.h"
#include "attention/cpu/amx_pack.h"
#include "attention/cpu/amx_softmax.h"
#include "attention/cpu/attention_results.h"
#include "attention/cpu/item_scratch.h"
#include "attention/cpu/item_walk.h"
#include "cpu_tiles.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

static_assert(MOST_COLUMNS == VEC_SIZE);

// Tile registers 0 to 3 hold sums, 4 and 5 hold A, 6 and 7 hold B.
constexpr int NUM_SUMS = 4;

constexpr int64_t A_STRIDE = STEP * sizeof(bfloat16);

// The logits of STEP tokens, for COUNT groups of columns. The tokens' keys are packed at `a` as soon as pack(step) was
// called.
template <int N, int COUNT, typename Pack>
PAGEDATTN_INLINE void multiply_keys(const bfloat16* a, int64_t steps, const uint32_t* const* queries,
                                    float* const* logits, const Pack& pack) {
  constexpr int64_t B_STRIDE = N * sizeof(uint32_t);
  const bfloat16* const next_a = a + steps * A_SIZE;  // of the next A_ROWS tokens
  for_each_number<2 * COUNT>([]<int I>() PAGEDATTN_ALWAYS_INLINE { zero_tile<I>(); });
  for (int64_t step = 0; step < steps; ++step) {
    pack(step);
    for_each_number<COUNT>([&]<int I>() PAGEDATTN_ALWAYS_INLINE {
      load_tile<6 + I>(queries[I] + step * STEP_PAIRS * N, B_STRIDE);
      for_each_number<2>([&]<int J>() PAGEDATTN_ALWAYS_INLINE {
        if constexpr (I == 0) load_tile<4 + J>((J == 0 ? a : next_a) + step * A_SIZE, A_STRIDE);
        add_bfloat16_products<2 * I + J, 4 + J, 6 + I>();
      });
    });
  }
  for_each_number<2 * COUNT>(
      [&]<int I>() PAGEDATTN_ALWAYS_INLINE { store_tile<I>(logits[I / 2] + I % 2 * A_ROWS * N, B_STRIDE); });
}

// Sums of weighted values in tile registers: ROW_GROUPS groups of A_ROWS elements, for COUNT groups of columns.
template <int N, int COUNT, int ROW_GROUPS>
struct ValueSums {
  static_assert(COUNT * ROW_GROUPS <= NUM_SUMS && COUNT <= 2);
  static constexpr int64_t STRIDE = N * sizeof(float);

  // Calls body.operator()<TILE, I, R>() for the tile of row group R and group of columns I.
  template <typename Body>
  static PAGEDATTN_INLINE void for_each_tile(const Body& body) {
    for_each_number<COUNT * ROW_GROUPS>([&]<int J>() PAGEDATTN_ALWAYS_INLINE {
      constexpr int I = J / ROW_GROUPS, R = J % ROW_GROUPS;
      body.template operator()<I*(NUM_SUMS / COUNT) + R, I, R>();
    });
  }

  static PAGEDATTN_INLINE void load(const float* const* from) {
    for_each_tile([&]<int TILE, int I, int R>()
                      PAGEDATTN_ALWAYS_INLINE { load_tile<TILE>(from[I] + R * A_ROWS * N, STRIDE); });
  }

  static PAGEDATTN_INLINE void store(float* const* to) {
    for_each_tile([&]<int TILE, int I, int R>()
                      PAGEDATTN_ALWAYS_INLINE { store_tile<TILE>(to[I] + R * A_ROWS * N, STRIDE); });
  }

  // Adds the values of a step, packed at `a`.
  static PAGEDATTN_INLINE void add(const bfloat16* a, const ColumnWeights<N>* weights, int step) {
    for_each_tile([&]<int TILE, int I, int R>() PAGEDATTN_ALWAYS_INLINE {
      constexpr int A = 4 + R % 2;
      if constexpr (R == 0) {
        load_tile<6>(weights[I].upper + step * STEP_PAIRS * N, STRIDE);
        load_tile<7>(weights[I].lower + step * STEP_PAIRS * N, STRIDE);
      }
      if constexpr (I == 0) load_tile<A>(a + R * A_SIZE, A_STRIDE);
      add_bfloat16_products<TILE, A, 6>();
      add_bfloat16_products<TILE, A, 7>();
    });
  }
};

template <int N>
class AmxWalk : public ItemWalk<bfloat16> {
  static constexpr bool FEW = are_few_columns(N);
  using Weights = std::conditional_t<FEW, FewWeights<N>, ColumnWeights<N>>;

 public:
  AmxWalk(const PagedAttentionParams& params, const AttentionRow* rows, const AttentionItem& item,
          const AttentionItem* next_item, float* scratch)
      : ItemWalk(params, rows, item, next_item),
        unit_(params),
        group_size_(params.num_heads / params.num_kv_heads),
        num_columns_(results_of_head(params, item)),
        groups_of_head_((num_columns_ + N - 1) / N),
        layout_(params.head_size, N),
        scratch_(scratch) {
    for_each_group([&](int64_t kv_head, int64_t first, const Group& group) {
      pack_queries(kv_head, first, group);
      locate_columns(kv_head, first, group);
    });
  }

  void clear_partition() const {
    for_each_group([&](int64_t, int64_t, const Group& group) { clear(group.partition); });
  }
  void clear_total() const {
    for_each_group([&](int64_t, int64_t, const Group& group) { clear(group.total); });
  }

  // Calls change(i, of_vectors...) for each vector of values, with what `by_column` have for its elements.
  template <typename... Vectors, typename Change>
  PAGEDATTN_INLINE void for_each_value_vector(const Change& change, Vectors... by_column) const {
    constexpr int COLUMNS = FEW ? N : 1;  // a vector has elements of one of them, or of all
    for (int n = 0; n < COLUMNS; ++n) {
      for (int64_t i = n * VEC_SIZE; i < layout_.values_size; i += COLUMNS * VEC_SIZE) {
        change(i, (FEW ? Vectors{} + by_column[n] : by_column)...);
      }
    }
  }

  // As merge of attention_results.h.
  void merge_partition() const {
    for_each_group([&](int64_t, int64_t, const Group& group) {
      const Vec old_max = load(group.total.max);
      const Vec from_max = load(group.partition.max) * unit_.to_natural;
      const Vec new_max = max(from_max, old_max);
      const Vec base = softmax_base(new_max);
      const Vec weight = exp(old_max - base);
      const Vec from_weight = exp(from_max - base);
      store(group.total.max, new_max);
      store(group.total.sum, load(group.total.sum) * weight + load(group.partition.sum) * from_weight);
      const auto add = [&](int64_t i, Vec of_vector, Vec of_from) PAGEDATTN_ALWAYS_INLINE {
        float* const values = group.total.values + i;
        store(values, fma(load(values), of_vector, load(group.partition.values + i) * of_from));
      };
      for_each_value_vector(add, weight, from_weight);
    });
  }

  template <typename Function>
  void for_each_partial(const Function& function) const {
    for_each_row_result(false, function);
  }

  template <typename Function>
  void for_each_total(const Function& function) const {
    for_each_row_result(true, function);
  }

  // Attends to a tile with the rows that see the tile, at one KV head.
  void attend(const TileRows<bfloat16>& at, int64_t kv_head, int64_t, Prefetcher<bfloat16>& prefetcher) const {
    const int64_t first_element = kv_head * p_.head_size * p_.block_size;
    const bfloat16* const keys = static_cast<const bfloat16*>(p_.key_cache) + first_element;
    const ValuePacker values(p_, at.tile, static_cast<const bfloat16*>(p_.value_cache) + first_element);
    const auto fetch = [&]() PAGEDATTN_ALWAYS_INLINE { prefetcher.fetch(); };  // a turn of four lines
    Packed packed;
    const int64_t first_column = (at.begin - item_.row_begin) * group_size_;
    const int64_t end_column = (at.end - item_.row_begin) * group_size_;
    const int64_t first_group = first_column / N;
    const int64_t end_group = (end_column + N - 1) / N;
    const HeadOfTile head{at.tile, kv_head, first_column, end_column, keys, values, packed};
    if (end_group - first_group <= 1) return attend_groups<1, true>(head, first_group, fetch);
    if constexpr (N == VEC_SIZE) {
      if (end_group - first_group == 2) return attend_groups<2, true>(head, first_group, fetch);
      const int64_t steps = num_steps(p_.head_size);
      const int64_t row_groups = num_row_groups(p_.head_size);
      for (int step = at.tile.begin / STEP; step * STEP < at.tile.end; ++step) {
        for (int token = step * STEP; token < (step + 1) * STEP; token += A_ROWS) {
          const KeyPacker of_tokens(p_, at.tile, keys, token);
          for (int64_t i = 0; i < steps; ++i) of_tokens.pack(i, packed.keys + token * steps * STEP + i * A_SIZE, fetch);
        }
        values.pack(step, 0, row_groups, packed.values + step * row_groups * A_SIZE, fetch);
      }
      int64_t group = first_group;
      for (; group + 2 <= end_group; group += 2) attend_groups<2, false>(head, group, fetch);
      if (group < end_group) attend_groups<1, false>(head, group, fetch);
    }
  }

 private:
  // The softmax over some tokens for a group of columns.
  struct State {
    float* max;     // [VEC_SIZE], a column's in each of its elements
    float* sum;     // [VEC_SIZE]
    float* values;  // [num_row_groups * A_ROWS, N]; FEW: [num_row_groups, N, A_ROWS]
  };

  // A group of columns, in scratch.
  struct Group {
    uint32_t* queries;  // [num_steps, STEP_PAIRS, N] pairs; FEW: [num_steps * STEP, N] floats
    int32_t* begin;     // [VEC_SIZE], what a column sees of its sequence
    int32_t* end;       // [VEC_SIZE]
    float* slopes;      // [VEC_SIZE]
    int32_t* position;  // [VEC_SIZE]
    State partition;    // max is in the logits' unit
    State total;        // of all partitions so far; max is of the natural logits
  };

  Group group_at(int64_t kv_head, int64_t group) const {
    float* const at = scratch_ + ((kv_head - item_.head_begin) * groups_of_head_ + group) * layout_.size;
    const auto state_at = [&](const GroupScratch::State& state) -> State {
      return {at + state.max, at + state.sum, at + state.values};
    };
    return {reinterpret_cast<uint32_t*>(at + layout_.queries),
            reinterpret_cast<int32_t*>(at + layout_.begin),
            reinterpret_cast<int32_t*>(at + layout_.end),
            at + layout_.slopes,
            reinterpret_cast<int32_t*>(at + layout_.position),
            state_at(layout_.partition),
            state_at(layout_.total)};
  }

  // Calls function(kv_head, first, group) with the first column of the group among those of the KV head.
  template <typename Function>
  void for_each_group(const Function& function) const {
    for (int64_t kv_head = item_.head_begin; kv_head < item_.head_end; ++kv_head) {
      for (int64_t i = 0; i < groups_of_head_; ++i) function(kv_head, i * N, group_at(kv_head, i));
    }
  }

  void clear(const State& state) const {
    store(state.max, broadcast(-__builtin_inff()));
    store(state.sum, Vec{});
    __builtin_memset(state.values, 0, layout_.values_size * sizeof(float));
  }

  const bfloat16* query_of(int64_t kv_head, int64_t column) const {
    const int64_t row = rows_[item_.row_begin + column / group_size_].row;
    const int64_t head = kv_head * group_size_ + column % group_size_;
    return static_cast<const bfloat16*>(p_.query) + row * p_.query_stride + head * p_.head_size;
  }

  void pack_queries(int64_t kv_head, int64_t first, const Group& group) const {
    const int64_t count = num_columns_ - first < N ? num_columns_ - first : N;
    if constexpr (N == VEC_SIZE) {
      for (int64_t d = 0; d < p_.head_size; d += STEP) {
        const int64_t left = p_.head_size - d;
        const uint32_t elements = left < STEP ? (1u << left) - 1 : 0xffffffff;
        __m512i v[VEC_SIZE];
        for (int64_t i = 0; i < VEC_SIZE; ++i) {
          v[i] = i < count ? _mm512_maskz_loadu_epi16(elements, query_of(kv_head, first + i) + d) : __m512i{};
        }
        transpose_16(v);
        for (int64_t i = 0; i < VEC_SIZE; ++i) _mm512_store_si512(group.queries + d / 2 * N + i * N, v[i]);
      }
      return;
    }
    __builtin_memset(group.queries, 0, layout_.queries_size * sizeof(uint32_t));
    for (int64_t i = 0; i < count; ++i) {
      const bfloat16* query = query_of(kv_head, first + i);
      if constexpr (FEW) {
        for (int64_t d = 0; d < p_.head_size; ++d) {
          group.queries[d * N + i] = static_cast<uint32_t>(query[d].bits) << 16;
        }
        continue;
      }
      for (int64_t d = 0; d < p_.head_size; d += 2) {
        __builtin_memcpy(group.queries + d / 2 * N + i, query + d, sizeof(uint32_t));
      }
    }
  }

  void locate_columns(int64_t kv_head, int64_t first, const Group& group) const {
    for (int i = 0; i < VEC_SIZE; ++i) {
      // A column that is none has logits of 0, and may see all of them.
      group.begin[i] = 0;
      group.end[i] = INT32_MAX;
      group.slopes[i] = 0.0f;
      group.position[i] = 0;
      const int64_t column = first + i % N;
      if (column >= num_columns_) continue;
      const AttentionRow& row = rows_[item_.row_begin + column / group_size_];
      const int64_t position = row.position;
      group.begin[i] = static_cast<int32_t>(p_.first_visible(position));
      group.end[i] = static_cast<int32_t>(p_.visible_end(row.seq, position));
      group.position[i] = static_cast<int32_t>(position);
      group.slopes[i] = p_.alibi_slope(row.seq, kv_head * group_size_ + column % group_size_);
    }
  }

  // A tile at one KV head, and the columns of the head that are to see the tile.
  struct HeadOfTile {
    const Tile<bfloat16>& tile;
    int64_t kv_head;
    int64_t first_column, end_column;
    const bfloat16* keys;
    const ValuePacker& values;
    Packed& packed;
  };

  // Attends with COUNT groups of columns. PACK: packs keys and values just before they are multiplied.
  template <int COUNT, bool PACK, typename Fetch>
  __attribute__((noinline)) void attend_groups(const HeadOfTile& head, int64_t first_group, const Fetch& fetch) const {
    const Tile<bfloat16>& tile = head.tile;
    const auto token = static_cast<int32_t>(tile.token);
    Group groups[COUNT];
    IntVec is_chosen[COUNT];
    VisibleTokens visible[COUNT];
    int32_t visible_begin = TILE_TOKENS;
    int32_t visible_end = 0;
    bool all_chosen = true;
    for (int i = 0; i < COUNT; ++i) {
      groups[i] = group_at(head.kv_head, first_group + i);
      visible[i] = {max(load_as<IntVec>(groups[i].begin) - token, IntVec{} + tile.begin),
                    min(load_as<IntVec>(groups[i].end) - token, IntVec{} + tile.end)};
      const IntVec column = iota() % N + static_cast<int32_t>((first_group + i) * N);
      is_chosen[i] =
          (column >= static_cast<int32_t>(head.first_column)) &
          ((column < static_cast<int32_t>(head.end_column)) | (column >= static_cast<int32_t>(num_columns_)));
      all_chosen &= _mm512_movepi32_mask((__m512i)is_chosen[i]) == 0xffff;
      visible[i].end = is_chosen[i] ? visible[i].end : IntVec{};
      const IntVec sees = visible[i].end > visible[i].begin;
      visible_begin = smaller(visible_begin, -reduce_max(sees ? -visible[i].begin : IntVec{} - TILE_TOKENS));
      visible_end = larger(visible_end, reduce_max(sees ? visible[i].end : IntVec{}));
    }
    if (visible_begin >= visible_end) return;
    const int begin = visible_begin / STEP;
    const int end = (visible_end + STEP - 1) / STEP;

    const int64_t steps = num_steps(p_.head_size);
    ColumnLogits<N> logits[COUNT];
    if constexpr (FEW) {
      const auto queries = reinterpret_cast<const float*>(groups[0].queries);
      multiply_few_keys<N>(p_, tile, head.keys, queries, begin * STEP, end * STEP, logits[0].at, fetch);
    } else {
      for (int step = begin; step < end; ++step) {
        bfloat16* const a = head.packed.keys + (PACK ? step % 2 : step) * STEP * steps * STEP;
        const uint32_t* queries[COUNT];
        float* to[COUNT];
        for (int i = 0; i < COUNT; ++i) queries[i] = groups[i].queries;
        for (int i = 0; i < COUNT; ++i) to[i] = logits[i].at + step * STEP * N;
        if constexpr (PACK) {
          const KeyPacker first(p_, tile, head.keys, step * STEP);
          const KeyPacker last(p_, tile, head.keys, step * STEP + A_ROWS);
          multiply_keys<N, COUNT>(a, steps, queries, to, [&](int64_t of_head) PAGEDATTN_ALWAYS_INLINE {
            first.pack(of_head, a + of_head * A_SIZE, fetch);
            last.pack(of_head, a + (steps + of_head) * A_SIZE, fetch);
          });
        } else {
          multiply_keys<N, COUNT>(a, steps, queries, to, [](int64_t) {});
        }
      }
    }
    Weights weights[COUNT];
    for (int i = 0; i < COUNT; ++i) {
      update_softmax(tile, groups[i], visible[i], begin * STEP, end * STEP, logits[i], weights[i]);
    }
    if (all_chosen) {
      float* values[COUNT];
      for (int i = 0; i < COUNT; ++i) values[i] = groups[i].partition.values;
      return add_values<COUNT, PACK>(head, weights, begin, end, values, fetch);
    }
    // A weight of 0 does not silence a NaN of what the other columns do not see.
    alignas(64) float sums[COUNT][MAX_HEAD_SIZE * N];
    float* values[COUNT];
    for (int i = 0; i < COUNT; ++i) {
      values[i] = sums[i];
      __builtin_memcpy(sums[i], groups[i].partition.values, layout_.values_size * sizeof(float));
    }
    add_values<COUNT, PACK>(head, weights, begin, end, values, fetch);
    for (int i = 0; i < COUNT; ++i) {
      float* const to = groups[i].partition.values;
      const auto choose = [&](int64_t j, IntVec of_vector) PAGEDATTN_ALWAYS_INLINE {
        store(to + j, select(of_vector, load(sums[i] + j), load(to + j)));
      };
      for_each_value_vector(choose, is_chosen[i]);
    }
  }

  // Makes weights of the logits of tokens [begin, end), and updates the group's maxima and sums.
  PAGEDATTN_INLINE void update_softmax(const Tile<bfloat16>& tile, const Group& group, const VisibleTokens& visible,
                                       int begin, int end, ColumnLogits<N>& logits, Weights& weights) const {
    if (!unit_.are_plain) {
      const IntVec distance = static_cast<int32_t>(tile.token) - load_as<IntVec>(group.position);
      change_logits<N>(p_, load(group.slopes), distance, begin, end, logits);
    }
    const IntVec sees_all = (visible.begin <= begin) & (visible.end >= end);
    if (_mm512_movepi32_mask((__m512i)sees_all) != 0xffff) mask_logits<N>(visible, begin, end, logits);

    const State& state = group.partition;
    const Vec old_max = load(state.max);
    const Vec new_max = max_logits<N>(logits, begin, end, old_max);
    const Vec base = softmax_base(new_max);
    if (_mm512_movepi32_mask((__m512i)(new_max > old_max)) != 0) {
      const Vec rescale = exp2_of_negative((old_max - base) * unit_.to_binary);
      store(state.max, new_max);
      store(state.sum, load(state.sum) * rescale);
      const auto multiply = [&](int64_t i, Vec of_vector) PAGEDATTN_ALWAYS_INLINE {
        store(state.values + i, load(state.values + i) * of_vector);
      };
      for_each_value_vector(multiply, rescale);
    }
    const Vec sum = make_weights<N>(logits, begin, end, base, unit_.to_binary, weights);
    store(state.sum, load(state.sum) + sum);
  }

  // Adds the weighted values of steps [begin, end) to values[COUNT].
  template <int COUNT, bool PACK, typename Fetch>
  PAGEDATTN_INLINE void add_values(const HeadOfTile& head, const Weights* weights, int begin, int end,
                                   float* const* values, const Fetch& fetch) const {
    const int64_t row_groups = num_row_groups(p_.head_size);
    if constexpr (FEW) {
      return add_few_values<N>(head.values, row_groups, weights[0], begin, end, values[0], fetch);
    } else {
      add_values_on_tiles<COUNT, PACK>(head, weights, begin, end, values, row_groups, fetch);
    }
  }

  template <int COUNT, bool PACK, typename Fetch>
  PAGEDATTN_INLINE void add_values_on_tiles(const HeadOfTile& head, const Weights* weights, int begin, int end,
                                            float* const* values, int64_t row_groups, const Fetch& fetch) const {
    int64_t row_group = 0;
    const auto add = [&]<int ROW_GROUPS>() PAGEDATTN_ALWAYS_INLINE {
      using Sums = ValueSums<N, COUNT, ROW_GROUPS>;
      float* sums[COUNT];
      for (int i = 0; i < COUNT; ++i) sums[i] = values[i] + row_group * A_ROWS * N;
      Sums::load(sums);
      for (int step = begin; step < end; ++step) {
        const bfloat16* a = head.packed.values + (step * row_groups + row_group) * A_SIZE;
        if constexpr (PACK) {
          bfloat16* const packed = head.packed.values + step % 4 * NUM_SUMS * A_SIZE;
          head.values.pack(step, row_group, ROW_GROUPS, packed, fetch);
          a = packed;
        }
        Sums::add(a, weights, step);
      }
      Sums::store(sums);
      row_group += ROW_GROUPS;
    };
    if constexpr (COUNT == 1) {
      while (row_groups - row_group >= 4) add.template operator()<4>();
    }
    while (row_groups - row_group >= 2) add.template operator()<2>();
    if (row_groups - row_group >= 1) add.template operator()<1>();
  }

  static int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
  static int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
  static int32_t reduce_max(IntVec v) {
    int32_t result = v[0];
    for (int i = 1; i < N; ++i) result = v[i] > result ? v[i] : result;
    return result;
  }

  // The values become [N, head_size].
  void copy_by_column(const float* values, float* by_column) const {
    if constexpr (N == VEC_SIZE) {
      for (int64_t d = 0; d < p_.head_size; d += A_ROWS) {
        const int64_t left = p_.head_size - d;
        const auto elements = static_cast<__mmask16>(left < A_ROWS ? (1u << left) - 1 : 0xffff);
        __m512i v[VEC_SIZE];
        for (int64_t i = 0; i < VEC_SIZE; ++i) v[i] = _mm512_load_si512(values + (d + i) * N);
        transpose_16(v);
        for (int64_t i = 0; i < VEC_SIZE; ++i) {
          _mm512_mask_storeu_epi32(by_column + i * p_.head_size + d, elements, v[i]);
        }
      }
      return;
    }
    for (int64_t d = 0; d < p_.head_size; ++d) {
      for (int i = 0; i < N; ++i) {
        by_column[i * p_.head_size + d] = FEW ? values[(d / A_ROWS * N + i) * A_ROWS + d % A_ROWS] : values[d * N + i];
      }
    }
  }

  // Calls function(row, head, results, i) with the plan's row and the place of its result.
  template <typename Function>
  void for_each_row_result(bool is_total, const Function& function) const {
    alignas(64) float memory[N * (MAX_HEAD_SIZE + 2)];
    const Results results(memory, N);
    for_each_group([&](int64_t kv_head, int64_t first, const Group& group) {
      const State& state = is_total ? group.total : group.partition;
      const int64_t count = num_columns_ - first < N ? num_columns_ - first : N;
      copy_by_column(state.values, results.values);
      for (int64_t i = 0; i < count; ++i) {
        results.max[i] = is_total ? state.max[i] : state.max[i] * unit_.to_natural;
        results.sum[i] = state.sum[i];
        const int64_t column = first + i;
        function(item_.row_begin + column / group_size_, kv_head * group_size_ + column % group_size_, results, i);
      }
    });
  }

  LogitUnit unit_;
  int64_t group_size_;      // query heads of a KV head
  int64_t num_columns_;     // of a KV head
  int64_t groups_of_head_;  // of columns
  GroupScratch layout_;
  float* scratch_;
};

template <int N>
void walk_item_in_columns(const PagedAttentionParams& p, const AttentionRow* rows, const AttentionItem& item,
                          const AttentionItem* next_item, float* scratch, float* partials) {
  constexpr uint16_t COLUMNS = N * sizeof(float);
  constexpr uint16_t NUMBERS = STEP * sizeof(bfloat16);
  const TileConfiguration tiles({16, 16, 16, 16, 16, 16, 16, 16},
                                {COLUMNS, COLUMNS, COLUMNS, COLUMNS, NUMBERS, NUMBERS, COLUMNS, COLUMNS});
  const AmxWalk<N> walk(p, rows, item, next_item, scratch);
  walk_item<bfloat16>(walk, p, rows, item, partials);
}

inline void walk_item_with_amx(const PagedAttentionParams& p, const AttentionRow* rows, const AttentionItem& item,
                               const AttentionItem* next_item, float* scratch, float* partials) {
  const auto walk_in_columns = [&]<int N>() PAGEDATTN_ALWAYS_INLINE {
    return walk_item_in_columns<N>(p, rows, item, next_item, scratch, partials);
  };
  switch (columns_of_group(results_of_head(p, item))) {
    case 1:
      return walk_in_columns.template operator()<1>();
    case 2:
      return walk_in_columns.template operator()<2>();
    case 4:
      return walk_in_columns.template operator()<4>();
    case 8:
      return walk_in_columns.template operator()<8>();
    default:
      return walk_in_columns.template operator()<MOST_COLUMNS>();
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
