// Products of words with columns (columns.h), for many_rows.h.
//
// A word is what one element of a vector holds: a float, or a pair of numbers in 16 bits. A word of the keys or values
// is repeated over a vector, and is multiplied with the same word of VEC_SIZE columns. A sum has a step of several
// words at a time. In attend_rows.h these are the lanes of a vector, which are added two by two in the end. Here they
// are chains of additions, one after the other or a few side by side, which are added two by two as well. So a sum has
// the same bits.
#pragma once

#include "attention/cpu/key_dot.h"
#include "attention/cpu/row_logits.h"
#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Words that are multiplied with a group at once: of so many tokens, or elements of the values.
constexpr int WORDS = 4;
constexpr int64_t WORD_BYTES = 4;

// Chains that are added up side by side, with so many vectors of a group: two where there are registers for their sums.
// More chains at once take more loads, and leave fewer sums that wait in memory.
template <int NUM_VECS>
constexpr int CHAINS = 2 * WORDS * NUM_VECS <= MAX_SUMS ? 2 : 1;

// Before the loop over steps. A step for 16 registers is so short that a jump and addresses are a quarter of it.
#if defined(__AVX512F__) || defined(__ARM_FEATURE_DOTPROD)
#define PAGEDATTN_UNROLL_STEPS
#else
#define PAGEDATTN_UNROLL_STEPS PAGEDATTN_UNROLL_BY(4)
#endif

struct Steps {
  int64_t begin, end;
};

// The sums of NUM_WORDS tokens or elements for the columns of a group, over some steps.
//
// Products: multiplies a word with columns, and adds. words_at(step): [NUM_WORDS, TOTAL_CHAINS] words. columns: [steps,
// TOTAL_CHAINS, NUM_VECS] vectors.
template <typename Products, int NUM_VECS, int NUM_WORDS, int TOTAL_CHAINS, typename WordsAt>
struct ChainSums {
  using V = SumVec<Products>;
  static constexpr int64_t SIZE = NUM_VECS * VEC_SIZE;
  static constexpr int AT_ONCE = TOTAL_CHAINS < CHAINS<NUM_VECS> ? TOTAL_CHAINS : CHAINS<NUM_VECS>;

  const WordsAt& words_at;
  Steps steps;
  const float* columns;

  // The sums of chains [FIRST, FIRST + COUNT). Chains are added two by two, and such sums two by two.
  template <int FIRST, int COUNT>
  PAGEDATTN_INLINE void add_up(Vec (&sums)[NUM_WORDS][NUM_VECS]) const {
    if constexpr (COUNT > AT_ONCE) {
      add_up<FIRST, COUNT / 2>(sums);
      Vec others[NUM_WORDS][NUM_VECS];
      add_up<FIRST + COUNT / 2, COUNT / 2>(others);
      add(sums, others);
    } else {
      Vec of_chain[COUNT][NUM_WORDS][NUM_VECS] = {};
      const float* of_step = columns + (steps.begin * TOTAL_CHAINS + FIRST) * SIZE;
      PAGEDATTN_UNROLL_STEPS
      for (int64_t step = steps.begin; step < steps.end; ++step) {
        multiply(words_at(step) + FIRST * WORD_BYTES, of_step, of_chain);
        of_step += TOTAL_CHAINS * SIZE;
      }
      PAGEDATTN_UNROLL
      for (int n = 1; n < COUNT; n *= 2) {
        PAGEDATTN_UNROLL
        for (int chain = 0; chain < COUNT; chain += 2 * n) add(of_chain[chain], of_chain[chain + n]);
      }
      __builtin_memcpy(sums, of_chain[0], sizeof sums);
    }
  }

 private:
  template <int COUNT>
  static PAGEDATTN_INLINE void multiply(const char* words, const float* of_step,
                                        Vec (&of_chain)[COUNT][NUM_WORDS][NUM_VECS]) {
    PAGEDATTN_UNROLL
    for (int chain = 0; chain < COUNT; ++chain) {
      Vec of_columns[NUM_VECS];
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_VECS; ++i) of_columns[i] = in_register(load(of_step + chain * SIZE + i * VEC_SIZE));
      PAGEDATTN_UNROLL
      for (int w = 0; w < NUM_WORDS; ++w) {
        const auto word = load_as<float>(words + (w * TOTAL_CHAINS + chain) * WORD_BYTES);
        const Vec repeated = load_repeated<1>(&word);
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_VECS; ++i) {
          Vec& sum = of_chain[chain][w][i];
          sum = Products::multiply_add(sum, repeated, of_columns[i]);
          // GCC 12 would keep some of the sums in memory.
          if constexpr (INTEGER_SUMS<Products>) sum = in_register(sum);
        }
      }
    }
  }

  static PAGEDATTN_INLINE void add(Vec (&sums)[NUM_WORDS][NUM_VECS], const Vec (&others)[NUM_WORDS][NUM_VECS]) {
    PAGEDATTN_UNROLL
    for (int w = 0; w < NUM_WORDS; ++w) {
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_VECS; ++i) sums[w][i] = (Vec)((V)sums[w][i] + (V)others[w][i]);
    }
  }
};

// The sums of all chains.
template <typename Products, int NUM_VECS, int NUM_WORDS, int TOTAL_CHAINS, typename WordsAt>
PAGEDATTN_INLINE void multiply_words(const WordsAt& words_at, Steps steps, const float* columns,
                                     Vec (&sums)[NUM_WORDS][NUM_VECS]) {
  using Sums = ChainSums<Products, NUM_VECS, NUM_WORDS, TOTAL_CHAINS, WordsAt>;
  Sums{words_at, steps, columns}.template add_up<0, TOTAL_CHAINS>(sums);
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
