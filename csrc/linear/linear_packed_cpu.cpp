// Few rows are bound by memory: each weight is read once. Many rows are bound by multiply-adds, so a tile of sums stays
// in registers along in_features. A tile has as many rows as there are registers for, by one panel of output features,
// or by 4 panels where a panel is one vector wide. Where rows are few, a tile has several panels, so that the additions
// to one sum hide behind the additions to other sums. Several tiles go together, block by block along in_features, and
// all but the first find the block of weights in the nearest cache.
//
// Rows and weights are multiplied in fp32, or in bf16 where both are bf16 and the CPU has an instruction for their
// products. The products of a block are one chain of additions, and the blocks are added in their order, whatever the
// tile: the bits of a row do not depend on the rows beside it.
#include "cpu_memory.h"
#include "cpu_rows.h"
#include "dispatch.h"
#include "linear/linear_packed.h"
#include "linear/panels.h"
#if defined(__AMX_BF16__)
#include "linear/tile_products.h"
#endif

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// In vectors. So many sums leave registers for the operands.
constexpr int NUM_SUMS = NUM_REGISTERS == 32 ? 24 : VEC_BYTES == 32 ? 12 : 8;
constexpr int MAX_TILE_ROWS = NUM_SUMS / (TILE_PANELS * PANEL_VECS);
// A single tile is bound by memory: it may have more rows, and reads fewer panels side by side.
constexpr int MAX_SINGLE_TILE_ROWS = TILE_PANELS == 1 ? MAX_TILE_ROWS : 2 * MAX_TILE_ROWS;
// Steps along in_features. Their weights, as they are multiplied, take 16 KiB, half of a first-level cache.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr int64_t BLOCK_STEPS = 128;
#else
constexpr int64_t BLOCK_STEPS = 256 / TILE_PANELS;
#endif
// Under way for a single tile, of all panels together. Where lines are fetched into the first-level cache alone, more
// lines would push each other out of it.
constexpr int PREFETCH_BYTES = VEC_BYTES == 64 ? 6144 : 1024;
// Conversions from fp16 leave the core less time to wait for the second-level cache.
template <typename W>
constexpr int NEAR_BYTES = VEC_BYTES == 64 && std::is_same_v<W, float16> ? 256 : 0;

// The form in which rows and weights are multiplied, step by step along in_features. Converted rows consist of
// Elements, and so do blocks of weights that are converted once for many rows. A step has one Element for each row, and
// one for each feature of a panel.

// A step is one element, in fp32.
struct Floats {
  using Element = float;
  static constexpr int STEP = 1;

  template <typename W>
  static PAGEDATTN_INLINE Vec load_weights(const W* weights) {
    return load(weights);
  }
  static PAGEDATTN_INLINE Vec repeat(const Element* x) { return load_repeated<1>(x); }
  static PAGEDATTN_INLINE Vec add_product(Vec x, Vec w, Vec sum) { return fma(x, w, sum); }

  template <typename T>
  static PAGEDATTN_INLINE void convert(const T* row, int64_t size, Element* converted) {
    for_each_vector(size, [&](int64_t i, auto load, auto store) { store(converted + i, load(row + i)); });
  }
};

#if defined(PAGEDATTN_BFLOAT16_DOTS)
// A step is two elements, in bf16. One instruction adds both products to a sum in fp32; denormals count as zeros.
struct Bfloat16Pairs {
  using Element = uint32_t;
  static constexpr int STEP = 2;

  // In a packed weight, the second elements of all features of a panel follow the first elements of all features.
  static PAGEDATTN_INLINE Vec load_weights(const bfloat16* weights) {
#if defined(__AVX512BF16__)
    const UintVec side_by_side = (UintVec)iota() * 0x10001 + 0x100000;  // 0, 16, 1, 17, ... in 16 bits each
    return (Vec)_mm512_maskz_permutexvar_epi16(~0u, (__m512i)side_by_side, load_as<__m512i>(weights));
#else
    const auto first = load_as<uint64x1_t>(weights), second = load_as<uint64x1_t>(weights + LINEAR_PANEL);
    return (Vec)vzip1q_u16((uint16x8_t)vcombine_u64(first, first), (uint16x8_t)vcombine_u64(second, second));
#endif
  }
  static PAGEDATTN_INLINE Vec load_weights(const Element* weights) { return load_as<Vec>(weights); }
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  // For an instruction that takes the first pair alone.
  static PAGEDATTN_INLINE Vec repeat(const Element* x) { return (Vec)vcombine_u64(vcreate_u64(*x), vcreate_u64(0)); }
  static PAGEDATTN_INLINE Vec add_product(Vec x, Vec w, Vec sum) {
    const bfloat16x4_t pair = vget_low_bf16((bfloat16x8_t)x);
    return (Vec)vbfdotq_lane_f32((float32x4_t)sum, (bfloat16x8_t)w, pair, 0);
  }
#else
  static PAGEDATTN_INLINE Vec repeat(const Element* x) { return (Vec)(UintVec{} + *x); }
  static PAGEDATTN_INLINE Vec add_product(Vec x, Vec w, Vec sum) { return add_pair_products(sum, x, w); }
#endif

  static PAGEDATTN_INLINE void convert(const bfloat16* row, int64_t size, Element* converted) {
    __builtin_memcpy(converted, row, size * sizeof(bfloat16));
  }
};
#endif

// The number of weights of a panel in one step.
template <typename Operands, typename W>
constexpr int STEP_SIZE = std::is_same_v<W, typename Operands::Element> ? LINEAR_PANEL : Operands::STEP * LINEAR_PANEL;

// Whether several tiles share converted blocks of weights. Where a tile has one panel, it has so many rows that the
// conversion costs it little. But the conversion from fp16 has one of the four pipes of NEON to itself.
template <typename Operands, typename W>
constexpr bool CONVERTS_BLOCKS =
    !std::is_same_v<W, typename Operands::Element> &&
    (TILE_PANELS > 1 || Operands::STEP > 1 || (NUM_REGISTERS == 32 && VEC_BYTES == 16 && std::is_same_v<W, float16>));

// Tiles of rows, as equal in size as can be.
struct Tiles {
  int64_t num_rows;
  int64_t num_tiles;

  explicit Tiles(int64_t rows) : num_rows(rows) {
    num_tiles = num_rows <= MAX_SINGLE_TILE_ROWS ? 1 : (num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
  }
  int64_t begin_of(int64_t tile) const { return tile * num_rows / num_tiles; }
  int64_t rows_of(int64_t tile) const { return begin_of(tile + 1) - begin_of(tile); }
};

// How many panels a single tile is multiplied with at once, up to 4. Each panel is a stream of memory.
constexpr int panels_at_once(int tile_rows) {
  return tile_rows > MAX_TILE_ROWS ? 2 : static_cast<int>(smaller(NUM_SUMS / (PANEL_VECS * tile_rows), 4));
}

// sums [ROWS][PANELS * LINEAR_PANEL] += rows [ROWS][BLOCK_STEPS] times weights [num_steps][STEP_SIZE] of each panel.
// Calls prefetch(step) at each step. Not inlined, or GCC 12 keeps the sums in memory.
template <int ROWS, int PANELS, typename Operands, typename W, typename Prefetch>
__attribute__((noinline)) void add_products(const typename Operands::Element* rows, const W* weights,
                                            int64_t panel_stride, int64_t num_steps, const Prefetch& prefetch,
                                            float* sums) {
  constexpr int VECS = PANELS * PANEL_VECS;
  Vec sum[ROWS][VECS];
  PAGEDATTN_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) sum[r][v] = Vec{};
  }
  for (int64_t step = 0; step < num_steps; ++step) {
    const W* weight = weights + step * STEP_SIZE<Operands, W>;
    prefetch(step);
    const auto weight_at = [&](int v) PAGEDATTN_ALWAYS_INLINE {
      return Operands::load_weights(weight + v / PANEL_VECS * panel_stride + v % PANEL_VECS * VEC_SIZE);
    };
    if constexpr (ROWS < VECS) {
      Vec x[ROWS];
      PAGEDATTN_UNROLL
      for (int r = 0; r < ROWS; ++r) x[r] = Operands::repeat(rows + r * BLOCK_STEPS + step);
      PAGEDATTN_UNROLL
      for (int v = 0; v < VECS; ++v) {
        const Vec w = in_register(weight_at(v));
        PAGEDATTN_UNROLL
        for (int r = 0; r < ROWS; ++r) sum[r][v] = Operands::add_product(x[r], w, sum[r][v]);
      }
    } else {
      Vec w[VECS];
      PAGEDATTN_UNROLL
      for (int v = 0; v < VECS; ++v) w[v] = weight_at(v);
      PAGEDATTN_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const Vec x = Operands::repeat(rows + r * BLOCK_STEPS + step);
        PAGEDATTN_UNROLL
        for (int v = 0; v < VECS; ++v) sum[r][v] = Operands::add_product(x, w[v], sum[r][v]);
      }
    }
  }
  PAGEDATTN_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < VECS; ++v) {
      float* total = sums + (r * VECS + v) * VEC_SIZE;
      store(total, load(total) + sum[r][v]);
    }
  }
}

// Adds the bias to sums [num_rows][PANELS * LINEAR_PANEL] and rounds them.
template <int PANELS>
void write_out(const LinearPackedParams& p, int64_t panel, const float* sums) {
  constexpr int FEATURES = PANELS * LINEAR_PANEL;
  const int64_t feature = panel * LINEAR_PANEL;
  const int64_t count = smaller(p.out_features - feature, FEATURES);
  dispatch_dtype(p.dtype, [&]<typename T>() {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      T* out = static_cast<T*>(p.out) + row * p.out_features + feature;
      for_each_vector(count, [&](int64_t i, auto load_some, auto store_some) {
        Vec value = load(sums + row * FEATURES + i);
        if (p.bias != nullptr) value = value + load_some(p.bias + feature + i);
        store_some(out + i, value);
      });
    }
  });
}

template <int ROWS, int PANELS, typename Operands, typename W>
void one_tile(const LinearPackedParams& p, int64_t panel) {
  constexpr int SIZE = STEP_SIZE<Operands, W>;
  alignas(64) float sums[ROWS * PANELS * LINEAR_PANEL] = {};
  const int64_t panel_size = p.in_features * LINEAR_PANEL, num_steps = p.in_features / Operands::STEP;
  const W* weights = static_cast<const W*>(p.packed_weight) + panel * panel_size;
  const auto* rows = static_cast<const typename Operands::Element*>(p.rows);
  const FetchAhead<PANELS, PREFETCH_BYTES, NEAR_BYTES<W>> fetch_ahead(weights, panel_size * sizeof(W));
  for (int64_t step = 0; step < num_steps; step += BLOCK_STEPS) {
    const W* block = weights + step * SIZE;
    const auto prefetch = [&](int64_t i) PAGEDATTN_ALWAYS_INLINE { fetch_ahead(block + i * SIZE); };
    add_products<ROWS, PANELS, Operands>(rows + step * ROWS, block, panel_size, smaller(num_steps - step, BLOCK_STEPS),
                                         prefetch, sums);
  }
  write_out<PANELS>(p, panel, sums);
}

template <int PANELS, typename Operands, typename W>
void several_tiles(const LinearPackedParams& p, int64_t panel) {
  using Element = typename Operands::Element;
  constexpr int SIZE = STEP_SIZE<Operands, W>;
  constexpr int FEATURES = PANELS * LINEAR_PANEL;
  alignas(64) float sums[LINEAR_CHUNK_ROWS * FEATURES];
  __builtin_memset(sums, 0, p.num_rows * FEATURES * sizeof(float));
  const Tiles tiles(p.num_rows);
  const int64_t panel_size = p.in_features * LINEAR_PANEL, num_steps = p.in_features / Operands::STEP;
  const W* panels = static_cast<const W*>(p.packed_weight) + panel * panel_size;
  for (int64_t step = 0; step < num_steps; step += BLOCK_STEPS) {
    const W* block = panels + step * SIZE;
    const bool is_last = step + BLOCK_STEPS >= num_steps;
    const W* next_block = is_last ? panels + PANELS * panel_size : block + BLOCK_STEPS * SIZE;
    const int64_t block_steps = smaller(num_steps - step, BLOCK_STEPS);
    const auto* rows = static_cast<const Element*>(p.rows) + step * p.num_rows;
    const auto add_tiles = [&](const auto* weights, int64_t panel_stride) {
      for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
        const int64_t first = tiles.begin_of(tile);
        fetch_next_block<PANELS, SIZE>(tile, tiles.num_tiles, next_block, panel_size, [&](const auto& prefetch) {
          dispatch_tile_rows<MAX_TILE_ROWS>(tiles.rows_of(tile), [&]<int ROWS>() {
            add_products<ROWS, PANELS, Operands>(rows + first * BLOCK_STEPS, weights, panel_stride, block_steps,
                                                 prefetch, sums + first * FEATURES);
          });
        });
      }
    };
    if constexpr (!CONVERTS_BLOCKS<Operands, W>) {
      add_tiles(block, panel_size);
    } else {
      // Converts the block once for all tiles. A tile has so few rows that it would spend a sixth of its time on the
      // conversion.
      constexpr int64_t BLOCK_SIZE = BLOCK_STEPS * LINEAR_PANEL;
      alignas(64) Element converted[PANELS * BLOCK_SIZE];
      for (int i = 0; i < PANELS; ++i) {
        for (int64_t j = 0; j < block_steps; ++j) {
          for (int v = 0; v < PANEL_VECS; ++v) {
            const Vec weights = Operands::load_weights(block + i * panel_size + j * SIZE + v * VEC_SIZE);
            __builtin_memcpy(converted + i * BLOCK_SIZE + j * LINEAR_PANEL + v * VEC_SIZE, &weights, sizeof weights);
          }
        }
      }
      add_tiles(converted, BLOCK_SIZE);
    }
  }
  write_out<PANELS>(p, panel, sums);
}

#if defined(__AMX_BF16__)
void multiply_on_tiles(const LinearPackedParams& p, int64_t begin, int64_t end) {
  if (p.num_rows == 1) {
    return for_each_panels<4>(begin, end, [&]<int PANELS>(int64_t panel) {
      alignas(64) float sums[PANELS * LINEAR_PANEL];
      multiply_one_row<PANELS>(p, panel, sums);
      write_out<PANELS>(p, panel, sums);
    });
  }
  const RowTiles tiles(p.num_rows);
  const auto few_tiles = [&]<int ROW_TILES>() {
    for_each_panels<4 / ROW_TILES>(begin, end, [&]<int PANELS>(int64_t panel) {
      alignas(64) float sums[ROW_TILES * TILE_ROWS * PANELS * LINEAR_PANEL];
      multiply_few_tiles<ROW_TILES, PANELS>(p, tiles, panel, sums);
      write_out<PANELS>(p, panel, sums);
    });
  };
  switch (tiles.num_tiles) {
    case 1:
      return few_tiles.template operator()<1>();
    case 2:
      return few_tiles.template operator()<2>();
    case 3:
      return few_tiles.template operator()<3>();
    case 4:
      return few_tiles.template operator()<4>();
  }
  for_each_panels<TILE_PANELS>(begin, end, [&]<int PANELS>(int64_t panel) {
    alignas(64) float sums[(TILE_CHUNK_ROWS + TILE_ROWS) * PANELS * LINEAR_PANEL];
    multiply_many_tiles<PANELS>(p, tiles, panel, sums);
    write_out<PANELS>(p, panel, sums);
  });
}
#endif

// Calls body.operator()<Operands, T, W>() for rows of T and weights of W.
template <typename Body>
void dispatch_operands(const LinearPackedParams& p, const Body& body) {
#if defined(PAGEDATTN_BFLOAT16_DOTS)
  if (p.dtype == DType::BFLOAT16 && p.weight_dtype == DType::BFLOAT16 && p.in_features % Bfloat16Pairs::STEP == 0) {
    return body.template operator()<Bfloat16Pairs, bfloat16, bfloat16>();
  }
#endif
  dispatch_dtype(p.dtype, [&]<typename T>() {
    dispatch_dtype(p.weight_dtype, [&]<typename W>() { body.template operator()<Floats, T, W>(); });
  });
}

}  // namespace

void convert_rows(const LinearPackedParams& params, int64_t begin, int64_t end) {
#if defined(__AMX_BF16__)
  if (params.on_tiles) return convert_rows_to_tiles(params, begin, end);
#endif
  dispatch_operands(params, [&]<typename Operands, typename T, typename W>() {
    constexpr int64_t BLOCK_SIZE = BLOCK_STEPS * Operands::STEP;
    static_assert(MAX_PACKED_BLOCK % BLOCK_SIZE == 0);
    for (int64_t row = begin; row < end; ++row) {
      const T* input = static_cast<const T*>(params.input) + row * params.input_stride;
      auto* converted = static_cast<typename Operands::Element*>(params.rows) + row * BLOCK_STEPS;
      for (int64_t i = 0; i < params.in_features; i += BLOCK_SIZE, converted += params.num_rows * BLOCK_STEPS) {
        Operands::convert(input + i, smaller(params.in_features - i, BLOCK_SIZE), converted);
      }
    }
  });
}

void linear_packed(const LinearPackedParams& params, int64_t begin, int64_t end) {
#if defined(__AMX_BF16__)
  if (params.on_tiles) return multiply_on_tiles(params, begin, end);
#endif
  dispatch_operands(params, [&]<typename Operands, typename T, typename W>() {
    dispatch_tiles<MAX_SINGLE_TILE_ROWS, panels_at_once>(
        params.num_rows, begin, end,
        [&]<int ROWS, int PANELS>(int64_t panel) { one_tile<ROWS, PANELS, Operands, W>(params, panel); },
        [&]<int PANELS>(int64_t panel) { several_tiles<PANELS, Operands, W>(params, panel); });
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
