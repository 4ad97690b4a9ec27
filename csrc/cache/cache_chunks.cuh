// What a thread of reshape_and_cache or gather_cached_kv moves at a time: elements of a row or of a cache, packed into
// 16 bytes or less. The thread may transpose elements or round them to float8, in its registers. Elements that are not
// rounded are integers, moved bit for bit.
#pragma once

#include <type_traits>

#include "cuda_float8.cuh"
#include "cuda_vec.cuh"

namespace pagedattn::cuda {

// An unsigned integer of the size of T.
template <typename T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>;

template <typename T>
using Chunk = Packed<T, ELEMENTS_PER_CHUNK<T>>;

template <typename T, int N>
__device__ T element(const Packed<T, N>& packed, int i) {
  constexpr int PER_WORD = 4 / sizeof(T);
  return {static_cast<BitsOf<T>>(packed.words[i / PER_WORD] >> (i % PER_WORD * 8 * sizeof(T)))};
}

// `packed` is zero where `bits` go.
template <typename T, int N>
__device__ void set_element(Packed<T, N>& packed, int i, BitsOf<T> bits) {
  constexpr int PER_WORD = 4 / sizeof(T);
  packed.words[i / PER_WORD] |= static_cast<uint32_t>(bits) << (i % PER_WORD * 8 * sizeof(T));
}

// The elements at source[0], source[step], ...
template <int N, typename T>
__device__ Packed<T, N> load_each(const T* source, int step) {
  Packed<T, N> packed = {};
#pragma unroll
  for (int i = 0; i < N; ++i) set_element(packed, i, reinterpret_cast<const BitsOf<T>*>(source)[i * step]);
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

// The signs of element i of `low` and element j of `high`, in bits 7 and 15, beside other bits. The signs are taken
// from the bits in memory, as even the conversion of float16 to float may lose the sign of a NaN.
template <typename T, int N>
__device__ uint32_t pair_signs(const Packed<T, N>& low, int i, const Packed<T, N>& high, int j) {
  constexpr int PER_WORD = 4 / sizeof(T);
  const auto top_byte = [](int e) { return (e % PER_WORD + 1) * sizeof(T) - 1; };
  return __byte_perm(low.words[i / PER_WORD], high.words[j / PER_WORD], (4 + top_byte(j)) << 4 | top_byte(i));
}

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

// N rows, which become E chunks of N elements: transposed, and converted on the way. A row is E elements of a token.
// For gather_cached_kv, a row is an element of E tokens.
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

}  // namespace pagedattn::cuda
