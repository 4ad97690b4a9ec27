// Dot products of keys with query rows.
//
// A chunk is 16 bytes of the key of one token. A vector holds the same chunk of NUM_LANES tokens, with a token in each
// 128-bit lane. In the CHUNKED layout these chunks are adjacent, in the NHD layout each is a load of its own. The
// vector is multiplied with this chunk of a query row, repeated in every lane. Each token ends up with four partial
// sums.
#pragma once

#include <type_traits>

#include "cpu_memory.h"
#include "cpu_rows.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Keys or values that are converted in two steps have a type Converted for what is between the steps. The first step is
// taken for many keys or values before the second step is taken for any: what the first step stores can be loaded only
// some time later.
template <typename Loader>
constexpr bool CONVERTS_FIRST = requires { typename Loader::Converted; };

// Whether sums hold the bits of 32-bit integers, which are added without rounding.
template <typename Products>
constexpr bool INTEGER_SUMS = requires { Products::INTEGER_SUMS; };
template <typename Products>
using SumVec = std::conditional_t<INTEGER_SUMS<Products>, IntVec, Vec>;

// Whether the integers of query rows and weights are multiplied digit by digit (int8_products.h).
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool BY_DIGITS = true;
#else
constexpr bool BY_DIGITS = false;
#endif

template <typename Loader, int COUNT>
struct ConvertedFirst {};
template <typename Loader, int COUNT>
  requires CONVERTS_FIRST<Loader>
struct ConvertedFirst<Loader, COUNT> {
  typename Loader::Converted at[COUNT];
};

// The same chunk of NUM_LANES tokens, each somewhere else.
template <typename T>
struct ScatteredChunks {
  const T* of[NUM_LANES];

  PAGEDATTN_INLINE ScatteredChunks operator+(int64_t elements) const {
    ScatteredChunks result;
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_LANES; ++i) result.of[i] = of[i] + elements;
    return result;
  }
};

template <typename T, CacheLayout LAYOUT>
using Chunks = std::conditional_t<LAYOUT == CacheLayout::NHD, ScatteredChunks<T>, const T*>;

template <typename T>
PAGEDATTN_INLINE UintVec load_chunks(const T* chunks) {
  return load_as<UintVec>(chunks);
}
#if defined(__AVX2__)
PAGEDATTN_INLINE __m256i load_two_chunks(const void* first, const void* second) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load_as<__m128i>(first)), load_as<__m128i>(second), 1);
}
#endif
template <typename T>
PAGEDATTN_INLINE UintVec load_chunks(const ScatteredChunks<T>& chunks) {
#if defined(__AVX512F__)
  const __m256i first = load_two_chunks(chunks.of[0], chunks.of[1]);
  const __m256i last = load_two_chunks(chunks.of[2], chunks.of[3]);
  return (UintVec)_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(first), last, 1);
#elif defined(__AVX2__)
  return (UintVec)load_two_chunks(chunks.of[0], chunks.of[1]);
#else
  return load_as<UintVec>(chunks.of[0]);
#endif
}

// Vector i of the chunks' elements, in order.
template <typename T>
PAGEDATTN_INLINE Vec load_in_order(const T* chunks, int i) {
  return load(chunks + i * VEC_SIZE);
}
PAGEDATTN_INLINE Vec load_in_order(const ScatteredChunks<float>& chunks, int) { return (Vec)load_chunks(chunks); }
PAGEDATTN_INLINE Vec load_in_order(const ScatteredChunks<float16>& chunks, int i) {
#if defined(__AVX512F__)
  return float16_to_float((ShortVec)load_two_chunks(chunks.of[2 * i], chunks.of[2 * i + 1]));
#else
  return NUM_LANES == 2 ? load(chunks.of[i]) : load(chunks.of[0] + i * VEC_SIZE);
#endif
}

// The elements of a vector of keys become PARTS vectors of floats.
template <typename CacheT>
struct KeyDot {
  static constexpr int CHUNK_ELEMENTS = ELEMENTS_PER_CHUNK<CacheT>;
  static constexpr int PARTS = CHUNK_ELEMENTS / 4;

  // In a part, RUN adjacent floats are of one token:
  //   fp16          is converted in order, as taking pairs apart would cost as much again. A part has the chunks of
  //                 half of the tokens, and each part has a sum of its own.
  //   fp8 on AVX2   is converted as fp16. A part has half of the chunk of one token, every second element.
  //   other types   A part has every PARTS-th element of all tokens.
  static constexpr bool IN_ORDER = std::is_same_v<CacheT, float> || std::is_same_v<CacheT, float16>;
  static constexpr bool IN_HALVES = sizeof(CacheT) == 1 && VEC_SIZE == 8;
  static constexpr int RUN = IN_HALVES ? 8 : IN_ORDER && CHUNK_ELEMENTS <= VEC_SIZE ? CHUNK_ELEMENTS : 4;
  static constexpr int SUMS = RUN / 4;
  static constexpr int COPIES = 1;  // of a query row

  struct Keys {
    Vec part[PARTS];
  };

  template <typename Chunks>
  static PAGEDATTN_INLINE Keys load_keys(const Chunks& chunks) {
    Keys result;
    if constexpr (IN_ORDER) {
      for (int i = 0; i < PARTS; ++i) result.part[i] = load_in_order(chunks, i);
    } else if constexpr (std::is_same_v<CacheT, bfloat16>) {
      const UintVec pairs = load_chunks(chunks);
      result = {{(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000)}};
    } else {
      const Vecs<4> parts = float8_to_floats(load_chunks(chunks), CacheT{});
      result = {{parts.of[0], parts.of[1], parts.of[2], parts.of[3]}};
    }
    return result;
  }

  // What `part` of this chunk of the keys is multiplied with, from a row made by unpack_query.
  static PAGEDATTN_INLINE Vec load_query(const float* row, int64_t chunk, int part) {
    return load_repeated<RUN>(row + chunk * CHUNK_ELEMENTS + part / SUMS * RUN);
  }

  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec keys, Vec query) { return fma(keys, query, sum); }

  static constexpr int64_t row_floats(int64_t head_size) { return head_size; }

  // Unpacks a query row, once, as load_query wants it: in order, or [head_size / CHUNK_ELEMENTS, PARTS / SUMS, RUN].
  template <typename T>
  static void unpack_query(const T* query, int64_t head_size, float* row) {
    float in_order[MAX_HEAD_SIZE];
    float* const unpacked = IN_ORDER ? row : in_order;
    for_each_vector(head_size, [&](int64_t d, auto load, auto store) { store(unpacked + d, load(query + d)); });
    if constexpr (!IN_ORDER) {
      constexpr int NUM_RUNS = PARTS / SUMS;
      for (int64_t d = 0; d < head_size; d += CHUNK_ELEMENTS) {
        PAGEDATTN_UNROLL
        for (int i = 0; i < CHUNK_ELEMENTS; ++i) row[d + i % NUM_RUNS * RUN + i / NUM_RUNS] = in_order[d + i];
      }
    }
  }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
template <typename CacheT>
struct Float8KeyDot : KeyDot<CacheT> {
  using Converted = Float16Pairs;
  using Nans = NanFinder<CacheT>;
  using typename KeyDot<CacheT>::Keys;

  template <bool NAN_TOO, typename Chunks>
  static PAGEDATTN_INLINE void convert(const Chunks& chunks, Converted& converted, Nans& nans) {
    converted.store<NAN_TOO>((__m256i)load_chunks(chunks), nans);
  }
  static PAGEDATTN_INLINE Vec load_part(const Converted& keys, int part) {
    const Float16Halves& halves = part < 2 ? keys.even : keys.odd;
    return part % 2 == 0 ? halves.first() : halves.last();
  }
  static PAGEDATTN_INLINE Keys load_converted(const Converted& keys) {
    return {{load_part(keys, 0), load_part(keys, 1), load_part(keys, 2), load_part(keys, 3)}};
  }
  template <typename Chunks>
  static PAGEDATTN_INLINE Keys load_keys(const Chunks& chunks) {
    Converted converted;
    Nans nans;
    convert<true>(chunks, converted, nans);
    return load_converted(converted);
  }
};
#endif

#if defined(PAGEDATTN_BFLOAT16_DOTS)
constexpr bool HAS_PAIR_DOT = true;

// The same for queries in bfloat16, and for keys in bfloat16 or in a type that bfloat16 can hold. The dot product
// instruction multiplies pairs as they are, and adds in fp32.
template <typename CacheT>
struct PairDot {
  static constexpr int CHUNK_ELEMENTS = ELEMENTS_PER_CHUNK<CacheT>;
  static constexpr int PARTS = CHUNK_ELEMENTS / 8;
  static constexpr int RUN = 8;  // elements of a row in a 128-bit lane
  static constexpr int SUMS = 1;

  // Rows for 8-bit keys hold every 8 elements as often as a vector needs them. A load that repeats elements is a
  // shuffle as well, and the conversion of the keys keeps the pipes for shuffles busy.
  static constexpr int COPIES = PARTS == 2 ? NUM_LANES : 1;

  struct Keys {
    Vec part[PARTS];  // of pairs
  };

  template <typename Chunks>
  static PAGEDATTN_INLINE Keys load_keys(const Chunks& chunks) {
    if constexpr (PARTS == 1) {
      return {{(Vec)load_chunks(chunks)}};
    } else {
      const Vecs<2> halves = float8_to_bfloat16_halves(load_chunks(chunks), CacheT{});
      return {{halves.of[0], halves.of[1]}};
    }
  }

  // Loads 8 elements, repeated in every lane.
  static PAGEDATTN_INLINE Vec load_query(const float* row, int64_t chunk, int part) {
    return load_repeated<4 * COPIES>(row + (chunk * PARTS + part) * 4 * COPIES);
  }

  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec keys, Vec query) { return add_pair_products(sum, keys, query); }

  static constexpr int64_t row_floats(int64_t head_size) { return head_size / 2 * COPIES; }

  template <typename T>
  static void unpack_query(const T* query, int64_t head_size, float* row) {
    bfloat16 in_order[MAX_HEAD_SIZE];
    for_each_vector(head_size, [&](int64_t d, auto load, auto store) { store(in_order + d, load(query + d)); });
    for (int64_t d = 0; d < head_size; d += 8) {
      for (int i = 0; i < COPIES; ++i) __builtin_memcpy(row + (d / 2 * COPIES + i * 4), in_order + d, 16);
    }
  }
};
#else
constexpr bool HAS_PAIR_DOT = false;
#endif

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
