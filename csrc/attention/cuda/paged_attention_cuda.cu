// paged_attention on CUDA: scratch, the choice of the kernels, and the merge of partial results.
#include <bit>

#include "attention/cuda/row_results.cuh"

namespace pagedattn::cuda {
namespace {

constexpr int MERGE_WARPS = 4;

// The packed row that a warp merges: warps over (row, head), heads innermost. The rows are all there are if `prefill`,
// else max_decode_rows of each sequence. False: there is no such row of that kind.
__device__ bool find_row(const AttentionArguments& a, bool prefill, int64_t warp, Work& work, int& packed) {
  const auto head = static_cast<int>(warp % a.p.num_heads);
  int64_t row = warp / a.p.num_heads;
  if (prefill) {
    if (row >= a.p.num_tokens) return false;
    set_sequence(a, find_sequence(a, [&](int seq) { return a.p.row_begin(seq) <= row; }), work);
    row -= work.first_row;
  } else {
    if (row >= a.p.num_seqs * a.max_decode_rows) return false;
    set_sequence(a, static_cast<int>(row / a.max_decode_rows), work);
    row %= a.max_decode_rows;
  }
  if (work.is_prefill != prefill) return false;
  work.kv_head = head / a.group_size;
  packed = static_cast<int>(row) * a.group_size + head % a.group_size;
  return packed < work.num_packed && set_tile(a, packed / (prefill ? a.prefill_tile_rows : a.decode_tile_rows), work);
}

// A warp merges a row's partitions: first a lane each for their maxima and sums, then lanes along the head.
// Grid: warps over (row, head).
__global__ void __launch_bounds__(MERGE_WARPS* WARP_SIZE)
    merge_kernel(const __grid_constant__ AttentionArguments a, bool prefill) {
  const auto lane = static_cast<int>(threadIdx.x % WARP_SIZE);
  Work work;
  int packed = 0;
  if (!find_row(a, prefill, int64_t{blockIdx.x} * MERGE_WARPS + threadIdx.x / WARP_SIZE, work, packed)) return;
  const Partitions partitions = find_partitions(a, work);
  const int num_partitions = partitions.last - partitions.first + 1;
  if (num_partitions == 1) return;  // the block that had it has written the row

  const Split& split = split_of(a, work);
  const int64_t first = partial_index(a, work, packed / a.group_size, head_of(a, work, packed));
  const float2 softmax = lane < num_partitions ? split.softmax[first + lane] : make_float2(-INFINITY, 0.0f);
  const float max = warp_max(softmax.x);
  const float weight = exp_below(softmax.x, max);
  const float sum = warp_sum(softmax.y * weight);
  const int64_t row = row_of(a, work, packed);
  const int head = head_of(a, work, packed);
  const float factor = finish_row(a, row, head, max, sum, lane == 0);

  const auto head_size = static_cast<int>(a.p.head_size);
  const float* values = split.values + first * head_size;
  for (int begin = 0; begin < head_size; begin += WARP_SIZE) {
    const int d = begin + lane;
    const float* column = values + min(d, head_size - 1);  // loaded before it is asked for: several at a time
    float value = 0.0f;
#pragma unroll 8
    for (int partition = 0; partition < num_partitions; ++partition) {
      const float of_partition = column[int64_t{partition} * head_size];
      value = fmaf(of_partition, __shfl_sync(ALL_LANES, weight, partition), value);
    }
    if (d >= head_size) continue;
    const int64_t index = row * a.p.out_stride + head * head_size + d;
    switch (a.p.dtype) {
      case DType::FLOAT16:
        store_out<float16>(a, index, Floats<1>{value * factor});
        break;
      case DType::BFLOAT16:
        store_out<bfloat16>(a, index, Floats<1>{value * factor});
        break;
      default:
        store_out<float>(a, index, Floats<1>{value * factor});
    }
  }
}

void launch_merge(const AttentionArguments& a, bool prefill, cudaStream_t stream) {
  const int64_t num_rows = prefill ? a.p.num_tokens : a.p.num_seqs * a.max_decode_rows;
  const int64_t num_blocks = ceil_div<int64_t>(num_rows * a.p.num_heads, MERGE_WARPS);
  launch(merge_kernel, dim3(grid_size(num_blocks)), dim3(MERGE_WARPS * WARP_SIZE), 0, stream, a, prefill);
}

void attend(const AttentionArguments& a, cudaStream_t stream) {
  switch (a.p.cache_dtype) {
    case DType::FLOAT32:
      return attend_fma<float>(a, stream);
    case DType::FLOAT16:
      return attend_mma<float16, float16>(a, stream);
    case DType::BFLOAT16:
      return attend_mma<bfloat16, bfloat16>(a, stream);
    case DType::FLOAT8_E4M3:
      return a.p.dtype == DType::FLOAT32 ? attend_fma<float8_e4m3>(a, stream)
                                         : attend_mma<float16, float8_e4m3>(a, stream);
    case DType::FLOAT8_E5M2:
      return a.p.dtype == DType::FLOAT32 ? attend_fma<float8_e5m2>(a, stream)
                                         : attend_mma<float16, float8_e5m2>(a, stream);
  }
}

// A split without its place in the scratch.
Split make_split(const PagedAttentionParams& p, int64_t max_partitions) {
  const int64_t needed = ceil_div<int64_t>(p.max_seq_len, MIN_PARTITION_TOKENS);
  return {static_cast<int>(std::clamp<int64_t>(needed, 1, max_partitions)), nullptr, nullptr};
}

AttentionArguments make_arguments(const PagedAttentionParams& p) {
  const bool on_tensor_cores = p.dtype != DType::FLOAT32;
  const auto group_size = static_cast<int>(p.num_heads / p.num_kv_heads);
  const int prefill_tile_rows = on_tensor_cores ? PREFILL_WARPS * MMA_ROWS : FMA_ROWS;
  const int64_t prefill_blocks = std::max<int64_t>(1, prefill_tiles(p, prefill_tile_rows) * p.num_kv_heads);
  const int max_decode_rows = p.query_start_loc == nullptr ? 1 : std::clamp(MMA_ROWS / group_size, 1, MAX_DECODE_ROWS);
  const int64_t element_bytes = element_size(p.cache_dtype);
  return {
      .p = p,
      .decode = make_split(p, MAX_PARTITIONS),
      .prefill = make_split(p, std::clamp<int64_t>(ENOUGH_BLOCKS / prefill_blocks, 1, MAX_PARTITIONS)),
      .group_size = group_size,
      .sliding_window = static_cast<int>(std::min<int64_t>(p.sliding_window, INT32_MAX)),
      .max_decode_rows = max_decode_rows,
      .decode_tile_rows = on_tensor_cores ? MMA_ROWS : FMA_ROWS,
      .prefill_tile_rows = prefill_tile_rows,
      .block_shift = std::countr_zero(static_cast<uint64_t>(p.block_size)),
      .aligned = is_aligned_16({p.key_cache, p.value_cache},
                               {p.key_block_stride * element_bytes, p.value_block_stride * element_bytes}),
      .out_aligned = is_aligned_16({p.out}, {p.out_stride * element_size(p.dtype)}),
      .decode_slots_are_rows = p.num_tokens <= p.num_seqs * max_decode_rows,
  };
}

// Takes what the split needs from the scratch at `begin`; returns where it ends.
char* place(Split& split, int64_t num_slots, const PagedAttentionParams& p, char* begin) {
  if (split.num_partitions == 1) return begin;
  // An even number of 8 bytes, so that the values begin at 16.
  const int64_t num_partials = ceil_div<int64_t>(num_slots * p.num_heads * split.num_partitions, 2) * 2;
  split.softmax = reinterpret_cast<float2*>(begin);
  split.values = reinterpret_cast<float*>(split.softmax + num_partials);
  return reinterpret_cast<char*>(split.values + num_partials * p.head_size);
}

char* place_splits(AttentionArguments& a, char* scratch) {
  const int64_t decode_slots = std::min(a.p.num_tokens, a.p.num_seqs * a.max_decode_rows);
  char* end = place(a.decode, decode_slots, a.p, scratch);
  return may_have_prefill(a) ? place(a.prefill, a.p.num_tokens, a.p, end) : end;
}

}  // namespace

int64_t paged_attention_scratch_bytes(const PagedAttentionParams& p) {
  AttentionArguments a = make_arguments(p);
  return place_splits(a, nullptr) - static_cast<char*>(nullptr);
}

void paged_attention(const PagedAttentionParams& p, void* scratch, cudaStream_t stream) {
  if (p.num_seqs == 0 || p.num_tokens == 0) return;
  AttentionArguments a = make_arguments(p);
  place_splits(a, static_cast<char*>(scratch));
  attend(a, stream);
  if (a.decode.num_partitions > 1) launch_merge(a, false, stream);
  if (may_have_prefill(a) && a.prefill.num_partitions > 1) launch_merge(a, true, stream);
}

}  // namespace pagedattn::cuda
