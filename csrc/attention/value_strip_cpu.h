// Weighted sums of values, for paged_attention_cpu.cpp.
//
// A row of the value cache holds one element of the consecutive tokens of a block. A strip is what is loaded at once:
// SIZE values, of one element, or, where a block has fewer tokens, of several. Its values are multiplied with weights
// that are laid out alike, and added up lane by lane over a tile; only then the lanes of an element are added.
#pragma once

#include "cpu_vec.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Value i of a strip is in lane i / PARTS of vector i % PARTS.
template <typename CacheT>
struct ValueStrip {
  static constexpr int PARTS = 1;
  Vec part[PARTS];
  static PAGEDATTN_INLINE ValueStrip load_from(const CacheT* values) { return {{load(values)}}; }
};

template <>
struct ValueStrip<bfloat16> {
  static constexpr int PARTS = 2;
  Vec part[PARTS];
  static PAGEDATTN_INLINE ValueStrip load_from(const bfloat16* values) {
    const UintVec pairs = load_as<UintVec>(values);
    return {{(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000)}};
  }
};

#if defined(__AVX512BF16__)
template <typename CacheT>
  requires(sizeof(CacheT) == 1)
struct ValueStrip<CacheT> {
  static constexpr int PARTS = 4;
  Vec part[PARTS];
  static PAGEDATTN_INLINE ValueStrip load_from(const CacheT* values) {
    const Float8AsBfloat16 bytes = float8_to_bfloat16(load_as<UintVec>(values), CacheT{});
    // From a low and a high byte each, the bfloat16 of the even values and of the odd ones.
    const UintVec low = (UintVec)bytes.low;
    const UintVec high = (UintVec)bytes.high;
    const UintVec even = (low & 0x00ff00ff) | (high << 8 & 0xff00ff00);
    const UintVec odd = (low >> 8 & 0x00ff00ff) | (high & 0xff00ff00);
    return {{(Vec)(even << 16), (Vec)(odd << 16), (Vec)(even & 0xffff0000), (Vec)(odd & 0xffff0000)}};
  }
};
#endif

template <typename CacheT>
constexpr int STRIP_SIZE = VEC_SIZE * ValueStrip<CacheT>::PARTS;

// Calls function.operator()<ELEMENTS>() with the number of elements that a strip holds for this block size.
template <typename CacheT, int ELEMENTS = 1, typename Function>
PAGEDATTN_INLINE void dispatch_strip_elements(int64_t block_size, const Function& function) {
  if constexpr (STRIP_SIZE<CacheT> / ELEMENTS > 8) {
    if (block_size < STRIP_SIZE<CacheT> / ELEMENTS) {
      return dispatch_strip_elements<CacheT, 2 * ELEMENTS>(block_size, function);
    }
  }
  function.template operator()<ELEMENTS>();
}

// The tokens of strip `strip` of a tile, as they lie in the vector `part`.
template <int PARTS, int ELEMENTS>
PAGEDATTN_INLINE IntVec strip_tokens(int strip, int part) {
  constexpr int TOKENS = VEC_SIZE * PARTS / ELEMENTS;
  return strip * TOKENS + ((iota() * PARTS + part) & (TOKENS - 1));
}

// The weights of `num_tokens` tokens as their strips want them: [strips, PARTS, VEC_SIZE].
template <int PARTS, int ELEMENTS>
PAGEDATTN_INLINE void arrange_weights(const float* by_token, int num_tokens, float* arranged) {
  constexpr int TOKENS = VEC_SIZE * PARTS / ELEMENTS;
  for (int first = 0; first < num_tokens; first += TOKENS) {
    Vec v[PARTS];  // as value i of the strip would be in lane i % VEC_SIZE of vector i / VEC_SIZE
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
    arranged += VEC_SIZE * PARTS;
  }
}

// Adds up the lanes of every element: v[i] has ELEMENTS runs of lanes, `sums` gets [VEC_SIZE, ELEMENTS]. Every sum adds
// in the same order.
template <int ELEMENTS>
PAGEDATTN_INLINE void sum_runs(const Vec (&v)[VEC_SIZE], float* sums) {
  if constexpr (ELEMENTS > NUM_LANES) {
    static_assert(ELEMENTS == 2 * NUM_LANES);
    for (int i = 0; i < VEC_SIZE / 2; ++i) {
      // In 128-bit lane l: runs 2 * l and 2 * l + 1 of v[2 * i], then of v[2 * i + 1].
      const Vec runs = add_neighbours(v[2 * i], v[2 * i + 1]);
      store(sums + i * VEC_SIZE,
            shuffle(runs, runs, [](int t) { return t % ELEMENTS / 2 * 4 + t / ELEMENTS * 2 + t % 2; }));
    }
    return;
  }
  Vec lanes[NUM_LANES];  // in 128-bit lane l of lanes[i], element j: the sum of that lane of v[4 * i + j]
  for (int i = 0; i < NUM_LANES; ++i) lanes[i] = sum_lanes(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  for (int n = NUM_LANES; n > ELEMENTS; n /= 2) {
    for (int i = 0; i < n / 2; ++i) lanes[i] = add_neighbour_lanes(lanes[2 * i], lanes[2 * i + 1]);
  }
  // ELEMENTS lanes after each other belong to the same four v: from [ELEMENTS, 4] to [4, ELEMENTS].
  for (int i = 0; i < ELEMENTS; ++i) {
    store(sums + i * VEC_SIZE, shuffle(lanes[i], lanes[i], [](int t) {
            constexpr int SIZE = 4 * ELEMENTS;
            return t / SIZE * SIZE + t % ELEMENTS * 4 + t % SIZE / ELEMENTS;
          }));
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
