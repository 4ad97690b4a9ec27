// What tile registers of AMX compute, for a few columns and by vectors, with the same bits; for amx_walk.h.
//
// With a few columns there is little to multiply, and packing for the tile registers would take longer than the reading
// of the cache. An instruction of AMX takes the even and the odd numbers of a step as two chains of multiply-adds, and
// adds the sum of both to what was there. Subnormal numbers count as zeros. Vectors do the same, as FlushedFloats
// (flushed_floats.h) surrounds the kernel. Their elements are tokens (keys), or elements of the values.
#pragma once

#include "attention/cpu/amx_pack.h"
#include "attention/cpu/amx_softmax.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// In every lane: element i of vector j becomes element j of vector i.
PAGEDATTN_INLINE void transpose_in_lanes(__m512i (&v)[4]) {
  const __m512i a = _mm512_maskz_unpacklo_epi32(0xffff, v[0], v[1]);
  const __m512i b = _mm512_maskz_unpackhi_epi32(0xffff, v[0], v[1]);
  const __m512i c = _mm512_maskz_unpacklo_epi32(0xffff, v[2], v[3]);
  const __m512i d = _mm512_maskz_unpackhi_epi32(0xffff, v[2], v[3]);
  v[0] = _mm512_maskz_unpacklo_epi64(0xff, a, c);
  v[1] = _mm512_maskz_unpackhi_epi64(0xff, a, c);
  v[2] = _mm512_maskz_unpacklo_epi64(0xff, b, d);
  v[3] = _mm512_maskz_unpackhi_epi64(0xff, b, d);
}

// The two numbers of each pair.
PAGEDATTN_INLINE Vec first_of_pairs(__m512i pairs) { return (Vec)((UintVec)pairs << 16); }
PAGEDATTN_INLINE Vec second_of_pairs(__m512i pairs) { return (Vec)((UintVec)pairs & 0xffff0000); }

// Stores sums[N], whose lane l has tokens l, 4 + l, 8 + l and 12 + l, as the logits of VEC_SIZE tokens.
template <int N>
PAGEDATTN_INLINE void store_by_token(const Vec (&sums)[N], float* logits) {
  if constexpr (N == 1) {
    store(logits, shuffle(sums[0], sums[0], [](int t) { return t % NUM_LANES * 4 + t / NUM_LANES; }));
  } else if constexpr (N == 2) {
    // Element e is of token e / 2, then of token 8 + e / 2.
    store(logits, shuffle(sums[0], sums[1], [](int e) { return e / 2 % 4 * 4 + e / 8 + e % 2 * VEC_SIZE; }));
    store(logits + VEC_SIZE,
          shuffle(sums[0], sums[1], [](int e) { return e / 2 % 4 * 4 + e / 8 + 2 + e % 2 * VEC_SIZE; }));
  } else {
    __m512i v[4] = {(__m512i)sums[0], (__m512i)sums[1], (__m512i)sums[2], (__m512i)sums[3]};
    transpose_in_lanes(v);
    for (int i = 0; i < 4; ++i) store(logits + i * VEC_SIZE, (Vec)v[i]);
  }
}

// The logits of VECS * VEC_SIZE tokens, from `token` of the tile on. `queries` are [num_steps * STEP, N]. Calls fetch()
// for every four cache lines.
template <int N, int VECS, typename Fetch>
PAGEDATTN_INLINE void multiply_keys_at(const PagedAttentionParams& p, const Tile<bfloat16>& tile, const bfloat16* keys,
                                       int token, const float* queries, float* logits, const Fetch& fetch) {
  constexpr int CHUNK = ELEMENTS_PER_CHUNK<bfloat16>;
  constexpr int STEP_CHUNKS = STEP / CHUNK;
  const int64_t chunk_stride = p.block_size * CHUNK;
  const int64_t num_chunks = p.head_size / CHUNK;
  const bfloat16* from[VECS][NUM_LANES];
  for (int v = 0; v < VECS; ++v) {
    for (int i = 0; i < NUM_LANES; ++i) from[v][i] = keys + tile.key_at(token + v * VEC_SIZE + i * NUM_LANES);
  }
  Vec sums[VECS][N] = {};
  for (int64_t first = 0; first < num_chunks; first += STEP_CHUNKS) {
    const int64_t end = first + STEP_CHUNKS < num_chunks ? first + STEP_CHUNKS : num_chunks;
    Vec even[VECS][N] = {};
    Vec odd[VECS][N] = {};
    for (int64_t chunk = first; chunk < end; ++chunk) {
      const float* const query = queries + chunk * CHUNK * N;
      PAGEDATTN_UNROLL
      for (int v = 0; v < VECS; ++v) {
        __m512i pairs[NUM_LANES];
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_LANES; ++i) pairs[i] = _mm512_loadu_si512(from[v][i] + chunk * chunk_stride);
        fetch();
        transpose_in_lanes(pairs);
        PAGEDATTN_UNROLL
        for (int i = 0; i < CHUNK / 2; ++i) {
          const Vec a = first_of_pairs(pairs[i]);
          const Vec b = second_of_pairs(pairs[i]);
          PAGEDATTN_UNROLL
          for (int n = 0; n < N; ++n) {
            even[v][n] = fma(a, load_repeated<1>(query + 2 * i * N + n), even[v][n]);
            odd[v][n] = fma(b, load_repeated<1>(query + (2 * i + 1) * N + n), odd[v][n]);
          }
        }
      }
    }
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) {
      PAGEDATTN_UNROLL
      for (int n = 0; n < N; ++n) sums[v][n] = sums[v][n] + (even[v][n] + odd[v][n]);
    }
  }
  for (int v = 0; v < VECS; ++v) store_by_token<N>(sums[v], logits + v * VEC_SIZE * N);
}

// The logits of tokens [begin, end) of the tile, which are whole steps.
template <int N, typename Fetch>
PAGEDATTN_INLINE void multiply_few_keys(const PagedAttentionParams& p, const Tile<bfloat16>& tile, const bfloat16* keys,
                                        const float* queries, int begin, int end, float* logits, const Fetch& fetch) {
  constexpr int VECS = 4 / N;  // as many chains as hide the latency of the multiply-adds
  int token = begin;
  for (; token + VECS * VEC_SIZE <= end; token += VECS * VEC_SIZE) {
    multiply_keys_at<N, VECS>(p, tile, keys, token, queries, logits + token * N, fetch);
  }
  for (; token < end; token += VEC_SIZE) {
    multiply_keys_at<N, 1>(p, tile, keys, token, queries, logits + token * N, fetch);
  }
}

// Adds the values of steps [begin, end), weighted, to values[num_row_groups, N, A_ROWS].
template <int N, typename Fetch>
PAGEDATTN_INLINE void add_few_values(const ValuePacker& values, int64_t row_groups, const FewWeights<N>& weights,
                                     int begin, int end, float* to, const Fetch& fetch) {
  for (int64_t group = 0; group < row_groups; ++group) {
    Vec sums[N];
    PAGEDATTN_UNROLL
    for (int n = 0; n < N; ++n) sums[n] = load(to + (group * N + n) * A_ROWS);
    for (int step = begin; step < end; ++step) {
      __m512i pairs[A_ROWS];
      values.load(step, group, [&](int i, __m512i tokens) PAGEDATTN_ALWAYS_INLINE { pairs[i] = tokens; }, fetch);
      transpose_16(pairs);
      const float* const upper = weights.upper + step * STEP * N;
      const float* const lower = weights.lower + step * STEP * N;
      Vec chains[N][4] = {};
      PAGEDATTN_UNROLL
      for (int i = 0; i < STEP_PAIRS; ++i) {
        const Vec a = first_of_pairs(pairs[i]);
        const Vec b = second_of_pairs(pairs[i]);
        PAGEDATTN_UNROLL
        for (int n = 0; n < N; ++n) {
          chains[n][0] = fma(a, load_repeated<1>(upper + 2 * i * N + n), chains[n][0]);
          chains[n][1] = fma(b, load_repeated<1>(upper + (2 * i + 1) * N + n), chains[n][1]);
          chains[n][2] = fma(a, load_repeated<1>(lower + 2 * i * N + n), chains[n][2]);
          chains[n][3] = fma(b, load_repeated<1>(lower + (2 * i + 1) * N + n), chains[n][3]);
        }
      }
      PAGEDATTN_UNROLL
      for (int n = 0; n < N; ++n) {
        sums[n] = sums[n] + (chains[n][0] + chains[n][1]);
        sums[n] = sums[n] + (chains[n][2] + chains[n][3]);
      }
    }
    PAGEDATTN_UNROLL
    for (int n = 0; n < N; ++n) store(to + (group * N + n) * A_ROWS, sums[n]);
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
