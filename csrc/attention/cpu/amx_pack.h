// Keys, values and queries as tile registers of AMX want them, for amx_walk.h.
//
// One instruction multiplies A, 16 rows of 32 numbers in bfloat16, with B, the same 32 numbers of up to 16 columns in
// pairs: row i of B has numbers 2 * i and 2 * i + 1 of each column. A column is a (query row, head) pair here. The rows
// of A are tokens with 32 elements each (keys), or elements with 32 tokens each (values, which the cache keeps this
// way). What is 32 numbers long is called a step.
#pragma once

#include "attention/cpu/item_scratch.h"
#include "attention/cpu/tile.h"
#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int A_SIZE = A_ROWS * STEP;

// What is packed of a tile at one KV head. Where several batches of columns multiply it, all of the tile:
// keys [TILE_TOKENS / A_ROWS, num_steps(head_size)] A, values [TILE_TOKENS / STEP, num_row_groups(head_size)] A. Where
// one batch does, only what is multiplied next, so that it stays in the first-level cache.
struct Packed {
  alignas(64) bfloat16 keys[TILE_TOKENS * MAX_HEAD_SIZE];
  alignas(64) bfloat16 values[TILE_TOKENS * MAX_HEAD_SIZE];
};

// Lane i of vector j becomes lane j of vector i. Lanes have 128 bits.
PAGEDATTN_INLINE void transpose_4_lanes(__m512i (&v)[4]) {
  const __m512i a = _mm512_maskz_shuffle_i64x2(0xff, v[0], v[1], 0x88);  // lanes 0 and 2 of both
  const __m512i b = _mm512_maskz_shuffle_i64x2(0xff, v[2], v[3], 0x88);
  const __m512i c = _mm512_maskz_shuffle_i64x2(0xff, v[0], v[1], 0xdd);  // lanes 1 and 3 of both
  const __m512i d = _mm512_maskz_shuffle_i64x2(0xff, v[2], v[3], 0xdd);
  v[0] = _mm512_maskz_shuffle_i64x2(0xff, a, b, 0x88);
  v[1] = _mm512_maskz_shuffle_i64x2(0xff, c, d, 0x88);
  v[2] = _mm512_maskz_shuffle_i64x2(0xff, a, b, 0xdd);
  v[3] = _mm512_maskz_shuffle_i64x2(0xff, c, d, 0xdd);
}

// Element i of vector j becomes element j of vector i.
PAGEDATTN_INLINE void transpose_16(__m512i (&v)[16]) {
  __m512i t[16];
  PAGEDATTN_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_maskz_unpacklo_epi32(0xffff, v[i], v[i + 1]);
    t[i + 1] = _mm512_maskz_unpackhi_epi32(0xffff, v[i], v[i + 1]);
  }
  // Now lane l of w[g][j] has elements 4 * l + j of vectors 4 * g to 4 * g + 3.
  __m512i w[4][4];
  PAGEDATTN_UNROLL
  for (int g = 0; g < 4; ++g) {
    w[g][0] = _mm512_maskz_unpacklo_epi64(0xff, t[4 * g], t[4 * g + 2]);
    w[g][1] = _mm512_maskz_unpackhi_epi64(0xff, t[4 * g], t[4 * g + 2]);
    w[g][2] = _mm512_maskz_unpacklo_epi64(0xff, t[4 * g + 1], t[4 * g + 3]);
    w[g][3] = _mm512_maskz_unpackhi_epi64(0xff, t[4 * g + 1], t[4 * g + 3]);
  }
  PAGEDATTN_UNROLL
  for (int j = 0; j < 4; ++j) {
    __m512i lanes[4] = {w[0][j], w[1][j], w[2][j], w[3][j]};
    transpose_4_lanes(lanes);
    PAGEDATTN_UNROLL
    for (int l = 0; l < 4; ++l) v[4 * l + j] = lanes[l];
  }
}

// The keys of A_ROWS tokens at one KV head, from `token` of the tile on.
class KeyPacker {
 public:
  KeyPacker(const PagedAttentionParams& p, const Tile<bfloat16>& tile, const bfloat16* keys, int token)
      : chunk_stride_(p.block_size * CHUNK), num_chunks_(p.head_size / CHUNK) {
    for (int i = 0; i < GROUPS; ++i) from_[i] = keys + tile.key_at(token + NUM_LANES * i);
  }

  // Packs a step of the tokens' elements. Past the head's elements there are zeros. Calls after() after every four
  // vectors.
  template <typename After>
  PAGEDATTN_INLINE void pack(int64_t step, bfloat16* packed, const After& after) const {
    const int64_t first = step * STEP_CHUNKS;
    if (first + STEP_CHUNKS <= num_chunks_) {
      pack_chunks(packed, after, [&](const bfloat16* chunks, int j) PAGEDATTN_ALWAYS_INLINE {
        return _mm512_loadu_si512(chunks + (first + j) * chunk_stride_);
      });
    } else {
      pack_chunks(packed, after, [&](const bfloat16* chunks, int j) PAGEDATTN_ALWAYS_INLINE {
        return first + j < num_chunks_ ? _mm512_loadu_si512(chunks + (first + j) * chunk_stride_) : __m512i{};
      });
    }
  }

 private:
  static constexpr int CHUNK = ELEMENTS_PER_CHUNK<bfloat16>;
  static constexpr int STEP_CHUNKS = STEP / CHUNK;
  static constexpr int GROUPS = A_ROWS / NUM_LANES;  // of tokens whose chunks are in a vector

  template <typename After, typename Load>
  PAGEDATTN_INLINE void pack_chunks(bfloat16* packed, const After& after, const Load& load_chunk) const {
    PAGEDATTN_UNROLL
    for (int i = 0; i < GROUPS; ++i) {
      __m512i v[STEP_CHUNKS];
      PAGEDATTN_UNROLL
      for (int j = 0; j < STEP_CHUNKS; ++j) v[j] = load_chunk(from_[i], j);
      transpose_4_lanes(v);
      PAGEDATTN_UNROLL
      for (int j = 0; j < NUM_LANES; ++j) _mm512_store_si512(packed + (NUM_LANES * i + j) * STEP, v[j]);
      after();
    }
  }

  int64_t chunk_stride_;
  int64_t num_chunks_;
  const bfloat16* from_[GROUPS];
};

// The values of a tile at one KV head.
class ValuePacker {
 public:
  ValuePacker(const PagedAttentionParams& p, const Tile<bfloat16>& tile, const bfloat16* values)
      : head_size_(p.head_size), block_size_(p.block_size), tile_(tile), values_(values) {}

  // Loads A_ROWS elements, of group `group`, of the tokens of a step: a vector of tokens for each element. Tokens that
  // no row sees have zeros, as 0 * NaN is NaN. So have the elements past the head. Calls use(i, vector) for each
  // element, and after() after every four vectors.
  template <typename Use, typename After>
  PAGEDATTN_INLINE void load(int step, int64_t group, const Use& use, const After& after) const {
    if (block_size_ >= STEP) {
      load_rows(step, group, use, after, block_size_,
                [](const bfloat16* const* from, int64_t offset)
                    PAGEDATTN_ALWAYS_INLINE { return _mm512_loadu_si512(from[0] + offset); });
    } else if (block_size_ == 16) {
      load_rows(step, group, use, after, 16, [](const bfloat16* const* from, int64_t offset) PAGEDATTN_ALWAYS_INLINE {
        return join(load_as<__m256i>(from[0] + offset), load_as<__m256i>(from[2] + offset));
      });
    } else {
      load_rows(step, group, use, after, 8, [](const bfloat16* const* from, int64_t offset) PAGEDATTN_ALWAYS_INLINE {
        return join(join(load_as<__m128i>(from[0] + offset), load_as<__m128i>(from[1] + offset)),
                    join(load_as<__m128i>(from[2] + offset), load_as<__m128i>(from[3] + offset)));
      });
    }
  }

  // Packs `count` groups of elements, from `group` on.
  template <typename After>
  PAGEDATTN_INLINE void pack(int step, int64_t group, int64_t count, bfloat16* packed, const After& after) const {
    for (int64_t i = 0; i < count; ++i) {
      load(
          step, group + i,
          [&](int row, __m512i tokens) PAGEDATTN_ALWAYS_INLINE { _mm512_store_si512(packed + row * STEP, tokens); },
          after);
      packed += A_SIZE;
    }
  }

 private:
  static PAGEDATTN_INLINE __m256i join(__m128i lower, __m128i upper) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(lower), upper, 1);
  }
  static PAGEDATTN_INLINE __m512i join(__m256i lower, __m256i upper) {
    return _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(lower), upper, 1);
  }

  template <typename Use, typename After, typename Load>
  PAGEDATTN_INLINE void load_rows(int step, int64_t group, const Use& use, const After& after, int64_t stride,
                                  const Load& load_row) const {
    const int first = tile_.begin - step * STEP;
    const int end = tile_.end - step * STEP;
    uint32_t visible = 0xffffffff;
    if (first > 0) visible &= 0xffffffffu << first;
    if (end < STEP) visible &= (1u << end) - 1;
    constexpr int LOCATED = Tile<bfloat16>::LOCATED;
    const bfloat16* from[STEP / LOCATED];
    for (int i = 0; i < STEP / LOCATED; ++i) {
      from[i] = values_ + tile_.value_at(step * STEP + i * LOCATED) + group * A_ROWS * stride;
    }
    const int64_t rows = head_size_ - group * A_ROWS;
    const auto use_rows = [&](const auto& row_at) PAGEDATTN_ALWAYS_INLINE {
      PAGEDATTN_UNROLL
      for (int i = 0; i < A_ROWS; ++i) {
        use(i, _mm512_maskz_mov_epi16(visible, row_at(i)));
        if (i % 4 == 3) after();
      }
    };
    if (rows >= A_ROWS) {
      use_rows([&](int i) PAGEDATTN_ALWAYS_INLINE { return load_row(from, i * stride); });
    } else {
      use_rows([&](int i) PAGEDATTN_ALWAYS_INLINE { return i < rows ? load_row(from, i * stride) : __m512i{}; });
    }
  }

  int64_t head_size_;
  int64_t block_size_;
  const Tile<bfloat16>& tile_;
  const bfloat16* values_;
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
