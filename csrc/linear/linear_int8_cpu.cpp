// 4 adjacent weights of each of the 16 columns of a panel are multiplied with 4 codes of a row. The products are summed
// in int32, which is exact, so a row's results do not depend on the rows beside it. The instructions for such products
// take one factor without a sign. This factor is the weight, stored 128 too large. 128 times the sum of a row's codes
// is taken off at the end. (NEON without i8mm takes two factors with a sign: the 128 are subtracted first.)
//
// One tile of rows after another passes over a block of some panels. All tiles but the first find the block in the
// nearest cache.
#include "cpu_memory.h"
#include "dispatch.h"
#include "linear/byte_products.h"
#include "linear/int8_out.h"
#include "linear/int8_rows.h"
#include "linear/linear_quantized.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int64_t BLOCK_QUADS = 256 / TILE_PANELS;  // 16 KiB of all panels of a tile, half of the nearest cache
constexpr int PREFETCH_BYTES = VEC_BYTES == 64 ? 6144 : 768;  // under way for a single tile, of all panels together

// Without VNNI, two products are added in 16 bits, with saturation, before they are widened to 32. A pair of adjacent
// codes whose sum is at most this never saturates. The excess of a pair goes into an ExtraQuad, which is multiplied
// separately. Of rows of 768 normally distributed elements, 2% of the pairs have an excess; 16-bit factors, which need
// no limit, took 1.15 times as long for these rows on a Zen 3. Of evenly distributed elements, 25% of the pairs have an
// excess; 16-bit factors took 0.8 times as long.
constexpr int MAX_PAIR_SUM = 128;
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool LIMITS_PAIRS = true;
#else
constexpr bool LIMITS_PAIRS = false;
#endif

// Adds the products of `num_quads` quads of ROWS rows with PANELS panels to row_sums [ROWS][PANELS * PANEL_VECS]. Calls
// prefetch(quad) for each quad.
template <int ROWS, int PANELS, typename Prefetch>
void add_tile(const uint8_t* weights, int64_t panel_bytes, int64_t num_quads, const int8_t* codes,
              const Prefetch& prefetch, UintVec* row_sums) {
  constexpr int VECS = PANELS * PANEL_VECS;
  UintVec sums[ROWS][VECS];
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) sums[row][v] = row_sums[row * VECS + v];
  }
  for (int64_t quad = 0; quad < num_quads; ++quad) {
    const uint8_t* weight = weights + quad * BYTES_PER_QUAD;
    prefetch(quad);
    UintVec w[VECS];
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) {
      w[v] = load_weights(weight + v / PANEL_VECS * panel_bytes + v % PANEL_VECS * VEC_BYTES);
    }
    PAGEDATTN_UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const UintVec x = broadcast_quad(codes + (quad * ROWS + row) * QUAD);
      PAGEDATTN_UNROLL
      for (int v = 0; v < VECS; ++v) sums[row][v] = add_products(sums[row][v], w[v], x);
    }
  }
  PAGEDATTN_UNROLL
  for (int row = 0; row < ROWS; ++row) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) row_sums[row * VECS + v] = sums[row][v];
  }
}

// Adds the products of each row's excess quads to the row's sums.
template <int PANELS>
void add_excess(const LinearInt8Params& p, const uint8_t* weights, int64_t num_quads, UintVec* sums) {
  constexpr int VECS = PANELS * PANEL_VECS;
  const int64_t panel_bytes = num_quads * BYTES_PER_QUAD;
  for (int64_t row = 0; row < p.num_rows; ++row, sums += VECS) {
    UintVec row_sums[VECS];
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) row_sums[v] = sums[v];
    add_extra<PANELS>(p.excess + row * num_quads, p.num_excesses[row], weights, panel_bytes, row_sums);
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) sums[v] = row_sums[v];
  }
}

// The sums of a single tile.
template <int ROWS, int PANELS>
void sum_one_tile(const LinearInt8Params& p, const uint8_t* weights, int64_t num_quads, UintVec* sums) {
  const int64_t panel_bytes = num_quads * BYTES_PER_QUAD;
  for (int i = 0; i < ROWS * PANELS * PANEL_VECS; ++i) sums[i] = UintVec{};
  const FetchAhead<PANELS, PREFETCH_BYTES> fetch_ahead(weights, panel_bytes);
  const auto prefetch = [&](int64_t quad) PAGEDATTN_ALWAYS_INLINE { fetch_ahead(weights + quad * BYTES_PER_QUAD); };
  add_tile<ROWS, PANELS>(weights, panel_bytes, num_quads, p.codes, prefetch, sums);
}

// The sums of several tiles.
template <int PANELS>
void sum_several_tiles(const LinearInt8Params& p, const uint8_t* weights, int64_t num_quads, UintVec* sums) {
  constexpr int VECS = PANELS * PANEL_VECS;
  const int64_t panel_bytes = num_quads * BYTES_PER_QUAD;
  const int64_t num_tiles = (p.num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
  for (int64_t i = 0; i < p.num_rows * VECS; ++i) sums[i] = UintVec{};
  for (int64_t quad = 0; quad < num_quads; quad += BLOCK_QUADS) {
    const int64_t block_quads = smaller(num_quads - quad, BLOCK_QUADS);
    const uint8_t* block = weights + quad * BYTES_PER_QUAD;
    const bool is_last = quad + BLOCK_QUADS >= num_quads;
    const uint8_t* next_block = is_last ? weights + PANELS * panel_bytes : block + BLOCK_QUADS * BYTES_PER_QUAD;
    for_each_tile<MAX_TILE_ROWS>(0, p.num_rows, [&]<int ROWS>(int64_t row) {
      const int64_t tile = row / MAX_TILE_ROWS;
      fetch_next_block<PANELS, BYTES_PER_QUAD>(tile, num_tiles, next_block, panel_bytes, [&](const auto& prefetch) {
        add_tile<ROWS, PANELS>(block, panel_bytes, block_quads, p.codes + row * p.code_stride + quad * ROWS * QUAD,
                               prefetch, sums + row * VECS);
      });
    });
  }
}

// Moves the excess of a row's pairs into `excess`. Returns the number of quads that have an excess.
int32_t limit_pairs(RowCodes row, int64_t num_quads, ExtraQuad* excess) {
  const auto excess_of = [](const int8_t* pair) {
    const int sum = pair[0] + pair[1];
    return sum > MAX_PAIR_SUM ? sum - MAX_PAIR_SUM : sum < -MAX_PAIR_SUM ? sum + MAX_PAIR_SUM : 0;
  };
  int32_t count = 0;
  for (int64_t quad = 0; quad < num_quads; ++quad) {
    int8_t* codes = row.first + quad * row.quad_stride;
    const int first = excess_of(codes), second = excess_of(codes + 2);
    if ((first | second) == 0) [[likely]]
      continue;
    // The two codes of a pair with an excess have the same sign, so the second code only comes closer to zero.
    codes[1] = static_cast<int8_t>(codes[1] - first);
    codes[3] = static_cast<int8_t>(codes[3] - second);
    excess[count++] = {static_cast<int32_t>(quad), {0, static_cast<int8_t>(first), 0, static_cast<int8_t>(second)}};
  }
  return count;
}

}  // namespace

void quantize_rows_int8(const LinearInt8Params& params, int64_t begin, int64_t end) {
  const int64_t num_quads = params.num_quads();
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) {
      const RowCodes codes = row_codes(params, row);
      quantize_row<T>(params, row, [&](int64_t i, IntVec values) PAGEDATTN_ALWAYS_INLINE { codes.store(i, values); });
      if (LIMITS_PAIRS) params.num_excesses[row] = limit_pairs(codes, num_quads, params.excess + row * num_quads);
    }
  });
}

void linear_int8(const LinearInt8Params& params, int64_t begin, int64_t end) {
  const int64_t num_quads = params.num_quads();
  UintVec sums[LINEAR_CHUNK_ROWS * TILE_PANELS * PANEL_VECS];
  dispatch_dtype(params.dtype, [&]<typename T>() {
    const auto multiply = [&]<int PANELS>(int64_t panel, const auto& sum_tiles) {
      const uint8_t* weights = params.weight + panel * num_quads * BYTES_PER_QUAD;
      sum_tiles(params, weights, num_quads, sums);
      if (LIMITS_PAIRS) add_excess<PANELS>(params, weights, num_quads, sums);
      write_out<PANELS, T>(params, panel, reinterpret_cast<int32_t*>(sums), PANELS * LINEAR_PANEL);
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
