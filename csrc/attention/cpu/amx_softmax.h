// The softmax of logits as tile registers of AMX leave them, for amx_walk.h.
//
// The logits of a tile are [TILE_TOKENS, N]: N columns, which are (query row, head) pairs, and N divides VEC_SIZE. So a
// vector has VEC_SIZE / N tokens of all columns, and element e of a vector belongs to column e % N. What a column has
// for itself is a vector with the column's number in each of its elements.
//
// A column has the same bits with every N. Its exponentials are summed in VEC_SIZE sums, of each VEC_SIZE-th token,
// and the sums are added in one order.
#pragma once

#include "attention/cpu/amx_pack.h"
#include "attention/cpu/tile.h"
#include "cpu_math.h"
#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

template <int N>
struct alignas(64) ColumnLogits {
  float at[TILE_TOKENS * N];
};

// A weight is the sum of two numbers in bfloat16, so that it keeps 16 binary digits. [TILE_TOKENS / STEP, STEP_PAIRS,
// N] pairs of tokens each: B of an instruction.
template <int N>
struct alignas(64) ColumnWeights {
  uint32_t upper[TILE_TOKENS / 2 * N];
  uint32_t lower[TILE_TOKENS / 2 * N];
};

// The same two numbers as floats, [TILE_TOKENS, N] each.
template <int N>
struct alignas(64) FewWeights {
  float upper[TILE_TOKENS * N];
  float lower[TILE_TOKENS * N];
};

// Combines all elements of a column; each element gets the result. Sums are taken from the most distant tokens first.
template <int N, typename Combine>
PAGEDATTN_INLINE Vec combine_tokens(Vec v, const Combine& combine) {
  if constexpr (N <= 8) v = combine(v, shuffle(v, v, [](int i) { return i ^ 8; }));
  if constexpr (N <= 4) v = combine(v, shuffle(v, v, [](int i) { return i ^ 4; }));
  if constexpr (N <= 2) v = combine(v, shuffle(v, v, [](int i) { return i ^ 2; }));
  if constexpr (N <= 1) v = combine(v, shuffle(v, v, [](int i) { return i ^ 1; }));
  return v;
}

// 2^x for x <= 0 within 2e-7 of itself, and 0 below -126. NaN stays NaN.
PAGEDATTN_INLINE Vec exp2_of_negative(Vec x) {
  constexpr int LESS_FLOOR = 0x09;
  constexpr float LEAST = -126.0f;
  const Vec r = (Vec)_mm512_maskz_reduce_ps(0xffff, (__m512)x, LESS_FLOOR);
  const Vec mantissa = polynomial(r, {1.0f, 0.6931513f, 0.24016444f, 0.055799913f, 0.00901703f, 0.0018671302f});
  const __mmask16 not_small = _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(LEAST), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(not_small, (__m512)mantissa, (__m512)x);
}

// The logits of a call, in the unit in which they are kept. As a rule this is a product of query and key, before it is
// scaled. If something is to be added to the logits, they are scaled first.
struct LogitUnit {
  bool are_plain;
  float to_natural;  // times a kept logit
  float to_binary;   // 2^(to_binary * x) is e^(to_natural * x)

  explicit LogitUnit(const PagedAttentionParams& p)
      : are_plain(p.logit_scale > 0.0f && p.softcap == 0.0f && p.alibi_slopes == nullptr),
        to_natural(are_plain ? p.logit_scale : 1.0f),
        to_binary(to_natural * 1.44269504f) {}
};

// Applies the scale, softcap and ALiBi where logits are not plain.
template <int N>
__attribute__((noinline)) void change_logits(const PagedAttentionParams& p, Vec slopes, IntVec distance, int begin,
                                             int end, ColumnLogits<N>& logits) {
  for (int i = begin * N; i < end * N; i += VEC_SIZE) {
    Vec x = load(logits.at + i) * p.logit_scale;
    if (p.softcap > 0.0f) x = p.softcap * tanh(x / p.softcap);
    if (p.alibi_slopes != nullptr) {
      const IntVec token = (iota() + i) / N;
      const IntVec to_token = token + distance;
      x = fma(slopes, __builtin_convertvector(to_token > 0 ? -to_token : to_token, Vec), x);
    }
    store(logits.at + i, x);
  }
}

template <int N>
__attribute__((noinline)) void mask_logits(const VisibleTokens& visible, int begin, int end, ColumnLogits<N>& logits) {
  for (int i = begin * N; i < end * N; i += VEC_SIZE) {
    const IntVec token = (iota() + i) / N;
    store(logits.at + i,
          select((token >= visible.begin) & (token < visible.end), load(logits.at + i), broadcast(-__builtin_inff())));
  }
}

template <int N>
PAGEDATTN_INLINE Vec max_logits(const ColumnLogits<N>& logits, int begin, int end, Vec max_logit) {
  Vec several[2] = {max_logit, max_logit};
  // A NaN is passed over here. The exponentials bring it out.
  for (int i = begin * N; i < end * N; i += STEP * N) {
    PAGEDATTN_UNROLL_BY(2)
    for (int j = 0; j < STEP * N; j += 2 * VEC_SIZE) {
      several[0] = max(load(logits.at + i + j), several[0]);
      several[1] = max(load(logits.at + i + j + VEC_SIZE), several[1]);
    }
  }
  return combine_tokens<N>(max(several[0], several[1]), [](Vec a, Vec b) PAGEDATTN_ALWAYS_INLINE { return max(a, b); });
}

// For every pair of B: where its first and second number lie in two vectors of tokens with N columns each. In elements
// of 16 bits; `part` is 1 for the upper half of a float.
template <int N>
struct PairPlaces {
  alignas(64) uint16_t in_floats[STEP];   // of 2 * VEC_SIZE floats: their upper halves
  alignas(64) uint16_t in_rounded[STEP];  // of 2 * VEC_SIZE numbers in bfloat16

  constexpr PairPlaces() : in_floats(), in_rounded() {
    for (int i = 0; i < STEP; ++i) {
      const int pair = i / 2 / N;
      const int column = i / 2 % N;
      in_rounded[i] = static_cast<uint16_t>((2 * pair + i % 2) * N + column);
      in_floats[i] = static_cast<uint16_t>(2 * in_rounded[i] + 1);
    }
  }
};
template <int N>
constexpr PairPlaces<N> PAIR_PLACES;

// The weights of two vectors of logits from `i` on, as B of an instruction.
template <int N>
PAGEDATTN_INLINE void store_weights(const Vec (&w)[2], const Vec (&upper)[2], __m512i rounded_rest, int i,
                                    ColumnWeights<N>& weights) {
  __m512i pairs;
  if constexpr (N == VEC_SIZE) {
    pairs = (__m512i)(((UintVec)w[0] >> 16) | (UintVec)upper[1]);
  } else {
    const auto in_floats = load_as<__m512i>(PAIR_PLACES<N>.in_floats);
    pairs = _mm512_maskz_permutex2var_epi16(0xffffffff, (__m512i)w[0], in_floats, (__m512i)w[1]);
  }
  const auto in_rounded = load_as<__m512i>(PAIR_PLACES<N>.in_rounded);
  _mm512_store_si512(weights.upper + i / 2, pairs);
  _mm512_store_si512(weights.lower + i / 2, _mm512_maskz_permutexvar_epi16(0xffffffff, in_rounded, rounded_rest));
}

// The same as floats.
template <int N>
PAGEDATTN_INLINE void store_weights(const Vec (&)[2], const Vec (&upper)[2], __m512i rounded_rest, int i,
                                    FewWeights<N>& weights) {
  bfloat16 lower[STEP];
  _mm512_storeu_si512(lower, rounded_rest);
  for (int j = 0; j < 2; ++j) {
    store(weights.upper + i + j * VEC_SIZE, upper[j]);
    store(weights.lower + i + j * VEC_SIZE, load(lower + j * VEC_SIZE));
  }
}

// Turns the logits of tokens [begin, end), which are whole steps, into weights: exponentials relative to `base`.
// Returns their sums.
template <int N, typename Weights>
PAGEDATTN_INLINE Vec make_weights(const ColumnLogits<N>& logits, int begin, int end, Vec base, float to_binary,
                                  Weights& weights) {
  const UintVec upper_half = UintVec{} + 0xffff0000;
  Vec sums[N] = {};
  for (int step = begin * N; step < end * N; step += STEP * N) {
    PAGEDATTN_UNROLL_BY(2)
    for (int i = 0; i < STEP * N; i += 2 * VEC_SIZE) {
      Vec w[2];
      Vec upper[2];
      PAGEDATTN_UNROLL
      for (int j = 0; j < 2; ++j) {
        w[j] = exp2_of_negative((load(logits.at + step + i + j * VEC_SIZE) - base) * to_binary);
        upper[j] = (Vec)((UintVec)w[j] & upper_half);
        Vec& sum = sums[(i / VEC_SIZE + j) % N];
        sum = sum + w[j];
      }
      const auto rest = (__m512i)_mm512_cvtne2ps_pbh((__m512)(w[1] - upper[1]), (__m512)(w[0] - upper[0]));
      store_weights(w, upper, rest, step + i, weights);
    }
  }
  PAGEDATTN_UNROLL
  for (int n = N / 2; n >= 1; n /= 2) {
    for (int i = 0; i < n; ++i) sums[i] = sums[i] + sums[i + n];
  }
  return combine_tokens<N>(sums[0], [](Vec a, Vec b) PAGEDATTN_ALWAYS_INLINE { return a + b; });
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
