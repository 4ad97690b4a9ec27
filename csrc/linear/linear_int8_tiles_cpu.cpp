// linear_int8 on the tiles of AMX, for more than a few rows. An instruction multiplies 16 rows with a panel, a step of
// 64 elements along in_features. The sums are the same integers as those of linear_int8_cpu.cpp.
//
// A group of up to 32 rows is multiplied with two panels at once: 4 loads of tiles for 4 products. One group after
// another passes over a block of the panels. All groups but the first find the block in the nearest cache. Meanwhile
// the next block is on its way from memory, as many lines beside each group.
#include "cpu_memory.h"
#include "cpu_tiles.h"
#include "dispatch.h"
#include "linear/int8_out.h"
#include "linear/int8_rows.h"
#include "linear/linear_quantized.h"
#include "linear/panels.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int STEP_QUADS = TILE_ROW_BYTES / QUAD;
constexpr int64_t BLOCK_STEPS = 8;  // 16 KiB of two panels, a third of the nearest cache
constexpr int TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES;
constexpr int OUT_PANELS = 4;  // whose sums are written together
constexpr int OUT_FEATURES = OUT_PANELS * LINEAR_PANEL;

// The products of some rows with some panels, for a range of steps.
struct TileProducts {
  const int8_t* codes;      // [num_steps] tiles of the first 16 rows
  int64_t code_tile_bytes;  // between the first 16 rows and the next
  const uint8_t* weights;   // [num_steps] tiles of the first panel
  int64_t panel_bytes;
  int64_t num_steps;
  int32_t* sums;  // [16 or 32][OUT_FEATURES]

  // Adds them to sums. Calls prefetch() two times a step for each tile of rows: many lines fetched at once would hold
  // up the loads of tiles.
  template <int ROW_TILES, int PANELS, typename Prefetch>
  PAGEDATTN_INLINE void add(const Prefetch& prefetch) const {
    constexpr int64_t SUM_BYTES = OUT_FEATURES * sizeof(int32_t);
    int32_t* next_sums = sums + TILE_ROWS * OUT_FEATURES;
    load_tile<0>(sums, SUM_BYTES);
    if constexpr (PANELS == 2) load_tile<1>(sums + LINEAR_PANEL, SUM_BYTES);
    if constexpr (ROW_TILES == 2) load_tile<2>(next_sums, SUM_BYTES);
    if constexpr (ROW_TILES == 2 && PANELS == 2) load_tile<3>(next_sums + LINEAR_PANEL, SUM_BYTES);
    for (int64_t step = 0; step < num_steps; ++step) {
      const uint8_t* w = weights + step * TILE_BYTES;
      const int8_t* x = codes + step * TILE_BYTES;
      load_tile<4>(x, TILE_ROW_BYTES);
      load_tile<6>(w, TILE_ROW_BYTES);
      prefetch();
      add_byte_products<0, 4, 6>();
      prefetch();
      if constexpr (PANELS == 2) {
        load_tile<7>(w + panel_bytes, TILE_ROW_BYTES);
        add_byte_products<1, 4, 7>();
      }
      if constexpr (ROW_TILES == 2) {
        load_tile<5>(x + code_tile_bytes, TILE_ROW_BYTES);
        prefetch();
        add_byte_products<2, 5, 6>();
        prefetch();
        if constexpr (PANELS == 2) add_byte_products<3, 5, 7>();
      }
    }
    store_tile<0>(sums, SUM_BYTES);
    if constexpr (PANELS == 2) store_tile<1>(sums + LINEAR_PANEL, SUM_BYTES);
    if constexpr (ROW_TILES == 2) store_tile<2>(next_sums, SUM_BYTES);
    if constexpr (ROW_TILES == 2 && PANELS == 2) store_tile<3>(next_sums + LINEAR_PANEL, SUM_BYTES);
  }
};

// Adds the products of all rows with PANELS panels to sums [num_rows][OUT_FEATURES].
template <int PANELS>
void add_panels(const LinearInt8Params& p, const uint8_t* panels, int32_t* sums) {
  const int64_t num_quads = p.num_quads(), num_steps = num_quads / STEP_QUADS;
  const int64_t panel_bytes = num_quads * LINEAR_PANEL * QUAD, code_tile_bytes = TILE_ROWS * p.code_stride;
  const int64_t num_row_tiles = (p.num_rows + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t lines_at_once = (TILE_ROWS / 2 + num_row_tiles - 1) / num_row_tiles;  // of each panel
  const auto add_to_all = [&](TileProducts products, const auto& prefetch) PAGEDATTN_ALWAYS_INLINE {
    for (int64_t tile = 0; tile < num_row_tiles; tile += 2) {
      if (tile + 1 < num_row_tiles) {
        products.add<2, PANELS>(prefetch);
      } else {
        products.add<1, PANELS>(prefetch);
      }
      products.codes += 2 * code_tile_bytes;
      products.sums += 2 * TILE_ROWS * OUT_FEATURES;
    }
  };
  for (int64_t step = 0; step < num_steps; step += BLOCK_STEPS) {
    const uint8_t* block = panels + step * TILE_BYTES;
    const bool is_last = step + BLOCK_STEPS >= num_steps;
    const uint8_t* next = is_last ? panels + PANELS * panel_bytes : block + BLOCK_STEPS * TILE_BYTES;
    add_to_all({p.codes + step * TILE_BYTES, code_tile_bytes, block, panel_bytes,
                smaller(num_steps - step, BLOCK_STEPS), sums},
               [&]() PAGEDATTN_ALWAYS_INLINE {
                 for (int64_t i = 0; i < lines_at_once; ++i, next += TILE_ROW_BYTES) {
                   PAGEDATTN_UNROLL
                   for (int j = 0; j < PANELS; ++j) prefetch_line(next + j * panel_bytes);
                 }
               });
  }
  if (const int64_t rest = num_quads % STEP_QUADS; rest > 0) {
    // Less than a step: filled up, as a tile must not be loaded from beyond the weight.
    alignas(64) uint8_t filled_up[PANELS * TILE_BYTES] = {};
    for (int i = 0; i < PANELS; ++i) {
      const uint8_t* weights = panels + i * panel_bytes + num_steps * TILE_BYTES;
      __builtin_memcpy(filled_up + i * TILE_BYTES, weights, rest * LINEAR_PANEL * QUAD);
    }
    add_to_all({p.codes + num_steps * TILE_BYTES, code_tile_bytes, filled_up, TILE_BYTES, 1, sums}, [] {});
  }
}

}  // namespace

void quantize_rows_int8_tiles(const LinearInt8Params& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) {
      int8_t* codes =
          params.codes + row / TILE_ROWS * TILE_ROWS * params.code_stride + row % TILE_ROWS * TILE_ROW_BYTES;
      const auto store = [&](int64_t i, IntVec values) PAGEDATTN_ALWAYS_INLINE {
        store_bytes(codes + i / TILE_ROW_BYTES * TILE_BYTES + i % TILE_ROW_BYTES, (UintVec)values);
      };
      quantize_row<T>(params, row, store);
    }
  });
}

void linear_int8_tiles(const LinearInt8Params& params, int64_t begin, int64_t end) {
  const int64_t panel_bytes = params.num_quads() * LINEAR_PANEL * QUAD;
  const int64_t num_padded_rows = (params.num_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
  alignas(64) int32_t sums[MAX_TILE_CHUNK_ROWS * OUT_FEATURES];
  const TileConfiguration tiles({16, 16, 16, 16, 16, 16, 16, 16});
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t first = begin; first < end; first += OUT_PANELS) {
      const int64_t last = smaller(first + OUT_PANELS, end);
      __builtin_memset(sums, 0, num_padded_rows * OUT_FEATURES * sizeof(int32_t));
      for_each_panels<2>(first, last, [&]<int PANELS>(int64_t panel) {
        add_panels<PANELS>(params, params.weight + panel * panel_bytes, sums + (panel - first) * LINEAR_PANEL);
      });
      for_each_panels<OUT_PANELS>(first, last, [&]<int PANELS>(int64_t panel) {
        write_out<PANELS, T>(params, panel, sums + (panel - first) * LINEAR_PANEL, OUT_FEATURES);
      });
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
