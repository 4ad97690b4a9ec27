// How reshape_and_cache and gather_cached_kv share out their work on a GPU, for a CHUNKED cache. A thread block has a
// token group: a warp's number of consecutive tokens, and the keys or the values of one KV head. Its threads move whole
// pieces of the value cache where the tokens fill them, and chunks of single tokens elsewhere.
#pragma once

#include <bit>

#include "cache/cache_chunks.cuh"
#include "cuda_utils.cuh"

namespace pagedattn::cuda {

constexpr int GROUP_TOKENS = WARP_SIZE;  // one for each lane
constexpr int GROUP_THREADS = 128;
constexpr int GROUP_WARPS = GROUP_THREADS / WARP_SIZE;
constexpr int BYTES_UNDER_WAY = 64;  // in a thread that moves chunks

// How the memory may be accessed. The host finds out.
struct Access {
  int block_size_log2;
  bool are_rows_aligned;  // to 16 bytes, in every head of every token
  bool is_cache_aligned;  // to 16 bytes, in every chunk
  bool do_pieces_fit;     // 16 aligned bytes of the value cache are tokens of one block
};

template <typename Params>
bool are_rows_aligned(const Params& p, int64_t row_element_size) {
  return is_aligned_16({p.key, p.value}, {p.head_size * row_element_size, p.key_stride * row_element_size,
                                          p.value_stride * row_element_size});
}

template <typename CacheT, typename Params>
Access make_access(const Params& p, int64_t row_element_size) {
  constexpr int64_t CACHE_BYTES = sizeof(CacheT);
  Access access{};
  access.block_size_log2 = std::countr_zero(static_cast<uint64_t>(p.block_size));
  access.are_rows_aligned = are_rows_aligned(p, row_element_size);
  access.is_cache_aligned = is_aligned_16({p.key_cache, p.value_cache},
                                          {p.key_strides.block * CACHE_BYTES, p.value_strides.block * CACHE_BYTES});
  access.do_pieces_fit = access.is_cache_aligned && p.block_size % ELEMENTS_PER_CHUNK<CacheT> == 0;
  return access;
}

struct Position {
  int64_t block;
  int offset;
};

__device__ inline Position position_of(int64_t slot, const Access& access) {
  return {slot >> access.block_size_log2, static_cast<int>(slot & ((int64_t{1} << access.block_size_log2) - 1))};
}

struct TokenGroup {
  int64_t first_token;
  int64_t head;
  bool is_value;
};

// Grid: groups of tokens x KV heads x (keys, values), the last one fastest.
__device__ inline TokenGroup group_of_block(int64_t num_kv_heads) {
  const auto num_heads = static_cast<unsigned>(num_kv_heads);
  const unsigned head_of_group = blockIdx.x / 2;
  return {int64_t{head_of_group / num_heads} * GROUP_TOKENS, head_of_group % num_heads, blockIdx.x % 2 == 1};
}

// The slot of a token. Negative for padding and past the last token.
__device__ inline int64_t slot_of(const Indices& slot_mapping, int64_t num_tokens, int64_t token) {
  return token < num_tokens ? slot_mapping[token] : -1;
}

// The chunks of a thread: 16 bytes each, of one token, every STEP-th from `first` on. A warp has 8 tokens x 4 chunks.
// Adjacent lanes have adjacent tokens, as in the key cache.
struct ThreadChunks {
  static constexpr int STEP = 4;
  int token;  // of the group
  int first;
};

__device__ inline ThreadChunks thread_chunks() {
  const int warp = static_cast<int>(threadIdx.x) / WARP_SIZE, lane = static_cast<int>(threadIdx.x) % WARP_SIZE;
  return {warp * 8 + lane % 8, lane / 8};
}

static_assert(GROUP_WARPS * 8 == GROUP_TOKENS);

// Calls write(chunk, read(chunk)) for every STEP-th chunk from `first` to `end`, with several reads under way.
template <int STEP, typename Read, typename Write>
__device__ void move_chunks(int first, int end, Read read, Write write) {
  using Loaded = decltype(read(0));
  constexpr int NUM_LOADS = BYTES_UNDER_WAY / sizeof(Loaded);
  for (; first < end; first += NUM_LOADS * STEP) {
    Loaded loaded[NUM_LOADS];
#pragma unroll
    for (int i = 0; i < NUM_LOADS; ++i) {
      if (first + i * STEP < end) loaded[i] = read(first + i * STEP);
    }
#pragma unroll
    for (int i = 0; i < NUM_LOADS; ++i) {
      if (first + i * STEP < end) write(first + i * STEP, loaded[i]);
    }
  }
}

// Which tokens of a group fill pieces of the value cache. A piece is PIECE adjacent slots, 16 bytes for each element.
// All members but `slot` are the same in every lane.
template <int PIECE>
struct Pieces {
  int64_t slot;     // of the lane's token
  unsigned starts;  // bit t: tokens t, t + 1, ... are a piece
  unsigned rest;    // bit t: token t is in no piece

  __device__ Pieces(int64_t lane_slot, bool do_pieces_fit) : slot(lane_slot) {
    const int64_t next_slot = __shfl_down_sync(ALL_LANES, slot, 1);
    const bool is_last_lane = threadIdx.x % WARP_SIZE == WARP_SIZE - 1;
    const unsigned links = __ballot_sync(ALL_LANES, slot >= 0 && !is_last_lane && next_slot == slot + 1);
    const unsigned valid = __ballot_sync(ALL_LANES, slot >= 0);
    starts = __ballot_sync(ALL_LANES, do_pieces_fit && slot >= 0 && slot % PIECE == 0);
#pragma unroll
    for (int i = 0; i < PIECE - 1; ++i) starts &= links >> i;
    unsigned covered = 0;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) covered |= starts << i;
    rest = valid & ~covered;
  }

  // The first token of piece k, or -1.
  __device__ int start(int k) const {
    unsigned later = starts;
    for (int i = 0; i < k; ++i) later &= later - 1;
    return __ffs(static_cast<int>(later)) - 1;
  }

  // The slot of token `start`, or 0 if there is none. All lanes take part.
  __device__ int64_t slot_at(int start) const {
    const int64_t result = __shfl_sync(ALL_LANES, slot, max(start, 0));
    return start >= 0 ? result : 0;
  }
};

// Calls move(d, start, position) for each piece of a group and every ELEMENTS-th element d of the head, a thread for
// each call. `start` is the first token of the piece, and lies at `position` of the cache. Returns a bit for each token
// that is in no piece.
template <int PIECE, int ELEMENTS, typename Params, typename Move>
__device__ unsigned move_pieces(const Params& p, const Access& access, const TokenGroup& group, Move move) {
  constexpr int NUM_PIECES = GROUP_TOKENS / PIECE;
  const int lane = static_cast<int>(threadIdx.x) % WARP_SIZE;
  const Pieces<PIECE> pieces(slot_of(p.slot_mapping, p.num_tokens, group.first_token + lane), access.do_pieces_fit);
  if (pieces.starts != 0) {
    const int start = pieces.start(static_cast<int>(threadIdx.x) % NUM_PIECES);
    const Position position = position_of(pieces.slot_at(start), access);
    const int head_size = start >= 0 ? static_cast<int>(p.head_size) : 0;
    for (int d = static_cast<int>(threadIdx.x) / NUM_PIECES * ELEMENTS; d < head_size;
         d += GROUP_THREADS / NUM_PIECES * ELEMENTS) {
      move(d, start, position);
    }
  }
  return pieces.rest;
}

}  // namespace pagedattn::cuda
