// Each of the 16 columns of a panel has 4 adjacent weights, which meet 4 codes of a row, in int32: exact, so a row's
// results do not depend on the rows beside it. The instructions for it want one factor without a sign. That is the
// weight, 128 too large; 128 times the sum of a row's codes is taken off at the end.
//
// A tile of rows passes over a block of a panel, then the next tile, which finds the block in the nearest cache.
#include "cpu_vec.h"
#include "dispatch.h"
#include "linear/byte_products.h"
#include "linear/linear_quantized.h"
#include "linear/quantize_rows.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int BYTES_PER_QUAD = LINEAR_PANEL * QUAD;  // of a panel
constexpr int64_t BLOCK_QUADS = 256;                 // 16 KiB, half of the nearest cache
constexpr int PREFETCH_BYTES = 768;                  // ahead, in the next panel too

#if defined(__AVX512VNNI__)
constexpr int MAX_TILE_ROWS = 12;
#elif defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 8;
#else
constexpr int MAX_TILE_ROWS = 4;
#endif

// Without VNNI two products are added in 16 bits, with saturation, before they become 32. Two adjacent codes whose sum
// is at most this never come so far; what is more goes into an ExcessQuad, which the row's panels take in one by one.
// Of 768 normally distributed elements it is 2% of the pairs. Factors of 16 bits, without a limit, took 1.15 times as
// long then on a Zen 3; and 0.8 times as long for evenly distributed elements, of which 25% of the pairs are too large.
constexpr int MAX_PAIR_SUM = 128;
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool LIMITS_PAIRS = true;
#else
constexpr bool LIMITS_PAIRS = false;
#endif

struct PanelSums {
  UintVec of[PANEL_VECS];
};

// Adds the products of `num_quads` quads of ROWS rows to their sums.
template <int ROWS>
PAGEDATTN_INLINE void add_tile(const uint8_t* weights, int64_t num_quads, const int8_t* codes, int64_t code_stride,
                               PanelSums* row_sums) {
  PanelSums sums[ROWS];
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) sums[row] = row_sums[row];
  for (int64_t quad = 0; quad < num_quads; ++quad) {
    prefetch_once(weights + quad * BYTES_PER_QUAD + PREFETCH_BYTES);
    UintVec w[PANEL_VECS];
    PAGEDATTN_UNROLL
    for (int v = 0; v < PANEL_VECS; ++v) w[v] = load_as<UintVec>(weights + quad * BYTES_PER_QUAD + v * VEC_BYTES);
    PAGEDATTN_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const UintVec x = broadcast_quad(codes + row * code_stride + quad * QUAD);
      PAGEDATTN_UNROLL
      for (int v = 0; v < PANEL_VECS; ++v) sums[row].of[v] = add_products(sums[row].of[v], w[v], x);
    }
  }
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) row_sums[row] = sums[row];
}

PAGEDATTN_INLINE PanelSums excess_sums(const uint8_t* weights, const ExcessQuad* excess, int32_t num_excesses,
                                       PanelSums sums) {
  for (int32_t i = 0; i < num_excesses; ++i) {
    const UintVec x = broadcast_quad(excess[i].codes);
    PAGEDATTN_UNROLL
    for (int v = 0; v < PANEL_VECS; ++v) {
      const uint8_t* w = weights + int64_t{excess[i].quad} * BYTES_PER_QUAD + v * VEC_BYTES;
      sums.of[v] = add_products(sums.of[v], load_as<UintVec>(w), x);
    }
  }
  return sums;
}

void sum_panel(const LinearInt8Params& p, const uint8_t* weights, int64_t num_quads, PanelSums* sums) {
  for (int64_t row = 0; row < p.num_rows; ++row) sums[row] = {};
  for (int64_t quad = 0; quad < num_quads; quad += BLOCK_QUADS) {
    const int64_t block_quads = num_quads - quad < BLOCK_QUADS ? num_quads - quad : BLOCK_QUADS;
    for_each_tile<MAX_TILE_ROWS>(0, p.num_rows, [&]<int ROWS>(int64_t row) {
      add_tile<ROWS>(weights + quad * BYTES_PER_QUAD, block_quads, p.codes + row * p.code_stride + quad * QUAD,
                     p.code_stride, sums + row);
    });
  }
  for (int64_t row = 0; LIMITS_PAIRS && row < p.num_rows; ++row) {
    sums[row] = excess_sums(weights, p.excess + row * num_quads, p.num_excesses[row], sums[row]);
  }
}

template <typename T>
void write_panel(const LinearInt8Params& p, int64_t first_column, const PanelSums* sums) {
  const int64_t num_columns = p.out_features - first_column < LINEAR_PANEL ? p.out_features - first_column  //
                                                                           : LINEAR_PANEL;
  for_each_vector(num_columns, [&](int64_t i, auto load, auto store) {
    const int64_t column = first_column + i;
    const Vec weight_scales = load(p.weight_scales + column);
    const Vec bias = p.bias == nullptr ? Vec{} : load(p.bias + column);
    for (int64_t row = 0; row < p.num_rows; ++row) {
      const UintVec sum = sums[row].of[i / VEC_SIZE] - 128 * static_cast<uint32_t>(p.code_sums[row]);
      const Vec scales = weight_scales * p.row_scales[row];
      store(static_cast<T*>(p.out) + row * p.out_features + column,
            fma(__builtin_convertvector((IntVec)sum, Vec), scales, bias));
    }
  });
}

// Takes from the pairs of a row what is too much for them; returns the number of quads that have such a pair.
int32_t limit_pairs(int8_t* codes, int64_t num_quads, ExcessQuad* excess) {
  const auto excess_of = [](const int8_t* pair) {
    const int sum = pair[0] + pair[1];
    return sum > MAX_PAIR_SUM ? sum - MAX_PAIR_SUM : sum < -MAX_PAIR_SUM ? sum + MAX_PAIR_SUM : 0;
  };
  int32_t count = 0;
  for (int64_t quad = 0; quad < num_quads; ++quad, codes += QUAD) {
    const int first = excess_of(codes), second = excess_of(codes + 2);
    if ((first | second) == 0) [[likely]]
      continue;
    // The codes of such a pair have the same sign, so its second one only becomes smaller.
    codes[1] = static_cast<int8_t>(codes[1] - first);
    codes[3] = static_cast<int8_t>(codes[3] - second);
    excess[count++] = {static_cast<int32_t>(quad), {0, static_cast<int8_t>(first), 0, static_cast<int8_t>(second)}};
  }
  return count;
}

int64_t num_quads_of(const LinearInt8Params& p) { return (p.in_features + QUAD - 1) / QUAD; }

}  // namespace

void quantize_rows_int8(const LinearInt8Params& params, int64_t begin, int64_t end) {
  const int64_t num_quads = num_quads_of(params);
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) {
      int8_t* codes = params.codes + row * params.code_stride;
      const Quantized quantized =
          quantize(static_cast<const T*>(params.input) + row * params.input_stride, params.in_features, codes);
      params.row_scales[row] = quantized.scale;
      params.code_sums[row] = static_cast<int32_t>(quantized.sum_of_codes);
      if (LIMITS_PAIRS) params.num_excesses[row] = limit_pairs(codes, num_quads, params.excess + row * num_quads);
    }
  });
}

void linear_int8(const LinearInt8Params& params, int64_t begin, int64_t end) {
  const int64_t num_quads = num_quads_of(params);
  PanelSums sums[MAX_QUANTIZED_ROWS];
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t panel = begin; panel < end; ++panel) {
      sum_panel(params, params.weight + panel * num_quads * BYTES_PER_QUAD, num_quads, sums);
      write_panel<T>(params, panel * LINEAR_PANEL, sums);
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
