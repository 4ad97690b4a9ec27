// A weight is (code - zero) * scale, with codes and zeros of 4 bits, and one scale and zero for each group of a column.
// A row has one scale for each block: up to 128 elements beside one group. The products of a block are summed in
// integers, exactly. The sums of blocks are added in fp32, block after block, so a row's results do not depend on the
// rows beside it.
#include "cpu_memory.h"
#include "cpu_quantize.h"
#include "dispatch.h"
#include "linear/byte_products.h"
#include "linear/int4_panels.h"
#include "linear/linear_quantized.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int PREFETCH_BYTES = VEC_BYTES == 64 ? 8192 : 4096;  // under way, of all panels together

// A sum begins with the products of -zero and the row's codes. Without VNNI, a column has two sums of 16 bits: of
// elements 0 and 1 of the quads, and of elements 2 and 3. They are the sums of a step: each is of 16 products of at
// most 15 * 127, so it fits once all are added, and before that it is modulo 2^16.
//
// minus_zeros: -zero of a column in 16 bits, twice. code_sums: CodeSums of a row.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool SUMS_HAVE_16_BITS = true;
// Keeps additions in the order of the source. GCC 12 would change the order, and store half of the sums meanwhile.
PAGEDATTN_INLINE UintVec in_order(UintVec sums) {
  asm volatile("" : "+v"(sums));
  return sums;
}
#if defined(__AVX512F__)
PAGEDATTN_INLINE UintVec begin_products(UintVec minus_zeros, UintVec code_sums) {
  return (UintVec)_mm512_maskz_mullo_epi16(~0u, (__m512i)minus_zeros, (__m512i)code_sums);
}
PAGEDATTN_INLINE UintVec add_small_products(UintVec sums, UintVec weights, UintVec codes) {
  const __m512i pairs = _mm512_maskz_maddubs_epi16(~0u, (__m512i)weights, (__m512i)codes);
  return in_order((UintVec)_mm512_maskz_add_epi16(~0u, (__m512i)sums, pairs));
}
PAGEDATTN_INLINE IntVec column_sums(UintVec sums) {
  return (IntVec)_mm512_maskz_madd_epi16(0xffff, (__m512i)sums, _mm512_set1_epi16(1));
}
#else
PAGEDATTN_INLINE UintVec begin_products(UintVec minus_zeros, UintVec code_sums) {
  return (UintVec)_mm256_mullo_epi16((__m256i)minus_zeros, (__m256i)code_sums);
}
PAGEDATTN_INLINE UintVec add_small_products(UintVec sums, UintVec weights, UintVec codes) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)codes);
  return in_order((UintVec)_mm256_add_epi16((__m256i)sums, pairs));
}
PAGEDATTN_INLINE IntVec column_sums(UintVec sums) {
  return (IntVec)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
}
#endif
#else
constexpr bool SUMS_HAVE_16_BITS = false;
PAGEDATTN_INLINE UintVec begin_products(UintVec minus_zeros, UintVec code_sums) {
#if defined(__AVX512VNNI__)
  return (UintVec)_mm512_dpwssd_epi32(__m512i{}, (__m512i)minus_zeros, (__m512i)code_sums);
#else
  const IntVec sums = (IntVec)code_sums;
  return (UintVec)(((IntVec)minus_zeros >> 16) * ((sums << 16 >> 16) + (sums >> 16)));
#endif
}
PAGEDATTN_INLINE UintVec add_small_products(UintVec sums, UintVec weights, UintVec codes) {
  return add_products(sums, weights, codes);
}
PAGEDATTN_INLINE IntVec column_sums(UintVec sums) { return (IntVec)sums; }
#endif

// The scales and zeros of one group of each panel.
template <int PANELS>
struct Group {
  Vec scales[PANELS * PANEL_VECS];
  UintVec minus_zeros[PANELS * PANEL_VECS];

  PAGEDATTN_INLINE Group(const LinearInt4Params& p, const uint8_t* panel_scales, int64_t panel_bytes) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
      const uint8_t* of_panel = panel_scales + v / PANEL_VECS * panel_bytes;
      const int feature = v % PANEL_VECS * VEC_SIZE;
      scales[v] = load_scales(p, of_panel, feature);
      minus_zeros[v] = (-load_zeros(p, of_panel, feature) & 0xffff) * 0x10001;
    }
  }
};

// How many steps a block has. In groups of INT4_STEP elements each block IS_STEP. To know this when a kernel is
// compiled saves up to a sixth of the time.
template <bool IS_STEP>
class NumSteps {
 public:
  PAGEDATTN_INLINE NumSteps(int num_steps) : num_steps_(num_steps) {}
  PAGEDATTN_INLINE operator int() const { return IS_STEP ? 1 : num_steps_; }

 private:
  int num_steps_;
};

// The weights of a block of PANELS panels, as they lie in memory. The two quads of a pair share bytes.
template <int PANELS, bool IS_STEP>
struct PackedBlock {
  const uint8_t* bytes;
  int64_t panel_bytes;
  NumSteps<IS_STEP> num_steps;
  const Group<PANELS>& group;
  FetchAhead<PANELS, PREFETCH_BYTES> fetch_ahead;

  static constexpr int QUADS_AT_ONCE = 2;
  // Of one row from memory, a Zen 5 multiplies blocks of several steps 1.07 times as fast with two lines at a time, and
  // blocks of a step from the third-level cache 1.2 times as fast with one.
  PAGEDATTN_INLINE void prefetch(int quad) const {
    constexpr int LINES = IS_STEP ? 1 : 2;
    if (quad % (2 * LINES) != 0) return;
    PAGEDATTN_UNROLL
    for (int i = 0; i < LINES; ++i) fetch_ahead(bytes + (quad / 2 + i) * BYTES_PER_PAIR);
  }
  PAGEDATTN_INLINE UintVec quad(int first, int half, int v) const {
    const uint8_t* pair = bytes + v / PANEL_VECS * panel_bytes + first / 2 * BYTES_PER_PAIR;
    return load_as<UintVec>(pair + v % PANEL_VECS * VEC_BYTES) >> 4 * half & 0x0f0f0f0f;
  }
  PAGEDATTN_INLINE UintVec minus_zero(int v) const { return group.minus_zeros[v]; }
  PAGEDATTN_INLINE Vec scale(int v) const { return group.scales[v]; }
};

// The same weights, a byte for each, for several tiles of rows. All have the zero 15: each is too large by 15 less its
// own zero. So a row's sums all begin with the same number.
template <int PANELS, bool IS_STEP>
struct UnpackedBlock {
  static constexpr uint32_t ZERO = 15;
  static constexpr int VECS = PANELS * PANEL_VECS;
  static constexpr int QUADS_AT_ONCE = VEC_BYTES == 32 ? 2 : 1;  // of 2, GCC 12 would keep a sum of AVX512 in memory
  const UintVec (*quads)[VECS];
  const Vec* scales;
  NumSteps<IS_STEP> num_steps;

  PAGEDATTN_INLINE void prefetch(int) const {}
  PAGEDATTN_INLINE UintVec quad(int first, int i, int v) const { return quads[first + i][v]; }
  PAGEDATTN_INLINE UintVec minus_zero(int) const { return UintVec{} + (-ZERO & 0xffff) * 0x10001; }
  PAGEDATTN_INLINE Vec scale(int v) const { return scales[v]; }
};

// A range of blocks, unpacked for several tiles of rows.
template <int PANELS, bool IS_STEP>
struct UnpackedRange {
  static constexpr int VECS = PANELS * PANEL_VECS;
  BlockRange blocks;
  Vec scales[RANGE_STEPS][VECS];  // of each block
  UintVec quads[RANGE_STEPS * QUADS_PER_STEP][VECS];

  PAGEDATTN_INLINE void add(const PackedBlock<PANELS, IS_STEP>& packed) {
    const int num_quads = packed.num_steps * QUADS_PER_STEP;
    for (int i = 0; i < num_quads; i += 2) packed.prefetch(i);
    UintVec(*to)[VECS] = quads + blocks.num_steps * QUADS_PER_STEP;
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) {
      const UintVec excess = ((packed.minus_zero(v) + UnpackedBlock<PANELS, IS_STEP>::ZERO) & 0xff) * 0x01010101;
      scales[blocks.num_blocks][v] = packed.scale(v);
      for (int i = 0; i < num_quads; i += 2) {
        to[i][v] = packed.quad(i, 0, v) + excess;
        to[i + 1][v] = packed.quad(i, 1, v) + excess;
      }
    }
    blocks.add(packed.num_steps);
  }

  // Calls body(block) for each block.
  template <typename Body>
  PAGEDATTN_INLINE void for_each_block(const Body& body) const {
    const UintVec(*of_block)[VECS] = quads;
    for (int i = 0; i < blocks.num_blocks; ++i) {
      const UnpackedBlock<PANELS, IS_STEP> block{of_block, scales[i], blocks.block_steps[i]};
      body(block);
      of_block += block.num_steps * QUADS_PER_STEP;
    }
  }
};

// A block of the rows of a tile.
template <int ROWS>
struct BlockOfRows {
  const int8_t* codes;
  const CodeSums* code_sums;
  const float* scales;

  PAGEDATTN_INLINE BlockOfRows(const LinearInt4Params& p, int64_t row, int64_t block, int64_t step)
      : codes(p.codes + row * p.code_stride + step * INT4_STEP * ROWS),
        code_sums(p.code_sums +
                  (SUMS_HAVE_16_BITS ? row * p.num_steps() + step * ROWS : row * p.num_blocks() + block * ROWS)),
        scales(p.block_scales + row * p.num_blocks() + block * ROWS) {}

  PAGEDATTN_INLINE void go_on(int num_steps) {
    codes += num_steps * INT4_STEP * ROWS;
    code_sums += (SUMS_HAVE_16_BITS ? num_steps : 1) * ROWS;
    scales += ROWS;
  }
};

// The sums of steps [step, end) of a block with ROWS rows, of vectors [BEGIN, END) of a row.
template <int ROWS, int BEGIN, int END>
struct StepSums {
  static constexpr int VECS = END - BEGIN;
  UintVec products[ROWS][VECS];

  template <typename Block>
  PAGEDATTN_INLINE StepSums(const Block& weights, int step, int end, const int8_t* codes, const CodeSums* code_sums) {
    PAGEDATTN_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const UintVec row_sums = UintVec{} + load_as<uint32_t>(code_sums + row);
      PAGEDATTN_UNROLL
      for (int v = 0; v < VECS; ++v) products[row][v] = begin_products(weights.minus_zero(BEGIN + v), row_sums);
    }
    int first = step * QUADS_PER_STEP;
#pragma GCC unroll 1  // the whole loop would need too many registers
    do {              // at least once: if there could be no step, GCC 12 would keep a copy of the sums
      if constexpr (BEGIN == 0) weights.prefetch(first);
      PAGEDATTN_UNROLL
      for (int i = 0; i < Block::QUADS_AT_ONCE; ++i) {
        UintVec w[VECS];
        PAGEDATTN_UNROLL
        for (int v = 0; v < VECS; ++v) w[v] = weights.quad(first, i, BEGIN + v);
        PAGEDATTN_UNROLL
        for (int row = 0; row < ROWS; ++row) {
          const UintVec x = broadcast_quad(codes + ((first + i) * ROWS + row) * QUAD);
          PAGEDATTN_UNROLL
          for (int v = 0; v < VECS; ++v) products[row][v] = add_small_products(products[row][v], w[v], x);
        }
      }
      first += Block::QUADS_AT_ONCE;
    } while (first < end * QUADS_PER_STEP);
  }
};

// Adds the products of a block with ROWS rows to sums [ROWS][PANELS * PANEL_VECS], of vectors [BEGIN, END) of a row.
template <int PANELS, int BEGIN, int END, int ROWS, typename Block>
PAGEDATTN_INLINE void add_vectors(const Block& weights, const BlockOfRows<ROWS>& rows, Vec* sums) {
  using Sums = StepSums<ROWS, BEGIN, END>;
  const auto scale_and_add = [&](const auto& total) PAGEDATTN_ALWAYS_INLINE {
    Vec weight_scales[Sums::VECS];  // a copy, or GCC would load each after each sum that is stored
    PAGEDATTN_UNROLL
    for (int v = 0; v < Sums::VECS; ++v) weight_scales[v] = weights.scale(BEGIN + v);
    PAGEDATTN_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const Vec scale = load_repeated<1>(rows.scales + row);
      PAGEDATTN_UNROLL
      for (int v = 0; v < Sums::VECS; ++v) {
        Vec& to = sums[row * PANELS * PANEL_VECS + BEGIN + v];
        to = fma(__builtin_convertvector(total(row, v), Vec) * scale, weight_scales[v], to);
      }
    }
  };
  if (!SUMS_HAVE_16_BITS || weights.num_steps == 1) {
    const Sums of_block(weights, 0, weights.num_steps, rows.codes, rows.code_sums);
    scale_and_add([&](int row, int v) PAGEDATTN_ALWAYS_INLINE { return column_sums(of_block.products[row][v]); });
    return;
  }
  IntVec totals[ROWS][Sums::VECS] = {};
  for (int step = 0; step < weights.num_steps; ++step) {
    const Sums of_step(weights, step, step + 1, rows.codes, rows.code_sums + step * ROWS);
    PAGEDATTN_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      PAGEDATTN_UNROLL
      for (int v = 0; v < Sums::VECS; ++v) totals[row][v] += column_sums(of_step.products[row][v]);
    }
  }
  scale_and_add([&](int row, int v) PAGEDATTN_ALWAYS_INLINE { return totals[row][v]; });
}

// The same of all vectors. Where a tile has more rows than the registers hold, half of the vectors come after the
// other half.
template <int PANELS, int ROWS, typename Block>
PAGEDATTN_INLINE void add_tile(const Block& weights, const BlockOfRows<ROWS>& rows, Vec* sums) {
  constexpr int VECS = PANELS * PANEL_VECS;
  if constexpr (NUM_REGISTERS < 32 && ROWS > MAX_TILE_ROWS) {
    add_vectors<PANELS, 0, VECS / 2>(weights, rows, sums);
    add_vectors<PANELS, VECS / 2, VECS>(weights, rows, sums);
  } else {
    add_vectors<PANELS, 0, VECS>(weights, rows, sums);
  }
}

// Calls body(block) for all blocks of PANELS panels.
template <int PANELS, bool IS_STEP, typename Body>
PAGEDATTN_INLINE void for_each_packed_block(const LinearInt4Params& p, const uint8_t* weights, int64_t panel_bytes,
                                            const Body& body) {
  const FetchAhead<PANELS, PREFETCH_BYTES> fetch_ahead(weights, panel_bytes);
  for (int64_t i = 0; i < p.num_groups; ++i, weights += scale_bytes(p)) {
    const uint8_t* scales = weights + p.group_size / INT4_STEP * BYTES_PER_STEP;
    fetch_ahead(scales);
    const Group<PANELS> group(p, scales, panel_bytes);
    for (int64_t left = p.group_size; left > 0; left -= INT4_BLOCK) {
      const int num_steps = static_cast<int>(smaller(left, INT4_BLOCK) / INT4_STEP);
      const PackedBlock<PANELS, IS_STEP> block{weights, panel_bytes, num_steps, group, fetch_ahead};
      body(block);
      weights += block.num_steps * BYTES_PER_STEP;
    }
  }
}

// Calls body.operator()<IS_STEP>(), for all blocks.
template <typename Body>
PAGEDATTN_INLINE void dispatch_blocks(const LinearInt4Params& p, const Body& body) {
  p.group_size == INT4_STEP ? body.template operator()<true>() : body.template operator()<false>();
}

// The sums of a single tile, from `row` on.
template <int ROWS, int PANELS, bool IS_STEP>
void sum_tile(const LinearInt4Params& p, int64_t row, const uint8_t* weights, int64_t panel_bytes, Vec* sums) {
  Vec tile_sums[ROWS * PANELS * PANEL_VECS] = {};
  BlockOfRows<ROWS> rows(p, row, 0, 0);
  for_each_packed_block<PANELS, IS_STEP>(p, weights, panel_bytes, [&](const auto& block) PAGEDATTN_ALWAYS_INLINE {
    add_tile<PANELS>(block, rows, tile_sums);
    rows.go_on(block.num_steps);
  });
  sums += row * PANELS * PANEL_VECS;
  PAGEDATTN_UNROLL
  for (int i = 0; i < ROWS * PANELS * PANEL_VECS; ++i) sums[i] = tile_sums[i];
}

template <int ROWS, int PANELS, bool IS_STEP>
void sum_one_tile(const LinearInt4Params& p, const uint8_t* weights, int64_t panel_bytes, Vec* sums) {
  sum_tile<ROWS, PANELS, IS_STEP>(p, 0, weights, panel_bytes, sums);
}

// The sums of a few single tiles, which find the weights in a near cache but for the first.
template <int PANELS, bool IS_STEP>
void sum_single_tiles(const LinearInt4Params& p, const uint8_t* weights, int64_t panel_bytes, Vec* sums) {
  constexpr int LEAST_ROWS = MAX_SINGLE_TILE_ROWS / 2;
  for (int64_t row = 0; row < p.num_rows; row += max_tile_rows(p)) {
    dispatch_tile_rows<MAX_SINGLE_TILE_ROWS, LEAST_ROWS>(
        rows_of_tile(p, row), [&]<int ROWS>() { sum_tile<ROWS, PANELS, IS_STEP>(p, row, weights, panel_bytes, sums); });
  }
}

// The sums of several tiles. A range of blocks is unpacked once for all tiles.
template <int PANELS, bool IS_STEP>
void sum_several_tiles(const LinearInt4Params& p, const uint8_t* weights, int64_t panel_bytes, Vec* sums) {
  constexpr int VECS = PANELS * PANEL_VECS;
  for (int64_t i = 0; i < p.num_rows * VECS; ++i) sums[i] = Vec{};
  UnpackedRange<PANELS, IS_STEP> range;
  const auto multiply = [&]() {
    for_each_tile<MAX_TILE_ROWS>(0, p.num_rows, [&]<int ROWS>(int64_t row) PAGEDATTN_ALWAYS_INLINE {
      BlockOfRows<ROWS> rows(p, row, range.blocks.first_block, range.blocks.first_step);
      Vec* tile_sums = sums + row * VECS;
      range.for_each_block([&](const auto& block) PAGEDATTN_ALWAYS_INLINE {
        add_tile<PANELS>(block, rows, tile_sums);
        // Or GCC would keep a copy of the sums beside them, and write both; and 24 addresses of sums in memory.
        asm volatile("" : "+r"(tile_sums) : : "memory");
        rows.go_on(block.num_steps);
      });
    });
    range.blocks.go_on();
  };
  for_each_packed_block<PANELS, IS_STEP>(p, weights, panel_bytes, [&](const auto& block) PAGEDATTN_ALWAYS_INLINE {
    if (!range.blocks.has_room(block.num_steps)) multiply();
    range.add(block);
  });
  multiply();
}

CodeSums code_sums_of(IntVec sums) {
  if constexpr (VEC_SIZE > 8) sums += shuffle(sums, sums, [](int i) { return i ^ 8; });
  if constexpr (VEC_SIZE > 4) sums += shuffle(sums, sums, [](int i) { return i ^ 4; });
  sums += shuffle(sums, sums, [](int i) { return i ^ 1; });
  return {{static_cast<int16_t>(sums[0]), static_cast<int16_t>(sums[2])}};
}

template <typename T, bool IS_STEP>
void quantize_row(const LinearInt4Params& p, int64_t row) {
  const T* input = static_cast<const T*>(p.input) + row * p.input_stride;
  const RowCodes codes = row_codes(p, row);
  const int64_t tile = first_row_of_tile(p, row);
  const int64_t tile_rows = rows_of_tile(p, tile);
  float* scales = p.block_scales + tile * p.num_blocks() + row - tile;
  CodeSums* code_sums = p.code_sums + tile * (SUMS_HAVE_16_BITS ? p.num_steps() : p.num_blocks()) + row - tile;
  for_each_block(p, [&](int64_t block, int64_t first, int64_t any_size) PAGEDATTN_ALWAYS_INLINE {
    const int64_t size = IS_STEP ? INT4_STEP : any_size;
    const float largest = largest_magnitude(input + first, size);
    IntVec block_sums{};
    for (int64_t i = first; i < first + size; i += INT4_STEP) {
      const Quantized step =
          quantize_to(MAX_CODE, largest, input + i, INT4_STEP,
                      [&](int64_t j, IntVec values) PAGEDATTN_ALWAYS_INLINE { codes.store(i + j, values); });
      scales[block * tile_rows] = step.scale;
      block_sums += step.sums_of_codes;
      if constexpr (SUMS_HAVE_16_BITS) code_sums[i / INT4_STEP * tile_rows] = code_sums_of(step.sums_of_codes);
    }
    if constexpr (!SUMS_HAVE_16_BITS) code_sums[block * tile_rows] = code_sums_of(block_sums);
  });
}

}  // namespace

void quantize_rows_int4(const LinearInt4Params& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    dispatch_blocks(params, [&]<bool IS_STEP>() {
      for (int64_t row = begin; row < end; ++row) quantize_row<T, IS_STEP>(params, row);
    });
  });
}

void linear_int4(const LinearInt4Params& params, int64_t begin, int64_t end) {
  const int64_t panel_bytes = params.num_groups * bytes_per_group(params);
  Vec sums[LINEAR_CHUNK_ROWS * TILE_PANELS * PANEL_VECS];
  dispatch_dtype(params.dtype, [&]<typename T>() {
    const auto multiply = [&]<int PANELS>(int64_t panel, const auto& sum_tiles) {
      sum_tiles(params, params.weight + panel * panel_bytes, panel_bytes, sums);
      write_out<PANELS, T>(params, panel * LINEAR_PANEL, reinterpret_cast<const float*>(sums));
    };
    dispatch_blocks(params, [&]<bool IS_STEP>() {
      if constexpr (MOST_SINGLE_TILES > 1) {
        const int64_t num_tiles = num_single_tiles(params.num_rows);
        if (num_tiles > 1 && num_tiles <= MOST_SINGLE_TILES) {
          return for_each_panels<panels_at_once(MAX_SINGLE_TILE_ROWS)>(begin, end, [&]<int PANELS>(int64_t panel) {
            multiply.template operator()<PANELS>(panel, sum_single_tiles<PANELS, IS_STEP>);
          });
        }
      }
      dispatch_tiles<MAX_SINGLE_TILE_ROWS, panels_at_once>(
          params.num_rows, begin, end,
          [&]<int ROWS, int PANELS>(int64_t panel) {
            multiply.template operator()<PANELS>(panel, sum_one_tile<ROWS, PANELS, IS_STEP>);
          },
          [&]<int PANELS>(int64_t panel) {
            multiply.template operator()<PANELS>(panel, sum_several_tiles<PANELS, IS_STEP>);
          });
    });
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
