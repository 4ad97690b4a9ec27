// What the kernels of the linear ops share: tiles and panels. In this folder, a tile is a register tile: the sums of a
// few rows by the output features of a few panels, which stay in registers while weights are read along in_features.
//
// Many rows are bound by multiply-adds, and after that by loads. With 4 vectors of weights for each element of a row, a
// tile of 6 rows takes 10 loads for 24 multiply-adds.
#pragma once

#include "cpu_memory.h"
#include "linear/linear.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int PANEL_VECS = LINEAR_PANEL / VEC_SIZE;
constexpr int TILE_PANELS = PANEL_VECS == 1 ? 4 : 1;  // of a tile, where there are several tiles of rows

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body.operator()<PANELS>(panel) for PANELS panels at a time, and body.operator()<1>(panel) for the panels that
// are left.
template <int PANELS, typename Body>
PAGEDATTN_INLINE void for_each_panels(int64_t begin, int64_t end, const Body& body) {
  int64_t panel = begin;
  for (; panel + PANELS <= end; panel += PANELS) body.template operator()<PANELS>(panel);
  if constexpr (PANELS > 1) {
    for (; panel < end; ++panel) body.template operator()<1>(panel);
  }
}

// Calls body.operator()<tile_rows>(), where tile_rows is from LEAST_ROWS to ROWS.
template <int ROWS, int LEAST_ROWS = 1, typename Body>
PAGEDATTN_INLINE void dispatch_tile_rows(int64_t tile_rows, const Body& body) {
  if constexpr (ROWS > LEAST_ROWS) {
    if (tile_rows < ROWS) return dispatch_tile_rows<ROWS - 1, LEAST_ROWS>(tile_rows, body);
  }
  body.template operator()<ROWS>();
}

// For panels [begin, end). If the rows are a single tile, calls one_tile.operator()<ROWS, PANELS>(panel) for
// PANELS_AT_ONCE(ROWS) panels at a time; otherwise calls several_tiles.operator()<PANELS>(panel) for TILE_PANELS panels
// at a time.
template <int MAX_SINGLE_TILE_ROWS, auto PANELS_AT_ONCE, typename OneTile, typename SeveralTiles>
PAGEDATTN_INLINE void dispatch_tiles(int64_t num_rows, int64_t begin, int64_t end, const OneTile& one_tile,
                                     const SeveralTiles& several_tiles) {
  if (num_rows > MAX_SINGLE_TILE_ROWS) return for_each_panels<TILE_PANELS>(begin, end, several_tiles);
  dispatch_tile_rows<MAX_SINGLE_TILE_ROWS>(num_rows, [&]<int ROWS>() {
    for_each_panels<PANELS_AT_ONCE(ROWS)>(
        begin, end, [&]<int PANELS>(int64_t panel) { one_tile.template operator()<ROWS, PANELS>(panel); });
  });
}

// Whether lines of weights are fetched into the first-level cache alone, where vectors are narrower than 64 bytes.
// Intel CPUs are two to three times as slow at this as at fetching into the second level.
PAGEDATTN_INLINE bool skips_second_level() {
#if defined(__x86_64__)
  return VEC_BYTES < 64 && !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

// Fetches ahead for a loop that reads PANELS panels side by side, as the hardware fetches ahead only within a page of 4
// KiB. BYTES are under way, of all panels together; more where the second level is not skipped, and on a Zen 5, which
// is asked for each line three times. At the end of the panels, the first bytes of the next panels are fetched. With
// NEAR_BYTES, lines that are so far ahead in each panel move on from the second-level cache into the first.
template <int PANELS, int BYTES, int NEAR_BYTES = 0>
class FetchAhead {
 public:
  PAGEDATTN_INLINE FetchAhead(const void* panels, int64_t panel_bytes)
      : skips_second_level_(skips_second_level()),
        asks_again_(VEC_BYTES == 64 && IS_ZEN_5),
        bytes_ahead_((asks_again_                              ? BYTES_ON_ZEN_5
                      : VEC_BYTES < 64 && !skips_second_level_ ? BYTES_IN_SECOND_LEVEL
                                                               : BYTES) /
                     PANELS),
        panel_bytes_(panel_bytes),
        end_(static_cast<const char*>(panels) + panel_bytes) {}

  // address: where the first panel is being read.
  PAGEDATTN_INLINE void operator()(const void* address) const {
    const char* ahead = static_cast<const char*>(address) + bytes_ahead_;
    if (ahead >= end_) ahead += (PANELS - 1) * panel_bytes_;
    PAGEDATTN_UNROLL
    for (int i = 0; i < PANELS; ++i) {
      if (skips_second_level_) {
        prefetch_into_first_level(ahead + i * panel_bytes_);
      } else {
        prefetch_line(ahead + i * panel_bytes_);
        if (asks_again_) {
          prefetch_line(ahead + i * panel_bytes_ - AGAIN_BYTES);
          prefetch_line(ahead + i * panel_bytes_ - 2 * AGAIN_BYTES);
        }
      }
      if constexpr (NEAR_BYTES > 0) {
        __builtin_prefetch(static_cast<const char*>(address) + NEAR_BYTES + i * panel_bytes_);
      }
    }
  }

 private:
  static constexpr int64_t BYTES_IN_SECOND_LEVEL = 6144;
  static constexpr int64_t BYTES_ON_ZEN_5 = 24 << 10;  // of the 48 KiB of the first level
  static constexpr int64_t AGAIN_BYTES = 128;
  bool skips_second_level_;
  bool asks_again_;
  int64_t bytes_ahead_;
  int64_t panel_bytes_;
  const char* end_;
};

// Calls add(prefetch) for one of several tiles, which are PANELS / 2 or more. add calls prefetch(step) for each step of
// a block. To fetch the next block at once would wait for memory, so the first tiles share this. Of several panels,
// each of them fetches the next block of one panel, or of two panels if the tiles are fewer than the panels. Of one
// panel of fp32, they take turns at each line. A panel of fewer bytes is left to the first tile. A step has STEP_SIZE
// weights.
template <int PANELS, int STEP_SIZE, typename W, typename Add>
PAGEDATTN_INLINE void fetch_next_block(int64_t tile, int64_t num_tiles, const W* next_block, int64_t panel_size,
                                       const Add& add) {
  if constexpr (PANELS == 1 && sizeof(W) == sizeof(float)) {
    const int64_t num_sharers = num_tiles >= 8 ? 8 : num_tiles >= 4 ? 4 : 2;
    if (tile >= num_sharers) return add([](int64_t) {});
    const W* next = next_block + tile * STEP_SIZE;
    return add([next, num_sharers](int64_t step) PAGEDATTN_ALWAYS_INLINE {
      if ((step & (num_sharers - 1)) == 0) prefetch_line(next + step * STEP_SIZE);
    });
  }
  const W* next = next_block + tile * panel_size;
  if (tile + num_tiles < PANELS) {
    const W* other = next + num_tiles * panel_size;
    add([next, other](int64_t step) PAGEDATTN_ALWAYS_INLINE {
      prefetch_line(next + step * STEP_SIZE);
      prefetch_line(other + step * STEP_SIZE);
    });
  } else if (tile < PANELS) {
    add([next](int64_t step) PAGEDATTN_ALWAYS_INLINE { prefetch_line(next + step * STEP_SIZE); });
  } else {
    add([](int64_t) {});
  }
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
