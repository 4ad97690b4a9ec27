// A weight is (code - zero) * scale, with codes and zeros of 4 bits, and one scale and zero for each group of a column.
// The products of a block of 32 elements are summed in integers, exactly. The sums of blocks are added in fp32, block
// after block, so a row's results do not depend on the rows beside it.
#include "cpu_memory.h"
#include "cpu_quantize.h"
#include "dispatch.h"
#include "linear/byte_products.h"
#include "linear/int4_panels.h"
#include "linear/linear_quantized.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int RANGE_BLOCKS = 8;  // that are unpacked at a time, where there are several tiles of rows
constexpr int PREFETCH_BYTES = VEC_BYTES == 64 ? 8192 : 4096;  // under way, of all panels together

// The sums of a block. A sum begins with the products of -zero and the row's codes. Without VNNI, a column has two sums
// of 16 bits: of elements 0 and 1 of the quads, and of elements 2 and 3. Each is of 16 products of at most 15 * 127: it
// fits once all products of the block are added, and before that it is modulo 2^16.
//
// minus_zeros: -zero of a column in 16 bits, twice. code_sums: QuantizedBlock::sums_of_codes of a row.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
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

// The weights of a block of PANELS panels, as they lie in memory. The two quads of a pair share bytes.
template <int PANELS>
struct PackedBlock {
  const uint8_t* bytes;
  int64_t panel_bytes;
  const Group<PANELS>& group;

  static constexpr int QUADS_AT_ONCE = 2;
  PAGEDATTN_INLINE UintVec quad(int first, int half, int v) const {
    const uint8_t* pair = bytes + v / PANEL_VECS * panel_bytes + first / 2 * BYTES_PER_PAIR;
    return load_as<UintVec>(pair + v % PANEL_VECS * VEC_BYTES) >> 4 * half & 0x0f0f0f0f;
  }
  PAGEDATTN_INLINE UintVec minus_zero(int v) const { return group.minus_zeros[v]; }
  PAGEDATTN_INLINE Vec scale(int v) const { return group.scales[v]; }
};

// The same weights, a byte for each, for several tiles of rows. All have the zero 15: each is too large by 15 less its
// own zero. So a row's sums all begin with the same number.
template <int PANELS>
struct UnpackedBlock {
  static constexpr uint32_t ZERO = 15;
  static constexpr int QUADS_AT_ONCE = VEC_BYTES == 32 ? 2 : 1;  // of 2, GCC 12 would keep a sum of AVX512 in memory
  UintVec quads[QUADS_PER_BLOCK][PANELS * PANEL_VECS];
  Vec scales[PANELS * PANEL_VECS];

  PAGEDATTN_INLINE void unpack(const PackedBlock<PANELS>& packed) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < PANELS * PANEL_VECS; ++v) {
      const UintVec excess = ((packed.minus_zero(v) + ZERO) & 0xff) * 0x01010101;
      scales[v] = packed.scale(v);
      for (int i = 0; i < QUADS_PER_BLOCK; i += 2) {
        quads[i][v] = packed.quad(i, 0, v) + excess;
        quads[i + 1][v] = packed.quad(i, 1, v) + excess;
      }
    }
  }

  PAGEDATTN_INLINE UintVec quad(int first, int i, int v) const { return quads[first + i][v]; }
  PAGEDATTN_INLINE UintVec minus_zero(int) const { return UintVec{} + (-ZERO & 0xffff) * 0x10001; }
  PAGEDATTN_INLINE Vec scale(int v) const { return scales[v]; }
};

// Adds the products of a block with ROWS rows to sums [ROWS][PANELS * PANEL_VECS], of vectors [BEGIN, END) of a row.
template <int ROWS, int PANELS, int BEGIN, int END, typename Block>
PAGEDATTN_INLINE void add_vectors(const Block& weights, const int8_t* codes, const QuantizedBlock* blocks, Vec* sums) {
  constexpr int VECS = END - BEGIN;
  UintVec products[ROWS][VECS];
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) {
    const UintVec code_sums = UintVec{} + load_as<uint32_t>(blocks[row].sums_of_codes);
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) products[row][v] = begin_products(weights.minus_zero(BEGIN + v), code_sums);
  }
#pragma GCC unroll 1  // the whole loop would need too many registers
  for (int first = 0; first < QUADS_PER_BLOCK; first += Block::QUADS_AT_ONCE) {
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
  }
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) {
    const Vec scale = load_repeated<1>(&blocks[row].scale);
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) {
      const Vec sum = __builtin_convertvector(column_sums(products[row][v]), Vec);
      Vec& to = sums[row * PANELS * PANEL_VECS + BEGIN + v];
      to = fma(sum * scale, weights.scale(BEGIN + v), to);
    }
  }
}

// The same of all vectors. Where a tile has more rows than the registers hold, half of the vectors come after the
// other half.
template <int ROWS, int PANELS, typename Block>
PAGEDATTN_INLINE void add_tile(const Block& weights, const int8_t* codes, const QuantizedBlock* blocks, Vec* sums) {
  constexpr int VECS = PANELS * PANEL_VECS;
  if constexpr (NUM_REGISTERS < 32 && ROWS > MAX_TILE_ROWS) {
    add_vectors<ROWS, PANELS, 0, VECS / 2>(weights, codes, blocks, sums);
    add_vectors<ROWS, PANELS, VECS / 2, VECS>(weights, codes, blocks, sums);
  } else {
    add_vectors<ROWS, PANELS, 0, VECS>(weights, codes, blocks, sums);
  }
}

// Calls body(block, weights) for all blocks of PANELS panels.
template <int PANELS, typename Body>
PAGEDATTN_INLINE void for_each_block(const LinearInt4Params& p, const uint8_t* weights, int64_t panel_bytes,
                                     const Body& body) {
  const int64_t num_blocks = p.in_features / INT4_BLOCK;
  const FetchAhead<PANELS, PREFETCH_BYTES> fetch_ahead(weights, panel_bytes);
  for (int64_t block = 0; block < num_blocks; weights += scale_bytes(p)) {
    const uint8_t* scales = weights + p.blocks_per_group * BYTES_PER_BLOCK;
    fetch_ahead(scales);
    const Group<PANELS> group(p, scales, panel_bytes);
    for (const int64_t end = block + p.blocks_per_group; block < end; ++block, weights += BYTES_PER_BLOCK) {
      PAGEDATTN_UNROLL
      for (int line = 0; line < BYTES_PER_BLOCK; line += 64) fetch_ahead(weights + line);
      body(block, PackedBlock<PANELS>{weights, panel_bytes, group});
    }
  }
}

// The sums of a single tile.
template <int ROWS, int PANELS>
void sum_one_tile(const LinearInt4Params& p, const uint8_t* weights, int64_t panel_bytes, Vec* sums) {
  Vec tile_sums[ROWS * PANELS * PANEL_VECS] = {};
  for_each_block<PANELS>(p, weights, panel_bytes, [&](int64_t block, const auto& packed) PAGEDATTN_ALWAYS_INLINE {
    add_tile<ROWS, PANELS>(packed, p.codes + block * INT4_BLOCK * ROWS, p.blocks + block * ROWS, tile_sums);
  });
  PAGEDATTN_UNROLL
  for (int i = 0; i < ROWS * PANELS * PANEL_VECS; ++i) sums[i] = tile_sums[i];
}

// The sums of several tiles. RANGE_BLOCKS blocks are unpacked once for all tiles.
template <int PANELS>
void sum_several_tiles(const LinearInt4Params& p, const uint8_t* weights, int64_t panel_bytes, Vec* sums) {
  constexpr int VECS = PANELS * PANEL_VECS;
  const int64_t num_blocks = p.in_features / INT4_BLOCK;
  for (int64_t i = 0; i < p.num_rows * VECS; ++i) sums[i] = Vec{};
  UnpackedBlock<PANELS> range[RANGE_BLOCKS];
  for_each_block<PANELS>(p, weights, panel_bytes, [&](int64_t block, const auto& packed) PAGEDATTN_ALWAYS_INLINE {
    const int64_t first = block & -RANGE_BLOCKS;
    range[block - first].unpack(packed);
    if (block - first + 1 < RANGE_BLOCKS && block + 1 < num_blocks) return;
    for_each_tile<MAX_TILE_ROWS>(0, p.num_rows, [&]<int ROWS>(int64_t row) PAGEDATTN_ALWAYS_INLINE {
      for (int64_t i = first; i <= block; ++i) {
        add_tile<ROWS, PANELS>(range[i - first], p.codes + row * p.code_stride + i * INT4_BLOCK * ROWS,
                               p.blocks + row * num_blocks + i * ROWS, sums + row * VECS);
        asm volatile("" : : : "memory");  // or GCC would keep a copy of the sums beside them, and write both
      }
    });
  });
}

QuantizedBlock quantized_block(const Quantized& quantized) {
  IntVec sums = quantized.sums_of_codes;
  if constexpr (VEC_SIZE > 8) sums += shuffle(sums, sums, [](int i) { return i ^ 8; });
  if constexpr (VEC_SIZE > 4) sums += shuffle(sums, sums, [](int i) { return i ^ 4; });
  sums += shuffle(sums, sums, [](int i) { return i ^ 1; });
  return {quantized.scale, {static_cast<int16_t>(sums[0]), static_cast<int16_t>(sums[2])}};
}

}  // namespace

void quantize_rows_int4(const LinearInt4Params& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) {
      const T* input = static_cast<const T*>(params.input) + row * params.input_stride;
      const RowCodes codes = row_codes(params, row);
      const int64_t num_blocks = params.in_features / INT4_BLOCK;
      const int64_t tile = first_row_of_tile(params.num_rows, row);
      const int64_t tile_rows = rows_of_tile(params.num_rows, tile);
      QuantizedBlock* blocks = params.blocks + tile * num_blocks + row - tile;
      for (int64_t i = 0; i < params.in_features; i += INT4_BLOCK, blocks += tile_rows) {
        const Quantized quantized =
            quantize(input + i, INT4_BLOCK,
                     [&](int64_t j, IntVec values) PAGEDATTN_ALWAYS_INLINE { codes.store(i + j, values); });
        *blocks = quantized_block(quantized);
      }
    }
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
    dispatch_tiles<MAX_SINGLE_TILE_ROWS, panels_at_once>(
        params.num_rows, begin, end,
        [&]<int ROWS, int PANELS>(int64_t panel) {
          multiply.template operator()<PANELS>(panel, sum_one_tile<ROWS, PANELS>);
        },
        [&]<int PANELS>(int64_t panel) { multiply.template operator()<PANELS>(panel, sum_several_tiles<PANELS>); });
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
