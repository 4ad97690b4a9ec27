// How much memory the results of attention take.
#pragma once

#include <cstdint>

#include "attention/paged_attention.h"

namespace pagedattn {

// Floats of the partial results of `num_results` (row, head) pairs: maxima, sums, weighted values.
constexpr int64_t partial_floats(int64_t num_results, int64_t head_size) { return num_results * (head_size + 2); }

// Floats that the queries of `num_results` pairs take at most, in the order in which keys are multiplied with them.
constexpr int64_t query_floats(int64_t num_results, int64_t head_size) { return num_results * 2 * head_size; }

// Floats of scratch for an item of `num_results` pairs: the queries, and twice the partial results. On AMX pairs go
// together as columns, up to twice as many as pairs, and head sizes are rounded up.
constexpr int64_t item_floats(int64_t num_results, int64_t head_size) { return num_results * (5 * head_size + 288); }

// Floats of scratch for the copies: keys and values of a tile at one KV head.
constexpr int64_t small_block_floats(const PagedAttentionParams& params) {
  return has_small_blocks(params) ? 2 * TILE_TOKENS * params.head_size : 0;
}

}  // namespace pagedattn
