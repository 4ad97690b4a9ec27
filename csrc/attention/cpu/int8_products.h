// Products with the keys and values of an int8 cache, for row_walk.h.
//
// Queries and weights are rounded to 16 bits with a scale for each row, and are multiplied as integers: two products
// are added in one instruction. Sums fit into 32 bits, and are the same in any order. A float takes part only once they
// are done: a sum times the scales of its row and of its token.
//
// `sdot` of ARM64 adds 16 products of bytes. There, a code of 16 bits has two digits, each a signed byte: the code is
// 256 * high + low. Both digits are multiplied with the keys or values as they are. Sums of high digits times 256 fit
// into 32 bits as well, as 256 * 127 is less than the greatest code.
#pragma once

#include "attention/cpu/row_logits.h"
#include "cpu_quantize.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int MAX_CODE_16 = BY_DIGITS ? 256 * 127 + 127 : 32767;
static_assert(int64_t{MAX_CODE_16} * MAX_CODE * MAX_HEAD_SIZE <= INT32_MAX && TILE_TOKENS <= MAX_HEAD_SIZE);

// The digits of codes. A low digit is from -128 on, a high digit from -127 on.
template <int SIZE>
struct Digits {
  int8_t high[SIZE];
  int8_t low[SIZE];

  PAGEDATTN_INLINE void set(int i, int32_t code) {
    high[i] = static_cast<int8_t>((code + 128) >> 8);
    low[i] = static_cast<int8_t>(code);
  }
};

// Bytes as 16-bit integers: a 32-bit element has bytes 0 and 2 in the first, and bytes 1 and 3 in the second.
struct EvenAndOdd {
  Vec of[2];
};

PAGEDATTN_INLINE EvenAndOdd sign_extend(UintVec bytes) {
  typedef int16_t Int16Vec __attribute__((vector_size(VEC_BYTES)));
  const auto odd = (Int16Vec)bytes;
  return {{(Vec)(odd << 8 >> 8), (Vec)(odd >> 8)}};
}

// Adds the products of both 16-bit halves of each element, or of all four bytes (BY_DIGITS). The sum is kept in a
// register: GCC 12 would change the order of the additions, and store many products before it adds any.
PAGEDATTN_INLINE Vec add_code_products(Vec sum, Vec a, Vec b) {
#if defined(__AVX512VNNI__)
  return (Vec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
  return in_register((Vec)((IntVec)sum + (IntVec)_mm512_maskz_madd_epi16(0xffff, (__m512i)a, (__m512i)b)));
#elif defined(__AVX2__)
  return in_register((Vec)((IntVec)sum + (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b)));
#elif defined(__SSE2__)
  return in_register((Vec)((IntVec)sum + (IntVec)_mm_madd_epi16((__m128i)a, (__m128i)b)));
#elif defined(__ARM_FEATURE_DOTPROD)
  return in_register((Vec)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b));
#else
  const auto low = [](Vec v) { return (IntVec)v << 16 >> 16; };
  const auto high = [](Vec v) { return (IntVec)v >> 16; };
  return (Vec)((IntVec)sum + low(a) * low(b) + high(a) * high(b));
#endif
}

struct Int8Dot {
  static constexpr bool INTEGER_SUMS = true;
  static constexpr int CHUNK_ELEMENTS = ELEMENTS_PER_CHUNK<int8>;
  static constexpr int PARTS = 2;
  static constexpr int RUN = 8;                   // elements of a row in a 128-bit lane
  static constexpr int SUMS = BY_DIGITS ? 2 : 1;  // by digits, each part is the bytes, for a digit and a sum
  static constexpr int COPIES = 1;                // of a query row

  struct Keys {
    Vec part[PARTS];
  };

  static PAGEDATTN_INLINE Keys load_keys(const int8* chunks) {
#if defined(__ARM_FEATURE_DOTPROD)
    const auto bytes = (Vec)load_chunks(chunks);
    return {{bytes, bytes}};
#else
    const EvenAndOdd bytes = sign_extend(load_chunks(chunks));
    return {{bytes.of[0], bytes.of[1]}};
#endif
  }

  // Loads 8 elements, repeated in every lane, or a digit of 16 elements.
  static PAGEDATTN_INLINE Vec load_query(const float* row, int64_t chunk, int part) {
    return load_repeated<4>(row + (chunk * PARTS + part) * 4);
  }

  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec keys, Vec query) { return add_code_products(sum, keys, query); }

  // The scale comes last.
  static constexpr int64_t row_floats(int64_t head_size) { return head_size / 2 + 4; }
  static PAGEDATTN_INLINE float row_scale(const float* row, int64_t head_size) { return row[head_size / 2]; }

  template <typename T>
  static void unpack_query(const T* query, int64_t head_size, float* row) {
    int32_t codes[MAX_HEAD_SIZE];
    const auto store_codes = [&](int64_t i, IntVec some) { __builtin_memcpy(codes + i, &some, sizeof some); };
    row[head_size / 2] = quantize<MAX_CODE_16>(query, head_size, store_codes).scale;
    for (int64_t d = 0; d < head_size; d += CHUNK_ELEMENTS) {
      if constexpr (BY_DIGITS) {
        Digits<CHUNK_ELEMENTS> digits;
        for (int i = 0; i < CHUNK_ELEMENTS; ++i) digits.set(i, codes[d + i]);
        __builtin_memcpy(row + d / 2, &digits, sizeof digits);
        continue;
      }
      int16_t by_part[CHUNK_ELEMENTS];
      PAGEDATTN_UNROLL
      for (int i = 0; i < CHUNK_ELEMENTS; ++i) by_part[i % 2 * 8 + i / 2] = static_cast<int16_t>(codes[d + i]);
      __builtin_memcpy(row + d / 2, by_part, sizeof by_part);
    }
  }
};

// The values of 4 tokens lie in each 32-bit element.
struct Int8Strip {
  static constexpr bool INTEGER_SUMS = true;
  static constexpr int PARTS = BY_DIGITS ? 1 : 2;
  static constexpr int SIZE = 4 * VEC_SIZE;
  Vec part[PARTS];

  template <int ELEMENTS>
  static PAGEDATTN_INLINE Int8Strip load_from(const int8* values) {
#if defined(__ARM_FEATURE_DOTPROD)
    return {{load_as<Vec>(values)}};
#else
    const EvenAndOdd bytes = sign_extend(load_as<UintVec>(values));
    return {{bytes.of[0], bytes.of[1]}};
#endif
  }

  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec values, Vec weights) {
    return add_code_products(sum, values, weights);
  }

  // A word of a part has a token, and the second one after it.
  static constexpr int JOINED = 2;
  template <int ELEMENTS>
  static constexpr int token_of(int part, int lane) {
    return 4 * lane + part;
  }
  static PAGEDATTN_INLINE Vec join(Vec first, Vec second) {
    return (Vec)(((UintVec)first & 0xffff) | (UintVec)second << 16);
  }

  // Rounds the weights of a tile, times the scales of the tokens' values, and lays them out: [strips, PARTS, VEC_SIZE],
  // or digit by digit [digits, strips, VEC_SIZE]. Returns the scale of the weights: NaN if the value of a token with a
  // weight is.
  template <int ELEMENTS>
  static PAGEDATTN_INLINE float arrange_weights(const HeadTile<int8>& h, const float* by_token, float* arranged) {
    constexpr int TOKENS = SIZE / ELEMENTS;
    constexpr int PAIRS = 2 * VEC_SIZE;  // tokens whose codes lie in a vector
    float scaled[TILE_TOKENS];
    for (int token = 0; token < TILE_TOKENS; token += VEC_SIZE) {
      const Vec weights = load(by_token + token);
      // The slot of a token that the row does not see may hold anything.
      const Vec scales = h.load_scales(token, h.params.head_size + INT8_SCALE_ROWS / 2);
      store(scaled + token, select(weights == 0.0f, Vec{}, weights * scales));
    }
    int16_t codes[TILE_TOKENS + PAIRS];  // short strips read the rest, but do not use it
    const auto store_codes = [&](int64_t i, IntVec some) {
      typedef int16_t Some __attribute__((vector_size(VEC_BYTES / 2)));
      const Some narrow = __builtin_convertvector(some, Some);
      __builtin_memcpy(codes + i, &narrow, sizeof narrow);
    };
    const float scale = quantize<MAX_CODE_16>(scaled, TILE_TOKENS, store_codes).scale;
    if constexpr (BY_DIGITS) {
      Digits<TILE_TOKENS * ELEMENTS> digits;
      for (int i = 0; i < TILE_TOKENS * ELEMENTS; ++i) digits.set(i, codes[i / SIZE * TOKENS + i % TOKENS]);
      __builtin_memcpy(arranged, &digits, sizeof digits);
      return scale;
    }
    for (int token = 0; token < TILE_TOKENS; token += TOKENS) {
      const Vec first = load_as<Vec>(codes + token);
      const Vec last = load_as<Vec>(codes + token + (TOKENS > PAIRS ? PAIRS : 0));
      const auto even = (UintVec)shuffle(first, last, [](int i) { return 2 * i % (TOKENS / 2); });
      const auto odd = (UintVec)shuffle(first, last, [](int i) { return 2 * i % (TOKENS / 2) + 1; });
      store(arranged, (Vec)((even & 0xffff) | odd << 16));
      store(arranged + VEC_SIZE, (Vec)(even >> 16 | (odd & 0xffff0000)));
      arranged += PARTS * VEC_SIZE;
    }
    return scale;
  }
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
