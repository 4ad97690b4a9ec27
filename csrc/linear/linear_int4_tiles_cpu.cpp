// linear_int4 on the tiles of AMX, for more than a few rows. The sums of a block of 32 elements are the same integers
// as those of linear_int4_cpu.cpp. They are scaled and added in the same order, so the results have the same bits.
//
// A range of blocks of four panels is unpacked once for all rows: each weight becomes a byte, less its zero. Then one
// tile of rows after another is multiplied with the range. An instruction makes the sums of a block, of 16 rows by a
// panel. Meanwhile the next range is on its way from memory, as many lines beside each tile of rows.
#include "cpu_memory.h"
#include "cpu_quantize.h"
#include "cpu_tiles.h"
#include "dispatch.h"
#include "linear/int4_panels.h"
#include "linear/linear_quantized.h"
#include "linear/panels.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int RANGE_BLOCKS = 8;  // unpacked, 16 KiB of four panels
constexpr int RANGE_PANELS = 4;
constexpr int RANGE_FEATURES = RANGE_PANELS * LINEAR_PANEL;
// The sums of so many blocks are under way before those of the first block are scaled.
constexpr int BLOCKS_AHEAD = 2;

typedef int8_t Bytes __attribute__((vector_size(VEC_BYTES)));

// A range of blocks of one panel.
struct Range {
  Bytes weights[RANGE_BLOCKS][INT4_BLOCK / QUAD];  // of 16 features by 4 elements
  Vec scales[RANGE_BLOCKS];

  void unpack(const LinearInt4Params& p, const uint8_t* panel, int64_t first_block, int64_t num_blocks) {
    for (int64_t i = 0; i < num_blocks; ++i) {
      const uint8_t* group = panel + (first_block + i) / p.blocks_per_group * bytes_per_group(p);
      const uint8_t* codes = group + (first_block + i) % p.blocks_per_group * BYTES_PER_BLOCK;
      const uint8_t* group_scales = group + p.blocks_per_group * BYTES_PER_BLOCK;
      const Bytes zeros = (Bytes)(load_zeros(p, group_scales, 0) * 0x01010101);
      scales[i] = load_scales(p, group_scales, 0);
      PAGEDATTN_UNROLL
      for (int pair = 0; pair < PAIRS_PER_BLOCK; ++pair) {
        const UintVec both = load_as<UintVec>(codes + pair * BYTES_PER_PAIR);
        weights[i][2 * pair] = (Bytes)(both & 0x0f0f0f0f) - zeros;
        weights[i][2 * pair + 1] = (Bytes)(both >> 4 & 0x0f0f0f0f) - zeros;
      }
    }
  }
};

// Adds the products of ROWS rows with a range to sums [ROWS][RANGE_FEATURES]. codes: [num_blocks][16][32]. blocks:
// [num_blocks][16]. Calls prefetch() for each block. SUMS and CODES are tiles of ROWS rows.
template <int ROWS, int SUMS, int CODES, typename Prefetch>
void add_products(const Range& range, int64_t num_blocks, const int8_t* codes, const QuantizedBlock* blocks,
                  const Prefetch& prefetch, float* sums) {
  constexpr int WEIGHTS = 4;
  alignas(64) int32_t products[2 * BLOCKS_AHEAD][ROWS][LINEAR_PANEL];
  const auto multiply = [&](int64_t i) PAGEDATTN_ALWAYS_INLINE {
    zero_tile<SUMS>();
    load_tile<CODES>(codes + i * TILE_ROWS * INT4_BLOCK, INT4_BLOCK);
    load_tile<WEIGHTS>(range.weights[i], TILE_ROW_BYTES);
    add_signed_byte_products<SUMS, CODES, WEIGHTS>();
    store_tile<SUMS>(products[i % (2 * BLOCKS_AHEAD)], sizeof products[0][0]);
  };
  Vec sum[ROWS];
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) sum[row] = load(sums + row * RANGE_FEATURES);
  for (int64_t i = 0; i < smaller(BLOCKS_AHEAD, num_blocks); ++i) multiply(i);
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (i + BLOCKS_AHEAD < num_blocks) multiply(i + BLOCKS_AHEAD);
    prefetch();
    const Vec scales = range.scales[i];
    PAGEDATTN_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const IntVec product = load_as<IntVec>(products[i % (2 * BLOCKS_AHEAD)][row]);
      const Vec row_scale = load_repeated<1>(&blocks[i * TILE_ROWS + row].scale);
      sum[row] = fma(__builtin_convertvector(product, Vec) * row_scale, scales, sum[row]);
    }
  }
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) store(sums + row * RANGE_FEATURES, sum[row]);
}

// The sums of all rows with PANELS panels: sums [num_rows][RANGE_FEATURES].
template <int PANELS>
void sum_panels(const LinearInt4Params& p, const uint8_t* panels, int64_t panel_bytes, float* sums) {
  const int64_t num_blocks = p.in_features / INT4_BLOCK, num_tiles = (p.num_rows + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t range_bytes = panel_bytes * RANGE_BLOCKS / num_blocks;
  const int64_t lines_per_block = range_bytes / (64 * RANGE_BLOCKS * num_tiles) + 1;  // to be fetched, of a panel
  __builtin_memset(sums, 0, p.num_rows * RANGE_FEATURES * sizeof(float));
  for (int64_t block = 0; block < num_blocks; block += RANGE_BLOCKS) {
    const int64_t count = smaller(num_blocks - block, RANGE_BLOCKS);
    Range ranges[PANELS];
    for (int i = 0; i < PANELS; ++i) ranges[i].unpack(p, panels + i * panel_bytes, block, count);
    const bool is_last = block + RANGE_BLOCKS >= num_blocks;
    const uint8_t* next = panels + (is_last ? PANELS * panel_bytes : (block / RANGE_BLOCKS + 1) * range_bytes);
    for (int64_t tile = 0; tile < num_tiles; ++tile, next += count * lines_per_block * 64) {
      const int64_t row = tile * TILE_ROWS, position = (tile * num_blocks + block) * TILE_ROWS;
      for (int i = 0; i < PANELS; ++i) {
        const uint8_t* line = next + i * panel_bytes;
        const auto prefetch = [&]() PAGEDATTN_ALWAYS_INLINE {
          for (int64_t j = 0; j < lines_per_block; ++j, line += 64) prefetch_line(line);
        };
        const int8_t* codes = p.codes + position * INT4_BLOCK;
        float* tile_sums = sums + row * RANGE_FEATURES + i * LINEAR_PANEL;
        const QuantizedBlock* blocks = p.blocks + position;
        if (p.num_rows - row >= TILE_ROWS) {
          add_products<TILE_ROWS, 0, 1>(ranges[i], count, codes, blocks, prefetch, tile_sums);
        } else {
          dispatch_tile_rows<TILE_ROWS - 1>(p.num_rows - row, [&]<int ROWS>() PAGEDATTN_ALWAYS_INLINE {
            add_products<ROWS, 2, 3>(ranges[i], count, codes, blocks, prefetch, tile_sums);
          });
        }
      }
    }
  }
}

}  // namespace

void quantize_rows_int4_tiles(const LinearInt4Params& params, int64_t begin, int64_t end) {
  const int64_t num_blocks = params.in_features / INT4_BLOCK;
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) {
      const T* input = static_cast<const T*>(params.input) + row * params.input_stride;
      for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t position = (row / TILE_ROWS * num_blocks + block) * TILE_ROWS + row % TILE_ROWS;
        int8_t* codes = params.codes + position * INT4_BLOCK;
        const Quantized quantized = quantize(input + block * INT4_BLOCK, INT4_BLOCK,
                                             [&](int64_t i, IntVec values)
                                                 PAGEDATTN_ALWAYS_INLINE { store_bytes(codes + i, (UintVec)values); });
        params.blocks[position] = {quantized.scale, {}};
      }
    }
  });
}

void linear_int4_tiles(const LinearInt4Params& params, int64_t begin, int64_t end) {
  const int64_t panel_bytes = params.num_groups * bytes_per_group(params);
  alignas(64) float sums[LINEAR_CHUNK_ROWS * RANGE_FEATURES];
  // Two tiles for each size of a tile of rows, and one for weights. The others are not used.
  constexpr uint8_t ALL = TILE_ROWS, QUADS = INT4_BLOCK / QUAD;
  const auto last = static_cast<uint8_t>((params.num_rows - 1) % TILE_ROWS + 1);
  const TileConfiguration tiles({ALL, ALL, last, last, QUADS, QUADS, QUADS, QUADS}, {64, 32, 64, 32, 64, 64, 64, 64});
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for_each_panels<RANGE_PANELS>(begin, end, [&]<int PANELS>(int64_t panel) {
      sum_panels<PANELS>(params, params.weight + panel * panel_bytes, panel_bytes, sums);
      write_out<RANGE_PANELS, T>(params, panel * LINEAR_PANEL, sums);
    });
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
