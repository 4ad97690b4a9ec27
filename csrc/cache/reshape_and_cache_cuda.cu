// A block moves a tile: a warp's number of consecutive tokens, one KV head, their keys or their values.
//
// 16 bytes of the value cache are one element of several tokens. Where those are a run that fills an aligned piece of a
// block, a thread moves 16 bytes of each token of the piece (2 elements, where they are rounded to float8), which it
// turns in its registers. Keys, and values of other tokens, go 16 bytes of a token at a time: on the side of the key
// cache a warp has neighbours of several tokens (128 bytes of 8 tokens), on the side of the rows neighbours of several
// chunks; values are an element each in their cache.
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
constexpr int NUM_THREADS = 128;
constexpr int NUM_WARPS = NUM_THREADS / WARP_SIZE;
constexpr int BYTES_UNDER_WAY = 64;  // of a thread that moves chunks

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
  int offset;
};

__device__ Position position_of(int64_t slot, const Access& access) {
  return {slot >> access.block_size_log2, static_cast<int>(slot & ((int64_t{1} << access.block_size_log2) - 1))};
}

// ---- elements of T, N of them at a time

template <typename T>
using Chunk = Packed<T, ELEMENTS_PER_CHUNK<T>>;

template <typename T, int N>
__device__ T element(const Packed<T, N>& packed, int i) {
  constexpr int PER_WORD = 4 / sizeof(T);
  return {static_cast<Bits<T>>(packed.words[i / PER_WORD] >> (i % PER_WORD * 8 * sizeof(T)))};
}

// `packed` is zero where `bits` go.
template <typename T, int N>
__device__ void set_element(Packed<T, N>& packed, int i, Bits<T> bits) {
  constexpr int PER_WORD = 4 / sizeof(T);
  packed.words[i / PER_WORD] |= static_cast<uint32_t>(bits) << (i % PER_WORD * 8 * sizeof(T));
}

// Those at source[0], source[step], ...
template <int N, typename T>
__device__ Packed<T, N> load_each(const T* source, int step) {
  Packed<T, N> packed = {};
#pragma unroll
  for (int i = 0; i < N; ++i) set_element(packed, i, reinterpret_cast<const Bits<T>*>(source)[i * step]);
  return packed;
}

template <typename T, int N>
__device__ void store_each(T* target, int step, const Packed<T, N>& packed) {
#pragma unroll
  for (int i = 0; i < N; ++i) target[i * step] = element(packed, i);
}

template <int N, typename T>
__device__ Packed<T, N> load_row(const T* source, bool is_aligned) {
  return is_aligned ? load<N>(source) : load_each<N>(source, 1);
}

template <typename T>
__device__ void store_row(T* target, const Chunk<T>& chunk, bool is_aligned) {
  if (is_aligned) {
    store(target, chunk);
  } else {
    store_each(target, 1, chunk);
  }
}

// The signs of element i of `low` and element j of `high` in bits 7 and 15, beside other bits: of what lies in memory,
// as even the conversion of float16 to float may lose that of NaN.
template <typename T, int N>
__device__ uint32_t pair_signs(const Packed<T, N>& low, int i, const Packed<T, N>& high, int j) {
  constexpr int PER_WORD = 4 / sizeof(T);
  const auto top_byte = [](int e) { return (e % PER_WORD + 1) * sizeof(T) - 1; };
  return __byte_perm(low.words[i / PER_WORD], high.words[j / PER_WORD], (4 + top_byte(j)) << 4 | top_byte(i));
}

// ---- rows of T, as they become chunks of the cache

// The elements of a chunk of the cache, before they are converted.
template <typename T, typename CacheT>
struct SourceChunk {
  static constexpr int NUM_PARTS = ELEMENTS_PER_CHUNK<CacheT> / ELEMENTS_PER_CHUNK<T>;
  Chunk<T> parts[NUM_PARTS];

  __device__ SourceChunk(const T* source, bool is_aligned) {
    constexpr int N = ELEMENTS_PER_CHUNK<T>;
#pragma unroll
    for (int i = 0; i < NUM_PARTS; ++i) parts[i] = load_row<N>(source + i * N, is_aligned);
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
          const uint32_t signs = pair_signs(parts[i], e, parts[i], e + 1);
          const uint32_t pair = to_float8x2<CacheT>(__fdiv_rn(x[e], scale), __fdiv_rn(x[e + 1], scale), signs);
          result.words[first / 4] |= pair << first % 4 * 8;
        }
      }
      return result;
    }
  }
};

// Of N tokens E elements each; or, for gather_cached_kv, of N elements E tokens each. Turned, and converted on the way,
// they are E chunks of N.
template <typename T, typename CacheT, int E>
struct Transposition {
  static constexpr int N = ELEMENTS_PER_CHUNK<CacheT>;
  Packed<T, E> rows[N];

  __device__ Chunk<CacheT> column(int e, [[maybe_unused]] float scale) const {
    Chunk<CacheT> result = {};
    if constexpr (std::is_same_v<T, CacheT> && sizeof(T) == 4) {
#pragma unroll
      for (int n = 0; n < N; ++n) result.words[n] = rows[n].words[e];
    } else if constexpr (std::is_same_v<T, CacheT>) {
      const unsigned halves = e % 2 == 0 ? 0x5410 : 0x7632;
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        result.words[n / 2] = __byte_perm(rows[n].words[e / 2], rows[n + 1].words[e / 2], halves);
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        const float low = to_floats(rows[n])[e], high = to_floats(rows[n + 1])[e];
        const uint32_t signs = pair_signs(rows[n], e, rows[n + 1], e);
        const uint32_t pair = to_float8x2<CacheT>(__fdiv_rn(low, scale), __fdiv_rn(high, scale), signs);
        result.words[n / 4] |= pair << n % 4 * 8;
      }
    }
    return result;
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
  const auto num_heads = static_cast<unsigned>(num_kv_heads);
  const unsigned head_of_tile = blockIdx.x / 2;
  return {int64_t{head_of_tile / num_heads} * TILE_TOKENS, head_of_tile % num_heads, blockIdx.x % 2 == 1};
}

// Negative for padding, and past the last token.
__device__ int64_t slot_of(const int64_t* slot_mapping, int64_t num_tokens, int64_t token) {
  return token < num_tokens ? slot_mapping[token] : -1;
}

// A thread's place among the 16-byte chunks of a tile: those of one token, from `first` on. A warp has 8 tokens x 4
// chunks, neighbouring tokens in neighbouring lanes: as chunks lie in the key cache.
struct ThreadChunks {
  static constexpr int STEP = 4;
  int token;  // of the tile
  int first;
};

__device__ ThreadChunks thread_chunks() {
  const int warp = static_cast<int>(threadIdx.x) / WARP_SIZE, lane = static_cast<int>(threadIdx.x) % WARP_SIZE;
  return {warp * 8 + lane % 8, lane / 8};
}

static_assert(NUM_WARPS * 8 == TILE_TOKENS);

// write(chunk, read(chunk)) for a thread's chunks below `end`, with several reads under way.
template <typename Read, typename Write>
__device__ void move_chunks(int first, int end, Read read, Write write) {
  using Loaded = decltype(read(0));
  constexpr int NUM_LOADS = BYTES_UNDER_WAY / sizeof(Loaded), STEP = ThreadChunks::STEP;
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

// move(d, start, position) for each piece of a tile and every ELEMENTS-th element d of the head, a thread each; `start`
// is the piece's first token, at `position` of the cache. Returns the tokens of no piece.
template <int PIECE, int ELEMENTS, typename Params, typename Move>
__device__ unsigned move_pieces(const Params& p, const Access& access, const Tile& tile, Move move) {
  constexpr int NUM_PIECES = TILE_TOKENS / PIECE;
  const int lane = static_cast<int>(threadIdx.x) % WARP_SIZE;
  const Pieces<PIECE> pieces(slot_of(p.slot_mapping, p.num_tokens, tile.first_token + lane), access.do_pieces_fit);
  if (pieces.starts != 0) {
    const int start = pieces.start(static_cast<int>(threadIdx.x) % NUM_PIECES);
    const Position position = position_of(pieces.slot_at(start), access);
    const int head_size = start >= 0 ? static_cast<int>(p.head_size) : 0;
    for (int d = static_cast<int>(threadIdx.x) / NUM_PIECES * ELEMENTS; d < head_size;
         d += NUM_THREADS / NUM_PIECES * ELEMENTS) {
      move(d, start, position);
    }
  }
  return pieces.rest;
}

// ---- reshape_and_cache

template <typename T, typename CacheT>
__global__ void __launch_bounds__(NUM_THREADS) reshape_and_cache_kernel(ReshapeAndCacheParams p, Access access) {
  constexpr int X = ELEMENTS_PER_CHUNK<CacheT>;
  const Tile tile = block_tile(p.num_kv_heads);
  const auto block_size = static_cast<int>(p.block_size);
  const int64_t row_stride = tile.is_value ? p.value_stride : p.key_stride;
  const int64_t block_stride = tile.is_value ? p.value_block_stride : p.key_block_stride;
  const T* rows =
      static_cast<const T*>(tile.is_value ? p.value : p.key) + tile.first_token * row_stride + tile.head * p.head_size;
  CacheT* cache =
      static_cast<CacheT*>(tile.is_value ? p.value_cache : p.key_cache) + tile.head * p.head_size * block_size;
  const float* scale_on_device = tile.is_value ? p.value_scale_on_device : p.key_scale_on_device;
  const float scale_on_host = tile.is_value ? p.value_scale : p.key_scale;
  const float scale = scale_on_device != nullptr ? *scale_on_device : scale_on_host;

  unsigned by_chunks = ALL_LANES;  // the tokens, a bit each
  if (tile.is_value) {
    constexpr int ELEMENTS = std::is_same_v<T, CacheT> ? X : 2;
    by_chunks = move_pieces<X, ELEMENTS>(p, access, tile, [&](int d, int start, const Position& position) {
      Transposition<T, CacheT, ELEMENTS> turned;
#pragma unroll
      for (int t = 0; t < X; ++t) {
        turned.rows[t] = load_row<ELEMENTS>(rows + (start + t) * row_stride + d, access.are_rows_aligned);
      }
      CacheT* target = cache + position.block * block_stride + d * block_size + position.offset;
#pragma unroll
      for (int e = 0; e < ELEMENTS; ++e) store(target + e * block_size, turned.column(e, scale));
    });
  }
  const ThreadChunks chunks = thread_chunks();
  const int64_t token = tile.first_token + chunks.token;
  if (token >= p.num_tokens || (by_chunks >> chunks.token & 1) == 0) return;
  const int64_t slot = p.slot_mapping[token];
  // Rows of padding are read too, so that no load of keys waits for a slot.
  move_chunks(
      chunks.first, static_cast<int>(p.head_size) / X,
      [&](int chunk) {
        return SourceChunk<T, CacheT>(rows + chunks.token * row_stride + chunk * X, access.are_rows_aligned);
      },
      [&](int chunk, const SourceChunk<T, CacheT>& source) {
        if (slot < 0) return;
        const Position position = position_of(slot, access);
        CacheT* target = cache + position.block * block_stride + chunk * X * block_size;
        const Chunk<CacheT> converted = source.converted(scale);
        if (tile.is_value) {
          store_each(target + position.offset, block_size, converted);
        } else {
          store_row(target + position.offset * X, converted, access.is_cache_aligned);
        }
      });
}

// ---- gather_cached_kv

template <typename T>
__global__ void __launch_bounds__(NUM_THREADS) gather_cached_kv_kernel(GatherCachedKvParams p, Access access) {
  constexpr int X = ELEMENTS_PER_CHUNK<T>;
  const Tile tile = block_tile(p.num_kv_heads);
  const auto block_size = static_cast<int>(p.block_size);
  const int64_t row_stride = tile.is_value ? p.value_stride : p.key_stride;
  const int64_t block_stride = tile.is_value ? p.value_block_stride : p.key_block_stride;
  T* rows = static_cast<T*>(tile.is_value ? p.value : p.key) + tile.first_token * row_stride + tile.head * p.head_size;
  const T* cache =
      static_cast<const T*>(tile.is_value ? p.value_cache : p.key_cache) + tile.head * p.head_size * block_size;

  unsigned by_chunks = ALL_LANES;  // the tokens, a bit each
  if (tile.is_value) {
    by_chunks = move_pieces<X, X>(p, access, tile, [&](int d, int start, const Position& position) {
      const T* source = cache + position.block * block_stride + d * block_size + position.offset;
      Transposition<T, T, X> turned;
#pragma unroll
      for (int e = 0; e < X; ++e) turned.rows[e] = load<X>(source + e * block_size);
#pragma unroll
      for (int t = 0; t < X; ++t) {
        store_row(rows + (start + t) * row_stride + d, turned.column(t, 1.0f), access.are_rows_aligned);
      }
    });
  }
  const ThreadChunks chunks = thread_chunks();
  const int64_t slot = slot_of(p.slot_mapping, p.num_tokens, tile.first_token + chunks.token);
  if (slot < 0 || (by_chunks >> chunks.token & 1) == 0) return;
  const Position position = position_of(slot, access);
  const T* source = cache + position.block * block_stride + position.offset * (tile.is_value ? 1 : X);
  move_chunks(
      chunks.first, static_cast<int>(p.head_size) / X,
      [&](int chunk) {
        const T* of_chunk = source + chunk * X * block_size;
        return tile.is_value ? load_each<X>(of_chunk, block_size) : load_row<X>(of_chunk, access.is_cache_aligned);
      },
      [&](int chunk, const Chunk<T>& loaded) {
        store_row(rows + chunks.token * row_stride + chunk * X, loaded, access.are_rows_aligned);
      });
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
  launch(kernel, dim3(grid_size(2 * num_tiles * params.num_kv_heads)), dim3(NUM_THREADS), 0, stream, params,
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
