// Works on runs. A run is adjacent tokens with adjacent slots in one block, as the tokens of a prompt have. Keys go to
// the cache in 16-byte chunks. Values are transposed, as the cache has element d of adjacent tokens side by side: as
// many tokens as 16 bytes have elements are transposed in registers at a time. For a cache in 8 bits, a run's rows of
// one head are converted first.
//
// In an NHD cache a token's elements lie as in its row, so a token is moved at a time.
#include "cache/reshape_and_cache.h"

#include <type_traits>
#include <utility>

#include "cpu_memory.h"
#include "cpu_quantize.h"
#include "cpu_rows.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int64_t MAX_RUN_LENGTH = 16;

struct Run {
  int64_t token;
  int64_t length;
  int64_t block;
  int64_t offset;  // of the first token in the block
};

Run find_run(const ReshapeAndCacheParams& p, int64_t token, int64_t end) {
  const int64_t slot = p.slot_mapping[token];
  Run run{token, 1, slot / p.block_size, slot % p.block_size};
  const int64_t to_block_end = p.block_size - run.offset;
  const int64_t longest = to_block_end < MAX_RUN_LENGTH ? to_block_end : MAX_RUN_LENGTH;
  while (run.length < longest && token + run.length < end && p.slot_mapping[token + run.length] == slot + run.length) {
    ++run.length;
  }
  return run;
}

// An integer of the size of a cache's element: elements are moved, and nothing is computed with them.
template <typename CacheT>
using CacheBits =
    std::conditional_t<sizeof(CacheT) == 4, uint32_t, std::conditional_t<sizeof(CacheT) == 2, uint16_t, uint8_t>>;

// A run's rows of one head, in the cache's dtype.
template <typename CacheT>
struct HeadRows {
  const CacheT* first;
  int64_t stride;
};

template <typename T, typename CacheT>
HeadRows<CacheT> rows_for_cache(const T* rows, int64_t stride, const Run& run, int64_t head_size, float scale,
                                CacheT* buffer) {
  if constexpr (sizeof(CacheT) == 1) {
    for (int64_t i = 0; i < run.length; ++i) {
      for_each_vector(head_size, [&](int64_t d, auto load, auto store) {
        store(buffer + i * head_size + d, load(rows + i * stride + d) / scale);
      });
    }
    return {buffer, head_size};
  } else {
    return {rows, stride};
  }
}

// Quantizes a run's rows of one head, each with a scale of its own, which goes to `scales`.
template <typename T>
HeadRows<int8> quantized_rows(const T* rows, int64_t stride, const Run& run, int64_t head_size, int8* scales,
                              int8* buffer) {
  for (int64_t i = 0; i < run.length; ++i) {
    const auto store = [&](int64_t d, IntVec codes) { store_bytes(buffer + i * head_size + d, (UintVec)codes); };
    const float scale = quantize(rows + i * stride, head_size, store).scale;
    __builtin_memcpy(scales + i * sizeof scale, &scale, sizeof scale);
  }
  return {buffer, head_size};
}

template <typename CacheT>
void store_key(const ReshapeAndCacheParams& p, const Run& run, int64_t head, const HeadRows<CacheT>& rows) {
  constexpr int X = ELEMENTS_PER_CHUNK<CacheT>;
  CacheT* target = static_cast<CacheT*>(p.key_cache) + run.block * p.key_strides.block + head * p.key_strides.kv_head +
                   run.offset * X;
  for (int64_t i = 0; i < run.length; ++i) {
    for (int64_t d = 0; d < p.head_size; d += X) {
      __builtin_memcpy(target + d * p.block_size + i * X, rows.first + i * rows.stride + d, 16);
    }
  }
}

// SIZE rows of 16 bytes, with SIZE elements each.
template <typename CacheT>
struct Square {
  static constexpr int SIZE = ELEMENTS_PER_CHUNK<CacheT>;
  typedef CacheBits<CacheT> Row __attribute__((vector_size(16)));
  Row rows[SIZE];

  // a[FIRST], b[FIRST], a[FIRST + 1], b[FIRST + 1], ...
  template <int FIRST, int... I>
  static PAGEDATTN_INLINE Row interleave(Row a, Row b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (FIRST + I / 2 + I % 2 * SIZE)...);
  }

  // Interleaving row i with row i + SIZE / 2 moves one bit of an element's column index into its row index. After
  // log2(SIZE) times, the two indices have changed places.
  PAGEDATTN_INLINE void transpose() {
    constexpr auto INDICES = std::make_integer_sequence<int, SIZE>{};
    for (int moved = 1; moved < SIZE; moved *= 2) {
      Row next[SIZE];
      PAGEDATTN_UNROLL
      for (int i = 0; i < SIZE / 2; ++i) {
        next[2 * i] = interleave<0>(rows[i], rows[i + SIZE / 2], INDICES);
        next[2 * i + 1] = interleave<SIZE / 2>(rows[i], rows[i + SIZE / 2], INDICES);
      }
      PAGEDATTN_UNROLL
      for (int i = 0; i < SIZE; ++i) rows[i] = next[i];
    }
  }
};

template <typename CacheT>
void store_value(const ReshapeAndCacheParams& p, const Run& run, int64_t head, const HeadRows<CacheT>& rows) {
  CacheT* target = static_cast<CacheT*>(p.value_cache) + run.block * p.value_strides.block +
                   head * p.value_strides.kv_head + run.offset;
  constexpr int SIZE = Square<CacheT>::SIZE;
  int64_t begin = 0;
  for (; begin + SIZE <= run.length; begin += SIZE) {
    for (int64_t d = 0; d < p.head_size; d += SIZE) {
      Square<CacheT> square;
      for (int i = 0; i < SIZE; ++i) {
        __builtin_memcpy(&square.rows[i], rows.first + (begin + i) * rows.stride + d, 16);
      }
      square.transpose();
      for (int i = 0; i < SIZE; ++i) __builtin_memcpy(target + (d + i) * p.block_size + begin, &square.rows[i], 16);
    }
  }
  for (int64_t d = 0; d < p.head_size; ++d) {
    for (int64_t i = begin; i < run.length; ++i) target[d * p.block_size + i] = rows.first[i * rows.stride + d];
  }
}

// Where the scales of a run begin, in row `row` of the rows of scales.
int8* scales_of(const ReshapeAndCacheParams& p, const Run& run, int64_t head, int64_t row) {
  return static_cast<int8*>(p.value_cache) + run.block * p.value_strides.block + head * p.value_strides.kv_head +
         (p.head_size + row) * p.block_size + run.offset * static_cast<int64_t>(sizeof(float));
}

float scale_of(float on_host, const float* on_device) { return on_device == nullptr ? on_host : *on_device; }

template <typename T, typename CacheT>
void store_runs(const ReshapeAndCacheParams& p, int64_t begin, int64_t end) {
  CacheT buffer[sizeof(CacheT) == 1 ? MAX_RUN_LENGTH * MAX_HEAD_SIZE : 1];
  const T* keys = static_cast<const T*>(p.key);
  const T* values = static_cast<const T*>(p.value);
  const float key_scale = scale_of(p.key_scale, p.key_scale_on_device);
  const float value_scale = scale_of(p.value_scale, p.value_scale_on_device);
  for (int64_t token = begin; token < end;) {
    if (p.slot_mapping[token] < 0) {
      ++token;
      continue;
    }
    const Run run = find_run(p, token, end);
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      const T* key = keys + token * p.key_stride + head * p.head_size;
      const T* value = values + token * p.value_stride + head * p.head_size;
      if constexpr (std::is_same_v<CacheT, int8>) {
        int8* const key_scales = scales_of(p, run, head, 0);
        int8* const value_scales = scales_of(p, run, head, INT8_SCALE_ROWS / 2);
        store_key(p, run, head, quantized_rows(key, p.key_stride, run, p.head_size, key_scales, buffer));
        store_value(p, run, head, quantized_rows(value, p.value_stride, run, p.head_size, value_scales, buffer));
      } else {
        store_key(p, run, head, rows_for_cache(key, p.key_stride, run, p.head_size, key_scale, buffer));
        store_value(p, run, head, rows_for_cache(value, p.value_stride, run, p.head_size, value_scale, buffer));
      }
    }
    token += run.length;
  }
}

// Calls body(of_row, of_cache, size) for the elements of a token that are adjacent both in its row and in an NHD cache:
// where they begin in the two, and how many they are.
template <typename Params, typename Body>
PAGEDATTN_INLINE void for_each_piece(const Params& p, const CacheStrides& strides, Body&& body) {
  if (strides.kv_head == p.head_size) return body(0, 0, p.num_kv_heads * p.head_size);
  for (int64_t head = 0; head < p.num_kv_heads; ++head) body(head * p.head_size, head * strides.kv_head, p.head_size);
}

// `size` is a multiple of 16 bytes.
template <typename T>
PAGEDATTN_INLINE void copy_elements(T* target, const T* source, int64_t size) {
  for (int64_t i = 0; i < size; i += ELEMENTS_PER_CHUNK<T>) __builtin_memcpy(target + i, source + i, 16);
}

template <typename T, typename CacheT>
void store_elements(CacheT* target, const T* source, int64_t size, [[maybe_unused]] float scale) {
  if constexpr (sizeof(CacheT) == 1) {
    for_each_vector(size, [&](int64_t i, auto load, auto store) { store(target + i, load(source + i) / scale); });
  } else {
    copy_elements(target, source, size);
  }
}

template <typename T, typename CacheT>
void store_tokens(const ReshapeAndCacheParams& p, int64_t begin, int64_t end) {
  const float key_scale = scale_of(p.key_scale, p.key_scale_on_device);
  const float value_scale = scale_of(p.value_scale, p.value_scale_on_device);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = p.slot_mapping[token];
    if (slot < 0) continue;
    const int64_t block = slot / p.block_size, offset = slot % p.block_size;
    const auto store = [&](const void* rows, int64_t row_stride, void* cache, const CacheStrides& strides,
                           float scale) {
      const T* source = static_cast<const T*>(rows) + token * row_stride;
      CacheT* target = static_cast<CacheT*>(cache) + block * strides.block + offset * strides.token;
      for_each_piece(p, strides, [&](int64_t of_row, int64_t of_cache, int64_t size) {
        store_elements(target + of_cache, source + of_row, size, scale);
      });
    };
    store(p.key, p.key_stride, p.key_cache, p.key_strides, key_scale);
    store(p.value, p.value_stride, p.value_cache, p.value_strides, value_scale);
  }
}

template <typename T, typename CacheT>
void store_in_layout(const ReshapeAndCacheParams& p, int64_t begin, int64_t end) {
  if (p.layout == CacheLayout::NHD) {
    store_tokens<T, CacheT>(p, begin, end);
  } else {
    store_runs<T, CacheT>(p, begin, end);
  }
}

template <typename T>
void gather_nhd_token(const GatherCachedKvParams& p, int64_t token) {
  const int64_t block = p.slot_mapping[token] / p.block_size, offset = p.slot_mapping[token] % p.block_size;
  const auto gather = [&](const void* cache, const CacheStrides& strides, void* rows, int64_t row_stride) {
    const T* source = static_cast<const T*>(cache) + block * strides.block + offset * strides.token;
    T* target = static_cast<T*>(rows) + token * row_stride;
    for_each_piece(p, strides, [&](int64_t of_row, int64_t of_cache, int64_t size) {
      copy_elements(target + of_row, source + of_cache, size);
    });
  };
  gather(p.key_cache, p.key_strides, p.key, p.key_stride);
  gather(p.value_cache, p.value_strides, p.value, p.value_stride);
}

template <typename T>
void gather_token(const GatherCachedKvParams& p, int64_t token) {
  constexpr int X = ELEMENTS_PER_CHUNK<T>;
  const int64_t block = p.slot_mapping[token] / p.block_size;
  const int64_t offset = p.slot_mapping[token] % p.block_size;
  const T* keys = static_cast<const T*>(p.key_cache) + block * p.key_strides.block + offset * X;
  const T* values = static_cast<const T*>(p.value_cache) + block * p.value_strides.block + offset;
  T* key = static_cast<T*>(p.key) + token * p.key_stride;
  T* value = static_cast<T*>(p.value) + token * p.value_stride;
  // Heads follow each other in rows and in blocks, so one loop takes all elements of a token.
  const int64_t num_elements = p.num_kv_heads * p.head_size;
  for (int64_t d = 0; d < num_elements; d += X) __builtin_memcpy(key + d, keys + d * p.block_size, 16);
  for (int64_t d = 0; d < num_elements; ++d) value[d] = values[d * p.block_size];
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    if (params.cache_dtype == DType::FLOAT8_E4M3) {
      store_in_layout<T, float8_e4m3>(params, begin, end);
    } else if (params.cache_dtype == DType::FLOAT8_E5M2) {
      store_in_layout<T, float8_e5m2>(params, begin, end);
    } else if (params.cache_dtype == DType::INT8) {
      store_runs<T, int8>(params, begin, end);
    } else {
      store_in_layout<T, T>(params, begin, end);
    }
  });
}

void gather_cached_kv(const GatherCachedKvParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t token = begin; token < end; ++token) {
      if (params.slot_mapping[token] < 0) continue;
      if (params.layout == CacheLayout::NHD) {
        gather_nhd_token<T>(params, token);
      } else {
        gather_token<T>(params, token);
      }
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
