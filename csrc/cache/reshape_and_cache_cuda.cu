// 16 bytes of the value cache are one element of several tokens. Where adjacent tokens fill such a piece, a thread
// loads 16 bytes of each token of the piece (2 elements, where they are rounded to float8), and transposes them in its
// registers. Keys, and values of all other tokens, move 16 bytes of one token at a time. The chunks of a warp are
// adjacent in the key cache (128 bytes of 8 tokens), and several chunks of a token are adjacent in its row. The
// elements of such a chunk of values are stored one by one.
//
// In an NHD cache the elements of a head lie as in a row, so that 16 bytes of a row are 16 bytes of the cache, for keys
// and values alike.
#include "cache/reshape_and_cache.h"
#include "cache/token_groups.cuh"
#include "dispatch.h"

namespace pagedattn::cuda {
namespace {

// ---- reshape_and_cache

template <typename T, typename CacheT>
__global__ void __launch_bounds__(GROUP_THREADS) reshape_and_cache_kernel(ReshapeAndCacheParams p, Access access) {
  constexpr int X = ELEMENTS_PER_CHUNK<CacheT>;
  const TokenGroup group = group_of_block(p.num_kv_heads);
  const auto block_size = static_cast<int>(p.block_size);
  const int64_t row_stride = group.is_value ? p.value_stride : p.key_stride;
  const int64_t block_stride = group.is_value ? p.value_strides.block : p.key_strides.block;
  const T* rows = static_cast<const T*>(group.is_value ? p.value : p.key) + group.first_token * row_stride +
                  group.head * p.head_size;
  CacheT* cache =
      static_cast<CacheT*>(group.is_value ? p.value_cache : p.key_cache) + group.head * p.head_size * block_size;
  const float* scale_on_device = group.is_value ? p.value_scale_on_device : p.key_scale_on_device;
  const float scale_on_host = group.is_value ? p.value_scale : p.key_scale;
  const float scale = scale_on_device != nullptr ? *scale_on_device : scale_on_host;

  unsigned by_chunks = ALL_LANES;  // a bit for each token that moves by chunks
  if (group.is_value) {
    constexpr int ELEMENTS = std::is_same_v<T, CacheT> ? X : 2;
    by_chunks = move_pieces<X, ELEMENTS>(p, access, group, [&](int d, int start, const Position& position) {
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
  const int64_t token = group.first_token + chunks.token;
  if (token >= p.num_tokens || (by_chunks >> chunks.token & 1) == 0) return;
  const int64_t slot = p.slot_mapping[token];
  // Rows of padding are read too, so that no load of keys waits for a slot.
  move_chunks<ThreadChunks::STEP>(
      chunks.first, static_cast<int>(p.head_size) / X,
      [&](int chunk) {
        return SourceChunk<T, CacheT>(rows + chunks.token * row_stride + chunk * X, access.are_rows_aligned);
      },
      [&](int chunk, const SourceChunk<T, CacheT>& source) {
        if (slot < 0) return;
        const Position position = position_of(slot, access);
        CacheT* target = cache + position.block * block_stride + chunk * X * block_size;
        const Chunk<CacheT> converted = source.converted(scale);
        if (group.is_value) {
          store_each(target + position.offset, block_size, converted);
        } else {
          store_row(target + position.offset * X, converted, access.is_cache_aligned);
        }
      });
}

// ---- gather_cached_kv

template <typename T>
__global__ void __launch_bounds__(GROUP_THREADS) gather_cached_kv_kernel(GatherCachedKvParams p, Access access) {
  constexpr int X = ELEMENTS_PER_CHUNK<T>;
  const TokenGroup group = group_of_block(p.num_kv_heads);
  const auto block_size = static_cast<int>(p.block_size);
  const int64_t row_stride = group.is_value ? p.value_stride : p.key_stride;
  const int64_t block_stride = group.is_value ? p.value_strides.block : p.key_strides.block;
  T* rows =
      static_cast<T*>(group.is_value ? p.value : p.key) + group.first_token * row_stride + group.head * p.head_size;
  const T* cache =
      static_cast<const T*>(group.is_value ? p.value_cache : p.key_cache) + group.head * p.head_size * block_size;

  unsigned by_chunks = ALL_LANES;  // a bit for each token that moves by chunks
  if (group.is_value) {
    by_chunks = move_pieces<X, X>(p, access, group, [&](int d, int start, const Position& position) {
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
  const int64_t slot = slot_of(p.slot_mapping, p.num_tokens, group.first_token + chunks.token);
  if (slot < 0 || (by_chunks >> chunks.token & 1) == 0) return;
  const Position position = position_of(slot, access);
  const T* source = cache + position.block * block_stride + position.offset * (group.is_value ? 1 : X);
  move_chunks<ThreadChunks::STEP>(
      chunks.first, static_cast<int>(p.head_size) / X,
      [&](int chunk) {
        const T* of_chunk = source + chunk * X * block_size;
        return group.is_value ? load_each<X>(of_chunk, block_size) : load_row<X>(of_chunk, access.is_cache_aligned);
      },
      [&](int chunk, const Chunk<T>& loaded) {
        store_row(rows + chunks.token * row_stride + chunk * X, loaded, access.are_rows_aligned);
      });
}

// ---- NHD caches

struct NhdAccess {
  int tokens_per_block;
  int chunks_per_token;  // of keys; of values as many
  int chunks_per_head;
  bool are_rows_aligned;  // to 16 bytes, in every head of every token
  bool is_cache_aligned;  // to 16 bytes, in every head of every slot
};

// The keys or the values of an op, and the tokens of a thread block. Grid: x shares out the tokens, y is keys or
// values.
struct NhdGroup {
  bool is_value;
  CacheStrides strides;
  int64_t first_token;
  int num_chunks;

  template <typename Params>
  __device__ NhdGroup(const Params& p, const NhdAccess& access)
      : is_value(blockIdx.y == 1),
        strides(is_value ? p.value_strides : p.key_strides),
        first_token(int64_t{blockIdx.x} * access.tokens_per_block) {
    const int64_t num_tokens = min(int64_t{access.tokens_per_block}, p.num_tokens - first_token);
    num_chunks = static_cast<int>(num_tokens) * access.chunks_per_token;
  }
};

// X elements: where they lie in the rows, and where in a slot of the cache.
struct NhdChunk {
  int64_t token;
  int64_t of_row;
  int64_t of_slot;

  __device__ NhdChunk(const NhdAccess& access, const NhdGroup& group, int index, int x) {
    token = group.first_token + index / access.chunks_per_token;
    const int chunk = index % access.chunks_per_token;
    of_row = int64_t{chunk} * x;
    of_slot = chunk / access.chunks_per_head * group.strides.kv_head + chunk % access.chunks_per_head * x;
  }
};

__device__ inline int64_t start_of_slot(int64_t slot, int64_t block_size, const CacheStrides& strides) {
  return slot / block_size * strides.block + slot % block_size * strides.token;
}

template <typename T, typename CacheT>
__global__ void __launch_bounds__(GROUP_THREADS)
    reshape_and_cache_nhd_kernel(ReshapeAndCacheParams p, NhdAccess access) {
  constexpr int X = ELEMENTS_PER_CHUNK<CacheT>;
  const NhdGroup group(p, access);
  const T* rows = static_cast<const T*>(group.is_value ? p.value : p.key);
  const int64_t row_stride = group.is_value ? p.value_stride : p.key_stride;
  CacheT* cache = static_cast<CacheT*>(group.is_value ? p.value_cache : p.key_cache);
  const float* scale_on_device = group.is_value ? p.value_scale_on_device : p.key_scale_on_device;
  const float scale_on_host = group.is_value ? p.value_scale : p.key_scale;
  const float scale = scale_on_device != nullptr ? *scale_on_device : scale_on_host;
  // Rows of padding are read too, so that no load waits for a slot.
  move_chunks<GROUP_THREADS>(
      static_cast<int>(threadIdx.x), group.num_chunks,
      [&](int index) {
        const NhdChunk chunk(access, group, index, X);
        return SourceChunk<T, CacheT>(rows + chunk.token * row_stride + chunk.of_row, access.are_rows_aligned);
      },
      [&](int index, const SourceChunk<T, CacheT>& source) {
        const NhdChunk chunk(access, group, index, X);
        const int64_t slot = p.slot_mapping[chunk.token];
        if (slot < 0) return;
        CacheT* target = cache + start_of_slot(slot, p.block_size, group.strides) + chunk.of_slot;
        store_row(target, source.converted(scale), access.is_cache_aligned);
      });
}

template <typename T>
__global__ void __launch_bounds__(GROUP_THREADS) gather_cached_kv_nhd_kernel(GatherCachedKvParams p, NhdAccess access) {
  constexpr int X = ELEMENTS_PER_CHUNK<T>;
  const NhdGroup group(p, access);
  T* rows = static_cast<T*>(group.is_value ? p.value : p.key);
  const int64_t row_stride = group.is_value ? p.value_stride : p.key_stride;
  const T* cache = static_cast<const T*>(group.is_value ? p.value_cache : p.key_cache);
  move_chunks<GROUP_THREADS>(
      static_cast<int>(threadIdx.x), group.num_chunks,
      [&](int index) {
        const NhdChunk chunk(access, group, index, X);
        const int64_t slot = p.slot_mapping[chunk.token];
        if (slot < 0) return Chunk<T>{};
        const T* source = cache + start_of_slot(slot, p.block_size, group.strides) + chunk.of_slot;
        return load_row<X>(source, access.is_cache_aligned);
      },
      [&](int index, const Chunk<T>& loaded) {
        const NhdChunk chunk(access, group, index, X);
        if (p.slot_mapping[chunk.token] < 0) return;
        store_row(rows + chunk.token * row_stride + chunk.of_row, loaded, access.are_rows_aligned);
      });
}

// ---- launches

template <typename CacheT, typename Params>
void launch_groups(void (*kernel)(Params, Access), const Params& params, int64_t row_element_size,
                   cudaStream_t stream) {
  const int64_t num_groups = ceil_div<int64_t>(params.num_tokens, GROUP_TOKENS);
  launch(kernel, dim3(grid_size(2 * num_groups * params.num_kv_heads)), dim3(GROUP_THREADS), 0, stream, params,
         make_access<CacheT>(params, row_element_size));
}

template <typename CacheT, typename Params>
void launch_nhd(void (*kernel)(Params, NhdAccess), const Params& p, int64_t row_element_size, cudaStream_t stream) {
  constexpr int64_t CACHE_BYTES = sizeof(CacheT);
  NhdAccess access{};
  access.chunks_per_head = static_cast<int>(p.head_size / ELEMENTS_PER_CHUNK<CacheT>);
  access.chunks_per_token = static_cast<int>(p.num_kv_heads) * access.chunks_per_head;
  access.tokens_per_block = std::max(1, GROUP_THREADS / access.chunks_per_token);
  access.are_rows_aligned = are_rows_aligned(p, row_element_size);
  const CacheStrides &keys = p.key_strides, &values = p.value_strides;
  access.is_cache_aligned =
      is_aligned_16({p.key_cache, p.value_cache},
                    {keys.block * CACHE_BYTES, keys.token * CACHE_BYTES, keys.kv_head * CACHE_BYTES,
                     values.block * CACHE_BYTES, values.token * CACHE_BYTES, values.kv_head * CACHE_BYTES});
  const unsigned num_blocks = grid_size(ceil_div<int64_t>(p.num_tokens, access.tokens_per_block));
  launch(kernel, dim3(num_blocks, 2), dim3(GROUP_THREADS), 0, stream, p, access);
}

template <typename T, typename CacheT>
void launch_in_layout(const ReshapeAndCacheParams& params, cudaStream_t stream) {
  if (params.layout == CacheLayout::NHD) {
    launch_nhd<CacheT>(reshape_and_cache_nhd_kernel<T, CacheT>, params, sizeof(T), stream);
  } else {
    launch_groups<CacheT>(reshape_and_cache_kernel<T, CacheT>, params, sizeof(T), stream);
  }
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    if (params.cache_dtype == DType::FLOAT8_E4M3) {
      launch_in_layout<T, float8_e4m3>(params, stream);
    } else if (params.cache_dtype == DType::FLOAT8_E5M2) {
      launch_in_layout<T, float8_e5m2>(params, stream);
    } else {
      launch_in_layout<BitsOf<T>, BitsOf<T>>(params, stream);
    }
  });
}

void gather_cached_kv(const GatherCachedKvParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    if (params.layout == CacheLayout::NHD) {
      launch_nhd<T>(gather_cached_kv_nhd_kernel<BitsOf<T>>, params, sizeof(T), stream);
    } else {
      launch_groups<T>(gather_cached_kv_kernel<BitsOf<T>>, params, sizeof(T), stream);
    }
  });
}

}  // namespace pagedattn::cuda
