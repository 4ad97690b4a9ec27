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

// The elements of a head, in whole pairs of vectors.
constexpr int64_t padded_head_size(int64_t head_size) { return (head_size + 31) / 32 * 32; }

// From so many (row, head) pairs of a KV head on, the pairs go over a tile as columns (many_rows.h).
constexpr int64_t LEAST_COLUMNS = 16;

// Columns come in vectors, of up to so many.
constexpr int64_t MOST_IN_VECTOR = 16;

// The columns of one KV head (columns.h).
struct ColumnScratch {
  int64_t num_columns;   // whole vectors
  int64_t held = 0;      // Columns::Held
  int64_t max;           // [num_columns]
  int64_t sum;           // [num_columns]
  int64_t begin;         // [num_columns]
  int64_t end;           // [num_columns]
  int64_t positions;     // [num_columns]
  int64_t slopes;        // [num_columns]
  int64_t scales;        // [num_columns]
  int64_t queries;       // [num_columns * head_size]
  int64_t values;        // [num_columns * head_size]
  int64_t total_max;     // [num_columns]
  int64_t total_sum;     // [num_columns]
  int64_t total_values;  // [num_columns * head_size]
  int64_t size;

  constexpr ColumnScratch(int64_t num_results, int64_t head_size)
      : num_columns((num_results + MOST_IN_VECTOR - 1) / MOST_IN_VECTOR * MOST_IN_VECTOR),
        max(held + MOST_IN_VECTOR),
        sum(max + num_columns),
        begin(sum + num_columns),
        end(begin + num_columns),
        positions(end + num_columns),
        slopes(positions + num_columns),
        scales(slopes + num_columns),
        queries(scales + num_columns),
        values(queries + num_columns * head_size),
        total_max(values + num_columns * head_size),
        total_sum(total_max + num_columns),
        total_values(total_sum + num_columns),
        size(total_values + num_columns * head_size) {}
};

// Of a RowWalk (row_walk.h): queries and results of all pairs. Where the pairs of a head are many, each head has its
// columns as well, and all heads have the words of a tile in common.
struct RowScratch {
  int64_t num_results;
  int64_t columns_of_head = 0;  // floats
  int64_t copies = 0;
  int64_t key_words;
  int64_t value_words;
  int64_t columns;
  int64_t queries;
  int64_t partition;  // results
  int64_t total;      // results
  int64_t size;

  constexpr RowScratch(const PagedAttentionParams& params, const AttentionItem& item) {
    const int64_t num_heads = item.head_end - item.head_begin;
    const int64_t of_head = results_of_head(params, item);
    int64_t tile_words = 0;
    if (of_head >= LEAST_COLUMNS) {
      tile_words = TILE_TOKENS * padded_head_size(params.head_size);
      columns_of_head = ColumnScratch(of_head, params.head_size).size;
    }
    num_results = num_heads * of_head;
    key_words = copies + small_block_floats(params);
    value_words = key_words + tile_words;
    columns = value_words + tile_words;
    queries = columns + num_heads * columns_of_head;
    partition = queries + query_floats(num_results, params.head_size);
    total = partition + partial_floats(num_results, params.head_size);
    size = total + partial_floats(num_results, params.head_size);
  }
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
