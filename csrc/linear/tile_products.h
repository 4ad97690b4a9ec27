// linear_packed with rows and weights in bf16 on the tiles of AMX. A tile of sums holds up to 16 rows by a panel of 16
// features. Four such sums go together: of one tile of rows, or of more tiles of rows and fewer panels. Each product
// adds TILE_STEP elements along in_features to the sums, in the order of in_features, so that the bits of a row depend
// neither on the rows beside it nor on the blocks below.
//
// A product wants the two elements of a pair beside each other, and a packed weight has them 16 features apart. So a
// block of weights is converted once for all rows, into the nearest cache. For a single row the conversion would take
// longer than the reading of the weights: vectors compute what tiles would compute.
#pragma once

#include "cpu_memory.h"
#include "cpu_tiles.h"
#include "linear/linear_packed.h"
#include "linear/panels.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int64_t TILE_STEP = TILE_ROW_BYTES / sizeof(bfloat16);  // elements along in_features
constexpr int TILE_PAIRS = TILE_STEP / 2;
// Steps of a block. With many tiles of rows, a block of four panels takes 32 KiB. Up to four tiles of rows keep their
// sums in registers from block to block, and memory is to be read all the time: the less they multiply at a time, the
// better.
constexpr int64_t TILE_BLOCK_STEPS = 8;
constexpr int64_t FEW_TILES_BLOCK_STEPS = 2;

using TileWeights = uint32_t[TILE_PAIRS][LINEAR_PANEL];  // pairs of bf16

// Tiles of rows, of one size. The last rows of the last tile may be none of the input, and hold anything.
struct RowTiles {
  int64_t num_tiles;
  int64_t tile_rows;

  explicit RowTiles(int64_t num_rows)
      : num_tiles((num_rows + TILE_ROWS - 1) / TILE_ROWS), tile_rows((num_rows + num_tiles - 1) / num_tiles) {}
  int64_t num_rows() const { return num_tiles * tile_rows; }
};

// Rows [begin, end) become [steps][rows of all tiles][TILE_STEP], filled up with zeros along in_features.
inline void convert_rows_to_tiles(const LinearPackedParams& p, int64_t begin, int64_t end) {
  const int64_t row_step = RowTiles(p.num_rows).num_rows() * TILE_STEP;
  for (int64_t i = begin; i < end; ++i) {
    const bfloat16* row = static_cast<const bfloat16*>(p.input) + i * p.input_stride;
    bfloat16* converted = static_cast<bfloat16*>(p.rows) + i * TILE_STEP;
    int64_t size = p.in_features;
    for (; size >= TILE_STEP; size -= TILE_STEP, row += TILE_STEP, converted += row_step) {
      __builtin_memcpy(converted, row, TILE_ROW_BYTES);
    }
    if (size > 0) {
      __builtin_memset(converted, 0, TILE_ROW_BYTES);
      __builtin_memcpy(converted, row, size * sizeof(bfloat16));
    }
  }
}

// Two elements of all features of a panel: the first elements, then the second elements, become pairs.
PAGEDATTN_INLINE __m512i to_pairs(__m512i elements) {
  const UintVec side_by_side = (UintVec)iota() * 0x10001 + 0x100000;  // 0, 16, 1, 17, ... in 16 bits each
  return _mm512_maskz_permutexvar_epi16(~0u, (__m512i)side_by_side, elements);
}

// Converts num_elements along in_features, up to a block, of PANELS panels. The last step is filled up with zeros.
// Calls prefetch(address) for each pair of the first panel.
template <int PANELS, typename Prefetch>
PAGEDATTN_INLINE void convert_weights(const bfloat16* weights, int64_t panel_size, int64_t num_elements,
                                      const Prefetch& prefetch, TileWeights (*converted)[PANELS]) {
  for (int64_t element = 0; element < num_elements; element += 2) {
    const bfloat16* first = weights + element * LINEAR_PANEL;
    prefetch(first);
    const __mmask32 there = element + 1 < num_elements ? ~0u : 0xffff;
    PAGEDATTN_UNROLL
    for (int i = 0; i < PANELS; ++i) {
      const __m512i elements = _mm512_maskz_loadu_epi16(there, first + i * panel_size);
      _mm512_store_si512(converted[element / TILE_STEP][i] + element % TILE_STEP / 2, to_pairs(elements));
    }
  }
  for (int64_t pair = (num_elements + 1) / 2; pair % TILE_PAIRS != 0; ++pair) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < PANELS; ++i) {
      _mm512_store_si512(converted[pair / TILE_PAIRS][i] + pair % TILE_PAIRS, __m512i{});
    }
  }
}

// The tiles of sums [0, ROW_TILES * PANELS) += rows times weights, for num_steps steps. Tiles of rows, of tile_rows
// rows each, follow each other; rows of the next step are row_step further. Calls prefetch(step).
template <int ROW_TILES, int PANELS, typename Prefetch>
PAGEDATTN_INLINE void add_tile_products(const bfloat16* rows, int64_t tile_rows, int64_t row_step,
                                        const TileWeights (*weights)[PANELS], int64_t num_steps,
                                        const Prefetch& prefetch) {
  constexpr int ROWS = ROW_TILES * PANELS, WEIGHTS = ROWS + 1;  // numbers of tiles
  static_assert(ROW_TILES == 1 || WEIGHTS + PANELS <= NUM_TILES);
  for (int64_t step = 0; step < num_steps; ++step) {
    prefetch(step);
    for_each_number<ROW_TILES>([&]<int R>() PAGEDATTN_ALWAYS_INLINE {
      load_tile<ROWS>(rows + step * row_step + R * tile_rows * TILE_STEP, TILE_ROW_BYTES);
      for_each_number<PANELS>([&]<int I>() PAGEDATTN_ALWAYS_INLINE {
        constexpr int W = WEIGHTS + I % (NUM_TILES - WEIGHTS);
        if constexpr (R == 0) load_tile<W>(weights[step][I], TILE_ROW_BYTES);
        add_bfloat16_products<R * PANELS + I, ROWS, W>();
      });
    });
  }
}

template <int SUMS>
void zero_sums() {
  for_each_number<SUMS>([]<int I>() PAGEDATTN_ALWAYS_INLINE { zero_tile<I>(); });
}
// Of a tile of rows.
template <int PANELS>
void load_sums(const float* sums) {
  for_each_number<PANELS>([&]<int I>() PAGEDATTN_ALWAYS_INLINE {
    load_tile<I>(sums + I * LINEAR_PANEL, PANELS * LINEAR_PANEL * sizeof(float));
  });
}
template <int ROW_TILES, int PANELS>
void store_sums(int64_t tile_rows, float* sums) {
  for_each_number<ROW_TILES * PANELS>([&]<int I>() PAGEDATTN_ALWAYS_INLINE {
    store_tile<I>(sums + (I / PANELS * tile_rows * PANELS + I % PANELS) * LINEAR_PANEL,
                  PANELS * LINEAR_PANEL * sizeof(float));
  });
}

// The tiles [0, ROW_TILES * PANELS) are sums. The next tile is for rows, all others are for weights.
template <int ROW_TILES, int PANELS>
TileConfiguration configure_tiles(const RowTiles& tiles) {
  uint8_t num_rows[NUM_TILES];
  for (int i = 0; i < NUM_TILES; ++i) {
    num_rows[i] = i <= ROW_TILES * PANELS ? static_cast<uint8_t>(tiles.tile_rows) : TILE_PAIRS;
  }
  return TileConfiguration(num_rows);
}

// sums [rows of all tiles][PANELS * LINEAR_PANEL], for ROW_TILES tiles of rows.
template <int ROW_TILES, int PANELS>
void multiply_few_tiles(const LinearPackedParams& p, const RowTiles& tiles, int64_t panel, float* sums) {
  constexpr int64_t BLOCK_SIZE = FEW_TILES_BLOCK_STEPS * TILE_STEP;
  const TileConfiguration configuration = configure_tiles<ROW_TILES, PANELS>(tiles);
  alignas(64) TileWeights converted[FEW_TILES_BLOCK_STEPS][PANELS];
  const int64_t panel_size = p.in_features * LINEAR_PANEL, num_rows = tiles.num_rows();
  const auto* weights = static_cast<const bfloat16*>(p.packed_weight) + panel * panel_size;
  const auto* rows = static_cast<const bfloat16*>(p.rows);
  const FetchAhead<PANELS, 6144> fetch_ahead(weights, panel_size * sizeof(bfloat16));
  zero_sums<ROW_TILES * PANELS>();
  for (int64_t i = 0; i < p.in_features; i += BLOCK_SIZE) {
    const int64_t size = smaller(p.in_features - i, BLOCK_SIZE);
    convert_weights<PANELS>(weights + i * LINEAR_PANEL, panel_size, size, fetch_ahead, converted);
    add_tile_products<ROW_TILES, PANELS>(rows + i * num_rows, tiles.tile_rows, num_rows * TILE_STEP, converted,
                                         (size + TILE_STEP - 1) / TILE_STEP, [](int64_t) {});
  }
  store_sums<ROW_TILES, PANELS>(tiles.tile_rows, sums);
}

// sums [PANELS * LINEAR_PANEL], for a single row. The arithmetic is that of tiles: even and odd elements of a step are
// two chains of multiply-adds, and their sum is added to the total.
template <int PANELS>
void multiply_one_row(const LinearPackedParams& p, int64_t panel, float* sums) {
  const int64_t panel_size = p.in_features * LINEAR_PANEL;
  const auto* weights = static_cast<const bfloat16*>(p.packed_weight) + panel * panel_size;
  const auto* row = static_cast<const char*>(p.rows);
  const FetchAhead<PANELS, 6144> fetch_ahead(weights, panel_size * sizeof(bfloat16));
  Vec total[PANELS] = {};
  for (int64_t i = 0; i < p.in_features; i += TILE_STEP) {
    Vec even[PANELS] = {};
    Vec odd[PANELS] = {};
    const int64_t size = smaller(p.in_features - i, TILE_STEP);
    for (int64_t k = 0; k < size; k += 2) {
      const bfloat16* weight = weights + (i + k) * LINEAR_PANEL;
      fetch_ahead(weight);
      const UintVec pair = UintVec{} + load_as<uint32_t>(row + (i + k) * sizeof(bfloat16));
      PAGEDATTN_UNROLL
      for (int j = 0; j < PANELS; ++j) {
        even[j] = fma((Vec)(pair << 16), load(weight + j * panel_size), even[j]);
      }
      if (k + 1 == size) break;
      PAGEDATTN_UNROLL
      for (int j = 0; j < PANELS; ++j) {
        odd[j] = fma((Vec)(pair & 0xffff0000), load(weight + LINEAR_PANEL + j * panel_size), odd[j]);
      }
    }
    PAGEDATTN_UNROLL
    for (int j = 0; j < PANELS; ++j) total[j] = total[j] + (even[j] + odd[j]);
  }
  PAGEDATTN_UNROLL
  for (int j = 0; j < PANELS; ++j) store(sums + j * LINEAR_PANEL, total[j]);
}

// sums [rows of all tiles][PANELS * LINEAR_PANEL]
template <int PANELS>
void multiply_many_tiles(const LinearPackedParams& p, const RowTiles& tiles, int64_t panel, float* sums) {
  constexpr int64_t BLOCK_SIZE = TILE_BLOCK_STEPS * TILE_STEP;
  const TileConfiguration configuration = configure_tiles<1, PANELS>(tiles);
  alignas(64) TileWeights converted[TILE_BLOCK_STEPS][PANELS];
  const int64_t panel_size = p.in_features * LINEAR_PANEL, row_step = tiles.num_rows() * TILE_STEP;
  const auto* weights = static_cast<const bfloat16*>(p.packed_weight) + panel * panel_size;
  const auto* rows = static_cast<const bfloat16*>(p.rows);
  // Lines of the next block of a panel that are fetched at a step of a tile.
  const int64_t fetched = (TILE_PAIRS + tiles.num_tiles - 1) / tiles.num_tiles;
  for (int64_t i = 0; i < p.in_features; i += BLOCK_SIZE) {
    const int64_t size = smaller(p.in_features - i, BLOCK_SIZE);
    const bfloat16* block = weights + i * LINEAR_PANEL;
    convert_weights<PANELS>(block, panel_size, size, [](const bfloat16*) {}, converted);
    const bool is_last = i + BLOCK_SIZE >= p.in_features;
    const bfloat16* next_block = is_last ? weights + PANELS * panel_size : block + BLOCK_SIZE * LINEAR_PANEL;
    for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
      float* tile_sums = sums + tile * tiles.tile_rows * PANELS * LINEAR_PANEL;
      i == 0 ? zero_sums<PANELS>() : load_sums<PANELS>(tile_sums);
      const bfloat16* next = next_block + tile * fetched * TILE_BLOCK_STEPS * 2 * LINEAR_PANEL;
      add_tile_products<1, PANELS>(rows + i * tiles.num_rows() + tile * tiles.tile_rows * TILE_STEP, 0, row_step,
                                   converted, (size + TILE_STEP - 1) / TILE_STEP,
                                   [&](int64_t step) PAGEDATTN_ALWAYS_INLINE {
                                     const bfloat16* line = next + step * fetched * 2 * LINEAR_PANEL;
                                     for (int64_t j = 0; j < fetched; ++j, line += 2 * LINEAR_PANEL) {
                                       PAGEDATTN_UNROLL
                                       for (int k = 0; k < PANELS; ++k) prefetch_line(line + k * panel_size);
                                     }
                                   });
      store_sums<1, PANELS>(tiles.tile_rows, tile_sums);
    }
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
