// What the attention kernels for CUDA share: which rows and tokens a block works on, and how the tokens are split.
//
// A packed row is a row of a sequence with one head of a group. The heads of a group read the same keys and values.
// Packed row m is head m % group_size of row m / group_size. A block holds a tile of packed rows, so K and V are read
// once for the whole tile.
//
// There are two kinds of sequence. They are told apart on the device, as only the device knows query_start_loc:
//   decode   at most max_decode_rows rows: few packed rows, many tokens. The tokens are split into partitions, with a
//            block for each, and a second kernel merges the partial results (flash-decoding). Where all blocks run at
//            the same time, the blocks of a tile are a cluster, and merge their results themselves.
//   prefill  more rows. A block has a tile of packed rows and walks over all their tokens. Only where this makes few
//            blocks are the tokens split, too.
#pragma once

#include <algorithm>
#include <bit>

#include "attention/paged_attention.h"
#include "cuda_utils.cuh"

namespace pagedattn::cuda {

constexpr int MMA_ROWS = 16;  // of mma.m16n8k16
constexpr int SLICE_TOKENS = 16;
constexpr int PREFILL_WARPS = 8;
constexpr int WIDE_TILES = 2;  // tiles of 16 rows in a decode block for a group of more than 16 heads
constexpr int FMA_ROWS = 8;    // packed rows of a block without tensor cores
constexpr int MAX_DECODE_ROWS = 8;
constexpr int MAX_PARTITIONS = WARP_SIZE;  // one for each lane of the warp that merges
constexpr int MIN_PARTITION_SHIFT = 9;     // log2 of the tokens of a partition
constexpr int MIN_PARTITION_TOKENS = 1 << MIN_PARTITION_SHIFT;
constexpr int64_t ENOUGH_BLOCKS = 128;  // in prefill: about one for each multiprocessor of a large GPU
// The blocks that share the works of decode: some times as many as fit. With fewer blocks, the last block ends late.
// With more, blocks begin more often, and where block_tables are wide and sequences short, most of them begin for
// nothing. 32 and 64 (at 64 sequences x 32 KV heads x 1,024 tokens, a work each) are to be tried on a GPU.
constexpr int64_t DECODE_BLOCKS_OF_MULTIPROCESSOR = 16;
constexpr float LOG2_E = 1.44269504088896340736f;

// How one kind of sequence is split: into at most num_partitions, which follows from shapes alone, so nothing is read
// back from the device. The places where a sequence is split follow from num_partitions and from its own length. Decode
// has as many partitions as its sequences may need, up to MAX_PARTITIONS, so the result of a decode row does not depend
// on the batch.
struct Split {
  int num_partitions;
  // Partial results, [slots, num_heads, num_partitions]: maximum and sum of a softmax, and the weighted values. Both
  // arrays begin at a multiple of 16 bytes.
  float2* softmax;
  float* values;  // [..., head_size]
};

// What GPUs of sm_90 have and GPUs of sm_80 lack. Whatever a GPU has is used, unless PAGEDATTN_CUDA_WITHOUT names it.
struct Mechanisms {
  bool wgmma = true;    // in prefill
  bool cluster = true;  // in decode of small batches
  bool bulk = true;     // copies of slices in decode; clusters cannot do without
  bool pdl = true;      // programmatic dependent launch: the kernel that merges begins early
};

// Divides numbers from 0 to 2^31 - 1 by one number, with a multiplication and a shift.
class Divisor {
 public:
  explicit Divisor(int number)
      : shift_(31 + std::bit_width(static_cast<uint32_t>(number - 1))),
        factor_(static_cast<uint32_t>(((uint64_t{1} << shift_) + number - 1) / number)) {}

  __device__ int divide(int x) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(x)) * factor_ >> shift_);
  }

 private:
  int shift_;
  uint32_t factor_;  // 2^shift / number, rounded up: so little too large that no quotient is
};

struct AttentionArguments {
  PagedAttentionParams p;
  Mechanisms may_use;
  Split decode;
  Split prefill;
  int group_size;
  int sliding_window;     // p.sliding_window, or the largest int
  int right_window;       // p.right_window
  int attention_chunk;    // p.attention_chunk
  Divisor chunk_divisor;  // of attention_chunk, if it is not 0
  int max_decode_rows;    // a sequence of at most so many rows is decode
  int decode_tile_rows;   // packed rows of a block
  int prefill_tile_rows;
  int block_shift;             // log2 of block_size; NHD: 0
  int block_size;              // p.block_size, or the largest int; NHD
  Divisor block_divisor;       // of block_size; NHD
  bool aligned;                // every block of both caches begins at a multiple of 16 bytes; NHD: every row of a token
  bool query_in_pairs;         // every row of query begins at a multiple of 4 bytes
  bool out_aligned;            // every row of out begins at a multiple of 16 bytes
  bool decode_slots_are_rows;  // a row's slot in decode.softmax is its own index; otherwise seq * max_decode_rows + its
                               // index in the sequence
  bool decode_in_clusters;     // then decode has no partial results in the scratch
};

// A tile of packed rows, and the tokens [begin, end) that it attends to, as far as the rows see any.
struct Work {
  int seq;
  int kv_head;
  int first_row;   // of the sequence
  int num_packed;  // packed rows of the sequence
  int tile_begin;  // packed rows [tile_begin, tile_end) are this block's
  int tile_end;
  int position;  // of the sequence's first row
  int seq_len;
  int begin;
  int end;
  bool is_prefill;
  int partition;       // of the partial result; negative: the result is whole
  int num_partitions;  // of the tile's tokens
};

__device__ inline int row_position(const AttentionArguments& a, const Work& work, int packed) {
  return work.position + packed / a.group_size;
}

// The window of a row, without its chunk: the first token, and whether a token that is not after the end of the
// sequence is before the end.
__device__ inline int first_of_window(const AttentionArguments& a, int position) {
  return position >= a.sliding_window ? position - a.sliding_window + 1 : 0;
}
__device__ inline bool is_before_end(const AttentionArguments& a, int position, int token) {
  return token - position <= a.right_window;
}

// The first token of a row's chunk, for attention_chunk that is not 0. A row before the first token sees nothing: its
// chunk ends there.
__device__ inline int first_of_chunk(const AttentionArguments& a, int position) {
  return position < 0 ? -a.attention_chunk : a.chunk_divisor.divide(position) * a.attention_chunk;
}
__device__ inline bool is_in_chunk(const AttentionArguments& a, int first_of_chunk, int token) {
  return static_cast<unsigned>(token) - static_cast<unsigned>(first_of_chunk) <
         static_cast<unsigned>(a.attention_chunk);
}

__device__ inline float alibi_distance(int position, int token) { return -fabsf(static_cast<float>(token - position)); }

__device__ inline int head_of(const AttentionArguments& a, const Work& work, int packed) {
  return work.kv_head * a.group_size + packed % a.group_size;
}

__device__ inline int64_t row_of(const AttentionArguments& a, const Work& work, int packed) {
  return int64_t{work.first_row} + packed / a.group_size;
}

__device__ inline const Split& split_of(const AttentionArguments& a, const Work& work) {
  return work.is_prefill ? a.prefill : a.decode;
}

// The index of the first partial result of a row of the sequence and a head.
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
  work.seq_len = static_cast<int>(a.p.seq_len(seq));
  work.position = work.seq_len - num_rows;
  work.is_prefill = num_rows > a.max_decode_rows;
}

// Sets the sequence's `tile`-th tile, and all the tokens that its rows see. False: there is no such tile.
__device__ inline bool set_tile(const AttentionArguments& a, int64_t tile, Work& work) {
  const int tile_rows = work.is_prefill ? a.prefill_tile_rows : a.decode_tile_rows;
  if (tile * tile_rows >= work.num_packed) return false;
  work.tile_begin = static_cast<int>(tile) * tile_rows;
  work.tile_end = min(work.tile_begin + tile_rows, work.num_packed);
  const int first_position = row_position(a, work, work.tile_begin);
  const int last_position = row_position(a, work, work.tile_end - 1);
  work.begin = first_of_window(a, first_position);
  work.end = is_before_end(a, last_position, work.seq_len - 1) ? work.seq_len : last_position + 1 + a.right_window;
  if (a.attention_chunk != 0) {
    work.begin = max(work.begin, first_of_chunk(a, first_position));
    work.end = min(work.end, first_of_chunk(a, last_position) + a.attention_chunk);
  }
  return true;
}

// Where a token's keys and values lie in the NHD layout.
struct TokenPlace {
  int32_t block;
  int32_t offset;  // in tokens
};

// For a token that no row of the work sees the place is 0, as its table entry may be anything.
__device__ inline TokenPlace find_token(const AttentionArguments& a, const Work& work, int token) {
  if (token < work.begin || token >= work.end) return {0, 0};
  if (!a.p.block_tables.is_given()) return {0, a.p.key_start_loc.low(work.seq) + token};
  const int index = a.block_divisor.divide(token);
  return {a.p.block_table(work.seq).low(index), token - index * a.block_size};
}

// The work's head of a token, in a cache in the NHD layout.
template <typename CacheT>
__device__ inline const CacheT* row_of_token(const void* cache, const CacheStrides& strides, const Work& work,
                                             const TokenPlace& place) {
  return static_cast<const CacheT*>(cache) + place.block * strides.block + place.offset * strides.token +
         work.kv_head * strides.kv_head;
}

struct Partitions {
  int shift;  // log2 of the tokens of a partition
  int first;
  int last;
};

// The partitions that the tile's tokens lie in. A partition has a multiple of 512 tokens, so that no slice lies in two
// partitions.
__device__ inline Partitions find_partitions(const AttentionArguments& a, const Work& work) {
  Partitions partitions{MIN_PARTITION_SHIFT, 0, 0};
  const int64_t seq_len = a.p.seq_len(work.seq);
  constexpr int MAX_SHIFT = 30;  // ends the loop, whatever seq_len is
  while (int64_t{split_of(a, work).num_partitions} << partitions.shift < seq_len && partitions.shift < MAX_SHIFT) {
    ++partitions.shift;
  }
  partitions.first = work.begin >> partitions.shift;
  partitions.last = max(partitions.first, (work.end - 1) >> partitions.shift);
  return partitions;
}

// Reduces the work to the tokens of its `index`-th partition. False: there is no such partition.
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

// The number of decode works. Works are numbered by KV head first, as heads lie side by side in memory, then by tile,
// then by sequence. They are numbered by partition last, as only the longest sequences have the last partitions. There
// is a work for each partition that a sequence could have. Where block_tables is wide, most of these partitions do not
// exist.
inline int64_t num_decode_works(const AttentionArguments& a) {
  return a.p.num_kv_heads * ceil_div(a.max_decode_rows * a.group_size, a.decode_tile_rows) * a.p.num_seqs *
         a.decode.num_partitions;
}

// The blocks that share the decode works. Their number is odd, so that the partitions of a sequence, which are often a
// power of two apart, fall to different blocks.
inline dim3 decode_grid(const AttentionArguments& a) {
  const int64_t num_blocks = DECODE_BLOCKS_OF_MULTIPROCESSOR * num_multiprocessors() | 1;
  return dim3(std::min(grid_size(num_decode_works(a)), grid_size(num_blocks)));
}

// Finds the decode work of a number. False: there is no such work.
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

// The number of tiles before the first tile of sequence `seq` in a grid over prefill tiles: at least as many as the
// sequences before `seq` have. So a block finds the sequence of its tile without a table.
__device__ inline int64_t tiles_before(const AttentionArguments& a, int seq) {
  return a.p.row_begin(seq) * a.group_size / a.prefill_tile_rows + seq;
}

inline int64_t prefill_tiles(const PagedAttentionParams& p, int tile_rows) {
  return p.num_tokens * (p.num_heads / p.num_kv_heads) / tile_rows + p.num_seqs;
}

// Without query_start_loc every sequence has one row.
inline bool may_have_prefill(const AttentionArguments& a) {
  return a.p.query_start_loc.is_given() && a.p.num_tokens > a.max_decode_rows;
}

inline dim3 prefill_grid(const AttentionArguments& a) {
  return dim3(grid_size(prefill_tiles(a.p, a.prefill_tile_rows)), grid_height(a.p.num_kv_heads),
              grid_height(a.prefill.num_partitions));
}

// The last sequence for which begins_before(seq) is true. It is true for sequence 0, and once it is false it stays
// false.
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

// Finds the work of a block of prefill_grid. False: the tile or its partition does not exist, or the sequence is
// decode.
__device__ inline bool find_prefill_work(const AttentionArguments& a, Work& work) {
  // The last tiles of a sequence see most tokens. They begin first, and shorter tiles fill the gaps at the end.
  const int64_t tile = int64_t{gridDim.x} - 1 - blockIdx.x;
  set_sequence(a, find_sequence(a, [&](int seq) { return tiles_before(a, seq) <= tile; }), work);
  work.kv_head = static_cast<int>(blockIdx.y);
  if (!work.is_prefill || !set_tile(a, tile - tiles_before(a, work.seq), work)) return false;
  return take_partition(a, static_cast<int>(blockIdx.z), work);
}

// Calls attend(work) for this block's share of num_works works, with a barrier after each call. In prefill, whose works
// are as many as gridDim.x, this is the block's own work. In decode, the lanes of a warp look for 32 works at a time,
// and all warps look for the same works.
template <typename Attend>
__device__ void for_each_work(const AttentionArguments& a, bool prefill, int64_t num_works, const Attend& attend) {
  for (int64_t first = blockIdx.x; first < num_works; first += int64_t{WARP_SIZE} * gridDim.x) {
    const int64_t of_lane = first + int64_t{threadIdx.x % WARP_SIZE} * gridDim.x;
    Work work;
    unsigned found = prefill ? find_prefill_work(a, work)
                             : __ballot_sync(ALL_LANES, of_lane < num_works &&
                                                            find_decode_work(a, static_cast<unsigned>(of_lane), work));
    for (; found != 0; found &= found - 1) {
      const int lane = __ffs(static_cast<int>(found)) - 1;
      if (!prefill) find_decode_work(a, static_cast<unsigned>(first + int64_t{lane} * gridDim.x), work);
      attend(work);
      __syncthreads();  // shared memory is free again
    }
  }
}

template <typename Attend>
__device__ void for_each_decode_work(const AttentionArguments& a, int64_t num_works, const Attend& attend) {
  for_each_work(a, false, num_works, attend);
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

// Whether decode has blocks with WIDE_TILES. Larger heads have too many results for shared memory. Over 8-bit caches,
// three blocks of 4 warps share a multiprocessor (head of 128), where there would be one block of 8 warps.
constexpr bool has_wide_tiles(int64_t head_size, int64_t cache_element_bytes) {
  return head_size <= 128 && cache_element_bytes > 1;
}

// Whether tensor cores multiply. Larger heads have more queries and values than the registers of a warp hold.
constexpr int64_t MAX_MMA_HEAD_SIZE = 256;
constexpr bool is_on_tensor_cores(const PagedAttentionParams& p) {
  return p.dtype != DType::FLOAT32 && p.head_size <= MAX_MMA_HEAD_SIZE;
}

// The head size that the kernel on tensor cores is compiled for: the smallest that holds the head.
constexpr int head_size_of_kernel(int64_t head_size) { return head_size <= 64 ? 64 : head_size <= 128 ? 128 : 256; }

// Whether bulk copies can load the slices: all keys of a slice lie side by side in memory, and so do all its values.
constexpr bool has_bulk_slices(const AttentionArguments& a, int kernel_head_size) {
  return a.p.layout == CacheLayout::CHUNKED && a.may_use.bulk && a.aligned && 1 << a.block_shift == SLICE_TOKENS &&
         a.p.head_size == kernel_head_size;
}

// Each instantiation has a file of its own. Runs decode and, where there may be any, prefill.
template <typename T, typename CacheT, CacheLayout LAYOUT>
void attend_mma(const AttentionArguments& a, cudaStream_t stream);
template <CacheLayout LAYOUT>
void attend_fma(const AttentionArguments& a, cudaStream_t stream);

// Runs prefill alone, on GPUs of compute capability 9.0, over a cache of T and heads of at most 128. Only a build with
// PAGEDATTN_SM90A has it.
template <typename T, CacheLayout LAYOUT>
void prefill_wgmma(const AttentionArguments& a, cudaStream_t stream);

}  // namespace pagedattn::cuda
