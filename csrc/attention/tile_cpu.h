// Where the tokens of a tile lie in the paged cache, and how they are fetched ahead, for paged_attention_cpu.cpp.
#pragma once

#include "attention/paged_attention.h"
#include "cpu_vec.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// A row's logits of a tile, then the weights of its values.
struct alignas(64) TileLogits {
  float at[TILE_TOKENS];
};

// Tokens that are located together: they are adjacent, as no block is smaller.
constexpr int LOCATED_TOKENS = 8;

// A tile of tokens. Offsets are in elements from the start of a cache, for KV head 0. A token that no row sees is
// masked; it may lie in a slot with NaN, and in a block that does not exist, for which the nearest visible one stands.
template <typename T>
struct Tile {
  int64_t token;       // the tile's first token in its sequence
  int32_t begin, end;  // the visible tokens, counted from there
  int64_t key_offset[TILE_TOKENS / LOCATED_TOKENS];
  int64_t value_offset[TILE_TOKENS / LOCATED_TOKENS];

  // Of token `t`, counted from the tile's first.
  int64_t key_at(int t) const { return key_offset[t / LOCATED_TOKENS] + t % LOCATED_TOKENS * ELEMENTS_PER_CHUNK<T>; }
  int64_t value_at(int t) const { return value_offset[t / LOCATED_TOKENS] + t % LOCATED_TOKENS; }
  bool all_visible(int first, int count) const { return begin <= first && first + count <= end; }
};

// The first token of the first vector that has a visible one.
template <typename T>
PAGEDATTN_INLINE int first_vec_token(const Tile<T>& tile) {
  return tile.begin / VEC_SIZE * VEC_SIZE;
}

// The tile at `token`, of which the tokens [visible_begin, visible_end) of the sequence are visible.
template <typename T>
Tile<T> locate_tile(const PagedAttentionParams& p, const int32_t* block_table, int64_t token, int64_t visible_begin,
                    int64_t visible_end) {
  Tile<T> tile;
  tile.token = token;
  tile.begin = static_cast<int32_t>(visible_begin > token ? visible_begin - token : 0);
  tile.end = static_cast<int32_t>(visible_end - token < TILE_TOKENS ? visible_end - token : TILE_TOKENS);
  const int block_bits = __builtin_ctzll(p.block_size);
  const int64_t first_block = (token + tile.begin) >> block_bits;
  const int64_t last_block = (token + tile.end - 1) >> block_bits;
  for (int i = 0; i < TILE_TOKENS / LOCATED_TOKENS; ++i) {
    const int64_t t = token + i * LOCATED_TOKENS;
    int64_t block_idx = t >> block_bits;
    block_idx = block_idx < first_block ? first_block : block_idx > last_block ? last_block : block_idx;
    const int64_t block = block_table[block_idx];
    const int64_t slot = t & (p.block_size - 1);
    tile.key_offset[i] = block * p.key_block_stride + slot * ELEMENTS_PER_CHUNK<T>;
    tile.value_offset[i] = block * p.value_block_stride + slot;
  }
  return tile;
}

// Fetches one head's part of a tile into the second-level cache: with the first as target, all the misses that it can
// have at a time would be in use. The hardware does not foresee the jumps from block to block: without this, a decode
// step over a large cache takes 1.5 to 1.9 times as long.
//
// The part is taken in groups, each in head_size / ELEMENTS_PER_CHUNK steps of four cache lines.
constexpr int FETCH_TOKENS = 2 * LOCATED_TOKENS;  // a group's

template <typename T>
class Prefetcher {
 public:
  static constexpr int NUM_GROUPS = TILE_TOKENS / FETCH_TOKENS;

  // Of the key cache at a head: a step is a chunk of FETCH_TOKENS tokens.
  static PAGEDATTN_INLINE Prefetcher of_keys(const PagedAttentionParams& p, const Tile<T>& tile, const T* keys) {
    Prefetcher fetcher(tile);
    fetcher.stride_ = p.block_size * ELEMENTS_PER_CHUNK<T>;
    for (int i = 0; i < NUM_GROUPS; ++i) {
      fetcher.low_[i] = keys + tile.key_offset[2 * i];
      fetcher.high_[i] = keys + tile.key_offset[2 * i + 1];
    }
    return fetcher;
  }

  // Of the value cache at a head. Blocks are taken as they lie, whatever token or element a line belongs to; of blocks
  // larger than a tile, the first lines of their rows.
  static PAGEDATTN_INLINE Prefetcher of_values(const PagedAttentionParams& p, const Tile<T>& tile, const T* values) {
    Prefetcher fetcher(tile);
    fetcher.stride_ = p.block_size > TILE_TOKENS ? p.block_size : p.block_size >= FETCH_TOKENS ? 4 * LINE : 2 * LINE;
    const int64_t spread = p.block_size > TILE_TOKENS ? p.block_size / TILE_TOKENS : 1;
    for (int i = 0; i < NUM_GROUPS; ++i) {
      const int64_t slot = i * FETCH_TOKENS % (p.block_size < TILE_TOKENS ? p.block_size : TILE_TOKENS);
      fetcher.low_[i] = values + tile.value_offset[2 * i] - slot + slot * spread * p.head_size;
      fetcher.high_[i] =
          p.block_size >= FETCH_TOKENS ? fetcher.low_[i] + 2 * LINE : values + tile.value_offset[2 * i + 1];
    }
    return fetcher;
  }

  PAGEDATTN_INLINE void fetch(int64_t group, int64_t step) const {
    if (group >= num_groups_) return;
    const T* low = low_[group] + step * stride_;
    const T* high = high_[group] + step * stride_;
    __builtin_prefetch(low, 0, 2);
    __builtin_prefetch(low + LINE, 0, 2);
    __builtin_prefetch(high, 0, 2);
    __builtin_prefetch(high + LINE, 0, 2);
  }

 private:
  static constexpr int LINE = 64 / sizeof(T);

  explicit PAGEDATTN_INLINE Prefetcher(const Tile<T>& tile)
      : num_groups_((tile.end + FETCH_TOKENS - 1) / FETCH_TOKENS) {}

  const T* low_[NUM_GROUPS];   // of each group, the first two lines
  const T* high_[NUM_GROUPS];  // and the next two: of blocks of 8, they are in the second
  int64_t stride_;
  int num_groups_;  // with a visible token
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
