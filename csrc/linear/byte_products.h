// What linear_int8 and linear_int4 share: sums of 4 products of bytes, and tiles of rows.
#pragma once

#include "linear/linear_quantized.h"
#include "linear/panels.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int BYTES_PER_QUAD = LINEAR_PANEL * QUAD;  // of a panel

// So many rows leave registers for the operands. A single tile may have more rows than one of several tiles: it reads
// fewer panels side by side, or takes fewer vectors of them at a time, and all its rows share what is loaded or
// unpacked.
constexpr int MAX_TILE_ROWS = NUM_REGISTERS == 32 ? 6 : 4;
constexpr int MAX_SINGLE_TILE_ROWS = VEC_BYTES >= 32 ? 12 : MAX_TILE_ROWS;

// Up to so many single tiles of int4 unpack the weights one after the other, each in registers: this takes less time
// than to unpack them once, into memory.
#if defined(__AVX512VNNI__)
constexpr int MOST_SINGLE_TILES = 4;
#else
constexpr int MOST_SINGLE_TILES = VEC_BYTES == 64 ? 2 : 1;
#endif

constexpr int64_t num_single_tiles(int64_t num_rows) {
  return (num_rows + MAX_SINGLE_TILE_ROWS - 1) / MAX_SINGLE_TILE_ROWS;
}

constexpr int64_t max_tile_rows(const LinearInt8Params& p) {
  return p.num_rows <= MAX_SINGLE_TILE_ROWS ? MAX_SINGLE_TILE_ROWS : MAX_TILE_ROWS;
}
constexpr int64_t max_tile_rows(const LinearInt4Params& p) {
  const int64_t num_tiles = num_single_tiles(p.num_rows);
  return num_tiles <= MOST_SINGLE_TILES ? (p.num_rows + num_tiles - 1) / num_tiles : MAX_TILE_ROWS;
}

// How many panels a single tile is multiplied with at once. Each panel is a stream of memory.
constexpr int panels_at_once(int rows) { return rows <= MAX_TILE_ROWS || TILE_PANELS == 1 ? TILE_PANELS : 2; }

#if defined(__ARM_FEATURE_DOTPROD)
// For an instruction that takes the first quad alone.
PAGEDATTN_INLINE UintVec broadcast_quad(const int8_t* codes) {
  return (UintVec)vcombine_u64(vcreate_u64(load_as<uint32_t>(codes)), vcreate_u64(0));
}
#else
PAGEDATTN_INLINE UintVec broadcast_quad(const int8_t* codes) { return UintVec{} + load_as<uint32_t>(codes); }
#endif

// As add_products wants the weights of linear_int8, which are stored 128 too large. Without i8mm, NEON has no
// instruction that takes one factor with a sign and one without.
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr uint32_t WEIGHT_EXCESS = 0;
PAGEDATTN_INLINE UintVec load_weights(const uint8_t* weights) { return load_as<UintVec>(weights) ^ 0x80808080; }
#else
constexpr uint32_t WEIGHT_EXCESS = 128;
PAGEDATTN_INLINE UintVec load_weights(const uint8_t* weights) { return load_as<UintVec>(weights); }
#endif

// Each of VEC_SIZE columns has 4 weights. Adds their products with a quad of codes, which is the same for each column.
// Sums are modulo 2^32: they fit when the 128s have been taken off.
PAGEDATTN_INLINE UintVec add_products(UintVec sums, UintVec weights, UintVec codes) {
#if defined(__AVX512VNNI__)
  return (UintVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)codes);
#elif defined(__AVX512F__)
  const __m512i pairs = _mm512_maskz_maddubs_epi16(~0u, (__m512i)weights, (__m512i)codes);
  return sums + (UintVec)_mm512_maskz_madd_epi16(0xffff, pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)codes);
  return sums + (UintVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (UintVec)vusdotq_lane_s32((int32x4_t)sums, (uint8x16_t)weights, vget_low_s8((int8x16_t)codes), 0);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (UintVec)vdotq_lane_s32((int32x4_t)sums, (int8x16_t)weights, vget_low_s8((int8x16_t)codes), 0);
#else
  for (int i = 0; i < QUAD; ++i) sums += (weights >> 8 * i & 0xff) * (UintVec)((IntVec)(codes << (24 - 8 * i)) >> 24);
  return sums;
#endif
}

// The tile that a row belongs to. The rows that are left in the end are a smaller tile.
template <typename Params>
PAGEDATTN_INLINE int64_t first_row_of_tile(const Params& p, int64_t row) {
  return row - row % max_tile_rows(p);
}
template <typename Params>
PAGEDATTN_INLINE int64_t rows_of_tile(const Params& p, int64_t first_row) {
  return smaller(p.num_rows - first_row, max_tile_rows(p));
}

// Where the codes of a row lie. Codes lie tile by tile, and in a tile quad by quad: the quads of all its rows are side
// by side.
struct RowCodes {
  int8_t* first;
  int64_t quad_stride;

  // Stores VEC_SIZE codes, from element `i` of the row on.
  PAGEDATTN_INLINE void store(int64_t i, IntVec codes) const {
    const ByteVec bytes = low_bytes((UintVec)codes);
    uint32_t quads[VEC_SIZE / QUAD];
    __builtin_memcpy(quads, &bytes, sizeof bytes);
    PAGEDATTN_UNROLL
    for (int q = 0; q < VEC_SIZE / QUAD; ++q) {
      __builtin_memcpy(first + (i / QUAD + q) * quad_stride, &quads[q], QUAD);
    }
  }
};

template <typename Params>
PAGEDATTN_INLINE RowCodes row_codes(const Params& p, int64_t row) {
  const int64_t tile = first_row_of_tile(p, row);
  return {p.codes + tile * p.code_stride + (row - tile) * QUAD, rows_of_tile(p, tile) * QUAD};
}

// Calls tile.operator()<ROWS>(row) for tiles of MAX_ROWS rows, and once for the rows that are left.
template <int MAX_ROWS, typename Tile>
PAGEDATTN_INLINE void for_each_tile(int64_t row, int64_t num_rows, const Tile& tile) {
  for (; row + MAX_ROWS <= num_rows; row += MAX_ROWS) tile.template operator()<MAX_ROWS>(row);
  if constexpr (MAX_ROWS > 1) for_each_tile<MAX_ROWS - 1>(row, num_rows, tile);
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
