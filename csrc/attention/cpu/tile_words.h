// The keys and values of a tile as words, for chain_sums.h and many_rows.h.
//
// What is multiplied together lies together here. In the cache, the steps of some elements are so far apart, often 4
// KiB or more, that they would meet in one set of the first-level cache, and push each other out.
#pragma once

#include "attention/cpu/chain_sums.h"
#include "attention/cpu/columns.h"
#include "attention/cpu/nhd_values.h"
#include "attention/cpu/tile_strips.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Keys: [tokens / WORDS, steps, WORDS, chains], or as they lie in the cache.
template <typename Dot, typename T, CacheLayout LAYOUT>
class KeyWords {
 public:
  static constexpr int NUM_CHAINS = 4 * Dot::SUMS;  // lanes that a token has

  // `memory` has room for TILE_TOKENS keys.
  KeyWords(const HeadTile<T, LAYOUT>& h, float* memory)
      : h_(h),
        memory_(memory),
        num_steps_(h.params.head_size / Dot::RUN),
        are_in_cache_(ARE_WORDS && h.params.block_size <= MOST_IN_CACHE) {
    if (are_in_cache_) return;
    for (int token = first_vec_token(h.tile); token < h.tile.end; token += WORDS) convert(token);
  }

  int64_t num_steps() const { return num_steps_; }

  // Of WORDS tokens.
  PAGEDATTN_INLINE const char* at(int token) const {
    if (are_in_cache_) return reinterpret_cast<const char*>(h_.keys + h_.tile.key_at(token));
    return reinterpret_cast<const char*>(memory_ + token * num_steps_ * NUM_CHAINS);
  }

  int64_t step_bytes() const {
    return are_in_cache_ ? h_.chunk_stride() * static_cast<int64_t>(sizeof(T)) : WORDS * NUM_CHAINS * WORD_BYTES;
  }

 private:
  // Not inlined: GCC 12 would keep the constants of the conversion in registers that sums need.
  __attribute__((noinline)) void convert(int token) {
    float* to = memory_ + token * num_steps_ * NUM_CHAINS;
    Chunks<T, LAYOUT> chunks[WORDS / NUM_LANES];  // the hidden tokens of a tile have a place as well
    for (int i = 0; i < WORDS / NUM_LANES; ++i) chunks[i] = h_.key_chunks(token + i * NUM_LANES);
    int64_t offset = 0;
    for (int64_t step = 0; step < num_steps_; step += Dot::PARTS / Dot::SUMS) {
      PAGEDATTN_UNROLL
      for (int i = 0; i < WORDS / NUM_LANES; ++i) {
        const typename Dot::Keys keys = Dot::load_keys(chunks[i] + offset);
        PAGEDATTN_UNROLL
        for (int part = 0; part < Dot::PARTS; ++part) {
          const int64_t of_step = step + part / Dot::SUMS;
          store(to + of_step * WORDS * NUM_CHAINS + (i * Dot::SUMS + part % Dot::SUMS) * VEC_SIZE, keys.part[part]);
        }
      }
      offset += h_.chunk_stride();
    }
  }

  // Steps of larger blocks are so far apart that they meet in a few sets of the first-level cache.
  static constexpr bool ARE_WORDS = LAYOUT == CacheLayout::CHUNKED && Dot::PARTS == 1;
  static constexpr int64_t MOST_IN_CACHE = 32;

  const HeadTile<T, LAYOUT>& h_;
  float* memory_;
  int64_t num_steps_;
  bool are_in_cache_;
};

// Whether a word has the values of two tokens. The second follows the first, or the one after it: JOINED tokens.
template <typename Products>
constexpr bool JOINS_TOKENS = requires { Products::JOINED; };

// Whether word `chain` of a step is of the token whose number is step * num_chains + chain.
template <typename Products>
constexpr bool IN_TOKEN_ORDER = !JOINS_TOKENS<Products>;
template <typename Products>
  requires requires { Products::PARTS; }
constexpr bool IN_TOKEN_ORDER<Products> = !JOINS_TOKENS<Products> && Products::PARTS == 1;

// Values of the CHUNKED layout: [head_size / WORDS, steps, WORDS, chains].
template <typename Strip, typename T>
class StripWords {
 public:
  static constexpr int AT_ONCE = WORDS;  // elements

  // `memory` has room for TILE_TOKENS values.
  StripWords(const HeadTile<T>& h, float* memory) : memory_(memory) {
    dispatch_strip_elements<Strip>(h.params.block_size, [&]<int ELEMENTS>() { convert<ELEMENTS>(h); });
  }

  int num_chains() const { return num_chains_; }

  // The steps of the tile's tokens up to `end`.
  Steps steps_until(int end) const { return {begin_ * Strip::PARTS, (end + tokens_ - 1) / tokens_ * Strip::PARTS}; }
  // The tokens that these steps have.
  TileTokens tokens_of(Steps steps) const {
    return {static_cast<int>(steps.begin) / Strip::PARTS * tokens_,
            static_cast<int>(steps.end) / Strip::PARTS * tokens_};
  }
  // The first token of a word.
  int token_of(int64_t step, int chain) const { return token_of_word_[step * num_chains_ + chain]; }

  // From element `d` on, a multiple of AT_ONCE.
  template <int NUM_CHAINS>
  PAGEDATTN_INLINE const char* at(int64_t step, int64_t d) const {
    return reinterpret_cast<const char*>(memory_ + d * TILE_WORDS + step * AT_ONCE * NUM_CHAINS);
  }

 private:
  static constexpr int64_t TILE_WORDS = TILE_TOKENS / (JOINS_TOKENS<Strip> ? 2 : 1);  // of an element

  template <int ELEMENTS>
  __attribute__((noinline)) void convert(const HeadTile<T>& h) {
    using Strips = TileStrips<T, Strip, ELEMENTS>;
    constexpr int NUM_CHAINS = VEC_SIZE / ELEMENTS;
    constexpr int TOGETHER = ELEMENTS < AT_ONCE ? ELEMENTS : AT_ONCE;  // elements of a strip that stay together
    constexpr int AT_A_TIME = ELEMENTS < AT_ONCE ? AT_ONCE : ELEMENTS;
    Strips strips(h);
    if (!INTEGER_SUMS<Strip> && strips.has_hidden_tokens) strips.hide_tokens(h);
    tokens_ = Strips::TOKENS;
    num_chains_ = NUM_CHAINS;
    begin_ = strips.begin;
    if constexpr (!IN_TOKEN_ORDER<Strip>) {
      for (int i = 0; i < TILE_WORDS; ++i) {
        const int step = i / NUM_CHAINS;
        const int of_strip = Strip::template token_of<ELEMENTS>(step % Strip::PARTS, i % NUM_CHAINS);
        token_of_word_[i] = static_cast<uint8_t>(step / Strip::PARTS * tokens_ + of_strip);
      }
    }
    // A few elements of all strips, then the next: the words of elements far apart meet in one set of the cache.
    for (int64_t first = 0; first < h.params.head_size; first += AT_A_TIME) {
      for (int s = strips.begin; s < strips.end; ++s) {
        PAGEDATTN_UNROLL
        for (int64_t d = first; d < first + AT_A_TIME; d += ELEMENTS) {
          const Strip strip = Strip::template load_from<ELEMENTS>(strips.of[s].at(d / ELEMENTS));
          PAGEDATTN_UNROLL
          for (int part = 0; part < Strip::PARTS; ++part) {
            PAGEDATTN_UNROLL
            for (int i = 0; i < ELEMENTS; i += TOGETHER) {
              float* const to = memory_ + (d + i) / AT_ONCE * AT_ONCE * TILE_WORDS +
                                ((s * Strip::PARTS + part) * AT_ONCE + d % AT_ONCE) * NUM_CHAINS;
              __builtin_memcpy(to, reinterpret_cast<const float*>(&strip.part[part]) + i * NUM_CHAINS,
                               TOGETHER * NUM_CHAINS * sizeof(float));
            }
          }
        }
      }
    }
  }

  float* memory_;
  uint8_t token_of_word_[TILE_WORDS];
  int num_chains_;
  int tokens_;  // of a strip
  int begin_;   // the first strip with visible tokens
};

// Values of the NHD layout: [head_size / AT_ONCE, steps, AT_ONCE], with a single chain.
template <typename Values, typename T>
class NhdWords {
 public:
  static constexpr int AT_ONCE = MAX_SUMS / GROUP_VECS;

  // `memory` has room for TILE_TOKENS values of a padded head.
  NhdWords(const HeadTile<T, CacheLayout::NHD>& h, float* memory) : begin_(h.tile.begin / TOKENS), memory_(memory) {
    int64_t d = 0;
    for (; d + NHD_PAIR <= h.params.head_size; d += NHD_PAIR) {
      convert(h, d, [&](const auto& values) PAGEDATTN_ALWAYS_INLINE { return load_nhd_at<Values>(values, d); });
    }
    const int64_t num_left = h.params.head_size - d;
    if (num_left > 0) convert(h, d, [&](const auto& values) { return load_padded_nhd<Values>(values, d, num_left); });
  }

  static constexpr int num_chains() { return 1; }
  Steps steps_until(int end) const { return {begin_, (end + TOKENS - 1) / TOKENS}; }
  TileTokens tokens_of(Steps steps) const {
    return {static_cast<int>(steps.begin) * TOKENS, static_cast<int>(steps.end) * TOKENS};
  }
  static int token_of(int64_t step, int) { return static_cast<int>(step) * TOKENS; }

  template <int NUM_CHAINS>
  PAGEDATTN_INLINE const char* at(int64_t step, int64_t d) const {
    return reinterpret_cast<const char*>(memory_ + d * TILE_WORDS + step * AT_ONCE);
  }

 private:
  static constexpr int TOKENS = Values::TOKENS;
  static constexpr int64_t TILE_WORDS = TILE_TOKENS / TOKENS;

  // Converts a pair of vectors of elements of all tokens.
  template <typename LoadPair>
  void convert(const HeadTile<T, CacheLayout::NHD>& h, int64_t d, const LoadPair& load_pair) {
    for (int t = h.tile.begin / TOKENS * TOKENS; t < h.tile.end; t += TOKENS) {
      TokenValues<Values, T> values;
      for (int i = 0; i < TOKENS; ++i) values[i] = nhd_value_at(h, t + i, h.tile.begin, h.tile.end);
      const Vecs<2> by_lane = load_pair(values);
      const Vecs<2> pair = Values::in_element_order(by_lane.of[0], by_lane.of[1]);
      PAGEDATTN_UNROLL
      for (int i = 0; i < NHD_PAIR; i += AT_ONCE) {
        float* const to = memory_ + (d + i) * TILE_WORDS + t / TOKENS * AT_ONCE;
        __builtin_memcpy(to, reinterpret_cast<const float*>(&pair) + i, AT_ONCE * sizeof(float));
      }
    }
  }

  int64_t begin_;
  float* memory_;
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
