// What the attention kernels for CUDA share: which rows and tokens a block works on, the softmax of a row while it is
// split, and its store.
//
// Packed rows: the rows of a sequence times the heads of a group, which read the same keys and values. Packed row m is
// head m % group_size of row m / group_size. A block holds a tile of packed rows, so K and V are read once for all of
// them.
//
// Two kinds of sequence, told apart on the device, as only the device knows query_start_loc:
//   decode   at most Split::max_rows rows: few packed rows, many tokens. The tokens are split into partitions, a block
//            each, and a second kernel merges the partial results (flash-decoding).
//   prefill  more rows: a block for a tile of packed rows walks over all their tokens.
#pragma once

#include <algorithm>

#include "attention/paged_attention.h"
#include "cuda_utils.cuh"

namespace pagedattn::cuda {

constexpr int MMA_ROWS = 16;  // of mma.m16n8k16
constexpr int SLICE_TOKENS = 16;
constexpr int MAX_DECODE_ROWS = 8;
constexpr int MAX_PARTITIONS = WARP_SIZE;  // a lane each when they are merged
constexpr int MIN_PARTITION_TOKENS = 512;
constexpr float LOG2_E = 1.44269504088896340736f;

// How decode rows are split: of shapes alone, so nothing is read back from the device, and of max_seq_len alone, so
// the result of a row does not depend on the batch.
struct Split {
  int max_rows;  // a sequence of at most so many rows is decode
  int partition_tokens;
  int num_partitions;  // at most

  explicit Split(const PagedAttentionParams& p) {
    const auto group_size = static_cast<int>(p.num_heads / p.num_kv_heads);
    max_rows = p.query_start_loc == nullptr ? 1 : std::clamp(MMA_ROWS / group_size, 1, MAX_DECODE_ROWS);
    int64_t tokens = MIN_PARTITION_TOKENS;
    while (tokens * MAX_PARTITIONS < p.max_seq_len) tokens *= 2;
    partition_tokens = static_cast<int>(std::min<int64_t>(tokens, INT32_MAX));
    num_partitions = static_cast<int>(std::max<int64_t>(1, ceil_div(p.max_seq_len, tokens)));
  }
};

// Partial results, [num_slots, num_heads, num_partitions]: maximum and sum of a softmax, and the weighted values.
struct Partials {
  float2* softmax;
  float* values;  // [..., head_size]
};

struct AttentionArguments {
  PagedAttentionParams p;
  Split split;
  Partials partials;
  int group_size;
  int block_shift;      // log2 of block_size
  bool aligned;         // every block of both caches begins at 16 bytes
  bool slots_are_rows;  // whether a row's partial results lie at its own index, or at seq * max_rows + its index there
};

// Tile of packed rows and the tokens to attend to: [begin, end), as far as the rows see any.
struct Work {
  int seq;
  int kv_head;
  int64_t first_row;  // of the sequence
  int num_packed;     // packed rows of the sequence
  int tile_begin;     // packed rows [tile_begin, tile_end) are this block's
  int tile_end;
  int position;  // of the sequence's first row
  int begin;
  int end;
  int partition;  // whose partial result this is; negative: it is the whole result
};

__device__ inline int row_position(const AttentionArguments& a, const Work& work, int packed) {
  return work.position + packed / a.group_size;
}

__device__ inline int first_visible(const AttentionArguments& a, int position) {
  return static_cast<int>(a.p.first_visible(position));
}

__device__ inline int head_of(const AttentionArguments& a, const Work& work, int packed) {
  return work.kv_head * a.group_size + packed % a.group_size;
}

__device__ inline int64_t row_of(const AttentionArguments& a, const Work& work, int packed) {
  return work.first_row + packed / a.group_size;
}

// Where the partial results of a packed row begin, in partitions.
__device__ inline int64_t partial_index(const AttentionArguments& a, int seq, int64_t first_row, int row, int head) {
  const int64_t slot = a.slots_are_rows ? first_row + row : int64_t{seq} * a.split.max_rows + row;
  return (slot * a.p.num_heads + head) * a.split.num_partitions;
}

__device__ inline void set_sequence(const AttentionArguments& a, int seq, Work& work) {
  work.seq = seq;
  work.first_row = a.p.row_begin(seq);
  const auto num_rows = static_cast<int>(a.p.row_end(seq) - work.first_row);
  work.num_packed = num_rows * a.group_size;
  work.position = a.p.seq_lens[seq] - num_rows;
}

// Tokens that the rows of the tile see.
__device__ inline void set_visible(const AttentionArguments& a, Work& work) {
  work.begin = max(0, first_visible(a, row_position(a, work, work.tile_begin)));
  work.end = row_position(a, work, work.tile_end - 1) + 1;
}

// Blocks of a grid over decode sequences: KV heads, which lie side by side in memory, then tiles, then sequences, and
// the partitions last: those that only the longest sequences have come at the end, when the rest is at work.
inline int64_t decode_blocks(const AttentionArguments& a, int tile_rows) {
  return a.p.num_kv_heads * ceil_div(a.split.max_rows * a.group_size, tile_rows) * a.p.num_seqs *
         a.split.num_partitions;
}

// False: the block has nothing to do.
__device__ inline bool find_decode_work(const AttentionArguments& a, int tile_rows, unsigned block, Work& work) {
  const auto num_kv_heads = static_cast<unsigned>(a.p.num_kv_heads);
  const auto num_tiles = static_cast<unsigned>(ceil_div(a.split.max_rows * a.group_size, tile_rows));
  const auto num_seqs = static_cast<unsigned>(a.p.num_seqs);
  work.kv_head = static_cast<int>(block % num_kv_heads);
  const unsigned tile = block / num_kv_heads % num_tiles;
  const unsigned seq_and_partition = block / num_kv_heads / num_tiles;
  set_sequence(a, static_cast<int>(seq_and_partition % num_seqs), work);
  work.tile_begin = static_cast<int>(tile) * tile_rows;
  work.tile_end = min(work.tile_begin + tile_rows, work.num_packed);
  if (work.tile_begin >= work.tile_end || work.num_packed > a.split.max_rows * a.group_size) return false;
  set_visible(a, work);

  // All tiles and rows of a sequence have the same partitions: those of any of its rows.
  const int first = first_visible(a, work.position) / a.split.partition_tokens;
  const int last = max(first, (a.p.seq_lens[work.seq] - 1) / a.split.partition_tokens);
  const int partition = first + static_cast<int>(seq_and_partition / num_seqs);
  if (partition > last) return false;
  work.partition = first == last ? -1 : partition - first;
  work.begin = max(work.begin, partition * a.split.partition_tokens);
  if (partition < last) work.end = min(work.end, (partition + 1) * a.split.partition_tokens);
  return true;
}

// Tiles before those of sequence `seq` in a grid over prefill tiles: at least as many as the sequences before it have.
// So a tile finds its sequence without a table.
__device__ inline int64_t tiles_before(const AttentionArguments& a, int tile_rows, int seq) {
  return a.p.row_begin(seq) * a.group_size / tile_rows + seq;
}

inline int64_t prefill_tiles(const AttentionArguments& a, int tile_rows) {
  return a.p.num_tokens * a.group_size / tile_rows + a.p.num_seqs;
}

// Without query_start_loc every sequence has one row.
inline bool may_have_prefill(const AttentionArguments& a) {
  return a.p.query_start_loc != nullptr && a.p.num_tokens > a.split.max_rows;
}

inline unsigned grid_size(int64_t num_blocks) {
  if (num_blocks > INT32_MAX) throw std::runtime_error("paged_attention: too large for one CUDA grid");
  return static_cast<unsigned>(num_blocks);
}

// False: the tile does not exist, or its sequence is decode.
__device__ inline bool find_prefill_work(const AttentionArguments& a, int tile_rows, int64_t tile, int kv_head,
                                         Work& work) {
  int low = 0;
  auto high = static_cast<int>(a.p.num_seqs);  // tiles_before(low) <= tile < tiles_before(high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tiles_before(a, tile_rows, middle) <= tile ? low : high) = middle;
  }
  set_sequence(a, low, work);
  const int64_t tile_begin = (tile - tiles_before(a, tile_rows, low)) * tile_rows;
  if (tile_begin >= work.num_packed || work.num_packed <= a.split.max_rows * a.group_size) return false;
  work.kv_head = kv_head;
  work.tile_begin = static_cast<int>(tile_begin);
  work.tile_end = min(work.tile_begin + tile_rows, work.num_packed);
  work.partition = -1;
  set_visible(a, work);
  return true;
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

__device__ inline float value_scale(const AttentionArguments& a) {
  return a.p.value_scale_on_device == nullptr ? a.p.value_scale : *a.p.value_scale_on_device;
}

// The end of a row's softmax: takes the sink in, writes lse, returns what the weighted values are multiplied with.
__device__ inline float finish_row(const AttentionArguments& a, int64_t row, int head, float max, float sum,
                                   bool write_lse) {
  float base = max;
  float total = sum;
  if (a.p.sinks != nullptr) {
    const float sink = a.p.sinks[head];
    base = fmaxf(max, sink);
    total = sum * exp_below(max, base) + exp_below(sink, base);
  }
  if (write_lse && a.p.lse != nullptr) {
    a.p.lse[row * a.p.num_heads + head] = total == 0.0f ? -INFINITY : base + logf(total);
  }
  // A row that sees nothing is zero. NaN goes on.
  return sum == 0.0f ? 0.0f : exp_below(max, base) / total * value_scale(a);
}

__device__ inline void store_out(const AttentionArguments& a, int64_t row, int head, int d, float value) {
  const int64_t index = row * a.p.out_stride + head * a.p.head_size + d;
  switch (a.p.dtype) {
    case DType::FLOAT16:
      static_cast<float16*>(a.p.out)[index] = ptx::to_float16(value);
      break;
    case DType::BFLOAT16:
      static_cast<bfloat16*>(a.p.out)[index] = ptx::to_bfloat16(value);
      break;
    default:
      static_cast<float*>(a.p.out)[index] = value;
  }
}

// The results of the warps of a block, each over tokens of its own, in shared memory.
template <int NUM_WARPS, int TILE_ROWS, int HEAD_SIZE>
struct WarpResults {
  // Rows of values begin 8 banks apart: the lanes of a warp, 8 rows with 4 pairs each, write without conflicts.
  static constexpr int ROW_FLOATS = HEAD_SIZE + 8;
  float2 softmax[NUM_WARPS][TILE_ROWS];
  float values[NUM_WARPS][TILE_ROWS][ROW_FLOATS];

  // After a barrier. Merges the warps' results and writes the rows of the tile, or their partial results.
  __device__ void store(const AttentionArguments& a, const Work& work) const {
    const auto head_size = static_cast<int>(a.p.head_size);
    for (int packed = work.tile_begin; packed < work.tile_end; ++packed) {
      const int i = packed - work.tile_begin;
      float max = softmax[0][i].x;
      for (int w = 1; w < NUM_WARPS; ++w) max = fmaxf(max, softmax[w][i].x);
      float weights[NUM_WARPS];
      float sum = 0.0f;
      for (int w = 0; w < NUM_WARPS; ++w) {
        weights[w] = exp_below(softmax[w][i].x, max);
        sum = fmaf(softmax[w][i].y, weights[w], sum);
      }
      const int head = head_of(a, work, packed);
      const int64_t row = row_of(a, work, packed);
      const auto merged = [&](int d) {
        float value = 0.0f;
        for (int w = 0; w < NUM_WARPS; ++w) value = fmaf(values[w][i][d], weights[w], value);
        return value;
      };
      const auto first = static_cast<int>(threadIdx.x);
      if (work.partition < 0) {
        const float factor = finish_row(a, row, head, max, sum, threadIdx.x == 0);
        for (int d = first; d < head_size; d += NUM_WARPS * WARP_SIZE) {
          store_out(a, row, head, d, merged(d) * factor);
        }
      } else {
        const int64_t partial =
            partial_index(a, work.seq, work.first_row, packed / a.group_size, head) + work.partition;
        if (threadIdx.x == 0) a.partials.softmax[partial] = make_float2(max, sum);
        for (int d = first; d < head_size; d += NUM_WARPS * WARP_SIZE) {
          a.partials.values[partial * head_size + d] = merged(d);
        }
      }
    }
  }
};

// One instantiation file each. Runs decode and, where there may be any, prefill.
template <typename T, typename CacheT>
void attend_mma(const AttentionArguments& a, cudaStream_t stream);
template <typename CacheT>
void attend_fma(const AttentionArguments& a, cudaStream_t stream);

}  // namespace pagedattn::cuda
