// Where the tokens of a tile lie in the paged cache, for item_walk.h.
//
// In this folder, a tile is TILE_TOKENS adjacent tokens of one sequence. A Tile says where these tokens lie, and which
// of them are visible. A HeadTile (row_logits.h) is a Tile at one KV head. TileLogits are the logits of one row over a
// tile. TileRows are the rows that share a Tile.
#pragma once

#include "attention/paged_attention.h"
#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// A row's logits of a tile, which become the weights of the values.
struct alignas(64) TileLogits {
  float at[TILE_TOKENS];
};

// Tokens that are located together: they are adjacent, as no block is smaller.
constexpr int LOCATED_TOKENS = 8;

// A tile of tokens. Offsets are in elements from the start of a cache, for KV head 0. A token that no row sees is
// masked. Its slot may hold NaN. Its block may not exist; the nearest visible block then stands for it.
template <typename T>
struct Tile {
  int64_t token;       // the tile's first token in its sequence
  int32_t begin, end;  // the visible tokens, counted from `token`
  int64_t key_offset[TILE_TOKENS / LOCATED_TOKENS];
  int64_t value_offset[TILE_TOKENS / LOCATED_TOKENS];

  // The offsets of token `t`, counted from the tile's first token.
  int64_t key_at(int t) const { return key_offset[t / LOCATED_TOKENS] + t % LOCATED_TOKENS * ELEMENTS_PER_CHUNK<T>; }
  int64_t value_at(int t) const { return value_offset[t / LOCATED_TOKENS] + t % LOCATED_TOKENS; }
  bool all_visible(int first, int count) const { return begin <= first && first + count <= end; }
};

template <typename T>
bool is_same(const Tile<T>& a, const Tile<T>& b) {
  return a.token == b.token && a.begin == b.begin && a.end == b.end && a.end > 0 &&
         __builtin_memcmp(a.key_offset, b.key_offset, sizeof a.key_offset) == 0 &&
         __builtin_memcmp(a.value_offset, b.value_offset, sizeof a.value_offset) == 0;
}

// The first token of the first vector that has a visible token.
template <typename T>
PAGEDATTN_INLINE int first_vec_token(const Tile<T>& tile) {
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

// The tile at `token`, in which the tokens in `visible` are visible; an empty tile if none of its tokens is visible.
template <typename T>
Tile<T> locate_tile(const PagedAttentionParams& p, int32_t seq, TokenRange visible, int64_t token) {
  Tile<T> tile;
  tile.token = token;
  tile.begin = tile.end = 0;
  if (token >= visible.end || token + TILE_TOKENS <= visible.begin || visible.begin >= visible.end) return tile;
  if (visible.begin > token) tile.begin = static_cast<int32_t>(visible.begin - token);
  tile.end = static_cast<int32_t>(visible.end - token < TILE_TOKENS ? visible.end - token : TILE_TOKENS);
  const int32_t* block_table = p.block_tables + seq * p.block_table_stride;
  const int block_bits = __builtin_ctzll(p.block_size);
  const int64_t first_block = (token + tile.begin) >> block_bits;
  const int64_t last_block = (token + tile.end - 1) >> block_bits;
  for (int i = 0; i < TILE_TOKENS / LOCATED_TOKENS; ++i) {
    const int64_t t = token + i * LOCATED_TOKENS;
    int64_t block_idx = t >> block_bits;
    block_idx = block_idx < first_block ? first_block : block_idx > last_block ? last_block : block_idx;
    const int64_t block = block_table[block_idx];
    const int64_t slot = t & (p.block_size - 1);
    tile.key_offset[i] = block * p.key_strides.block + slot * ELEMENTS_PER_CHUNK<T>;
    tile.value_offset[i] = block * p.value_strides.block + slot;
  }
  return tile;
}

// Some rows of an item that see the same tokens of a tile, in the same blocks. No rows: the end of a partition.
template <typename T>
struct TileRows {
  Tile<T> tile;
  int64_t begin, end;  // of the plan's rows
};

// The first rows, from `row` on, that see a token of the tile at `token` or of a later tile in the partition. Rows of
// several sequences go together only where all of them see the same tokens: a token that one sequence does not see may
// be NaN, and 0 * NaN is NaN.
template <typename T>
TileRows<T> find_tile_rows(const PagedAttentionParams& p, const AttentionRow* rows, const AttentionItem& item,
                           int64_t partition, int64_t token, int64_t row) {
  const auto end_of_sequence = [&](int64_t begin) {
    int64_t end = begin + 1;
    while (end < item.row_end && rows[end].seq == rows[begin].seq) ++end;
    return end;
  };
  const auto locate = [&](int64_t begin, int64_t end) {
    return locate_tile<T>(p, rows[begin].seq, visible_tokens(p, rows[begin], rows[end - 1], partition), token);
  };
  for (; token < (partition + 1) * PARTITION_TOKENS; token += TILE_TOKENS, row = item.row_begin) {
    while (row < item.row_end) {
      TileRows<T> found;
      found.begin = row;
      found.end = end_of_sequence(row);
      found.tile = locate(found.begin, found.end);
      row = found.end;
      if (found.tile.end == 0) continue;
      while (found.end < item.row_end) {
        const int64_t end = end_of_sequence(found.end);
        if (!is_same(locate(found.end, end), found.tile)) break;
        found.end = end;
      }
      return found;
    }
  }
  TileRows<T> none;
  none.tile.begin = none.tile.end = 0;
  none.begin = none.end = item.row_end;
  return none;
}

template <typename T>
TileRows<T> find_first_tile_rows(const PagedAttentionParams& p, const AttentionRow* rows, const AttentionItem& item,
                                 int64_t partition) {
  return find_tile_rows<T>(p, rows, item, partition, partition * PARTITION_TOKENS, item.row_begin);
}

template <typename T>
TileRows<T> find_next_tile_rows(const PagedAttentionParams& p, const AttentionRow* rows, const AttentionItem& item,
                                int64_t partition, const TileRows<T>& last) {
  return find_tile_rows<T>(p, rows, item, partition, last.tile.token, last.end);
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
