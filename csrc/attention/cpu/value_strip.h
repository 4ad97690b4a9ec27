// Weighted sums of values.
//
// A row of the value cache holds one element of the consecutive tokens of a block. A strip is what is loaded at once:
// SIZE values of one element, or of several elements where a block has fewer tokens. The values of a strip are
// multiplied with weights in the same layout, and added up lane by lane over a tile. Only then are the lanes of an
// element added.
#pragma once

#include "attention/paged_attention.h"
#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Values as floats: value i of a strip is in lane i / PARTS of vector i % PARTS.
//
// ELEMENTS: how many elements the strip holds, which depends on the block size.
template <int NUM_PARTS>
struct FloatStrip {
  static constexpr int PARTS = NUM_PARTS;
  static constexpr int SIZE = PARTS * VEC_SIZE;
  Vec part[PARTS];

  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec values, Vec weights) { return fma(values, weights, sum); }

  // The token of a strip that this lane of an element has in this part.
  template <int ELEMENTS>
  static constexpr int token_of(int part, int lane) {
    return lane * PARTS + part;
  }

  // Lays out the weights of a tile as the strips want them: [strips, PARTS, VEC_SIZE]. With one element to a strip,
  // both may be in the same place.
  template <int ELEMENTS>
  static PAGEDATTN_INLINE void arrange_weights(const float* by_token, float* arranged) {
    constexpr int TOKENS = SIZE / ELEMENTS;
    for (int first = 0; first < TILE_TOKENS; first += TOKENS) {
      Vec v[PARTS];  // in order: value i of the strip has its weight in lane i % VEC_SIZE of v[i / VEC_SIZE]
      for (int i = 0; i < PARTS; ++i) {
        if constexpr (TOKENS >= VEC_SIZE) {
          v[i] = load(by_token + first + i * VEC_SIZE % TOKENS);
        } else {
          static_assert(TOKENS == VEC_SIZE / 2);
          const Vec two_strips = load(by_token + first / VEC_SIZE * VEC_SIZE);
          v[i] = first % VEC_SIZE == 0 ? shuffle(two_strips, two_strips, [](int t) { return t % (VEC_SIZE / 2); })
                                       : shuffle(two_strips, two_strips, [](int t) { return t | (VEC_SIZE / 2); });
        }
      }
      const auto even = [](Vec a, Vec b) { return shuffle(a, b, [](int t) { return 2 * t; }); };
      const auto odd = [](Vec a, Vec b) { return shuffle(a, b, [](int t) { return 2 * t + 1; }); };
      if constexpr (PARTS == 1) {
        store(arranged, v[0]);
      } else if constexpr (PARTS == 2) {
        store(arranged, even(v[0], v[1]));
        store(arranged + VEC_SIZE, odd(v[0], v[1]));
      } else {
        const Vec evens[] = {even(v[0], v[1]), even(v[2], v[3])};
        const Vec odds[] = {odd(v[0], v[1]), odd(v[2], v[3])};
        store(arranged, even(evens[0], evens[1]));
        store(arranged + VEC_SIZE, even(odds[0], odds[1]));
        store(arranged + 2 * VEC_SIZE, odd(evens[0], evens[1]));
        store(arranged + 3 * VEC_SIZE, odd(odds[0], odds[1]));
      }
      arranged += SIZE;
    }
  }
};

template <typename CacheT>
struct ValueStrip : FloatStrip<1> {
  template <int ELEMENTS>
  static PAGEDATTN_INLINE ValueStrip load_from(const CacheT* values) {
    return {{{load(values)}}};
  }
};

template <>
struct ValueStrip<bfloat16> : FloatStrip<2> {
  template <int ELEMENTS>
  static PAGEDATTN_INLINE ValueStrip load_from(const bfloat16* values) {
    const UintVec pairs = load_as<UintVec>(values);
    return {{{(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000)}}};
  }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
template <typename CacheT>
  requires(sizeof(CacheT) == 1)
struct ValueStrip<CacheT> : FloatStrip<2> {
  using Converted = Float16Halves;
  using Nans = NanFinder<CacheT>;

  template <bool NAN_TOO>
  static PAGEDATTN_INLINE void convert(const CacheT* values, Converted& converted, Nans& nans) {
    store_pairs<NAN_TOO>(converted, values, nans);
  }
  static PAGEDATTN_INLINE ValueStrip load_converted(const Converted& values) {
    return {{{values.first(), values.last()}}};
  }
  template <int ELEMENTS>
  static PAGEDATTN_INLINE ValueStrip load_from(const CacheT* values) {
    Converted converted;
    Nans nans;
    convert<true>(values, converted, nans);
    return load_converted(converted);
  }
};
#endif

#if defined(__AVX512VBMI__) || defined(__ARM_FEATURE_DOTPROD)
template <typename CacheT>
  requires(sizeof(CacheT) == 1)
struct ValueStrip<CacheT> : FloatStrip<4> {
  template <int ELEMENTS>
  static PAGEDATTN_INLINE ValueStrip load_from(const CacheT* values) {
    const Vecs<4> parts = float8_to_floats(load_as<UintVec>(values), CacheT{});
    return {{{parts.of[0], parts.of[1], parts.of[2], parts.of[3]}}};
  }
};
#endif

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIR_STRIPS = true;

// Values as bfloat16, multiplied in pairs with weights that are rounded to bfloat16. The error is that of torch's SDPA,
// which rounds them as well (docs/cpu-kernels.md).
template <typename CacheT>
struct PairStrip;

// The weights of a tile, rounded to bfloat16. Short strips of 8-bit values read what follows the tile, but do not use
// it.
struct RoundedWeights {
  static constexpr int AT_ONCE = 2 * VEC_SIZE;
  bfloat16 at[TILE_TOKENS + AT_ONCE] = {};

  PAGEDATTN_INLINE explicit RoundedWeights(const float* by_token) {
    for (int i = 0; i < TILE_TOKENS; i += AT_ONCE) {
      store_two<false>(at + i, load(by_token + i), load(by_token + i + VEC_SIZE));
    }
  }
};

// The weights of two tokens that follow each other, as a word.
struct JoinedWeights {
  static constexpr int JOINED = 1;  // tokens from the first to the second

  static PAGEDATTN_INLINE Vec join(Vec first, Vec second) {
    const auto rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    const UintVec in_turns = (UintVec)iota() * 0x10001 + 0x100000;  // numbers i and i + 16 of the 32
    return (Vec)_mm512_maskz_permutexvar_epi16(0xffffffff, (__m512i)in_turns, rounded);
  }
};

// The values of a strip are in order, as they lie in the cache.
template <>
struct PairStrip<bfloat16> : JoinedWeights {
  static constexpr int PARTS = 1;
  static constexpr int SIZE = 2 * VEC_SIZE;
  Vec part[PARTS];

  template <int ELEMENTS>
  static PAGEDATTN_INLINE PairStrip load_from(const bfloat16* values) {
    return {{}, {load_as<Vec>(values)}};
  }

  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec values, Vec weights) {
    return add_pair_products(sum, values, weights);
  }

  template <int ELEMENTS>
  static constexpr int token_of(int, int lane) {
    return 2 * lane;
  }

  // [strips, 2 * VEC_SIZE] in bfloat16: the weights of a strip's tokens, once for each of its elements.
  template <int ELEMENTS>
  static PAGEDATTN_INLINE void arrange_weights(const float* by_token, float* arranged) {
    constexpr int TOKENS = SIZE / ELEMENTS;
    const RoundedWeights rounded(by_token);
    for (int token = 0; token < TILE_TOKENS; token += TOKENS) {
      store(arranged, load_repeated<TOKENS / 2>(reinterpret_cast<const float*>(rounded.at + token)));
      arranged += VEC_SIZE;
    }
  }
};

// 8-bit values, which bfloat16 holds exactly.
template <typename CacheT>
  requires(sizeof(CacheT) == 1)
struct PairStrip<CacheT> : JoinedWeights {
  static constexpr int PARTS = 2;
  static constexpr int SIZE = 2 * PARTS * VEC_SIZE;
  Vec part[PARTS];

  template <int ELEMENTS>
  static PAGEDATTN_INLINE PairStrip load_from(const CacheT* values) {
    __m512i bytes = load_as<__m512i>(values);
    if constexpr (RUN<ELEMENTS> == 4) {
      // In every 128-bit lane: the first two of every four bytes, then the last two of every four.
      bytes = _mm512_shuffle_epi8(bytes, _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100));
    }
    const Vecs<2> halves = float8_to_bfloat16_halves((UintVec)bytes, CacheT{});
    return {{}, {halves.of[0], halves.of[1]}};
  }

  static PAGEDATTN_INLINE Vec multiply_add(Vec sum, Vec values, Vec weights) {
    return add_pair_products(sum, values, weights);
  }

  template <int ELEMENTS>
  static constexpr int token_of(int part, int lane) {
    return first_of_pair<ELEMENTS>(lane, part);
  }

  // [strips, PARTS, 2 * VEC_SIZE] in bfloat16.
  template <int ELEMENTS>
  static PAGEDATTN_INLINE void arrange_weights(const float* by_token, float* arranged) {
    constexpr int TOKENS = SIZE / ELEMENTS;
    const RoundedWeights rounded(by_token);
    for (int token = 0; token < TILE_TOKENS; token += TOKENS) {
      const Vec first = load_as<Vec>(rounded.at + token);
      const Vec last = load_as<Vec>(rounded.at + token + (TOKENS > rounded.AT_ONCE ? rounded.AT_ONCE : 0));
      store(arranged, shuffle(first, last, [](int t) { return first_of_pair<ELEMENTS>(t, 0) % TOKENS / 2; }));
      store(arranged + VEC_SIZE,
            shuffle(first, last, [](int t) { return first_of_pair<ELEMENTS>(t, 1) % TOKENS / 2; }));
      arranged += PARTS * VEC_SIZE;
    }
  }

 private:
  // Of RUN adjacent values, the first half is in part 0 and the second half in part 1. They must be of one element, so
  // that an element has the same lanes in both parts.
  template <int ELEMENTS>
  static constexpr int RUN = SIZE / ELEMENTS >= 16 ? 16 : 4;

  // The first of the two values that a 32-bit lane of a part holds.
  template <int ELEMENTS, typename Int>
  static constexpr PAGEDATTN_INLINE Int first_of_pair(Int lane, int part_idx) {
    constexpr int LANES = RUN<ELEMENTS> / 4;  // of a part
    return lane / LANES * RUN<ELEMENTS> + part_idx * (RUN<ELEMENTS> / 2) + lane % LANES * 2;
  }
};
#else
constexpr bool HAS_PAIR_STRIPS = false;
#endif

// Calls function.operator()<ELEMENTS>() with the number of elements that a strip holds for this block size.
template <typename Strip, int ELEMENTS = 1, typename Function>
PAGEDATTN_INLINE void dispatch_strip_elements(int64_t block_size, const Function& function) {
  if constexpr (Strip::SIZE / ELEMENTS > 8) {
    if (block_size < Strip::SIZE / ELEMENTS) {
      return dispatch_strip_elements<Strip, 2 * ELEMENTS>(block_size, function);
    }
  }
  function.template operator()<ELEMENTS>();
}

// Adds up the lanes of every element. v[i] has ELEMENTS runs of lanes; `sums` gets [VEC_SIZE, ELEMENTS]. Every sum is
// added in the same order.
//
// V: what the vectors hold the bits of, Vec or IntVec.
template <int ELEMENTS, typename V = Vec>
PAGEDATTN_INLINE void sum_runs(const Vec (&v)[VEC_SIZE], float* sums) {
  const auto at = [&](int i) { return (V)v[i]; };
  if constexpr (ELEMENTS > NUM_LANES) {
    static_assert(ELEMENTS == 2 * NUM_LANES);
    for (int i = 0; i < VEC_SIZE / 2; ++i) {
      // In 128-bit lane l: runs 2 * l and 2 * l + 1 of v[2 * i], then of v[2 * i + 1].
      const V runs = add_neighbours(at(2 * i), at(2 * i + 1));
      store(sums + i * VEC_SIZE,
            (Vec)shuffle(runs, runs, [](int t) { return t % ELEMENTS / 2 * 4 + t / ELEMENTS * 2 + t % 2; }));
    }
    return;
  }
  V lanes[NUM_LANES];  // element j of 128-bit lane l of lanes[i] is the sum of lane l of v[4 * i + j]
  for (int i = 0; i < NUM_LANES; ++i) lanes[i] = sum_lanes(at(4 * i), at(4 * i + 1), at(4 * i + 2), at(4 * i + 3));
  for (int n = NUM_LANES; n > ELEMENTS; n /= 2) {
    for (int i = 0; i < n / 2; ++i) lanes[i] = add_neighbour_lanes(lanes[2 * i], lanes[2 * i + 1]);
  }
  // ELEMENTS adjacent lanes belong to the same four v, and go from [ELEMENTS, 4] to [4, ELEMENTS].
  for (int i = 0; i < ELEMENTS; ++i) {
    store(sums + i * VEC_SIZE, (Vec)shuffle(lanes[i], lanes[i], [](int t) {
            constexpr int SIZE = 4 * ELEMENTS;
            return t / SIZE * SIZE + t % ELEMENTS * 4 + t % SIZE / ELEMENTS;
          }));
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
