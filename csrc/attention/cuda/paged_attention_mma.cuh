// Attention on tensor cores, for queries of 16 bits: mma.m16n8k16 with fp32 accumulation, online softmax
// (Dao et al., "FlashAttention-2", 2023), K and V from the paged cache through shared memory (cache_slice.cuh).
//
// A warp holds 16 packed rows: their queries as operands, the weighted values as accumulators. With
//   decode   the warps of a block share the rows and part the tokens: warp w takes slices w, w + 4, ..., each through a
//            pipeline of its own, and the results are merged at the end. Memory bound; 16 rows cost no more than one,
//            so tensor cores serve every group size. Of 32 rows, two warps share a slice.
//   prefill  each warp has rows of its own, and all share a tile of 4 slices. Compute bound.
//
// Bytes: decode reads K and V once for each tile of 16 or 32 packed rows; prefill once for each tile of 128.
#pragma once

#include "attention/cuda/cache_slice.cuh"
#include "attention/cuda/row_results.cuh"

namespace pagedattn::cuda {
namespace {

// The 16 packed rows of a warp, from `first_packed` on. A lane holds parts of rows lane / 4 and lane / 4 + 8: index 0
// and 1 below.
template <typename T, typename CacheT, int HEAD_SIZE>
class WarpRows {
 public:
  using Slice = CacheSlice<CacheT, HEAD_SIZE>;

  __device__ WarpRows(const AttentionArguments& a, const Work& work, int first_packed)
      : lane_(threadIdx.x % WARP_SIZE), first_packed_(first_packed) {
    const float scale = logit_scale(a);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int packed = packed_row(work, i);
      position_[i] = row_position(a, work, packed);
      slope_[i] = a.p.alibi_slopes == nullptr ? 0.0f : a.p.alibi_slopes[head_of(a, work, packed)];
      scale_[i] = scale;
      max_[i] = -INFINITY;
      sum_[i] = 0.0f;
    }
    load_query(a, work);
#pragma unroll
    for (auto& tile : values_) {
      for (float& value : tile) value = 0.0f;
    }
  }

  // Takes in the tokens of `NUM_SLICES` slices from `token` on.
  template <int NUM_SLICES>
  __device__ void attend(const AttentionArguments& a, const Work& work, const unsigned char* slices, int token) {
    float logits[NUM_SLICES][2][4] = {};
#pragma unroll
    for (int step = 0; step < HEAD_SIZE / 32; ++step) {
#pragma unroll
      for (int slice = 0; slice < NUM_SLICES; ++slice) {
        uint32_t keys[2][4];
        Slice::load_keys(slices + slice * Slice::BYTES, lane_, step, keys);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ptx::mma_m16n8k16<T>(logits[slice][0], query_[2 * step + i], keys[i][0], keys[i][1]);
          ptx::mma_m16n8k16<T>(logits[slice][1], query_[2 * step + i], keys[i][2], keys[i][3]);
        }
      }
    }

    for_each(logits, token, [&](float& logit, int i, int) { logit *= scale_[Slice::IS_FLOAT8 ? i : 0]; });
    if (a.p.softcap > 0.0f) {
      for_each(logits, token, [&](float& logit, int, int) { logit = cap_logit(a, logit); });
    }
    if (a.p.alibi_slopes != nullptr) {
      for_each(logits, token, [&](float& logit, int i, int key_token) {
        logit = fmaf(slope_[i], static_cast<float>(key_token - position_[i]), logit);
      });
    }
    if (!sees_all(a, token, NUM_SLICES * SLICE_TOKENS)) {
      for_each(logits, token, [&](float& logit, int i, int key_token) {
        const bool visible = key_token >= first_visible(a, position_[i]) && key_token <= position_[i];
        logit = visible ? logit : -INFINITY;
      });
    }
    float max[2] = {max_[0], max_[1]};
    for_each(logits, token, [&](float& logit, int i, int) { max[i] = fmaxf(max[i], logit); });

    rescale(max);
    const float base[2] = {max[0] == -INFINITY ? 0.0f : max[0], max[1] == -INFINITY ? 0.0f : max[1]};
    if (work.begin <= token && token + NUM_SLICES * SLICE_TOKENS <= work.end) {
      add_values<false>(work, slices, logits, base, token);
    } else {
      add_values<true>(work, slices, logits, base, token);
    }
  }

  // Once, after the last token: the sums of whole rows.
  __device__ void finish() {
#pragma unroll
    for (float& sum : sum_) {
      sum += __shfl_xor_sync(ALL_LANES, sum, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    }
  }

  // To the `index`-th results of the block.
  template <typename Results>
  __device__ void write(const Work& work, Results& results, int index) const {
    const int pair = lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has_row(work, i)) continue;
      const int row = first_packed_ - work.tile_begin + lane_ / 4 + i * 8;
      if (pair == 0) results.softmax[index][row] = make_float2(max_[i], sum_[i]);
#pragma unroll
      for (int tile = 0; tile < HEAD_SIZE / 8; ++tile) {
        *reinterpret_cast<float2*>(&results.values[index][row][tile * 8 + pair]) =
            make_float2(values_[tile][2 * i], values_[tile][2 * i + 1]);
      }
    }
  }

  // The rows' results as they are, to an out of type Out: no other warp has worked on them.
  template <typename Out>
  __device__ void store(const AttentionArguments& a, const Work& work) const {
    const int pair = lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has_row(work, i)) continue;
      const RowTarget target = begin_row(a, work, packed_row(work, i), max_[i], sum_[i], pair == 0);
#pragma unroll
      for (int tile = 0; tile < HEAD_SIZE / 8; ++tile) {
        const int d = tile * 8 + pair;
        if (d >= a.p.head_size) continue;
        target.template store<Out>(a, work, d, Floats<2>{values_[tile][2 * i], values_[tile][2 * i + 1]});
      }
    }
  }

  // Whether none of the rows, if there are any, sees any of the tokens from `token` on.
  __device__ bool is_before(const Work& work, int token) const {
    return first_packed_ >= work.tile_end || !__any_sync(ALL_LANES, position_[0] >= token || position_[1] >= token);
  }

 private:
  __device__ bool has_row(const Work& work, int i) const { return first_packed_ + lane_ / 4 + i * 8 < work.tile_end; }
  // Past the last row of the tile, that one again: it sees no other tokens, and is not written.
  __device__ int packed_row(const Work& work, int i) const {
    return min(first_packed_ + lane_ / 4 + i * 8, work.tile_end - 1);
  }

  // function(logit, row, token) for all logits of a lane; row is 0 or 1.
  template <int NUM_SLICES, typename Function>
  __device__ void for_each(float (&logits)[NUM_SLICES][2][4], int token, const Function& function) const {
#pragma unroll
    for (int slice = 0; slice < NUM_SLICES; ++slice) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int first = token + slice * SLICE_TOKENS + Slice::token_of(lane_, tile);
#pragma unroll
        for (int i = 0; i < 4; ++i) function(logits[slice][tile][i], i / 2, first + i % 2);
      }
    }
  }

  // Whether all rows of the warp see all of the tokens.
  __device__ bool sees_all(const AttentionArguments& a, int token, int num_tokens) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      all = all && first_visible(a, position_[i]) <= token && token + num_tokens - 1 <= position_[i];
    }
    return __all_sync(ALL_LANES, all);
  }

  // With an 8-bit cache, bfloat16 queries are multiplied in float16: divided by a power of two of their own, so that
  // none overflows. What is then below float16's range is 2^-24 of the row's largest element.
  __device__ void load_query(const AttentionArguments& a, const Work& work) {
    const uint16_t* rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int packed = packed_row(work, i);
      rows[i] = static_cast<const uint16_t*>(a.p.query) + row_of(a, work, packed) * a.p.query_stride +
                head_of(a, work, packed) * a.p.head_size;
    }
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < HEAD_SIZE / 16; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int element = Slice::element_of(lane_, step, r / 2);
        uint32_t bits = 0;
        if (element < a.p.head_size) {
          bits = rows[r % 2][element] | static_cast<uint32_t>(rows[r % 2][element + 1]) << 16;
        }
        query_[step][r] = bits;
        if constexpr (Slice::IS_FLOAT8) {
          largest[r % 2] = fmaxf(largest[r % 2], fmaxf(fabsf(low_bfloat16(bits)), fabsf(high_bfloat16(bits))));
        }
      }
    }
    if constexpr (Slice::IS_FLOAT8) {
      if (a.p.dtype == DType::BFLOAT16) convert_query(largest);
    }
  }

  __device__ void convert_query(float (&largest)[2]) {
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(ALL_LANES, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(ALL_LANES, largest[i], 2));
      // The power of two at or below it, within what has an inverse.
      const uint32_t exponent = min(max(__float_as_uint(largest[i]) >> 23, 1u), 253u);
      scale_[i] *= __uint_as_float(exponent << 23);
      inverse[i] = __uint_as_float((254 - exponent) << 23);
    }
#pragma unroll
    for (auto& registers : query_) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t bits = registers[r];
        registers[r] = ptx::pack<T>(low_bfloat16(bits) * inverse[r % 2], high_bfloat16(bits) * inverse[r % 2]);
      }
    }
  }

  static __device__ float low_bfloat16(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ float high_bfloat16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

  // Takes the maxima of a lane's logits to those of the rows, and what was summed so far to these.
  __device__ void rescale(float (&max)[2]) {
    bool larger = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max[i] = fmaxf(max[i], __shfl_xor_sync(ALL_LANES, max[i], 1));
      max[i] = fmaxf(max[i], __shfl_xor_sync(ALL_LANES, max[i], 2));
      larger = larger || max[i] > max_[i];
    }
    if (!__any_sync(ALL_LANES, larger)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float weight = exp_below(max_[i], max[i]);
      max_[i] = max[i];
      sum_[i] *= weight;
#pragma unroll
      for (auto& tile : values_) {
        tile[2 * i] *= weight;
        tile[2 * i + 1] *= weight;
      }
    }
  }

  // values += probabilities * V, probabilities = e^(logits - base). At an edge of what the work sees, the values of the
  // other tokens are masked: they may be anything, and 0 * NaN is NaN.
  template <bool AT_EDGE, int NUM_SLICES>
  __device__ void add_values(const Work& work, const unsigned char* slices, const float (&logits)[NUM_SLICES][2][4],
                             const float (&base)[2], int token) {
#pragma unroll
    for (int slice = 0; slice < NUM_SLICES; ++slice) {
      uint32_t probabilities[4];
      uint32_t mask[2] = {~0u, ~0u};
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          p[i] = ptx::exp2_approx((logits[slice][tile][i] - base[i / 2]) * LOG2_E);
          sum_[i / 2] += p[i];
        }
        probabilities[2 * tile] = ptx::pack<T>(p[0], p[1]);
        probabilities[2 * tile + 1] = ptx::pack<T>(p[2], p[3]);
        if constexpr (AT_EDGE) {
          mask[tile] = visible_pair(work, token + slice * SLICE_TOKENS + Slice::token_of(lane_, tile));
        }
      }
#pragma unroll
      for (int step = 0; step < HEAD_SIZE / 32; ++step) {
        uint32_t operands[4][2];
        Slice::load_values(slices + slice * Slice::BYTES, lane_, step, operands);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ptx::mma_m16n8k16<T>(values_[4 * step + i], probabilities, operands[i][0] & mask[0],
                               operands[i][1] & mask[1]);
        }
      }
    }
  }

  // Two neighbouring tokens' 16-bit elements: ones where a row of the work may see the token.
  static __device__ uint32_t visible_pair(const Work& work, int token) {
    const auto visible = [&](int t) { return t >= work.begin && t < work.end; };
    return (visible(token) ? 0x0000ffffu : 0u) | (visible(token + 1) ? 0xffff0000u : 0u);
  }

  int lane_;
  int first_packed_;
  int position_[2];
  float slope_[2];  // of ALiBi
  float scale_[2];  // one for both rows, unless convert_query scales them
  float max_[2];
  float sum_[2];  // of this lane's logits
  uint32_t query_[HEAD_SIZE / 16][4];
  float values_[HEAD_SIZE / 8][4];
};

// store.operator()<Out>() with the type of out: that of the queries, which over an 8-bit cache are multiplied in
// float16 whatever they are.
template <typename T, typename CacheT, typename Store>
__device__ void with_out_type(const AttentionArguments& a, const Store& store) {
  if constexpr (sizeof(CacheT) == 1) {
    if (a.p.dtype == DType::BFLOAT16) return store.template operator()<bfloat16>();
  }
  store.template operator()<T>();
}

// ---- decode

// What every GPU since sm_80 lets a block have.
constexpr int MAX_SHARED_BYTES = 99 * 1024;

// The block of decode is of teams, which part the tokens. A team has a slice at a time, and a warp for each tile of 16
// rows.
template <typename CacheT, int HEAD_SIZE, int NUM_TILES>
struct Decode {
  static constexpr int SLICE_BYTES = CacheSlice<CacheT, HEAD_SIZE>::BYTES;
  static constexpr int NUM_TEAMS = HEAD_SIZE > 128 && sizeof(CacheT) > 1 ? 2 : 4;
  static constexpr int TEAM_THREADS = NUM_TILES * WARP_SIZE;
  static constexpr int NUM_WARPS = NUM_TEAMS * NUM_TILES;
  static constexpr int NUM_STAGES = NUM_TEAMS * SLICE_BYTES > 16 * 1024 ? 3 : 4;
  static constexpr int TEAM_BYTES = NUM_STAGES * SLICE_BYTES;
  static constexpr bool IS_LOOP = HEAD_SIZE <= 128;  // over works; larger heads leave no registers for it
  using Results = BlockResults<NUM_TEAMS, NUM_TILES * MMA_ROWS, HEAD_SIZE>;
  static constexpr int SHARED_BYTES = std::max<int>(NUM_TEAMS * TEAM_BYTES, sizeof(Results));
  static_assert(SHARED_BYTES <= MAX_SHARED_BYTES);

  static __device__ void sync_team(int team) {
    if constexpr (NUM_TILES == 1) {
      __syncwarp();
    } else {
      ptx::barrier_sync(1 + team, TEAM_THREADS);
    }
  }
};

template <typename T, typename CacheT, int HEAD_SIZE, int NUM_TILES>
__device__ void attend_decode(const AttentionArguments& a, const Work& work) {
  using Slice = CacheSlice<CacheT, HEAD_SIZE>;
  using Shape = Decode<CacheT, HEAD_SIZE, NUM_TILES>;
  constexpr int STEP = Shape::NUM_TEAMS * SLICE_TOKENS;
  const int team = threadIdx.x / Shape::TEAM_THREADS;
  const int thread = threadIdx.x % Shape::TEAM_THREADS;
  const int first_packed = work.tile_begin + thread / WARP_SIZE * MMA_ROWS;  // the last tile may have no row
  unsigned char* stages = shared_memory + team * Shape::TEAM_BYTES;
  int token = work.begin / SLICE_TOKENS * SLICE_TOKENS + team * SLICE_TOKENS;
  int next_token = token;  // of the next slice to load, whose blocks are looked up one step ahead
  SliceBlocks next_blocks = find_blocks(a, work, next_token);
  int next_stage = 0;
  const auto load_next = [&] {
    if (next_token < work.end) {
      Slice::template load<Shape::TEAM_THREADS>(a, work, next_token, next_blocks, stages + next_stage * Slice::BYTES,
                                                thread);
      next_token += STEP;
      next_blocks = find_blocks(a, work, next_token);
    }
    ptx::cp_async_commit();
    next_stage = next_stage + 1 == Shape::NUM_STAGES ? 0 : next_stage + 1;
  };
  for (int i = 0; i < Shape::NUM_STAGES - 1; ++i) load_next();

  WarpRows<T, CacheT, HEAD_SIZE> rows(a, work, first_packed);
  for (int stage = 0; token < work.end; token += STEP) {
    ptx::cp_async_wait<Shape::NUM_STAGES - 2>();
    Shape::sync_team(team);  // the slice is there for all, and all have done with the one before, whose place is filled
    load_next();
    if (NUM_TILES == 1 || first_packed < work.tile_end) {
      rows.template attend<1>(a, work, stages + stage * Slice::BYTES, token);
    }
    stage = stage + 1 == Shape::NUM_STAGES ? 0 : stage + 1;
  }
  rows.finish();

  ptx::cp_async_wait<0>();
  __syncthreads();  // the results take the place of the slices
  auto& results = *reinterpret_cast<typename Shape::Results*>(shared_memory);
  rows.write(work, results, team);
  __syncthreads();
  with_out_type<T, CacheT>(a, [&]<typename Out>() { results.template store<Out, Shape::NUM_WARPS>(a, work); });
}

// Grid: decode_grid; num_decode_works where IS_LOOP is false.
template <typename T, typename CacheT, int HEAD_SIZE, int NUM_TILES>
__global__ void __launch_bounds__(Decode<CacheT, HEAD_SIZE, NUM_TILES>::NUM_WARPS* WARP_SIZE)
    decode_kernel(const __grid_constant__ AttentionArguments a, int64_t num_works) {
  ptx::griddepcontrol_launch_dependents();  // merge_kernel: a block that waits takes no place of ours
  if constexpr (Decode<CacheT, HEAD_SIZE, NUM_TILES>::IS_LOOP) {
    for_each_decode_work(a, num_works,
                         [&](const Work& work) { attend_decode<T, CacheT, HEAD_SIZE, NUM_TILES>(a, work); });
  } else {
    Work work;
    if (find_decode_work(a, blockIdx.x, work)) attend_decode<T, CacheT, HEAD_SIZE, NUM_TILES>(a, work);
  }
}

// ---- prefill

template <typename CacheT, int HEAD_SIZE>
struct Prefill {
  static constexpr int NUM_WARPS = PREFILL_WARPS;
  // Of a tile. Limited by the registers for their logits: all of them with large heads, and half with small ones, where
  // two blocks share a multiprocessor.
  static constexpr bool TWO_BLOCKS = HEAD_SIZE <= 64 && sizeof(CacheT) > 1;
  static constexpr int NUM_SLICES = HEAD_SIZE > 128 ? 1 : TWO_BLOCKS ? 2 : 4;
  static constexpr int NUM_STAGES = HEAD_SIZE > 128 ? 4 : 3;
  static constexpr int STAGE_BYTES = NUM_SLICES * CacheSlice<CacheT, HEAD_SIZE>::BYTES;
  static constexpr int SHARED_BYTES = NUM_STAGES * STAGE_BYTES;
  static_assert(SHARED_BYTES <= MAX_SHARED_BYTES);
  static constexpr int MIN_BLOCKS = TWO_BLOCKS ? 2 : 1;
  static constexpr int THREADS_PER_SLICE = NUM_WARPS * WARP_SIZE / NUM_SLICES;
};

// Grid: prefill_grid.
template <typename T, typename CacheT, int HEAD_SIZE>
__global__ void __launch_bounds__(Prefill<CacheT, HEAD_SIZE>::NUM_WARPS* WARP_SIZE,
                                  Prefill<CacheT, HEAD_SIZE>::MIN_BLOCKS)
    prefill_kernel(const __grid_constant__ AttentionArguments a) {
  using Slice = CacheSlice<CacheT, HEAD_SIZE>;
  using Shape = Prefill<CacheT, HEAD_SIZE>;
  constexpr int STEP = Shape::NUM_SLICES * SLICE_TOKENS;
  Work work;
  if (!find_prefill_work(a, work)) return;

  const int warp = threadIdx.x / WARP_SIZE;
  const int slice = threadIdx.x / Shape::THREADS_PER_SLICE;  // that this thread loads
  int token = work.begin / STEP * STEP;                      // so that no tile lies in two partitions
  int next_token = token;
  SliceBlocks next_blocks = find_blocks(a, work, next_token + slice * SLICE_TOKENS);
  int next_stage = 0;
  const auto load_next = [&] {
    if (next_token < work.end) {
      unsigned char* target = shared_memory + next_stage * Shape::STAGE_BYTES + slice * Slice::BYTES;
      Slice::template load<Shape::THREADS_PER_SLICE>(a, work, next_token + slice * SLICE_TOKENS, next_blocks, target,
                                                     threadIdx.x % Shape::THREADS_PER_SLICE);
      next_token += STEP;
      next_blocks = find_blocks(a, work, next_token + slice * SLICE_TOKENS);
    }
    ptx::cp_async_commit();
    next_stage = next_stage + 1 == Shape::NUM_STAGES ? 0 : next_stage + 1;
  };
  for (int i = 0; i < Shape::NUM_STAGES - 1; ++i) load_next();

  WarpRows<T, CacheT, HEAD_SIZE> rows(a, work, work.tile_begin + warp * MMA_ROWS);
  for (int stage = 0; token < work.end; token += STEP) {
    ptx::cp_async_wait<Shape::NUM_STAGES - 2>();
    __syncthreads();  // as in decode
    load_next();
    if (!rows.is_before(work, token)) {
      rows.template attend<Shape::NUM_SLICES>(a, work, shared_memory + stage * Shape::STAGE_BYTES, token);
    }
    stage = stage + 1 == Shape::NUM_STAGES ? 0 : stage + 1;
  }
  rows.finish();
  with_out_type<T, CacheT>(a, [&]<typename Out>() { rows.template store<Out>(a, work); });
}

template <typename T, typename CacheT, int HEAD_SIZE, int NUM_TILES>
void launch_decode(const AttentionArguments& a, cudaStream_t stream) {
  using Shape = Decode<CacheT, HEAD_SIZE, NUM_TILES>;
  const int64_t num_works = num_decode_works(a);
  launch(decode_kernel<T, CacheT, HEAD_SIZE, NUM_TILES>, Shape::IS_LOOP ? decode_grid(a) : dim3(grid_size(num_works)),
         dim3(Shape::NUM_WARPS * WARP_SIZE), Shape::SHARED_BYTES, stream, a, num_works);
}

template <typename T, typename CacheT, int HEAD_SIZE>
void launch_mma(const AttentionArguments& a, cudaStream_t stream) {
  if (a.decode_tile_rows == MMA_ROWS) {
    launch_decode<T, CacheT, HEAD_SIZE, 1>(a, stream);
  } else if constexpr (has_wide_tiles(HEAD_SIZE, sizeof(CacheT))) {
    launch_decode<T, CacheT, HEAD_SIZE, WIDE_TILES>(a, stream);
  }
  if (!may_have_prefill(a)) return;
  using PrefillShape = Prefill<CacheT, HEAD_SIZE>;
  launch(prefill_kernel<T, CacheT, HEAD_SIZE>, prefill_grid(a), dim3(PrefillShape::NUM_WARPS * WARP_SIZE),
         PrefillShape::SHARED_BYTES, stream, a);
}

}  // namespace

template <typename T, typename CacheT>
void attend_mma(const AttentionArguments& a, cudaStream_t stream) {
  if (a.p.head_size <= 64) {
    launch_mma<T, CacheT, 64>(a, stream);
  } else if (a.p.head_size <= 128) {
    launch_mma<T, CacheT, 128>(a, stream);
  } else {
    launch_mma<T, CacheT, 256>(a, stream);
  }
}

}  // namespace pagedattn::cuda
