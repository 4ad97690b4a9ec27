// Where the tokens of a tile lie in the paged cache, for item_walk.h.
//
// In this folder, a tile is TILE_TOKENS adjacent tokens of one sequence. A Tile says where these tokens lie, and which
// of them are visible. A HeadTile (row_logits.h) is a Tile at one KV head. TileLogits are the logits of one row over a
// tile. TileRows are the rows that share a Tile.
#pragma once

#include "attention/cpu/item_scratch.h"
#include "attention/paged_attention_plan.h"
#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// A row's logits of a tile, which become the weights of the values.
struct alignas(64) TileLogits {
  float at[TILE_TOKENS];
};

// Tokens that are located together. In the CHUNKED layout they are adjacent: smaller blocks are copied together.
template <CacheLayout LAYOUT>
constexpr int LOCATED_TOKENS = LAYOUT == CacheLayout::NHD ? 1 : CHUNKED_TOKENS;

// A tile of tokens. Offsets are in elements from the start of a cache, for KV head 0. A token that no row sees is
// masked. Its slot may hold NaN. Its block may not exist; the nearest visible block (NHD: the nearest visible token)
// then stands for it.
template <typename T, CacheLayout LAYOUT = CacheLayout::CHUNKED>
struct Tile {
  static constexpr int LOCATED = LOCATED_TOKENS<LAYOUT>;

  int64_t token;       // the tile's first token in its sequence
  int32_t begin, end;  // the visible tokens, counted from `token`
  int64_t key_offset[TILE_TOKENS / LOCATED];
  int64_t value_offset[TILE_TOKENS / LOCATED];

  // The offsets of token `t`, counted from the tile's first token.
  int64_t key_at(int t) const { return key_offset[t / LOCATED] + t % LOCATED * ELEMENTS_PER_CHUNK<T>; }
  int64_t value_at(int t) const { return value_offset[t / LOCATED] + t % LOCATED; }
  bool all_visible(int first, int count) const { return begin <= first && first + count <= end; }
};

// Whether (row, head) pairs of a KV head go over a tile as columns (many_rows.h): if the columns of two vectors or more
// are hardly empty. Otherwise a few rows at a time are faster.
constexpr bool are_many(int64_t num_results) {
  const int64_t whole_vectors = (num_results + VEC_SIZE - 1) / VEC_SIZE * VEC_SIZE;
  return num_results >= LEAST_COLUMNS && num_results > VEC_SIZE && 3 * num_results >= 2 * whole_vectors;
}

// Some tokens of a tile, counted from its first.
struct TileTokens {
  int begin, end;
};

// What each column of a vector sees of a tile.
struct VisibleTokens {
  IntVec begin, end;
};

// The first token of the first vector that has a visible token.
template <typename T, CacheLayout LAYOUT>
PAGEDATTN_INLINE int first_vec_token(const Tile<T, LAYOUT>& tile) {
  return tile.begin / VEC_SIZE * VEC_SIZE;
}

struct TokenRange {
  int64_t begin, end;
};

// The tokens of a partition that adjacent rows of one sequence see.
inline TokenRange visible_tokens(const PagedAttentionParams& p, const AttentionRow& first_row,
                                 const AttentionRow& last_row, int64_t partition) {
  const int64_t begin = partition * PARTITION_TOKENS;
  const int64_t visible_begin = p.first_visible(first_row.position);
  const int64_t visible_end = p.visible_end(last_row.seq, last_row.position);
  return {visible_begin > begin ? visible_begin : begin,
          visible_end < begin + PARTITION_TOKENS ? visible_end : begin + PARTITION_TOKENS};
}

// What is visible of the tile at `token`. Empty where `end` is not greater than `begin`.
inline TokenRange visible_in_tile(TokenRange visible, int64_t token) {
  return {visible.begin > token ? visible.begin : token,
          visible.end < token + TILE_TOKENS ? visible.end : token + TILE_TOKENS};
}

template <typename T>
void locate_tokens(const PagedAttentionParams& p, int32_t seq, Tile<T, CacheLayout::CHUNKED>& tile) {
  if (has_small_blocks(p)) {  // in the copy of the tile (small_blocks.h)
    const int first = tile.begin / tile.LOCATED;
    const int last = (tile.end - 1) / tile.LOCATED;
    for (int i = 0; i < TILE_TOKENS / tile.LOCATED; ++i) {
      const int visible = i < first ? first : i > last ? last : i;
      tile.key_offset[i] = tile.value_offset[i] = visible * tile.LOCATED * p.head_size;
    }
    return;
  }
  const int64_t token = tile.token;
  const Indices block_table = p.block_table(seq);
  const int block_bits = __builtin_ctzll(p.block_size);
  const int64_t first_block = (token + tile.begin) >> block_bits;
  const int64_t last_block = (token + tile.end - 1) >> block_bits;
  for (int i = 0; i < TILE_TOKENS / tile.LOCATED; ++i) {
    const int64_t t = token + i * tile.LOCATED;
    int64_t block_idx = t >> block_bits;
    block_idx = block_idx < first_block ? first_block : block_idx > last_block ? last_block : block_idx;
    const int64_t block = block_table[block_idx];
    const int64_t slot = t & (p.block_size - 1);
    tile.key_offset[i] = block * p.key_strides.block + slot * ELEMENTS_PER_CHUNK<T>;
    tile.value_offset[i] = block * p.value_strides.block + slot;
  }
}

template <typename T>
void locate_tokens(const PagedAttentionParams& p, int32_t seq, Tile<T, CacheLayout::NHD>& tile) {
  const auto locate_adjacent = [&](int begin, int end, int64_t block, int64_t slot) {
    for (int t = begin; t < end; ++t, ++slot) {
      tile.key_offset[t] = block * p.key_strides.block + slot * p.key_strides.token;
      tile.value_offset[t] = block * p.value_strides.block + slot * p.value_strides.token;
    }
  };
  const int64_t first = tile.token + tile.begin;
  if (!p.block_tables.is_given()) {
    locate_adjacent(tile.begin, tile.end, 0, p.key_start_loc[seq] + first);
  } else {
    const Indices block_table = p.block_table(seq);
    int64_t block_idx = first / p.block_size;
    int64_t slot = first % p.block_size;
    for (int t = tile.begin; t < tile.end; ++block_idx, slot = 0) {
      const int64_t left = p.block_size - slot;
      const int end = left < tile.end - t ? t + static_cast<int>(left) : tile.end;
      locate_adjacent(t, end, block_table[block_idx], slot);
      t = end;
    }
  }
  for (int t = 0; t < tile.begin; ++t) {
    tile.key_offset[t] = tile.key_offset[tile.begin];
    tile.value_offset[t] = tile.value_offset[tile.begin];
  }
  for (int t = tile.end; t < TILE_TOKENS; ++t) {
    tile.key_offset[t] = tile.key_offset[tile.end - 1];
    tile.value_offset[t] = tile.value_offset[tile.end - 1];
  }
}

// The tile at `token`, in which the tokens in `visible` are visible; an empty tile if none of its tokens is visible.
template <typename T, CacheLayout LAYOUT>
Tile<T, LAYOUT> locate_tile(const PagedAttentionParams& p, int32_t seq, TokenRange visible, int64_t token) {
  Tile<T, LAYOUT> tile;
  tile.token = token;
  tile.begin = tile.end = 0;
  const TokenRange range = visible_in_tile(visible, token);
  if (range.begin >= range.end) return tile;
  tile.begin = static_cast<int32_t>(range.begin - token);
  tile.end = static_cast<int32_t>(range.end - token);
  locate_tokens(p, seq, tile);
  return tile;
}

// Whether two sequences see the same tokens of the tile at `token`, in the same blocks.
inline bool sees_same(const PagedAttentionParams& p, int32_t seq, TokenRange visible, int32_t other_seq,
                      TokenRange other_visible, int64_t token) {
  const TokenRange range = visible_in_tile(visible, token);
  const TokenRange other = visible_in_tile(other_visible, token);
  if (!p.block_tables.is_given() || range.begin != other.begin || range.end != other.end) return false;
  const int64_t first_block = range.begin / p.block_size;
  const int64_t end_block = (range.end - 1) / p.block_size + 1;
  const Indices table = p.block_table(seq);
  const Indices other_table = p.block_table(other_seq);
  for (int64_t i = first_block; i < end_block; ++i) {
    if (table[i] != other_table[i]) return false;
  }
  return true;
}

// Some rows of an item that see the same tokens of a tile, in the same blocks. No rows: the end of a partition.
template <typename T, CacheLayout LAYOUT = CacheLayout::CHUNKED>
struct TileRows {
  Tile<T, LAYOUT> tile;
  int64_t begin, end;  // of the plan's rows
};

// The first rows, from `row` on, that see a token of the tile at `token` or of a later tile in the partition. Rows of
// several sequences go together only where all of them see the same tokens: a token that one sequence does not see may
// be NaN, and 0 * NaN is NaN.
template <typename T, CacheLayout LAYOUT>
TileRows<T, LAYOUT> find_tile_rows(const PagedAttentionParams& p, const AttentionRow* rows, const AttentionItem& item,
                                   int64_t partition, int64_t token, int64_t row) {
  const auto end_of_sequence = [&](int64_t begin) {
    int64_t end = begin + 1;
    while (end < item.row_end && rows[end].seq == rows[begin].seq) ++end;
    return end;
  };
  const auto visible = [&](int64_t begin, int64_t end) {
    return visible_tokens(p, rows[begin], rows[end - 1], partition);
  };
  for (; token < (partition + 1) * PARTITION_TOKENS; token += TILE_TOKENS, row = item.row_begin) {
    while (row < item.row_end) {
      TileRows<T, LAYOUT> found;
      found.begin = row;
      found.end = end_of_sequence(row);
      const int32_t seq = rows[row].seq;
      const TokenRange seen = visible(found.begin, found.end);
      found.tile = locate_tile<T, LAYOUT>(p, seq, seen, token);
      row = found.end;
      if (found.tile.end == 0) continue;
      while (found.end < item.row_end) {
        const int64_t end = end_of_sequence(found.end);
        if (!sees_same(p, seq, seen, rows[found.end].seq, visible(found.end, end), token)) break;
        found.end = end;
      }
      return found;
    }
  }
  TileRows<T, LAYOUT> none;
  none.tile.begin = none.tile.end = 0;
  none.begin = none.end = item.row_end;
  return none;
}

template <typename T, CacheLayout LAYOUT = CacheLayout::CHUNKED>
TileRows<T, LAYOUT> find_first_tile_rows(const PagedAttentionParams& p, const AttentionRow* rows,
                                         const AttentionItem& item, int64_t partition) {
  return find_tile_rows<T, LAYOUT>(p, rows, item, partition, partition * PARTITION_TOKENS, item.row_begin);
}

template <typename T, CacheLayout LAYOUT>
TileRows<T, LAYOUT> find_next_tile_rows(const PagedAttentionParams& p, const AttentionRow* rows,
                                        const AttentionItem& item, int64_t partition, const TileRows<T, LAYOUT>& last) {
  return find_tile_rows<T, LAYOUT>(p, rows, item, partition, last.tile.token, last.end);
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
