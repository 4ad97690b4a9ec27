// A block moves a tile: a warp's number of consecutive tokens, one KV head, their keys or their values.
//
// Keys go straight from memory to memory, 16 bytes of a token at a time: on the side of the cache a warp has neighbours
// of several tokens (128 bytes of 8 tokens), on the side of the rows neighbours of several chunks. Values change places
// in shared memory: rows in 16-byte pieces on one side; on the other, 16 bytes are one element of as many tokens, where
// those are a run that fills an aligned piece of a block. Elements of other tokens are moved one by one.
//
// Elements are moved as integers, bit for bit, unless they are rounded to float8.
#include <type_traits>

#include "cache/reshape_and_cache.h"
#include "cuda_float8.cuh"
#include "cuda_vec.cuh"
#include "dispatch.h"

namespace pagedattn::cuda {
namespace {

constexpr int TILE_TOKENS = WARP_SIZE;  // a lane for each
constexpr int NUM_THREADS = 256;
constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;
constexpr int LOADS_PER_THREAD = 2;  // under way at a time

// An unsigned integer of the size of T.
template <typename T>
using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>;

// What the host found out for both kernels.
struct Access {
  int block_size_log2;
  bool are_rows_aligned;  // to 16 bytes, in every head of every token
  bool is_cache_aligned;  // to 16 bytes, in every chunk
  bool do_pieces_fit;     // 16 bytes of the value cache are elements of one block
};

struct Position {
  int64_t block;
  int64_t offset;
};

__device__ Position position_of(int64_t slot, const Access& access) {
  return {slot >> access.block_size_log2, slot & ((int64_t{1} << access.block_size_log2) - 1)};
}

// ---- 16 bytes of T

template <typename T>
using Chunk = Packed<T, ELEMENTS_PER_CHUNK<T>>;

template <typename T>
__device__ T element(const Chunk<T>& chunk, int i) {
  constexpr int PER_WORD = 4 / sizeof(T);
  return {static_cast<Bits<T>>(chunk.words[i / PER_WORD] >> (i % PER_WORD * 8 * sizeof(T)))};
}

// `chunk` is zero where `bits` go.
template <typename T>
__device__ void set_element(Chunk<T>& chunk, int i, Bits<T> bits) {
  constexpr int PER_WORD = 4 / sizeof(T);
  chunk.words[i / PER_WORD] |= static_cast<uint32_t>(bits) << (i % PER_WORD * 8 * sizeof(T));
}

template <typename T>
__device__ Chunk<T> load_chunk(const T* source, bool is_aligned) {
  constexpr int N = ELEMENTS_PER_CHUNK<T>;
  if (is_aligned) return load<N>(source);
  Chunk<T> chunk = {};
#pragma unroll
  for (int i = 0; i < N; ++i) set_element<T>(chunk, i, reinterpret_cast<const Bits<T>*>(source)[i]);
  return chunk;
}

template <typename T>
__device__ void store_chunk(T* target, const Chunk<T>& chunk, bool is_aligned) {
  if (is_aligned) {
    store(target, chunk);
    return;
  }
#pragma unroll
  for (int i = 0; i < ELEMENTS_PER_CHUNK<T>; ++i) target[i] = element(chunk, i);
}

// ---- rows of T, as they become a chunk of the cache

// The signs of elements i, which is even, and i + 1 in bits 7 and 15: of what lies in memory, as even the conversion of
// float16 to float may lose that of NaN.
template <typename T>
__device__ uint32_t pair_signs(const Chunk<T>& chunk, int i) {
  constexpr int PER_WORD = 4 / sizeof(T);
  const uint32_t low = chunk.words[i / PER_WORD] >> (PER_WORD == 2 ? 8 : 24);
  const uint32_t high = chunk.words[(i + 1) / PER_WORD] >> 16;
  return (low & 0x80) | (high & 0x8000);
}

// The elements of a chunk of the cache, before they are converted.
template <typename T, typename CacheT>
struct SourceChunk {
  static constexpr int NUM_PARTS = ELEMENTS_PER_CHUNK<CacheT> / ELEMENTS_PER_CHUNK<T>;
  Chunk<T> parts[NUM_PARTS];

  __device__ SourceChunk(const T* source, bool is_aligned) {
#pragma unroll
    for (int i = 0; i < NUM_PARTS; ++i) parts[i] = load_chunk(source + i * ELEMENTS_PER_CHUNK<T>, is_aligned);
  }
  SourceChunk() = default;

  __device__ Chunk<CacheT> converted(float scale) const {
    if constexpr (std::is_same_v<T, CacheT>) {
      return parts[0];
    } else {
      Chunk<CacheT> result = {};
#pragma unroll
      for (int i = 0; i < NUM_PARTS; ++i) {
        constexpr int N = ELEMENTS_PER_CHUNK<T>;
        const Floats<N> x = to_floats(parts[i]);
#pragma unroll
        for (int e = 0; e < N; e += 2) {
          const int first = i * N + e;
          const uint32_t pair =
              to_float8x2<CacheT>(__fdiv_rn(x[e], scale), __fdiv_rn(x[e + 1], scale), pair_signs(parts[i], e));
          result.words[first / 4] |= pair << first % 4 * 8;
        }
      }
      return result;
    }
  }
};

// ---- tiles

struct Tile {
  int64_t first_token;
  int64_t head;
  bool is_value;
};

// Grid of both kernels: tiles of tokens x KV heads x (keys, values), the last one fastest.
__device__ Tile block_tile(int64_t num_kv_heads) {
  const int64_t head_of_tile = blockIdx.x / 2;
  return {head_of_tile / num_kv_heads * TILE_TOKENS, head_of_tile % num_kv_heads, blockIdx.x % 2 == 1};
}

// Negative for padding, and past the last token.
__device__ int64_t slot_of(const int64_t* slot_mapping, int64_t num_tokens, int64_t token) {
  return token < num_tokens ? slot_mapping[token] : -1;
}

// A thread's place among the 16-byte chunks of a tile: those of one token, from `first` on.
struct ThreadChunks {
  int token;  // of the tile
  int first;
  int step;
};

// A warp has 8 tokens x 4 chunks, neighbouring tokens in neighbouring lanes: as chunks lie in the key cache.
__device__ ThreadChunks chunks_by_token() {
  const int warp = static_cast<int>(threadIdx.x) / WARP_SIZE, lane = static_cast<int>(threadIdx.x) % WARP_SIZE;
  return {warp % 4 * 8 + lane % 8, warp / 4 * 4 + lane / 8, NUM_WARPS / 4 * 4};
}

// A warp has 4 tokens x 8 chunks, neighbouring chunks in neighbouring lanes: as chunks lie in a row.
__device__ ThreadChunks chunks_by_row() {
  return {static_cast<int>(threadIdx.x) / 8, static_cast<int>(threadIdx.x) % 8, 8};
}

static_assert(NUM_THREADS / 8 == TILE_TOKENS && NUM_WARPS % 4 == 0);

// write(i, read(i)) for i = first, first + step, ... below `end`, with several reads under way.
template <typename Read, typename Write>
__device__ void move(int first, int step, int end, Read read, Write write) {
  for (; first < end; first += LOADS_PER_THREAD * step) {
    decltype(read(0)) loaded[LOADS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < LOADS_PER_THREAD; ++i) {
      if (first + i * step < end) loaded[i] = read(first + i * step);
    }
#pragma unroll
    for (int i = 0; i < LOADS_PER_THREAD; ++i) {
      if (first + i * step < end) write(first + i * step, loaded[i]);
    }
  }
}

// The values of a tile in shared memory, [TILE_TOKENS, head_size].
template <typename CacheT>
class SharedValues {
 public:
  static constexpr int PIECE = ELEMENTS_PER_CHUNK<CacheT>;  // tokens of a piece

  __device__ explicit SharedValues(int64_t head_size) : pitch_(row_pitch(head_size)) {}

  static __host__ __device__ int row_pitch(int64_t head_size) {
    return static_cast<int>(head_size * sizeof(CacheT)) + 16;
  }
  static size_t num_bytes(int64_t head_size) { return TILE_TOKENS * row_pitch(head_size) + TILE_TOKENS / PIECE * 16; }

  // Pitch and the extra 16 bytes after a piece: the threads of a warp that access an element of several pieces, or of
  // several tokens, find them in different banks.
  __device__ CacheT* row(int token) const {
    return reinterpret_cast<CacheT*>(shared_memory + token * pitch_ + token / PIECE * 16);
  }

 private:
  int pitch_;
};

// How the tokens of a tile lie in the value cache. All lanes have the same but for `slot`, their token's.
template <int PIECE>
struct Pieces {
  int64_t slot;
  unsigned starts;  // bit t: tokens t, t + 1, ... are a piece
  unsigned rest;    // tokens of no piece

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

  // The slot of that token, or 0. All lanes take part.
  __device__ int64_t slot_at(int start) const {
    const int64_t result = __shfl_sync(ALL_LANES, slot, max(start, 0));
    return start >= 0 ? result : 0;
  }
};

// ---- reshape_and_cache

template <typename T, typename CacheT>
__device__ void store_keys(const ReshapeAndCacheParams& p, const Access& access, const Tile& tile, float scale) {
  constexpr int X = ELEMENTS_PER_CHUNK<CacheT>;
  const ThreadChunks chunks = chunks_by_token();
  const int64_t token = tile.first_token + chunks.token;
  if (token >= p.num_tokens) return;
  const int64_t slot = p.slot_mapping[token];
  const T* row = static_cast<const T*>(p.key) + token * p.key_stride + tile.head * p.head_size;
  CacheT* cache = static_cast<CacheT*>(p.key_cache) + tile.head * p.head_size * p.block_size;
  // Rows of padding are read too, so that no load waits for a slot.
  move(
      chunks.first, chunks.step, static_cast<int>(p.head_size) / X,
      [&](int chunk) { return SourceChunk<T, CacheT>(row + chunk * X, access.are_rows_aligned); },
      [&](int chunk, const SourceChunk<T, CacheT>& source) {
        if (slot < 0) return;
        const Position position = position_of(slot, access);
        CacheT* target = cache + position.block * p.key_block_stride + position.offset * X;
        store_chunk(target + chunk * p.block_size * X, source.converted(scale), access.is_cache_aligned);
      });
}

template <typename T, typename CacheT>
__device__ void store_values(const ReshapeAndCacheParams& p, const Access& access, const Tile& tile, float scale) {
  constexpr int X = ELEMENTS_PER_CHUNK<CacheT>;
  const SharedValues<CacheT> values(p.head_size);
  const ThreadChunks chunks = chunks_by_row();
  const int64_t token = tile.first_token + chunks.token;
  if (token < p.num_tokens) {
    const T* row = static_cast<const T*>(p.value) + token * p.value_stride + tile.head * p.head_size;
    move(
        chunks.first, chunks.step, static_cast<int>(p.head_size) / X,
        [&](int chunk) { return SourceChunk<T, CacheT>(row + chunk * X, access.are_rows_aligned); },
        [&](int chunk, const SourceChunk<T, CacheT>& source) {
          const Chunk<CacheT> c = source.converted(scale);
          *reinterpret_cast<uint4*>(values.row(chunks.token) + chunk * X) =
              make_uint4(c.words[0], c.words[1], c.words[2], c.words[3]);
        });
  }
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % WARP_SIZE;
  const Pieces<X> pieces(slot_of(p.slot_mapping, p.num_tokens, tile.first_token + lane), access.do_pieces_fit);
  CacheT* cache = static_cast<CacheT*>(p.value_cache) + tile.head * p.head_size * p.block_size;
  if (pieces.starts != 0) {
    constexpr int NUM_PIECES = TILE_TOKENS / X;
    const int start = pieces.start(static_cast<int>(threadIdx.x) % NUM_PIECES);
    const Position position = position_of(pieces.slot_at(start), access);
    CacheT* target = cache + position.block * p.value_block_stride + position.offset;
    for (int d = static_cast<int>(threadIdx.x) / NUM_PIECES; start >= 0 && d < p.head_size;
         d += NUM_THREADS / NUM_PIECES) {
      Chunk<CacheT> piece = {};
#pragma unroll
      for (int i = 0; i < X; ++i) {
        set_element<CacheT>(piece, i, *reinterpret_cast<const Bits<CacheT>*>(values.row(start + i) + d));
      }
      store(target + d * p.block_size, piece);
    }
  }
  if (pieces.rest >> lane & 1) {
    const Position position = position_of(pieces.slot, access);
    CacheT* target = cache + position.block * p.value_block_stride + position.offset;
    for (int d = static_cast<int>(threadIdx.x) / WARP_SIZE; d < p.head_size; d += NUM_WARPS) {
      target[d * p.block_size] = values.row(lane)[d];
    }
  }
}

template <typename T, typename CacheT>
__global__ void __launch_bounds__(NUM_THREADS) reshape_and_cache_kernel(ReshapeAndCacheParams p, Access access) {
  const Tile tile = block_tile(p.num_kv_heads);
  if (tile.is_value) {
    store_values<T, CacheT>(p, access, tile,
                            p.value_scale_on_device != nullptr ? *p.value_scale_on_device : p.value_scale);
  } else {
    store_keys<T, CacheT>(p, access, tile, p.key_scale_on_device != nullptr ? *p.key_scale_on_device : p.key_scale);
  }
}

// ---- gather_cached_kv

template <typename T>
__device__ void gather_keys(const GatherCachedKvParams& p, const Access& access, const Tile& tile) {
  constexpr int X = ELEMENTS_PER_CHUNK<T>;
  const ThreadChunks chunks = chunks_by_token();
  const int64_t token = tile.first_token + chunks.token;
  const int64_t slot = slot_of(p.slot_mapping, p.num_tokens, token);
  if (slot < 0) return;
  const Position position = position_of(slot, access);
  const T* source = static_cast<const T*>(p.key_cache) + position.block * p.key_block_stride +
                    tile.head * p.head_size * p.block_size + position.offset * X;
  T* row = static_cast<T*>(p.key) + token * p.key_stride + tile.head * p.head_size;
  move(
      chunks.first, chunks.step, static_cast<int>(p.head_size) / X,
      [&](int chunk) { return load_chunk(source + chunk * p.block_size * X, access.is_cache_aligned); },
      [&](int chunk, const Chunk<T>& loaded) { store_chunk(row + chunk * X, loaded, access.are_rows_aligned); });
}

template <typename T>
__device__ void gather_values(const GatherCachedKvParams& p, const Access& access, const Tile& tile) {
  constexpr int X = ELEMENTS_PER_CHUNK<T>;
  const SharedValues<T> values(p.head_size);
  const int lane = static_cast<int>(threadIdx.x) % WARP_SIZE;
  const int head_size = static_cast<int>(p.head_size);
  const Pieces<X> pieces(slot_of(p.slot_mapping, p.num_tokens, tile.first_token + lane), access.do_pieces_fit);
  const T* cache = static_cast<const T*>(p.value_cache) + tile.head * p.head_size * p.block_size;
  if (pieces.starts != 0) {
    constexpr int NUM_PIECES = TILE_TOKENS / X;
    const int start = pieces.start(static_cast<int>(threadIdx.x) % NUM_PIECES);
    const Position position = position_of(pieces.slot_at(start), access);
    const T* source = cache + position.block * p.value_block_stride + position.offset;
    move(
        static_cast<int>(threadIdx.x) / NUM_PIECES, NUM_THREADS / NUM_PIECES, start >= 0 ? head_size : 0,
        [&](int d) { return load<X>(source + d * p.block_size); },
        [&](int d, const Chunk<T>& loaded) {
#pragma unroll
          for (int i = 0; i < X; ++i) values.row(start + i)[d] = element(loaded, i);
        });
  }
  if (pieces.rest >> lane & 1) {
    const Position position = position_of(pieces.slot, access);
    const T* source = cache + position.block * p.value_block_stride + position.offset;
    move(
        static_cast<int>(threadIdx.x) / WARP_SIZE, NUM_WARPS, head_size,
        [&](int d) { return source[d * p.block_size]; }, [&](int d, T loaded) { values.row(lane)[d] = loaded; });
  }
  __syncthreads();

  const ThreadChunks chunks = chunks_by_row();
  const int64_t token = tile.first_token + chunks.token;
  if (slot_of(p.slot_mapping, p.num_tokens, token) < 0) return;
  T* row = static_cast<T*>(p.value) + token * p.value_stride + tile.head * p.head_size;
  for (int chunk = chunks.first; chunk < head_size / X; chunk += chunks.step) {
    store_chunk(row + chunk * X, load<X>(values.row(chunks.token) + chunk * X), access.are_rows_aligned);
  }
}

template <typename T>
__global__ void __launch_bounds__(NUM_THREADS) gather_cached_kv_kernel(GatherCachedKvParams p, Access access) {
  const Tile tile = block_tile(p.num_kv_heads);
  if (tile.is_value) {
    gather_values<T>(p, access, tile);
  } else {
    gather_keys<T>(p, access, tile);
  }
}

// ---- launches

template <typename CacheT, typename Params>
Access make_access(const Params& p, int64_t row_element_size) {
  constexpr int64_t CACHE_BYTES = sizeof(CacheT);
  Access access{};
  access.block_size_log2 = std::countr_zero(static_cast<uint64_t>(p.block_size));
  access.are_rows_aligned = is_aligned_16(
      {p.key, p.value},
      {p.head_size * row_element_size, p.key_stride * row_element_size, p.value_stride * row_element_size});
  access.is_cache_aligned = is_aligned_16({p.key_cache, p.value_cache},
                                          {p.key_block_stride * CACHE_BYTES, p.value_block_stride * CACHE_BYTES});
  access.do_pieces_fit = access.is_cache_aligned && p.block_size % ELEMENTS_PER_CHUNK<CacheT> == 0;
  return access;
}

template <typename CacheT, typename Params>
void launch_tiles(void (*kernel)(Params, Access), const Params& params, int64_t row_element_size, cudaStream_t stream) {
  const int64_t num_tiles = ceil_div<int64_t>(params.num_tokens, TILE_TOKENS);
  launch(kernel, dim3(grid_size(2 * num_tiles * params.num_kv_heads)), dim3(NUM_THREADS),
         SharedValues<CacheT>::num_bytes(params.head_size), stream, params,
         make_access<CacheT>(params, row_element_size));
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    if (params.cache_dtype == DType::FLOAT8_E4M3) {
      launch_tiles<float8_e4m3>(reshape_and_cache_kernel<T, float8_e4m3>, params, sizeof(T), stream);
    } else if (params.cache_dtype == DType::FLOAT8_E5M2) {
      launch_tiles<float8_e5m2>(reshape_and_cache_kernel<T, float8_e5m2>, params, sizeof(T), stream);
    } else {
      launch_tiles<T>(reshape_and_cache_kernel<Bits<T>, Bits<T>>, params, sizeof(T), stream);
    }
  });
}

void gather_cached_kv(const GatherCachedKvParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype,
                 [&]<typename T>() { launch_tiles<T>(gather_cached_kv_kernel<Bits<T>>, params, sizeof(T), stream); });
}

}  // namespace pagedattn::cuda
