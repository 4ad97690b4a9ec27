// The tiles of AMX: eight registers of up to 16 rows of 64 bytes each, and instructions that multiply two of them. The
// instructions are written out, as the intrinsics of GCC 12 take no template argument for the number of a tile, and
// do not tell the compiler that a tile is read from memory.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu_vec.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int NUM_TILES = 8;
constexpr int TILE_ROWS = 16;  // at most
constexpr int TILE_ROW_BYTES = 64;

// Configures the tiles of this thread, and releases them at the end of the object's life. What they hold is zero at
// first. Nobody else uses tiles meanwhile: neither before nor after it do other libraries in this thread find tiles
// that are configured.
class TileConfiguration {
 public:
  // Tile i has num_rows[i] rows of row_bytes[i] bytes.
  PAGEDATTN_INLINE explicit TileConfiguration(const uint8_t (&num_rows)[NUM_TILES],
                                              const uint16_t (&row_bytes)[NUM_TILES] = {64, 64, 64, 64, 64, 64, 64,
                                                                                        64}) {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t num_rows[16] = {};
    } config;
    for (int i = 0; i < NUM_TILES; ++i) {
      config.row_bytes[i] = row_bytes[i];
      config.num_rows[i] = num_rows[i];
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  PAGEDATTN_INLINE ~TileConfiguration() { asm volatile("tilerelease"); }
  TileConfiguration(const TileConfiguration&) = delete;
  TileConfiguration& operator=(const TileConfiguration&) = delete;
};

// Instructions hold the numbers of tiles. Calls body.operator()<I>() for I from 0 to N - 1.
template <int N, typename Body>
PAGEDATTN_INLINE void for_each_number(const Body& body) {
  [&]<int... I>(std::integer_sequence<int, I...>)
      PAGEDATTN_ALWAYS_INLINE { (body.template operator()<I>(), ...); }(std::make_integer_sequence<int, N>{});
}

template <int TILE>
PAGEDATTN_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}

// stride: bytes between two rows of the tile.
template <int TILE>
PAGEDATTN_INLINE void load_tile(const void* source, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(source), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
PAGEDATTN_INLINE void store_tile(void* target, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(target), "r"(stride), "i"(TILE) : "memory");
}

// The tile SUMS, of fp32, [rows of A][16], += products of the tile A, of bf16, [rows of A][pairs][2], and the tile B,
// [pairs][16][2]. Even and odd elements are two chains of multiply-adds, and their sum is added to SUMS. Denormals
// count as zeros.
template <int SUMS, int A, int B>
PAGEDATTN_INLINE void add_bfloat16_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
}

// The tile SUMS, of int32, [rows of A][16], += products of the tile A, of int8, [rows of A][quads][4], and the tile B,
// of uint8, [quads][16][4].
template <int SUMS, int A, int B>
PAGEDATTN_INLINE void add_byte_products() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
}

// The same, of int8 in both tiles.
template <int SUMS, int A, int B>
PAGEDATTN_INLINE void add_signed_byte_products() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
