// How decode loads its slices. A block consists of teams, which share out the tokens. A team has a warp for each tile
// of 16 rows. It works on one slice at a time and loads NUM_STAGES - 1 slices ahead:
//   AsyncStages  by cp.async, 16 bytes for each thread and instruction: any cache, any GPU
//   BulkStages   by two bulk copies for each slice, which one lane starts: from sm_90 on, where a block's slice of
//                a head is adjacent in memory, in the CHUNKED layout
// Both bring the same numbers to the same operands: results are the same to the last bit.
#pragma once

#include "attention/cuda/nhd_slice.cuh"
#include "attention/cuda/row_results.cuh"

namespace pagedattn::cuda {

// The shared memory that every GPU since sm_80 lets a block have.
constexpr int MAX_SHARED_BYTES = 99 * 1024;
// The shared memory that the largest GPUs, since sm_90, have for all blocks of a multiprocessor. The system takes some
// of it for each block.
constexpr int MULTIPROCESSOR_SHARED_BYTES = 228 * 1024;
constexpr int SYSTEM_SHARED_BYTES = 1024;

template <typename CacheT, int HEAD_SIZE, int NUM_TILES>
struct Decode {
  static constexpr int SLICE_BYTES = CacheSlice<CacheT, HEAD_SIZE>::BYTES;
  static constexpr int NUM_TEAMS = HEAD_SIZE > 128 && sizeof(CacheT) > 1 ? 2 : 4;
  static constexpr int TEAM_THREADS = NUM_TILES * WARP_SIZE;
  static constexpr int NUM_WARPS = NUM_TEAMS * NUM_TILES;
  static constexpr int NUM_STAGES = NUM_TEAMS * SLICE_BYTES > 16 * 1024 ? 3 : 4;
  static constexpr int TEAM_BYTES = NUM_STAGES * SLICE_BYTES;
  static constexpr int STEP = NUM_TEAMS * SLICE_TOKENS;  // from a slice of a team to its next slice
  static constexpr bool IS_LOOP = HEAD_SIZE <= 128;      // over works; larger heads leave no registers for the loop
  using Results = BlockResults<NUM_TEAMS, NUM_TILES * MMA_ROWS, HEAD_SIZE>;
  static constexpr int BARRIERS_BEGIN = std::max<int>(NUM_TEAMS * TEAM_BYTES, sizeof(Results));  // of BulkStages
  static constexpr int SHARED_BYTES = BARRIERS_BEGIN + NUM_TEAMS * NUM_STAGES * sizeof(uint64_t);
  static_assert(SHARED_BYTES <= MAX_SHARED_BYTES);
  // Blocks of a multiprocessor: as many as registers allow, but no more than there is shared memory for, as fewer
  // blocks may have more registers each.
  static constexpr int BLOCKS_BY_REGISTERS = (HEAD_SIZE <= 64                           ? 4
                                              : HEAD_SIZE <= 128 && sizeof(CacheT) == 1 ? 3
                                                                                        : 2) /
                                             NUM_TILES;
  static constexpr int MIN_BLOCKS =
      std::min(BLOCKS_BY_REGISTERS, MULTIPROCESSOR_SHARED_BYTES / (SHARED_BYTES + SYSTEM_SHARED_BYTES));

  static __device__ int team() { return threadIdx.x / TEAM_THREADS; }
  static __device__ void sync_team() {
    if constexpr (NUM_TILES == 1) {
      __syncwarp();
    } else {
      ptx::barrier_sync(1 + team(), TEAM_THREADS);
    }
  }
  // The first token of the team's first slice of a work.
  static __device__ int first_token(const Work& work) {
    return work.begin / SLICE_TOKENS * SLICE_TOKENS + team() * SLICE_TOKENS;
  }
  static __device__ int stage_after(int stage) { return stage + 1 == NUM_STAGES ? 0 : stage + 1; }
};

template <typename CacheT, int HEAD_SIZE, int NUM_TILES, CacheLayout LAYOUT>
class AsyncStages {
 public:
  using Slice = SliceOf<CacheT, HEAD_SIZE, LAYOUT>;

  __device__ AsyncStages() : stages_(shared_memory + Shape::team() * Shape::TEAM_BYTES) {}

  // Begins a work.
  __device__ void begin(const AttentionArguments& a, const Work& work) {
    next_token_ = Shape::first_token(work);
    look_up(a, work);
    stage_ = next_stage_ = 0;
  }

  // Begins to load the next slice, if there is one.
  __device__ void load_next(const AttentionArguments& a, const Work& work) {
    if (next_token_ < work.end) {
      const typename Slice::Places places{stages_ + next_stage_ * Slice::BYTES};
      Slice::template load<Shape::TEAM_THREADS>(a, work, next_token_, next_blocks_, places, thread());
      next_token_ += Shape::STEP;
      look_up(a, work);
    }
    ptx::cp_async_commit();
    next_stage_ = Shape::stage_after(next_stage_);
  }

  // Waits for the slice that is used next. The team is then done with the slice before it, whose place is filled next.
  __device__ const unsigned char* wait() {
    ptx::cp_async_wait<Shape::NUM_STAGES - 2>();
    Shape::sync_team();
    const unsigned char* slice = stages_ + stage_ * Slice::BYTES;
    stage_ = Shape::stage_after(stage_);
    return slice;
  }

  // After the last slice: nothing is under way.
  __device__ void finish() { ptx::cp_async_wait<0>(); }

 private:
  using Shape = Decode<CacheT, HEAD_SIZE, NUM_TILES>;

  static __device__ int thread() { return threadIdx.x % Shape::TEAM_THREADS; }
  __device__ void look_up(const AttentionArguments& a, const Work& work) {
    next_blocks_ = Slice::template find<Shape::TEAM_THREADS>(a, work, next_token_, thread());
  }

  unsigned char* stages_;
  int next_token_;  // of the next slice to load, whose blocks are looked up one step ahead
  typename Slice::template Blocks<Shape::TEAM_THREADS> next_blocks_;
  int stage_, next_stage_;
};

// Has the functions of AsyncStages. Each stage has an mbarrier, which says when its slice has come. The phases of an
// mbarrier go on from work to work. One lane of the team's first warp initializes the mbarriers and starts the copies.
template <typename CacheT, int HEAD_SIZE, int NUM_TILES>
class BulkStages {
 public:
  using Slice = CacheSlice<CacheT, HEAD_SIZE, false>;

  // Tokens that no row of a work sees are loaded with their slice, and are masked where they would be used.
  static __device__ bool fits(const AttentionArguments& a) { return ptx::is_sm90() && has_bulk_slices(a, HEAD_SIZE); }

  __device__ BulkStages()
      : stages_(shared_memory + Shape::team() * Shape::TEAM_BYTES),
        barriers_(reinterpret_cast<uint64_t*>(shared_memory + Shape::BARRIERS_BEGIN) +
                  Shape::team() * Shape::NUM_STAGES),
        is_first_warp_(NUM_TILES == 1 || __shfl_sync(ALL_LANES, tile_of_thread(), 0) == 0) {
    as_loader([&] {
      for (int stage = 0; stage < Shape::NUM_STAGES; ++stage) ptx::mbarrier_init(barriers_ + stage, 1);
    });
  }

  __device__ void begin(const AttentionArguments& a, const Work& work) {
    // The barriers are new, or threads have written results where slices come now.
    as_loader([] { ptx::fence_proxy_async(); });
    Shape::sync_team();
    const int64_t head_offset = int64_t{work.kv_head} * HEAD_SIZE * SLICE_TOKENS;
    keys_ = static_cast<const CacheT*>(a.p.key_cache) + head_offset;
    values_ = static_cast<const CacheT*>(a.p.value_cache) + head_offset;
    next_token_ = Shape::first_token(work);
    look_up(a, work);
  }

  __device__ void load_next(const AttentionArguments& a, const Work& work) {
    if (next_token_ < work.end) {
      as_loader([&] {
        unsigned char* slice = stages_ + next_stage_ * Slice::BYTES;
        uint64_t* barrier = barriers_ + next_stage_;
        ptx::mbarrier_arrive_expect(barrier, Slice::BYTES);
        ptx::bulk_copy(slice, keys_ + int64_t{next_block_} * a.p.key_strides.block, Slice::BYTES / 2, barrier);
        ptx::bulk_copy(slice + Slice::BYTES / 2, values_ + int64_t{next_block_} * a.p.value_strides.block,
                       Slice::BYTES / 2, barrier);
      });
      __syncwarp();  // ldmatrix and mma come next, and want all lanes together
      next_stage_ = Shape::stage_after(next_stage_);
      next_token_ += Shape::STEP;
      look_up(a, work);
    }
  }

  __device__ const unsigned char* wait() {
    ptx::mbarrier_wait(barriers_ + stage_, parity_);
    Shape::sync_team();
    const unsigned char* slice = stages_ + stage_ * Slice::BYTES;
    stage_ = Shape::stage_after(stage_);
    if (stage_ == 0) parity_ ^= 1;
    return slice;
  }

  __device__ void finish() {}  // each slice was waited for

 private:
  using Shape = Decode<CacheT, HEAD_SIZE, NUM_TILES>;

  static __device__ int tile_of_thread() { return threadIdx.x % Shape::TEAM_THREADS / WARP_SIZE; }

  // Calls function in one lane of the team's first warp. There are two branches: with one, whose condition is more than
  // elect(), the compiler makes a loop over lanes around each bulk copy.
  template <typename Function>
  __device__ void as_loader(const Function& function) const {
    if (is_first_warp_) {
      if (ptx::elect()) function();
    }
  }

  __device__ void look_up(const AttentionArguments& a, const Work& work) {
    if (next_token_ >= work.end) return;
    next_block_ = a.p.block_table(work.seq).low(next_token_ / SLICE_TOKENS);
  }

  unsigned char* stages_;
  uint64_t* barriers_;
  bool is_first_warp_;            // of the team; found by a shuffle, which tells the compiler that lanes do not part
  const CacheT *keys_, *values_;  // of the work's head in block 0
  int32_t next_block_ = 0;
  int next_token_;
  int stage_ = 0, next_stage_ = 0;
  uint32_t parity_ = 0;  // of the phase that ends when the next slice has come
};

}  // namespace pagedattn::cuda
