// Attention on tensor cores, for queries of 16 bits: mma.m16n8k16 with fp32 accumulation, online softmax (Dao et al.,
// "FlashAttention-2", 2023), K and V from the paged cache through shared memory (cache_slice.cuh, nhd_slice.cuh).
//
// A warp holds 16 packed rows (warp_rows.cuh).
//   decode   The warps of a block have the same rows and share out the tokens. Warp w takes slices w, w + 4, ...
//            through a pipeline of its own (decode_stages.cuh), and the results are merged at the end. Decode is memory
//            bound: 16 rows cost no more than one, so tensor cores serve every group size. With 32 rows, two warps
//            share a slice.
//   prefill  Each warp has rows of its own, and all warps share a tile of 4 slices. Prefill is compute bound.
//
// Bytes: decode reads K and V once for each tile of 16 or 32 packed rows, prefill once for each tile of 128.
#pragma once

#include "attention/cuda/decode_stages.cuh"
#include "attention/cuda/merge_partitions.cuh"
#include "attention/cuda/warp_rows.cuh"

namespace pagedattn::cuda {
namespace {

// Calls store.operator()<Out>() with the type of out, which is the type of the queries. Over an 8-bit cache, queries of
// any type are multiplied in float16.
template <typename T, typename CacheT, typename Store>
__device__ void with_out_type(const AttentionArguments& a, const Store& store) {
  if constexpr (sizeof(CacheT) == 1) {
    if (a.p.dtype == DType::BFLOAT16) return store.template operator()<bfloat16>();
  }
  store.template operator()<T>();
}

// ---- decode

// Returns the sums of all teams, which all threads may read.
template <typename T, typename CacheT, int HEAD_SIZE, int NUM_TILES, typename Stages>
__device__ auto& attend_decode(const AttentionArguments& a, const Work& work, Stages& stages) {
  using Shape = Decode<CacheT, HEAD_SIZE, NUM_TILES>;
  stages.begin(a, work);
  for (int i = 0; i < Shape::NUM_STAGES - 1; ++i) stages.load_next(a, work);

  const int tile = threadIdx.x % Shape::TEAM_THREADS / WARP_SIZE;
  const int first_packed = work.tile_begin + tile * MMA_ROWS;  // the last tile may have no row
  WarpRows<T, CacheT, HEAD_SIZE, typename Stages::Slice> rows(a, work, first_packed);
  for (int token = Shape::first_token(work); token < work.end; token += Shape::STEP) {
    const unsigned char* slice = stages.wait();
    stages.load_next(a, work);
    if (NUM_TILES == 1 || first_packed < work.tile_end) rows.template attend<1>(a, work, slice, token);
  }
  rows.finish();

  stages.finish();
  __syncthreads();  // the results take the place of the slices
  auto& results = *reinterpret_cast<typename Shape::Results*>(shared_memory);
  rows.write(work, results, Shape::team());
  __syncthreads();
  return results;
}

template <typename T, typename CacheT, int HEAD_SIZE, int NUM_TILES, typename Stages>
__device__ void attend_decode_works(const AttentionArguments& a, int64_t num_works) {
  using Shape = Decode<CacheT, HEAD_SIZE, NUM_TILES>;
  Stages stages;
  const auto attend = [&](const Work& work) {
    const auto& results = attend_decode<T, CacheT, HEAD_SIZE, NUM_TILES>(a, work, stages);
    with_out_type<T, CacheT>(a, [&]<typename Out>() { results.template store<Out, Shape::NUM_WARPS>(a, work); });
  };
  if constexpr (Shape::IS_LOOP) {
    for_each_decode_work(a, num_works, attend);
  } else {
    Work work;
    if (find_decode_work(a, blockIdx.x, work)) attend(work);
  }
}

// Grid: decode_grid, or num_decode_works where IS_LOOP is false.
template <typename T, typename CacheT, int HEAD_SIZE, int NUM_TILES, CacheLayout LAYOUT>
__global__ void __launch_bounds__(Decode<CacheT, HEAD_SIZE, NUM_TILES>::NUM_WARPS* WARP_SIZE,
                                  Decode<CacheT, HEAD_SIZE, NUM_TILES>::MIN_BLOCKS)
    decode_kernel(const __grid_constant__ AttentionArguments a, int64_t num_works) {
  using Async = AsyncStages<CacheT, HEAD_SIZE, NUM_TILES, LAYOUT>;
  ptx::griddepcontrol_launch_dependents();  // merge_kernel may begin: its blocks that wait take no place of ours
  if constexpr (LAYOUT == CacheLayout::CHUNKED) {
    using Bulk = BulkStages<CacheT, HEAD_SIZE, NUM_TILES>;
    if (Bulk::fits(a)) return attend_decode_works<T, CacheT, HEAD_SIZE, NUM_TILES, Bulk>(a, num_works);
  }
  attend_decode_works<T, CacheT, HEAD_SIZE, NUM_TILES, Async>(a, num_works);
}

// For decode_in_clusters, by bulk copies. Grid: (works of a partition, partitions), a cluster along y.
template <typename T, typename CacheT, int HEAD_SIZE, int NUM_TILES>
__global__ void __launch_bounds__(Decode<CacheT, HEAD_SIZE, NUM_TILES>::NUM_WARPS* WARP_SIZE,
                                  Decode<CacheT, HEAD_SIZE, NUM_TILES>::MIN_BLOCKS)
    decode_cluster_kernel(const __grid_constant__ AttentionArguments a) {
  using Shape = Decode<CacheT, HEAD_SIZE, NUM_TILES>;
  if (!ptx::is_sm90()) return;  // this kernel is not launched there
  Work work;
  if (!find_decode_work(a, blockIdx.y * gridDim.x + blockIdx.x, work)) work.num_partitions = 0;
  if (work.num_partitions > 0) {
    BulkStages<CacheT, HEAD_SIZE, NUM_TILES> stages;
    auto& results = attend_decode<T, CacheT, HEAD_SIZE, NUM_TILES>(a, work, stages);
    if (work.num_partitions > 1) {
      results.template merge_in_place<Shape::NUM_WARPS>(a, work);
    } else {
      with_out_type<T, CacheT>(a, [&]<typename Out>() { results.template store<Out, Shape::NUM_WARPS>(a, work); });
    }
  }
  ptx::cluster_sync();
  if (work.num_partitions > 1) {
    const auto& results = *reinterpret_cast<const typename Shape::Results*>(shared_memory);
    with_out_type<T, CacheT>(a, [&]<typename Out>() { merge_cluster<Out, Shape::NUM_WARPS>(a, work, results); });
  }
  ptx::cluster_sync_relaxed();  // other blocks may still read this block's results
}

// ---- prefill

template <typename CacheT, int HEAD_SIZE>
struct Prefill {
  static constexpr int NUM_WARPS = PREFILL_WARPS;
  // The slices of a tile are limited by the registers for their logits. With large heads, a block has all registers of
  // a multiprocessor. With small heads it has half of them, as two blocks share a multiprocessor.
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
template <typename T, typename CacheT, int HEAD_SIZE, CacheLayout LAYOUT>
__global__ void __launch_bounds__(Prefill<CacheT, HEAD_SIZE>::NUM_WARPS* WARP_SIZE,
                                  Prefill<CacheT, HEAD_SIZE>::MIN_BLOCKS)
    prefill_kernel(const __grid_constant__ AttentionArguments a) {
  using Slice = SliceOf<CacheT, HEAD_SIZE, LAYOUT>;
  using Shape = Prefill<CacheT, HEAD_SIZE>;
  constexpr int STEP = Shape::NUM_SLICES * SLICE_TOKENS;
  Work work;
  if (!find_prefill_work(a, work)) return;

  const int warp = threadIdx.x / WARP_SIZE;
  const int slice = threadIdx.x / Shape::THREADS_PER_SLICE;  // that this thread loads
  const int thread = threadIdx.x % Shape::THREADS_PER_SLICE;
  const auto find = [&](int first) {
    return Slice::template find<Shape::THREADS_PER_SLICE>(a, work, first + slice * SLICE_TOKENS, thread);
  };
  int token = work.begin / STEP * STEP;  // so that no tile lies in two partitions
  int next_token = token;
  auto next_blocks = find(next_token);
  int next_stage = 0;
  const auto load_next = [&] {
    if (next_token < work.end) {
      const typename Slice::Places places{shared_memory + next_stage * Shape::STAGE_BYTES + slice * Slice::BYTES};
      Slice::template load<Shape::THREADS_PER_SLICE>(a, work, next_token + slice * SLICE_TOKENS, next_blocks, places,
                                                     thread);
      next_token += STEP;
      next_blocks = find(next_token);
    }
    ptx::cp_async_commit();
    next_stage = next_stage + 1 == Shape::NUM_STAGES ? 0 : next_stage + 1;
  };
  for (int i = 0; i < Shape::NUM_STAGES - 1; ++i) load_next();

  WarpRows<T, CacheT, HEAD_SIZE, Slice> rows(a, work, work.tile_begin + warp * MMA_ROWS);
  for (int stage = 0; token < work.end; token += STEP) {
    ptx::cp_async_wait<Shape::NUM_STAGES - 2>();
    __syncthreads();  // the tile is there for all threads, and all are done with the tile before it
    load_next();
    if (!rows.is_before(a, work, token)) {
      rows.template attend<Shape::NUM_SLICES>(a, work, shared_memory + stage * Shape::STAGE_BYTES, token);
    }
    stage = stage + 1 == Shape::NUM_STAGES ? 0 : stage + 1;
  }
  rows.finish();
  with_out_type<T, CacheT>(a, [&]<typename Out>() { rows.template store<Out>(a, work); });
}

template <typename T, typename CacheT, int HEAD_SIZE, int NUM_TILES, CacheLayout LAYOUT>
void launch_decode(const AttentionArguments& a, cudaStream_t stream) {
  using Shape = Decode<CacheT, HEAD_SIZE, NUM_TILES>;
  constexpr dim3 BLOCK(Shape::NUM_WARPS * WARP_SIZE);
  const int64_t num_works = num_decode_works(a);
  if constexpr (LAYOUT == CacheLayout::CHUNKED) {
    if (a.decode_in_clusters) {
      const auto num_partitions = static_cast<unsigned>(a.decode.num_partitions);
      const dim3 grid(grid_size(num_works) / num_partitions, num_partitions);
      return launch_in_clusters(decode_cluster_kernel<T, CacheT, HEAD_SIZE, NUM_TILES>, grid, dim3(1, num_partitions),
                                BLOCK, Shape::SHARED_BYTES, stream, a);
    }
  }
  launch(decode_kernel<T, CacheT, HEAD_SIZE, NUM_TILES, LAYOUT>,
         Shape::IS_LOOP ? decode_grid(a) : dim3(grid_size(num_works)), BLOCK, Shape::SHARED_BYTES, stream, a,
         num_works);
}

template <typename T, typename CacheT, int HEAD_SIZE, CacheLayout LAYOUT>
void launch_mma(const AttentionArguments& a, cudaStream_t stream) {
  if (a.decode_tile_rows == MMA_ROWS) {
    launch_decode<T, CacheT, HEAD_SIZE, 1, LAYOUT>(a, stream);
  } else if constexpr (has_wide_tiles(HEAD_SIZE, sizeof(CacheT))) {
    launch_decode<T, CacheT, HEAD_SIZE, WIDE_TILES, LAYOUT>(a, stream);
  }
  if (!may_have_prefill(a)) return;
#if defined(PAGEDATTN_SM90A)
  if constexpr (sizeof(CacheT) == 2 && HEAD_SIZE <= 128) {
    if (a.may_use.wgmma && compute_capability() == 90) return prefill_wgmma<T, LAYOUT>(a, stream);
  }
#endif
  using PrefillShape = Prefill<CacheT, HEAD_SIZE>;
  launch(prefill_kernel<T, CacheT, HEAD_SIZE, LAYOUT>, prefill_grid(a), dim3(PrefillShape::NUM_WARPS * WARP_SIZE),
         PrefillShape::SHARED_BYTES, stream, a);
}

}  // namespace

template <typename T, typename CacheT, CacheLayout LAYOUT>
void attend_mma(const AttentionArguments& a, cudaStream_t stream) {
  switch (head_size_of_kernel(a.p.head_size)) {
    case 64:
      return launch_mma<T, CacheT, 64, LAYOUT>(a, stream);
    case 128:
      return launch_mma<T, CacheT, 128, LAYOUT>(a, stream);
    case 256:
      return launch_mma<T, CacheT, 256, LAYOUT>(a, stream);
  }
}

}  // namespace pagedattn::cuda
