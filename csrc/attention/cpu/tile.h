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

template <typename T>
bool is_same(const Tile<T>& a, const Tile<T>& b) {
  return a.token == b.token && a.begin == b.begin && a.end == b.end && a.end > 0 &&
         __builtin_memcmp(a.key_offset, b.key_offset, sizeof a.key_offset) == 0 &&
         __builtin_memcmp(a.value_offset, b.value_offset, sizeof a.value_offset) == 0;
}

// The first token of the first vector that has a visible one.
template <typename T>
PAGEDATTN_INLINE int first_vec_token(const Tile<T>& tile) {
  return tile.begin / VEC_SIZE * VEC_SIZE;
}

struct TokenRange {
  int64_t begin, end;
};

// What adjacent rows of one sequence see of a partition.
inline TokenRange visible_tokens(const PagedAttentionParams& p, const AttentionRow& first_row,
                                 const AttentionRow& last_row, int64_t partition) {
  const int64_t begin = partition * PARTITION_TOKENS;
  const int64_t visible_begin = p.first_visible(first_row.position);
  const int64_t visible_end = last_row.position + 1;
  return {visible_begin > begin ? visible_begin : begin,
          visible_end < begin + PARTITION_TOKENS ? visible_end : begin + PARTITION_TOKENS};
}

// The tile at `token`, of which the tokens in `visible` are visible; an empty one if there are none.
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
    tile.key_offset[i] = block * p.key_block_stride + slot * ELEMENTS_PER_CHUNK<T>;
    tile.value_offset[i] = block * p.value_block_stride + slot;
  }
  return tile;
}

// Some rows of an item that see the same of a tile, in the same blocks; none: the end of a partition.
template <typename T>
struct TileRows {
  Tile<T> tile;
  int64_t begin, end;  // of the plan's rows
};

// The first rows from `row` on that see some of the tile at `token` or of a later one in the partition. Rows of several
// sequences go together only where all of them see the same: what one does not see may be NaN to the others.
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

// Fetches a part of a tile into the second-level cache, while the part before it is computed: the hardware does not
// foresee the jumps from block to block, and without this a decode step over a large cache takes 1.5 to 1.9 times as
// long. The first-level cache as target would be slower: all the misses that it can have at a time would be in use.
//
// A part is the keys and values of some adjacent KV heads. Its blocks, first all of the keys, take turns, FETCH_BYTES
// each: memory is fastest with several blocks at a time, and long runs in each.
//
// Each turn is fetched again with the next ones, as the CPU drops a part of it (prefetch_line).
//
// A line of each page is fetched at the start. Addresses in a page are translated when it is first used, and until then
// nothing that comes later can retire; many such waits together are shorter than one at each page's turn.
constexpr int64_t FETCH_BYTES = 256;
constexpr int64_t PAGE_BYTES = 4 << 10;

constexpr int MAX_RUNS = 2 * TILE_TOKENS / LOCATED_TOKENS;

// As many heads of a block as FETCH_RUN_BYTES holds are a part, and RUNS_IN_TURNS blocks take turns. CPUs with AVX512
// have a second-level cache of 1 MiB or more, and take all blocks of a tile. In the 512 KiB of others two such parts
// would push each other out; and measured on a Zen 3, more than four blocks in turns are slower beside arithmetic.
constexpr int64_t FETCH_RUN_BYTES = (VEC_SIZE == 16 ? 16 : 8) << 10;
constexpr int RUNS_IN_TURNS = VEC_SIZE == 16 ? MAX_RUNS : 4;

template <typename T>
class Prefetcher {
 public:
  // Drops what was left of the part before. A tile without visible tokens is nothing to fetch.
  void start(const PagedAttentionParams& p, const Tile<T>& tile, int64_t head, int64_t num_heads) {
    const int64_t head_elements = p.head_size * p.block_size;
    const T* keys = static_cast<const T*>(p.key_cache) + head * head_elements;
    const T* values = static_cast<const T*>(p.value_cache) + head * head_elements;
    const bool whole_blocks = p.block_size <= TILE_TOKENS;
    const int64_t run_tokens = whole_blocks ? p.block_size : TILE_TOKENS;
    num_runs_ = 0;
    const auto add_runs = [&](const T* head_begin, const int64_t* offsets, int64_t row_elements) {
      for (int64_t token = tile.begin / run_tokens * run_tokens; token < tile.end; token += run_tokens) {
        runs_[num_runs_++] = {head_begin + offsets[token / LOCATED_TOKENS], whole_blocks ? 0 : -row_elements};
      }
    };
    add_runs(keys, tile.key_offset, run_tokens * ELEMENTS_PER_CHUNK<T>);
    add_runs(values, tile.value_offset, run_tokens);
    for (Turn& turn : recent_turns_) {
      for (const T*& piece : turn.pieces) piece = keys;
    }
    run_elements_ = num_heads * p.head_size * run_tokens;
    num_left_ = (run_elements_ + TURN - 1) / TURN * num_runs_;
    take_turns_from(0);
    for (int64_t offset = 0; offset < run_elements_; offset += PAGE_BYTES / static_cast<int64_t>(sizeof(T))) {
      for (int i = 0; i < num_runs_; ++i) prefetch_line(runs_[i].at(offset));
    }
  }

  // How often fetch() has something to fetch.
  int64_t num_left() const { return num_left_; }

  // The next FETCH_BYTES, if any are left; with AGAIN the turns before as well.
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
    end_run_ = num_runs_ - run < RUNS_IN_TURNS ? num_runs_ : run + RUNS_IN_TURNS;
    offset_ = 0;
  }

  // With how many of the next turns: fewer where the arithmetic takes longer for a byte.
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

  // Adjacent elements; or, of a block of two tiles, every other row of a tile's length. `skipped` has the bits of an
  // offset that count the rows.
  struct Run {
    const T* begin;
    int64_t skipped;

    const T* at(int64_t offset) const { return begin + offset + (offset & skipped); }
  };
  Run runs_[MAX_RUNS];
  Turn recent_turns_[NUM_RECENT];
  int num_runs_ = 0;
  int first_run_ = 0;  // of those that take turns
  int end_run_ = 0;
  int run_ = 0;
  int64_t run_elements_ = 0;
  int64_t offset_ = 0;  // in each of them
  int64_t num_left_ = 0;
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
