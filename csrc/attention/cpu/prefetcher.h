// Fetches what the walk of item_walk.h comes to next, while the walk is at work on what came before.
#pragma once

#include <type_traits>

#include "attention/cpu/fetch_order.h"
#include "attention/cpu/key_dot.h"
#include "attention/cpu/tile.h"
#include "attention/cpu/value_strip.h"
#include "attention/paged_attention.h"
#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Fetches a part of a tile, while the part before it is computed. The hardware does not foresee the jumps from block to
// block: without fetching, a decode step over a large cache takes 1.5 to 1.9 times as long. The part goes into the
// second-level cache. Fetching into the first would be slower, as all misses that this cache can have at a time would
// be in use; but on a Zen 5 it is faster (prefetch_line).
//
// A part is the keys and values of some adjacent KV heads. Its blocks take turns of FETCH_BYTES each, the blocks of the
// keys first: memory is fastest with several blocks at a time, and a long run in each.
//
// Each turn is fetched again with the next turns, as the CPU drops a part of it (prefetch_line).
//
// A line of each page is fetched at the start. The first use of a page waits until its address is translated, and until
// then nothing that comes later can retire. Many such waits together are shorter than one wait at each page's turn.
constexpr int64_t FETCH_BYTES = 256;
constexpr int64_t PAGE_BYTES = 4 << 10;

template <typename T, CacheLayout LAYOUT = CacheLayout::CHUNKED>
class Prefetcher {
 public:
  // Begins a part, and drops what was left of the part before. A tile without visible tokens is nothing to fetch.
  void start(const PagedAttentionParams& p, const Tile<T>& tile, int64_t head, int64_t num_heads) {
    const T* keys = static_cast<const T*>(p.key_cache) + head * p.key_strides.kv_head;
    const T* values = static_cast<const T*>(p.value_cache) + head * p.value_strides.kv_head;
    const bool whole_blocks = p.block_size <= TILE_TOKENS;
    const int64_t run_tokens = whole_blocks ? p.block_size : TILE_TOKENS;
    num_runs_ = 0;
    const auto add_runs = [&](const T* head_begin, const int64_t* offsets, int64_t row_elements) {
      for (int64_t token = tile.begin / run_tokens * run_tokens; token < tile.end; token += run_tokens) {
        runs_[num_runs_++] = {head_begin + offsets[token / tile.LOCATED], whole_blocks ? 0 : -row_elements};
      }
    };
    add_runs(keys, tile.key_offset, run_tokens * ELEMENTS_PER_CHUNK<T>);
    add_runs(values, tile.value_offset, run_tokens);
    for (Turn& turn : recent_turns_) {
      for (const T*& piece : turn.pieces) piece = keys;
    }
    run_elements_ = num_heads * p.value_strides.kv_head / p.block_size * run_tokens;  // keys have as many, or fewer
    num_left_ = (run_elements_ + TURN - 1) / TURN * num_runs_;
    take_turns_from(0);
    for (int64_t offset = 0; offset < run_elements_; offset += PAGE_BYTES / static_cast<int64_t>(sizeof(T))) {
      for (int i = 0; i < num_runs_; ++i) prefetch_line(runs_[i].at(offset));
    }
  }

  // How often fetch() has something to fetch.
  int64_t num_left() const { return num_left_; }

  // Fetches the next turn, if any is left; with AGAIN, the turns before it as well.
  template <bool AGAIN = true>
  PAGEDATTN_INLINE void fetch() {
    if (num_left_ == 0) return;
    --num_left_;
    Turn turn;
    PAGEDATTN_UNROLL
    for (int64_t i = 0; i < NUM_PIECES; ++i) turn.pieces[i] = runs_[run_].at(offset_ + i * PIECE);
    fetch_lines(turn);
    if constexpr (AGAIN) {
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_RECENT; ++i) fetch_lines(recent_turns_[i]);
      for (int i = NUM_RECENT - 1; i > 0; --i) recent_turns_[i] = recent_turns_[i - 1];
      recent_turns_[0] = turn;
    }
    if (++run_ < end_run_) return;
    run_ = first_run_;
    offset_ += TURN;
    if (offset_ >= run_elements_) take_turns_from(end_run_);
  }

 private:
  void take_turns_from(int run) {
    run_ = first_run_ = run;
    end_run_ = num_runs_ - run < runs_in_turns_ ? num_runs_ : run + runs_in_turns_;
    offset_ = 0;
  }

  // With how many of the next turns a turn is fetched again: fewer where the arithmetic takes longer for a byte.
  static constexpr int NUM_RECENT = sizeof(T) == 4 ? 3 : (sizeof(T) == 2 ? 2 : 1);

  // A turn, in pieces no longer than a row of a tile.
  static constexpr int64_t TURN = FETCH_BYTES / sizeof(T);
  static constexpr int64_t PIECE = TURN < TILE_TOKENS ? TURN : TILE_TOKENS;
  static constexpr int64_t NUM_PIECES = TURN / PIECE;
  struct Turn {
    const T* pieces[NUM_PIECES];
  };

  static PAGEDATTN_INLINE void fetch_lines(const Turn& turn) {
    constexpr int64_t LINE = 64 / sizeof(T);
    PAGEDATTN_UNROLL
    for (int64_t i = 0; i < TURN; i += LINE) prefetch_line(turn.pieces[i / PIECE] + i % PIECE);
  }

  // Adjacent elements; or, in a block of two tiles, every second row of a tile's length. `skipped` has the bits of an
  // offset that count the rows.
  struct Run {
    const T* begin;
    int64_t skipped;

    const T* at(int64_t offset) const { return begin + offset + (offset & skipped); }
  };
  Run runs_[MAX_RUNS];
  Turn recent_turns_[NUM_RECENT];
  const int runs_in_turns_ = fetch_order().runs_in_turns;
  int num_runs_ = 0;
  int first_run_ = 0;  // of the runs that take turns
  int end_run_ = 0;
  int run_ = 0;
  int64_t run_elements_ = 0;
  int64_t offset_ = 0;  // in each of these runs
  int64_t num_left_ = 0;
};

// How much NUM_ROWS rows fetch beside their work on a tile. Half of the next part is fetched beside the keys, and half
// beside the values. Where one instruction multiplies pairs of keys, but not of values, several rows have more to do
// with the values. Then three quarters of the next part are fetched beside the values, so that the work is even. Beside
// int8 values there is room for rows of scales, which are up to a quarter of what is fetched of a head of 32 or more.
template <typename T, int NUM_ROWS>
struct Pace {
  static constexpr bool HAS_SCALES = std::is_same_v<T, int8>;
  static constexpr bool LIGHT_KEYS = HAS_PAIR_DOT && !HAS_PAIR_STRIPS && std::is_same_v<T, bfloat16> && NUM_ROWS > 1;

  // How many chunks of the keys, of `num_bytes` each, go with a fetch in one pass over the chunks.
  static constexpr int64_t chunks_per_fetch(int64_t num_bytes) {
    return (LIGHT_KEYS ? 2 : 1) * (num_bytes < FETCH_BYTES ? FETCH_BYTES / num_bytes : 1);
  }

  // How many fetches go with values of `num_bytes`.
  static constexpr int64_t num_value_fetches(int64_t num_bytes) {
    return num_bytes / FETCH_BYTES * (LIGHT_KEYS || HAS_SCALES ? 3 : 2) / 2;
  }
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
