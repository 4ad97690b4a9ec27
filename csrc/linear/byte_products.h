// What the products of quantized rows with panels of quantized weights share: sums of 4 products of bytes, tiles of
// rows.
#pragma once

#include "cpu_vec.h"
#include "linear/linear_quantized.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int PANEL_VECS = LINEAR_PANEL / VEC_SIZE;

// Adds the products of the weights of VEC_SIZE columns with a quad of codes, the same for each column. Modulo 2^32: the
// sums fit when the 128s have been taken off.
PAGEDATTN_INLINE UintVec add_products(UintVec sums, UintVec weights, UintVec codes) {
#if defined(__AVX512VNNI__)
  return (UintVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)codes);
#elif defined(__AVX512F__)
  const __m512i pairs = _mm512_maskz_maddubs_epi16(~0u, (__m512i)weights, (__m512i)codes);
  return sums + (UintVec)_mm512_maskz_madd_epi16(0xffff, pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)codes);
  return sums + (UintVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int i = 0; i < QUAD; ++i) sums += (weights >> 8 * i & 0xff) * (UintVec)((IntVec)(codes << (24 - 8 * i)) >> 24);
  return sums;
#endif
}

PAGEDATTN_INLINE UintVec broadcast_quad(const int8_t* codes) { return UintVec{} + load_as<uint32_t>(codes); }

// Calls tile.operator()<ROWS>(row) for tiles of MAX_ROWS rows, and once for those that are left.
template <int MAX_ROWS, typename Tile>
PAGEDATTN_INLINE void for_each_tile(int64_t row, int64_t num_rows, const Tile& tile) {
  for (; row + MAX_ROWS <= num_rows; row += MAX_ROWS) tile.template operator()<MAX_ROWS>(row);
  if constexpr (MAX_ROWS > 1) for_each_tile<MAX_ROWS - 1>(row, num_rows, tile);
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
