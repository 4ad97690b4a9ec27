// Fetches ahead from caches in the NHD layout, as prefetcher.h does from CHUNKED ones; for fetch_ahead.h.
#pragma once

#include "attention/cpu/prefetcher.h"
#include "attention/cpu/tile.h"
#include "attention/paged_attention.h"
#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Fetches some heads of a tile, as the walk reads them: token by token, the keys before the values. The first
// nhd_lead_bytes (fetch_order.h) were fetched before the walk came to the tile. Beside the tile's last tokens, as much
// is fetched of what the walk comes to next. Lines are fetched in the order of memory, or of a few runs in turns.
template <typename T>
class Prefetcher<T, CacheLayout::NHD> {
 public:
  // Begins with heads that the walk comes to now, and drops what was left of the heads before.
  //
  // whole_tile: all of a tile is fetched before the walk comes to the tile.
  void start(const PagedAttentionParams& p, const Tile<T, CacheLayout::NHD>& tile, int64_t head, int64_t num_heads,
             bool whole_tile) {
    num_tokens_ = token_ = piece_ = 0;
    num_left_ = 0;
    line_ = end_ = nullptr;
    const int64_t head_bytes = p.head_size * static_cast<int64_t>(sizeof(T));
    const bool adjacent = p.key_strides.kv_head == p.head_size && p.value_strides.kv_head == p.head_size;
    num_pieces_ = adjacent ? 1 : num_heads;
    piece_bytes_ = adjacent ? num_heads * head_bytes : head_bytes;
    lead_ = 0;
    const FetchOrder order = fetch_order();
    asks_again_ = num_heads * head_bytes < order.foreseen_token_bytes;
    if (num_heads * head_bytes >= order.hardware_token_bytes) return;
    const int64_t lead = order.nhd_lead_bytes / (num_heads * head_bytes);
    lead_ = static_cast<int>(!whole_tile && lead < MOST_TOKENS ? lead + 1 : MOST_TOKENS);
    add(p, tile, head, lead_, MOST_TOKENS);
  }

  // Goes on with as many heads that the walk comes to next.
  void start_next(const PagedAttentionParams& p, const Tile<T, CacheLayout::NHD>& tile, int64_t head) {
    add(p, tile, head, 0, lead_);
  }

  // How often fetch() has something to fetch, approximately.
  int64_t num_left() const { return num_left_; }

  // Fetches the next FETCH_BYTES, if any are left; where it asks again, with those of the two calls before.
  template <bool = true>
  PAGEDATTN_INLINE void fetch() {
    if (num_left_ == 0) return;
    --num_left_;
    PAGEDATTN_UNROLL
    for (int64_t i = 0; i < FETCH_BYTES; i += LINE_BYTES) {
      if (line_ >= end_) next_piece();
      prefetch_line(line_);
      if (asks_again_) {
        const char*(&recent)[2] = recent_[i / LINE_BYTES];
        prefetch_line(recent[0]);
        prefetch_line(recent[1]);
        recent[1] = recent[0];
        recent[0] = line_;
      }
      line_ += LINE_BYTES;
    }
  }

 private:
  static constexpr int64_t LINE_BYTES = 64;
  static constexpr int MOST_TOKENS = 2 * TILE_TOKENS;  // of a tile: its keys and its values
  static constexpr int HND_RUNS = 4;                   // as of a CHUNKED cache, measured on a Zen 3

  struct Token {
    const char* piece;
    int64_t stride;  // bytes to the next piece
  };

  // Adds tokens [begin, end) of the keys, followed by the values, that are visible in a tile.
  void add(const PagedAttentionParams& p, const Tile<T, CacheLayout::NHD>& tile, int64_t head, int begin, int end) {
    const int num_keys = tile.end - tile.begin;
    if (end > 2 * num_keys) end = 2 * num_keys;
    const auto token_of = [&](const void* cache, const CacheStrides& strides, int64_t offset) {
      const T* const piece = static_cast<const T*>(cache) + head * strides.kv_head + offset;
      return Token{reinterpret_cast<const char*>(piece), strides.kv_head * static_cast<int64_t>(sizeof(T))};
    };
    uintptr_t last_page = 0;
    // HND: a head's tokens are adjacent. Where all of a tile are fetched ahead, HND_RUNS runs take turns.
    const bool in_turns = p.key_strides.token < p.key_strides.kv_head && begin == 0 && end == MOST_TOKENS;
    for (int n = begin; n < end; ++n) {
      const int i = in_turns ? n % HND_RUNS * (MOST_TOKENS / HND_RUNS) + n / HND_RUNS : n;
      const int t = tile.begin + i;
      const Token token = i < num_keys ? token_of(p.key_cache, p.key_strides, tile.key_offset[t])
                                       : token_of(p.value_cache, p.value_strides, tile.value_offset[t - num_keys]);
      // The first use of a page waits for its address (prefetcher.h).
      const uintptr_t page = reinterpret_cast<uintptr_t>(token.piece) / PAGE_BYTES;
      if (page != last_page) prefetch_line(token.piece);
      last_page = page;
      tokens_[num_tokens_++] = token;
    }
    if (end > begin) num_left_ += ((end - begin) * num_pieces_ * piece_bytes_ + FETCH_BYTES - 1) / FETCH_BYTES;
  }

  PAGEDATTN_INLINE void next_piece() {
    if (token_ == num_tokens_) return;  // lines that begin before their piece make it a few more
    const char* const piece = tokens_[token_].piece + piece_ * tokens_[token_].stride;
    line_ = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(piece) & ~uintptr_t{LINE_BYTES - 1});
    end_ = piece + piece_bytes_;
    if (++piece_ < num_pieces_) return;
    piece_ = 0;
    ++token_;
  }

  Token tokens_[2 * MOST_TOKENS];
  int num_tokens_ = 0;
  int lead_ = 0;            // tokens
  int64_t num_pieces_ = 0;  // of a token; heads that are adjacent are one piece
  int64_t piece_bytes_ = 0;
  int token_ = 0;  // of the next piece
  int64_t piece_ = 0;
  const char* line_ = nullptr;
  const char* end_ = nullptr;
  int64_t num_left_ = 0;
  bool asks_again_ = false;
  const char* recent_[FETCH_BYTES / LINE_BYTES][2] = {};  // lines of the two calls before
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
