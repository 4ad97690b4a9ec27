// Tiles of a CHUNKED cache whose blocks have 2 or 4 tokens; for row_walk.h.
//
// The kernels read LOCATED_TOKENS adjacent tokens at once, which no such block has. So a tile at one KV head is copied
// first, into blocks of so many tokens, and the kernels read the copy.
#pragma once

#include "attention/cpu/item_scratch.h"
#include "attention/cpu/row_logits.h"
#include "attention/cpu/tile.h"
#include "attention/paged_attention.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

template <typename T>
class SmallBlocks {
 public:
  // `copies` has room for small_block_floats(params).
  SmallBlocks(const PagedAttentionParams& params, float* copies)
      : p_(params), of_copies_(params), keys_(reinterpret_cast<T*>(copies)) {
    of_copies_.block_size = COPY_TOKENS;
  }

  // Copies what is visible of a tile of `seq` at one KV head, and of each copied block the hidden tokens, too.
  HeadTile<T> copy(const Tile<T>& tile, int32_t seq, int64_t kv_head, Prefetcher<T>* prefetcher) const {
    p_.block_size == 2 ? copy_blocks<2>(tile, seq, kv_head) : copy_blocks<4>(tile, seq, kv_head);
    return {of_copies_, tile, keys_, values(), prefetcher};
  }

 private:
  static constexpr int COPY_TOKENS = LOCATED_TOKENS<CacheLayout::CHUNKED>;

  T* values() const { return keys_ + TILE_TOKENS * p_.head_size; }

  template <int BLOCK_SIZE>
  void copy_blocks(const Tile<T>& tile, int32_t seq, int64_t kv_head) const {
    constexpr int NUM_BLOCKS = COPY_TOKENS / BLOCK_SIZE;
    constexpr int KEY_RUN = BLOCK_SIZE * ELEMENTS_PER_CHUNK<T>;
    const T* const key_cache = static_cast<const T*>(p_.key_cache) + kv_head * p_.key_strides.kv_head;
    const T* const value_cache = static_cast<const T*>(p_.value_cache) + kv_head * p_.value_strides.kv_head;
    const Indices table = p_.block_table(seq);
    const int64_t first_block = (tile.token + tile.begin) / BLOCK_SIZE;
    const int64_t last_block = (tile.token + tile.end - 1) / BLOCK_SIZE;
    for (int t = tile.begin / COPY_TOKENS * COPY_TOKENS; t < tile.end; t += COPY_TOKENS) {
      const T* from_keys[NUM_BLOCKS];
      const T* from_values[NUM_BLOCKS];
      for (int i = 0; i < NUM_BLOCKS; ++i) {
        int64_t block_idx = (tile.token + t) / BLOCK_SIZE + i;
        block_idx = block_idx < first_block ? first_block : block_idx > last_block ? last_block : block_idx;
        from_keys[i] = key_cache + table[block_idx] * p_.key_strides.block;
        from_values[i] = value_cache + table[block_idx] * p_.value_strides.block;
      }
      copy_in_turns<KEY_RUN>(from_keys, p_.head_size / ELEMENTS_PER_CHUNK<T>, keys_ + t * p_.head_size);
      copy_in_turns<BLOCK_SIZE>(from_values, p_.head_size, values() + t * p_.head_size);
    }
  }

  // Copies `num_runs` runs of RUN elements from each source. The sources take turns.
  template <int RUN, int NUM_SOURCES>
  static void copy_in_turns(const T* const (&sources)[NUM_SOURCES], int64_t num_runs, T* to) {
    for (int64_t run = 0; run < num_runs; ++run) {
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_SOURCES; ++i) {
        __builtin_memcpy(to + (run * NUM_SOURCES + i) * RUN, sources[i] + run * RUN, RUN * sizeof(T));
      }
    }
  }

  const PagedAttentionParams& p_;
  PagedAttentionParams of_copies_;
  T* keys_;  // [TILE_TOKENS / COPY_TOKENS, head_size / x, COPY_TOKENS, x]; the values follow
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
