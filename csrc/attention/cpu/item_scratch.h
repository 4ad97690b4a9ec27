// What an item has in scratch, and where. Offsets and sizes count floats.
#pragma once

#include <cstdint>

#include "attention/paged_attention_plan.h"

namespace pagedattn {

// The partial results of `num_results` (row, head) pairs: maxima, sums, weighted values.
constexpr int64_t partial_floats(int64_t num_results, int64_t head_size) { return num_results * (head_size + 2); }

// The queries of `num_results` pairs, at most, in the order in which keys are multiplied with them.
constexpr int64_t query_floats(int64_t num_results, int64_t head_size) { return num_results * 2 * head_size; }

// The copies of small blocks: keys and values of a tile at one KV head.
constexpr int64_t small_block_floats(const PagedAttentionParams& params) {
  return has_small_blocks(params) ? 2 * TILE_TOKENS * params.head_size : 0;
}

// The rows of an item times the query heads of a KV head.
constexpr int64_t results_of_head(const PagedAttentionParams& params, const AttentionItem& item) {
  return (item.row_end - item.row_begin) * (params.num_heads / params.num_kv_heads);
}

// Of a RowWalk (row_walk.h): queries and results of all pairs.
struct RowScratch {
  int64_t num_results;
  int64_t copies = 0;
  int64_t queries;
  int64_t partition;  // results
  int64_t total;      // results
  int64_t size;

  constexpr RowScratch(const PagedAttentionParams& params, const AttentionItem& item)
      : num_results(results_of_head(params, item) * (item.head_end - item.head_begin)),
        queries(copies + small_block_floats(params)),
        partition(queries + query_floats(num_results, params.head_size)),
        total(partition + partial_floats(num_results, params.head_size)),
        size(total + partial_floats(num_results, params.head_size)) {}
};

// Tile registers of AMX hold up to 16 rows of 32 numbers in bfloat16, or sums of up to 16 columns.
constexpr int A_ROWS = 16;
constexpr int STEP = 32;  // numbers that an instruction multiplies and adds up
constexpr int STEP_PAIRS = STEP / 2;
constexpr int MOST_COLUMNS = 16;

constexpr int64_t num_steps(int64_t head_size) { return (head_size + STEP - 1) / STEP; }
constexpr int64_t num_row_groups(int64_t head_size) { return (head_size + A_ROWS - 1) / A_ROWS; }

// How many columns of a KV head an AmxWalk takes together as a group: a power of two, up to MOST_COLUMNS.
constexpr int columns_of_group(int64_t num_columns) {
  int columns = 1;
  while (columns < num_columns && columns < MOST_COLUMNS) columns *= 2;
  return columns;
}

// Whether columns are so few that vectors multiply them.
constexpr bool are_few_columns(int columns) { return columns <= 2; }

// A group of columns of an AmxWalk (amx_walk.h). Groups lie one after the other.
struct GroupScratch {
  // The softmax over some tokens.
  struct State {
    int64_t max;     // [MOST_COLUMNS]
    int64_t sum;     // [MOST_COLUMNS]
    int64_t values;  // [values_size]
  };

  int64_t queries_size;
  int64_t values_size;
  int64_t queries = 0;
  int64_t begin;     // [MOST_COLUMNS]
  int64_t end;       // [MOST_COLUMNS]
  int64_t slopes;    // [MOST_COLUMNS]
  int64_t position;  // [MOST_COLUMNS]
  State partition;
  State total;
  int64_t size;

  constexpr GroupScratch(int64_t head_size, int columns)
      : queries_size(num_steps(head_size) * (are_few_columns(columns) ? STEP : STEP_PAIRS) * columns),
        values_size(num_row_groups(head_size) * A_ROWS * columns),
        begin(queries + queries_size),
        end(begin + MOST_COLUMNS),
        slopes(end + MOST_COLUMNS),
        position(slopes + MOST_COLUMNS),
        partition(state_at(position + MOST_COLUMNS)),
        total(state_at(partition.values + values_size)),
        size(total.values + values_size) {}

 private:
  static constexpr State state_at(int64_t at) { return {at, at + MOST_COLUMNS, at + 2 * MOST_COLUMNS}; }
};

// All groups of an AmxWalk.
constexpr int64_t amx_floats(const PagedAttentionParams& params, const AttentionItem& item) {
  const int64_t num_columns = results_of_head(params, item);
  const int columns = columns_of_group(num_columns);
  const int64_t groups_of_head = (num_columns + columns - 1) / columns;
  return (item.head_end - item.head_begin) * groups_of_head * GroupScratch(params.head_size, columns).size;
}

}  // namespace pagedattn
