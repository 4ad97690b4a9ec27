// linear_int4 on the tiles of AMX, for more than a few rows. The sums of a block are the same integers as those of
// linear_int4_cpu.cpp. They are scaled and added in the same order, so the results have the same bits.
//
// A range of blocks of four panels is unpacked once for all rows: each weight becomes a byte, less its zero. Then one
// tile of rows after another is multiplied with the range. An instruction multiplies 16 rows with a panel, two steps of
// 32 elements at a time where a block has two. Meanwhile the next range is on its way from memory, as many lines beside
// each tile of rows.
#include "cpu_memory.h"
#include "cpu_quantize.h"
#include "cpu_tiles.h"
#include "dispatch.h"
#include "linear/int4_panels.h"
#include "linear/linear_quantized.h"
#include "linear/panels.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int RANGE_PANELS = 4;  // of which a range is 16 KiB, unpacked
constexpr int RANGE_FEATURES = RANGE_PANELS * LINEAR_PANEL;
constexpr int STEPS_PER_BLOCK = INT4_BLOCK / INT4_STEP;
constexpr int TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES;
// The sums of so many blocks are under way before those of the first block are scaled.
constexpr int BLOCKS_AHEAD = 2;

typedef int8_t Bytes __attribute__((vector_size(VEC_BYTES)));

// Where a block lies in a panel.
int64_t block_offset(const LinearInt4Params& p, int64_t block) {
  const int64_t of_group = block % p.blocks_per_group();
  return block / p.blocks_per_group() * bytes_per_group(p) + of_group * STEPS_PER_BLOCK * BYTES_PER_STEP;
}

// A range of one panel.
struct UnpackedRange {
  Bytes weights[RANGE_STEPS][QUADS_PER_STEP];  // of 16 features by 4 elements
  Vec scales[RANGE_STEPS];                     // of each block

  void unpack(const LinearInt4Params& p, const uint8_t* panel, const BlockRange& range) {
    int step = 0;
    for (int i = 0; i < range.num_blocks; ++i) {
      const int64_t block = range.first_block + i, group = block / p.blocks_per_group();
      const uint8_t* codes = panel + block_offset(p, block);
      const uint8_t* group_scales = panel + (group + 1) * bytes_per_group(p) - scale_bytes(p);
      const Bytes zeros = (Bytes)(load_zeros(p, group_scales, 0) * 0x01010101);
      scales[i] = load_scales(p, group_scales, 0);
      for (const int end = step + range.block_steps[i]; step < end; ++step) {
        PAGEDATTN_UNROLL
        for (int quad = 0; quad < QUADS_PER_STEP; quad += 2, codes += BYTES_PER_PAIR) {
          const UintVec both = load_as<UintVec>(codes);
          weights[step][quad] = (Bytes)(both & 0x0f0f0f0f) - zeros;
          weights[step][quad + 1] = (Bytes)(both >> 4 & 0x0f0f0f0f) - zeros;
        }
      }
    }
  }
};

// Adds the products of ROWS rows with a range to sums [ROWS][RANGE_FEATURES]. codes: of the first of 16 rows. scales:
// [num_blocks][16]. Calls prefetch() for each step. SUMS and the two tiles after it are of ROWS rows.
template <int ROWS, int SUMS, typename Prefetch>
void add_products(const BlockRange& range, const UnpackedRange& unpacked, const int8_t* codes, const float* scales,
                  const Prefetch& prefetch, float* sums) {
  constexpr int CODES = SUMS + 1, TWO_CODES = SUMS + 2, WEIGHTS = 6, TWO_WEIGHTS = 7;
  alignas(64) int32_t products[2 * BLOCKS_AHEAD][ROWS][LINEAR_PANEL];
  int step = 0;  // of the range
  const auto multiply = [&](int block) PAGEDATTN_ALWAYS_INLINE {
    zero_tile<SUMS>();
    for (const int end = step + range.block_steps[block]; step < end;) {
      const int64_t of_row = range.first_step + step;
      const int8_t* x = codes + of_row / 2 * TILE_BYTES;
      if (of_row % 2 == 0 && step + 1 < end) {
        load_tile<TWO_CODES>(x, TILE_ROW_BYTES);
        load_tile<TWO_WEIGHTS>(unpacked.weights[step], TILE_ROW_BYTES);
        add_signed_byte_products<SUMS, TWO_CODES, TWO_WEIGHTS>();
        step += 2;
      } else {
        load_tile<CODES>(x + of_row % 2 * INT4_STEP, TILE_ROW_BYTES);
        load_tile<WEIGHTS>(unpacked.weights[step], TILE_ROW_BYTES);
        add_signed_byte_products<SUMS, CODES, WEIGHTS>();
        ++step;
      }
    }
    store_tile<SUMS>(products[block % (2 * BLOCKS_AHEAD)], sizeof products[0][0]);
  };
  Vec sum[ROWS];
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) sum[row] = load(sums + row * RANGE_FEATURES);
  for (int i = 0; i < BLOCKS_AHEAD && i < range.num_blocks; ++i) multiply(i);
  for (int i = 0; i < range.num_blocks; ++i) {
    if (i + BLOCKS_AHEAD < range.num_blocks) multiply(i + BLOCKS_AHEAD);
    for (int j = 0; j < range.block_steps[i]; ++j) prefetch();
    const Vec weight_scales = unpacked.scales[i];
    PAGEDATTN_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const IntVec product = load_as<IntVec>(products[i % (2 * BLOCKS_AHEAD)][row]);
      const Vec row_scale = load_repeated<1>(scales + i * TILE_ROWS + row);
      sum[row] = fma(__builtin_convertvector(product, Vec) * row_scale, weight_scales, sum[row]);
    }
  }
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) store(sums + row * RANGE_FEATURES, sum[row]);
}

// Adds the products of all rows with a range of PANELS panels to sums [num_rows][RANGE_FEATURES].
template <int PANELS>
void add_range(const LinearInt4Params& p, const BlockRange& range, const uint8_t* panels, int64_t panel_bytes,
               float* sums) {
  const int64_t num_tiles = (p.num_rows + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t lines_per_step = panel_bytes / (64 * p.num_steps() * num_tiles) + 1;  // to be fetched, of a panel
  UnpackedRange unpacked[PANELS];
  for (int i = 0; i < PANELS; ++i) unpacked[i].unpack(p, panels + i * panel_bytes, range);
  const int64_t next_block = range.first_block + range.num_blocks;
  const uint8_t* next = panels + (next_block == p.num_blocks() ? PANELS * panel_bytes : block_offset(p, next_block));
  for (int64_t row = 0; row < p.num_rows; row += TILE_ROWS, next += range.num_steps * lines_per_step * 64) {
    const int8_t* codes = p.codes + row * p.code_stride;
    const float* scales = p.block_scales + row * p.num_blocks() + range.first_block * TILE_ROWS;
    for (int i = 0; i < PANELS; ++i) {
      const uint8_t* line = next + i * panel_bytes;
      const auto prefetch = [&]() PAGEDATTN_ALWAYS_INLINE {
        for (int64_t j = 0; j < lines_per_step; ++j, line += 64) prefetch_line(line);
      };
      float* tile_sums = sums + row * RANGE_FEATURES + i * LINEAR_PANEL;
      if (p.num_rows - row >= TILE_ROWS) {
        add_products<TILE_ROWS, 0>(range, unpacked[i], codes, scales, prefetch, tile_sums);
      } else {
        dispatch_tile_rows<TILE_ROWS - 1>(p.num_rows - row, [&]<int ROWS>() PAGEDATTN_ALWAYS_INLINE {
          add_products<ROWS, 3>(range, unpacked[i], codes, scales, prefetch, tile_sums);
        });
      }
    }
  }
}

// The sums of all rows with PANELS panels: sums [num_rows][RANGE_FEATURES].
template <int PANELS>
void sum_panels(const LinearInt4Params& p, const uint8_t* panels, int64_t panel_bytes, float* sums) {
  __builtin_memset(sums, 0, p.num_rows * RANGE_FEATURES * sizeof(float));
  BlockRange range;
  for_each_block(p, [&](int64_t, int64_t, int64_t size) {
    const int num_steps = static_cast<int>(size / INT4_STEP);
    if (!range.has_room(num_steps)) {
      add_range<PANELS>(p, range, panels, panel_bytes, sums);
      range.go_on();
    }
    range.add(num_steps);
  });
  add_range<PANELS>(p, range, panels, panel_bytes, sums);
}

}  // namespace

void quantize_rows_int4_tiles(const LinearInt4Params& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) {
      const T* input = static_cast<const T*>(params.input) + row * params.input_stride;
      const int64_t tile = row - row % TILE_ROWS;
      int8_t* codes = params.codes + tile * params.code_stride + (row - tile) * TILE_ROW_BYTES;
      float* scales = params.block_scales + tile * params.num_blocks() + row - tile;
      for_each_block(params, [&](int64_t block, int64_t first, int64_t size) {
        const auto store = [&](int64_t i, IntVec values) PAGEDATTN_ALWAYS_INLINE {
          const int64_t element = first + i;
          store_bytes(codes + element / TILE_ROW_BYTES * TILE_BYTES + element % TILE_ROW_BYTES, (UintVec)values);
        };
        scales[block * TILE_ROWS] = quantize(input + first, size, store).scale;
      });
    }
  });
}

void linear_int4_tiles(const LinearInt4Params& params, int64_t begin, int64_t end) {
  const int64_t panel_bytes = params.num_groups * bytes_per_group(params);
  alignas(64) float sums[LINEAR_CHUNK_ROWS * RANGE_FEATURES];
  // For each size of a tile of rows: a tile of sums, and one of codes of a step and of two steps. Then weights of a
  // step and of two steps.
  constexpr uint8_t ALL = TILE_ROWS, QUADS = QUADS_PER_STEP;
  const auto last = static_cast<uint8_t>((params.num_rows - 1) % TILE_ROWS + 1);
  const TileConfiguration tiles({ALL, ALL, ALL, last, last, last, QUADS, 2 * QUADS},
                                {64, INT4_STEP, 64, 64, INT4_STEP, 64, 64, 64});
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for_each_panels<RANGE_PANELS>(begin, end, [&]<int PANELS>(int64_t panel) {
      sum_panels<PANELS>(params, params.weight + panel * panel_bytes, panel_bytes, sums);
      write_out<RANGE_PANELS, T>(params, panel * LINEAR_PANEL, sums);
    });
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
