// What the attention kernels for CUDA share: which rows and tokens a block works on, and how the tokens are split.
//
// Packed rows: the rows of a sequence times the heads of a group, which read the same keys and values. Packed row m is
// head m % group_size of row m / group_size. A block holds a tile of packed rows, so K and V are read once for all of
// them.
//
// Two kinds of sequence, told apart on the device, as only the device knows query_start_loc:
//   decode   at most max_decode_rows rows: few packed rows, many tokens. The tokens are split into partitions, a block
//            each, and a second kernel merges the partial results (flash-decoding). Where all blocks run at the same
//            time, those of a tile are a cluster instead, and merge what they have themselves.
//   prefill  more rows: a block for a tile of packed rows walks over all their tokens. Only where that makes few blocks
//            are the tokens split, too.
#pragma once

#include <algorithm>

#include "attention/paged_attention.h"
#include "cuda_utils.cuh"

namespace pagedattn::cuda {

constexpr int MMA_ROWS = 16;  // of mma.m16n8k16
constexpr int SLICE_TOKENS = 16;
constexpr int PREFILL_WARPS = 8;
constexpr int WIDE_TILES = 2;  // of 16 rows, in a decode block for a group of more than 16 heads
constexpr int FMA_ROWS = 8;    // packed rows of a block without tensor cores
constexpr int MAX_DECODE_ROWS = 8;
constexpr int MAX_PARTITIONS = WARP_SIZE;  // a lane each when they are merged
constexpr int MIN_PARTITION_SHIFT = 9;     // log2 of the tokens of a partition
constexpr int MIN_PARTITION_TOKENS = 1 << MIN_PARTITION_SHIFT;
constexpr int64_t ENOUGH_BLOCKS = 128;  // of a prefill: about one for each multiprocessor of a large GPU
// Of decode, which share its works: some times as many as fit. With fewer the last of them end late; with more, they
// begin more often, and where block_tables are wide and sequences short, most for nothing. 32 and 64 (at 64 sequences x
// 32 KV heads x 1,024 tokens, a work each) are to be tried on a GPU.
constexpr int64_t DECODE_BLOCKS_OF_MULTIPROCESSOR = 16;
constexpr float LOG2_E = 1.44269504088896340736f;

// How rows of one kind are split: in at most num_partitions, of shapes alone, so nothing is read back from the device.
// Where a sequence is parted depends on that and on its own length: the result of a decode row, which has
// MAX_PARTITIONS whenever it needs them, does not depend on the batch.
struct Split {
  int num_partitions;
  // Partial results, [slots, num_heads, num_partitions]: maximum and sum of a softmax, and the weighted values. Both
  // begin at 16 bytes.
  float2* softmax;
  float* values;  // [..., head_size]
};

// What GPUs of sm_90 have beside those of sm_80. Whatever a GPU has is used, unless PAGEDATTN_CUDA_WITHOUT names it.
struct Mechanisms {
  bool wgmma = true;    // in prefill
  bool cluster = true;  // in decode of small batches
  bool bulk = true;     // copies of slices in decode; clusters have no other way
  bool pdl = true;      // programmatic dependent launch: the kernel that merges begins early
};

struct AttentionArguments {
  PagedAttentionParams p;
  Mechanisms may_use;
  Split decode;
  Split prefill;
  int group_size;
  int sliding_window;    // p.sliding_window, or as many tokens as there can be
  int max_decode_rows;   // a sequence of at most so many rows is decode
  int decode_tile_rows;  // packed rows of a block
  int prefill_tile_rows;
  int block_shift;             // log2 of block_size
  bool aligned;                // every block of both caches begins at 16 bytes
  bool query_in_pairs;         // every row of query begins at 4 bytes
  bool out_aligned;            // every row of out at 16
  bool decode_slots_are_rows;  // a row's slot in decode.softmax: its own index, or seq * max_decode_rows + its index
                               // there
  bool decode_in_clusters;     // and without partial results in the scratch
};

// Tile of packed rows and the tokens to attend to: [begin, end), as far as the rows see any.
struct Work {
  int seq;
  int kv_head;
  int first_row;   // of the sequence
  int num_packed;  // packed rows of the sequence
  int tile_begin;  // packed rows [tile_begin, tile_end) are this block's
  int tile_end;
  int position;  // of the sequence's first row
  int begin;
  int end;
  bool is_prefill;
  int partition;       // whose partial result this is; negative: it is the whole result
  int num_partitions;  // of the tile's tokens
};

__device__ inline int row_position(const AttentionArguments& a, const Work& work, int packed) {
  return work.position + packed / a.group_size;
}

__device__ inline int first_visible(const AttentionArguments& a, int position) {
  return position >= a.sliding_window ? position - a.sliding_window + 1 : 0;
}

__device__ inline int head_of(const AttentionArguments& a, const Work& work, int packed) {
  return work.kv_head * a.group_size + packed % a.group_size;
}

__device__ inline int64_t row_of(const AttentionArguments& a, const Work& work, int packed) {
  return int64_t{work.first_row} + packed / a.group_size;
}

__device__ inline const Split& split_of(const AttentionArguments& a, const Work& work) {
  return work.is_prefill ? a.prefill : a.decode;
}

// Where the partial results of a row of the sequence and a head begin, in partitions.
__device__ inline int64_t partial_index(const AttentionArguments& a, const Work& work, int row_of_sequence, int head) {
  const bool slots_are_rows = work.is_prefill || a.decode_slots_are_rows;
  const int64_t first_slot = slots_are_rows ? work.first_row : int64_t{work.seq} * a.max_decode_rows;
  return ((first_slot + row_of_sequence) * a.p.num_heads + head) * split_of(a, work).num_partitions;
}

__device__ inline void set_sequence(const AttentionArguments& a, int seq, Work& work) {
  work.seq = seq;
  work.first_row = static_cast<int>(a.p.row_begin(seq));
  const auto num_rows = static_cast<int>(a.p.row_end(seq) - work.first_row);
  work.num_packed = num_rows * a.group_size;
  work.position = a.p.seq_lens[seq] - num_rows;
  work.is_prefill = num_rows > a.max_decode_rows;
}

// The sequence's `tile`-th tile, and all the tokens that its rows see. False: there is none.
__device__ inline bool set_tile(const AttentionArguments& a, int64_t tile, Work& work) {
  const int tile_rows = work.is_prefill ? a.prefill_tile_rows : a.decode_tile_rows;
  if (tile * tile_rows >= work.num_packed) return false;
  work.tile_begin = static_cast<int>(tile) * tile_rows;
  work.tile_end = min(work.tile_begin + tile_rows, work.num_packed);
  work.begin = max(0, first_visible(a, row_position(a, work, work.tile_begin)));
  work.end = row_position(a, work, work.tile_end - 1) + 1;
  return true;
}

struct Partitions {
  int shift;  // log2 of the tokens of one
  int first;
  int last;
};

// Those that the tile's tokens lie in. A multiple of 512 tokens each, so that no slice lies in two.
__device__ inline Partitions find_partitions(const AttentionArguments& a, const Work& work) {
  Partitions partitions{MIN_PARTITION_SHIFT, 0, 0};
  const int64_t seq_len = a.p.seq_lens[work.seq];
  constexpr int MAX_SHIFT = 30;  // ends the loop, whatever a length holds
  while (int64_t{split_of(a, work).num_partitions} << partitions.shift < seq_len && partitions.shift < MAX_SHIFT) {
    ++partitions.shift;
  }
  partitions.first = work.begin >> partitions.shift;
  partitions.last = max(partitions.first, (work.end - 1) >> partitions.shift);
  return partitions;
}

// Leaves the tokens of the `index`-th partition to the work. False: there is none.
__device__ inline bool take_partition(const AttentionArguments& a, int index, Work& work) {
  const Partitions partitions = find_partitions(a, work);
  const int partition = partitions.first + index;
  if (partition > partitions.last) return false;
  work.num_partitions = partitions.last - partitions.first + 1;
  work.partition = work.num_partitions == 1 ? -1 : index;
  work.begin = max(work.begin, partition << partitions.shift);
  if (partition < partitions.last) work.end = min(work.end, (partition + 1) << partitions.shift);
  return true;
}

// Decode works, in this order: KV heads, which lie side by side in memory, then tiles, then sequences, and the
// partitions last: those that only the longest sequences have. There is one for each partition that a sequence could
// have, and most do not exist where block_tables is wide.
inline int64_t num_decode_works(const AttentionArguments& a) {
  return a.p.num_kv_heads * ceil_div(a.max_decode_rows * a.group_size, a.decode_tile_rows) * a.p.num_seqs *
         a.decode.num_partitions;
}

// Blocks that share the decode works: an odd number, so that the partitions of a sequence, which are often a power of
// two apart, fall to different blocks.
inline dim3 decode_grid(const AttentionArguments& a) {
  const int64_t num_blocks = DECODE_BLOCKS_OF_MULTIPROCESSOR * num_multiprocessors() | 1;
  return dim3(std::min(grid_size(num_decode_works(a)), grid_size(num_blocks)));
}

// False: there is no such work.
__device__ inline bool find_decode_work(const AttentionArguments& a, unsigned index, Work& work) {
  const auto num_kv_heads = static_cast<unsigned>(a.p.num_kv_heads);
  const auto num_tiles = static_cast<unsigned>(ceil_div(a.max_decode_rows * a.group_size, a.decode_tile_rows));
  const auto num_seqs = static_cast<unsigned>(a.p.num_seqs);
  work.kv_head = static_cast<int>(index % num_kv_heads);
  const unsigned tile = index / num_kv_heads % num_tiles;
  const unsigned seq_and_partition = index / num_kv_heads / num_tiles;
  if (seq_and_partition >= num_seqs * static_cast<unsigned>(a.decode.num_partitions)) return false;
  set_sequence(a, static_cast<int>(seq_and_partition % num_seqs), work);
  if (work.is_prefill || !set_tile(a, tile, work)) return false;
  return take_partition(a, static_cast<int>(seq_and_partition / num_seqs), work);
}

// attend(work) for this block's share of the decode works, a barrier after each. The lanes of a warp look for 32 of
// them at a time, every warp for the same.
template <typename Attend>
__device__ void for_each_decode_work(const AttentionArguments& a, int64_t num_works, const Attend& attend) {
  for (int64_t first = blockIdx.x; first < num_works; first += int64_t{WARP_SIZE} * gridDim.x) {
    const int64_t of_lane = first + int64_t{threadIdx.x % WARP_SIZE} * gridDim.x;
    Work work;
    unsigned found =
        __ballot_sync(ALL_LANES, of_lane < num_works && find_decode_work(a, static_cast<unsigned>(of_lane), work));
    for (; found != 0; found &= found - 1) {
      const int lane = __ffs(static_cast<int>(found)) - 1;
      find_decode_work(a, static_cast<unsigned>(first + int64_t{lane} * gridDim.x), work);
      attend(work);
      __syncthreads();  // shared memory is free again
    }
  }
}

// Tiles before those of sequence `seq` in a grid over prefill tiles: at least as many as the sequences before it have.
// So a tile finds its sequence without a table.
__device__ inline int64_t tiles_before(const AttentionArguments& a, int seq) {
  return a.p.row_begin(seq) * a.group_size / a.prefill_tile_rows + seq;
}

inline int64_t prefill_tiles(const PagedAttentionParams& p, int tile_rows) {
  return p.num_tokens * (p.num_heads / p.num_kv_heads) / tile_rows + p.num_seqs;
}

// Without query_start_loc every sequence has one row.
inline bool may_have_prefill(const AttentionArguments& a) {
  return a.p.query_start_loc != nullptr && a.p.num_tokens > a.max_decode_rows;
}

inline dim3 prefill_grid(const AttentionArguments& a) {
  return dim3(grid_size(prefill_tiles(a.p, a.prefill_tile_rows)), static_cast<unsigned>(a.p.num_kv_heads),
              static_cast<unsigned>(a.prefill.num_partitions));
}

// The last sequence for which begins_before(seq) is true; it is for sequence 0, and for none after one for which it is
// not.
template <typename Condition>
__device__ int find_sequence(const AttentionArguments& a, const Condition& begins_before) {
  int low = 0;
  auto high = static_cast<int>(a.p.num_seqs);
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (begins_before(middle) ? low : high) = middle;
  }
  return low;
}

// For a block of prefill_grid. False: the tile or its partition does not exist, or the sequence is decode.
__device__ inline bool find_prefill_work(const AttentionArguments& a, Work& work) {
  // The last tiles of a sequence see most tokens: they begin first, and the short ones fill the gaps at the end.
  const int64_t tile = int64_t{gridDim.x} - 1 - blockIdx.x;
  set_sequence(a, find_sequence(a, [&](int seq) { return tiles_before(a, seq) <= tile; }), work);
  work.kv_head = static_cast<int>(blockIdx.y);
  if (!work.is_prefill || !set_tile(a, tile - tiles_before(a, work.seq), work)) return false;
  return take_partition(a, static_cast<int>(blockIdx.z), work);
}

__device__ inline float cap_logit(const AttentionArguments& a, float logit) {
  return a.p.softcap * tanhf(logit * (1.0f / a.p.softcap));
}

// e^(x - max); 0 for a masked logit (minus infinity) whatever `max` is.
__device__ inline float exp_below(float x, float max) {
  return ptx::exp2_approx((x - (max == -INFINITY ? 0.0f : max)) * LOG2_E);
}

__device__ inline float logit_scale(const AttentionArguments& a) {
  return a.p.key_scale_on_device == nullptr ? a.p.logit_scale : a.p.logit_scale * *a.p.key_scale_on_device;
}

// Whether decode has such blocks. Larger heads have too many results for shared memory; over 8-bit caches three blocks
// of 4 warps share a multiprocessor (head of 128), where there would be one of 8.
constexpr bool has_wide_tiles(int64_t head_size, int64_t cache_element_bytes) {
  return head_size <= 128 && cache_element_bytes > 1;
}

// What kernels on tensor cores are compiled for: the smallest that holds the head.
constexpr int head_size_of_kernel(int64_t head_size) { return head_size <= 64 ? 64 : head_size <= 128 ? 128 : 256; }

// Whether bulk copies can bring the slices: all keys of a slice lie side by side in memory, and all values.
constexpr bool has_bulk_slices(const AttentionArguments& a, int kernel_head_size) {
  return a.may_use.bulk && a.aligned && 1 << a.block_shift == SLICE_TOKENS && a.p.head_size == kernel_head_size;
}

// One instantiation file each. Runs decode and, where there may be any, prefill.
template <typename T, typename CacheT>
void attend_mma(const AttentionArguments& a, cudaStream_t stream);
template <typename CacheT>
void attend_fma(const AttentionArguments& a, cudaStream_t stream);

// Prefill alone, on GPUs of compute capability 9.0, over a cache of T and heads of at most 128. In a build with
// PAGEDATTN_SM90A.
template <typename T>
void prefill_wgmma(const AttentionArguments& a, cudaStream_t stream);

}  // namespace pagedattn::cuda
