// A weight is (code - zero) * scale, with codes and zeros of 4 bits, and one scale and zero for each group of a column.
// In a block of 32 elements all is summed in integers, exactly; blocks are summed in fp32, one after the other, so a
// row's results do not depend on the rows beside it.
#include "cpu_vec.h"
#include "dispatch.h"
#include "linear/byte_products.h"
#include "linear/linear_quantized.h"
#include "linear/quantize_rows.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int PAIRS_PER_BLOCK = INT4_BLOCK / (2 * QUAD);
constexpr int BYTES_PER_PAIR = LINEAR_PANEL * QUAD;
constexpr int BYTES_PER_BLOCK = PAIRS_PER_BLOCK * BYTES_PER_PAIR;
constexpr int PREFETCH_BYTES = 4096;  // ahead, in the next panel too

#if defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 8;
#else
constexpr int MAX_TILE_ROWS = 4;
#endif

// Sums of a block. Without VNNI they are 16 bits wide, two for each column: at most 16 products of at most 15 * 127.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#if defined(__AVX512F__)
PAGEDATTN_INLINE UintVec add_small_products(UintVec sums, UintVec weights, UintVec codes) {
  const __m512i pairs = _mm512_maskz_maddubs_epi16(~0u, (__m512i)weights, (__m512i)codes);
  return (UintVec)_mm512_maskz_add_epi16(~0u, (__m512i)sums, pairs);
}
PAGEDATTN_INLINE IntVec column_sums(UintVec sums) {
  return (IntVec)_mm512_maskz_madd_epi16(0xffff, (__m512i)sums, _mm512_set1_epi16(1));
}
#else
PAGEDATTN_INLINE UintVec add_small_products(UintVec sums, UintVec weights, UintVec codes) {
  return (UintVec)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)weights, (__m256i)codes));
}
PAGEDATTN_INLINE IntVec column_sums(UintVec sums) {
  return (IntVec)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
}
#endif
#else
PAGEDATTN_INLINE UintVec add_small_products(UintVec sums, UintVec weights, UintVec codes) {
  return add_products(sums, weights, codes);
}
PAGEDATTN_INLINE IntVec column_sums(UintVec sums) { return (IntVec)sums; }
#endif

// Codes of a block of a panel as they lie in memory. Quads come in pairs, which share bytes.
struct PackedCodes {
  const uint8_t* bytes;

  PAGEDATTN_INLINE UintVec quad(int pair, int half, int v) const {
    const UintVec both = load_as<UintVec>(bytes + pair * BYTES_PER_PAIR + v * VEC_BYTES);
    return both >> 4 * half & 0x0f0f0f0f;
  }
};

// The same, a byte each: for several tiles of rows.
struct UnpackedCodes {
  UintVec quads[PAIRS_PER_BLOCK][2][PANEL_VECS];

  PAGEDATTN_INLINE explicit UnpackedCodes(PackedCodes packed) {
    for (int pair = 0; pair < PAIRS_PER_BLOCK; ++pair) {
      PAGEDATTN_UNROLL
      for (int half = 0; half < 2; ++half) {
        PAGEDATTN_UNROLL
        for (int v = 0; v < PANEL_VECS; ++v) quads[pair][half][v] = packed.quad(pair, half, v);
      }
    }
  }

  PAGEDATTN_INLINE UintVec quad(int pair, int half, int v) const { return quads[pair][half][v]; }
};

// What a group of a panel has in common.
struct Group {
  Vec scales[PANEL_VECS];
  Vec minus_zeros[PANEL_VECS];
};

template <typename Scale>
PAGEDATTN_INLINE Group load_group(const uint8_t* scales) {
  const uint8_t* zeros = scales + LINEAR_PANEL * sizeof(Scale);
  Group group;
  PAGEDATTN_UNROLL
  for (int v = 0; v < PANEL_VECS; ++v) {
    const UintVec zero = widen(widen(load_as<ByteVec>(zeros + v * VEC_SIZE)));
    group.scales[v] = load(reinterpret_cast<const Scale*>(scales) + v * VEC_SIZE);
    group.minus_zeros[v] = -__builtin_convertvector((IntVec)zero, Vec);
  }
  return group;
}

struct PanelSums {
  Vec of[PANEL_VECS];
};

// The rows of a tile in a block.
struct BlockRows {
  const int8_t* codes;
  int64_t code_stride;
  const QuantizedBlock* blocks;
  int64_t block_stride;
};

// Adds the products of a block with ROWS rows to their sums.
template <int ROWS, typename Codes>
PAGEDATTN_INLINE void add_tile(const Codes& weights, const Group& group, const BlockRows& rows, PanelSums* sums) {
  UintVec products[ROWS][PANEL_VECS] = {};
#pragma GCC unroll 1  // the whole loop would need too many registers
  for (int pair = 0; pair < PAIRS_PER_BLOCK; ++pair) {
    PAGEDATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      UintVec w[PANEL_VECS];
      PAGEDATTN_UNROLL
      for (int v = 0; v < PANEL_VECS; ++v) w[v] = weights.quad(pair, half, v);
      PAGEDATTN_UNROLL
      for (int row = 0; row < ROWS; ++row) {
        const UintVec x = broadcast_quad(rows.codes + row * rows.code_stride + (2 * pair + half) * QUAD);
        PAGEDATTN_UNROLL
        for (int v = 0; v < PANEL_VECS; ++v) {
          products[row][v] = add_small_products(products[row][v], w[v], x);
        }
      }
    }
  }
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) {
    const QuantizedBlock& block = rows.blocks[row * rows.block_stride];
    const Vec scale = load_repeated<1>(&block.scale), sum_of_codes = load_repeated<1>(&block.sum_of_codes);
    PAGEDATTN_UNROLL
    for (int v = 0; v < PANEL_VECS; ++v) {
      const Vec without_zeros = __builtin_convertvector(column_sums(products[row][v]), Vec);
      const Vec sum = fma(group.minus_zeros[v], sum_of_codes, without_zeros);  // exact: integers below 2^24
      sums[row].of[v] = fma(sum * scale, group.scales[v], sums[row].of[v]);
    }
  }
}

template <typename Scale>
PAGEDATTN_INLINE void sum_panel(const LinearInt4Params& p, const uint8_t* weights, PanelSums* sums) {
  const int64_t num_blocks = p.in_features / INT4_BLOCK;
  for (int64_t row = 0; row < p.num_rows; ++row) sums[row] = {};
  for (int64_t block = 0; block < num_blocks; weights += LINEAR_PANEL * (sizeof(Scale) + 1)) {
    const Group group = load_group<Scale>(weights + p.blocks_per_group * BYTES_PER_BLOCK);
    for (const int64_t end = block + p.blocks_per_group; block < end; ++block, weights += BYTES_PER_BLOCK) {
      PAGEDATTN_UNROLL
      for (int line = 0; line < BYTES_PER_BLOCK; line += 64) prefetch_once(weights + line + PREFETCH_BYTES);
      const PackedCodes packed{weights};
      const auto rows_from = [&](int64_t row) PAGEDATTN_ALWAYS_INLINE {
        return BlockRows{p.codes + row * p.code_stride + block * INT4_BLOCK, p.code_stride,
                         p.blocks + row * num_blocks + block, num_blocks};
      };
      if (p.num_rows <= MAX_TILE_ROWS) {
        for_each_tile<MAX_TILE_ROWS>(
            0, p.num_rows, [&]<int ROWS>(int64_t row) { add_tile<ROWS>(packed, group, rows_from(row), sums + row); });
      } else {
        const UnpackedCodes unpacked(packed);
        for_each_tile<MAX_TILE_ROWS>(
            0, p.num_rows, [&]<int ROWS>(int64_t row) { add_tile<ROWS>(unpacked, group, rows_from(row), sums + row); });
      }
    }
  }
}

template <typename T>
void write_panel(const LinearInt4Params& p, int64_t first_column, const PanelSums* sums) {
  const int64_t rest = p.out_features - first_column;
  for_each_vector(rest < LINEAR_PANEL ? rest : LINEAR_PANEL, [&](int64_t i, auto load, auto store) {
    const int64_t column = first_column + i;
    const Vec bias = p.bias == nullptr ? Vec{} : load(p.bias + column);
    for (int64_t row = 0; row < p.num_rows; ++row) {
      store(static_cast<T*>(p.out) + row * p.out_features + column, sums[row].of[i / VEC_SIZE] + bias);
    }
  });
}

template <typename T, typename Scale>
void multiply_panels(const LinearInt4Params& p, int64_t begin, int64_t end) {
  const int64_t panel_bytes =
      p.num_groups * (p.blocks_per_group * BYTES_PER_BLOCK + LINEAR_PANEL * (int64_t{sizeof(Scale)} + 1));
  PanelSums sums[MAX_QUANTIZED_ROWS];
  for (int64_t panel = begin; panel < end; ++panel) {
    sum_panel<Scale>(p, p.weight + panel * panel_bytes, sums);
    write_panel<T>(p, panel * LINEAR_PANEL, sums);
  }
}

}  // namespace

void quantize_rows_int4(const LinearInt4Params& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) {
      const T* input = static_cast<const T*>(params.input) + row * params.input_stride;
      int8_t* codes = params.codes + row * params.code_stride;
      QuantizedBlock* blocks = params.blocks + row * (params.in_features / INT4_BLOCK);
      for (int64_t i = 0; i < params.in_features; i += INT4_BLOCK) {
        const Quantized quantized = quantize(input + i, INT4_BLOCK, codes + i);
        *blocks++ = {quantized.scale, quantized.sum_of_codes};
      }
    }
  });
}

void linear_int4(const LinearInt4Params& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    if (params.scale_dtype == DType::FLOAT16) {
      multiply_panels<T, float16>(params, begin, end);
    } else {
      multiply_panels<T, float>(params, begin, end);
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
