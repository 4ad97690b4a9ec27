// paged_attention on CUDA: scratch, the choice of the kernels, and the merge of partial results.
#include <bit>

#include "attention/paged_attention_cuda.cuh"

namespace pagedattn::cuda {
namespace {

constexpr int MERGE_WARPS = 4;

// Rows that may have partial results.
bool slots_are_rows(const PagedAttentionParams& p, const Split& split) {
  return p.num_tokens <= p.num_seqs * split.max_rows;
}

int64_t num_partials(const PagedAttentionParams& p, const Split& split) {
  if (split.num_partitions == 1) return 0;
  return std::min(p.num_tokens, p.num_seqs * split.max_rows) * p.num_heads * split.num_partitions;
}

// A warp merges a row's partitions: first a lane each for their maxima and sums, then lanes along the head.
// Grid: warps over (sequence, row, head), heads innermost.
__global__ void __launch_bounds__(MERGE_WARPS* WARP_SIZE) merge_kernel(const __grid_constant__ AttentionArguments a) {
  const int64_t index = int64_t{blockIdx.x} * MERGE_WARPS + threadIdx.x / WARP_SIZE;
  const auto lane = static_cast<int>(threadIdx.x % WARP_SIZE);
  const auto head = static_cast<int>(index % a.p.num_heads);
  const auto row = static_cast<int>(index / a.p.num_heads % a.split.max_rows);
  const int64_t seq = index / a.p.num_heads / a.split.max_rows;
  if (seq >= a.p.num_seqs) return;
  const int64_t first_row = a.p.row_begin(seq);
  const int64_t num_rows = a.p.row_end(seq) - first_row;
  if (row >= num_rows || num_rows > a.split.max_rows) return;
  const auto seq_len = static_cast<int>(a.p.seq_lens[seq]);
  const int first_token = first_visible(a, seq_len - static_cast<int>(num_rows));
  const int num_partitions =
      (seq_len - 1) / a.split.partition_tokens - first_token / a.split.partition_tokens + 1;
  if (num_partitions <= 1) return;  // the block that had it has written the row

  const int64_t first = partial_index(a, static_cast<int>(seq), first_row, row, head);
  const float2 softmax = lane < num_partitions ? a.partials.softmax[first + lane] : make_float2(-INFINITY, 0.0f);
  float max = softmax.x;
  for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, lanes));
  const float weight = exp_below(softmax.x, max);
  const float sum = warp_sum(softmax.y * weight);
  const float factor = finish_row(a, first_row + row, head, max, sum, lane == 0);

  const auto head_size = static_cast<int>(a.p.head_size);
  const float* values = a.partials.values + first * head_size;
  for (int begin = 0; begin < head_size; begin += WARP_SIZE) {
    const int d = begin + lane;
    float value = 0.0f;
#pragma unroll 4
    for (int partition = 0; partition < num_partitions; ++partition) {
      const float partition_weight = __shfl_sync(ALL_LANES, weight, partition);
      if (d < head_size) value = fmaf(values[int64_t{partition} * head_size + d], partition_weight, value);
    }
    if (d < head_size) store_out(a, first_row + row, head, d, value * factor);
  }
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

bool blocks_are_aligned(const void* cache, int64_t block_bytes) {
  return reinterpret_cast<uintptr_t>(cache) % 16 == 0 && block_bytes % 16 == 0;
}

}  // namespace

int64_t paged_attention_scratch_bytes(const PagedAttentionParams& p) {
  return num_partials(p, Split(p)) * static_cast<int64_t>(sizeof(float2) + p.head_size * sizeof(float));
}

void paged_attention(const PagedAttentionParams& p, void* scratch, cudaStream_t stream) {
  if (p.num_seqs == 0 || p.num_tokens == 0) return;
  const Split split(p);
  auto* softmax = static_cast<float2*>(scratch);
  const int64_t element_bytes = element_size(p.cache_dtype);
  const AttentionArguments a{
      .p = p,
      .split = split,
      .partials = {softmax, reinterpret_cast<float*>(softmax + num_partials(p, split))},
      .group_size = static_cast<int>(p.num_heads / p.num_kv_heads),
      .block_shift = std::countr_zero(static_cast<uint64_t>(p.block_size)),
      .aligned = blocks_are_aligned(p.key_cache, p.key_block_stride * element_bytes) &&
                 blocks_are_aligned(p.value_cache, p.value_block_stride * element_bytes),
      .slots_are_rows = slots_are_rows(p, split),
  };
  attend(a, stream);
  if (split.num_partitions == 1) return;
  const int64_t num_warps = p.num_seqs * split.max_rows * p.num_heads;
  launch(merge_kernel, dim3(grid_size(ceil_div<int64_t>(num_warps, MERGE_WARPS))), dim3(MERGE_WARPS * WARP_SIZE), 0,
         stream, a);
}

}  // namespace pagedattn::cuda
