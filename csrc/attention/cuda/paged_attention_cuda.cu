// paged_attention on CUDA: scratch, the choice of the kernels, and the merge of partial results.
#include <bit>
#include <cstdlib>
#include <string_view>

#include "attention/cuda/merge_partitions.cuh"
#include "dispatch.h"

namespace pagedattn::cuda {
namespace {

constexpr int MERGE_WARPS = 4;

// Finds the `row`-th of the rows that may have partial results: all rows if `prefill`, else max_decode_rows of each
// sequence. Sets the work to what the row sees, and row_of_sequence to the row's index in its sequence. False: there is
// no such row of this kind.
__device__ bool find_row(const AttentionArguments& a, bool prefill, int row, int head, Work& work,
                         int& row_of_sequence) {
  if (prefill) {
    set_sequence(a, find_sequence(a, [&](int seq) { return a.p.row_begin(seq) <= row; }), work);
    row_of_sequence = row - work.first_row;
  } else {
    set_sequence(a, row / a.max_decode_rows, work);
    row_of_sequence = row % a.max_decode_rows;
  }
  if (work.is_prefill != prefill) return false;
  work.kv_head = head / a.group_size;
  const int packed = row_of_sequence * a.group_size + head - work.kv_head * a.group_size;
  return packed < work.num_packed && set_tile(a, packed / (prefill ? a.prefill_tile_rows : a.decode_tile_rows), work);
}

// Grid: rows x heads, a warp for each. This kernel may begin before the kernel that writes the partial results has
// ended.
template <typename Out>
__global__ void __launch_bounds__(MERGE_WARPS* WARP_SIZE)
    merge_kernel(const __grid_constant__ AttentionArguments a, bool prefill) {
  const auto head = static_cast<int>(blockIdx.y * MERGE_WARPS + threadIdx.x / WARP_SIZE);
  Work work;
  int row = 0;
  int num_partitions = 0;
  if (head < a.p.num_heads && find_row(a, prefill, static_cast<int>(blockIdx.x), head, work, row)) {
    const Partitions partitions = find_partitions(a, work);
    num_partitions = partitions.last - partitions.first + 1;
  }
  ptx::griddepcontrol_wait();
  if (num_partitions <= 1) return;  // the block of a single partition has written the row

  const Split& split = split_of(a, work);
  const auto head_size = static_cast<int>(a.p.head_size);
  const int64_t first = partial_index(a, work, row, head);
  const ScratchPartials partials{split.softmax + first, split.values + first * head_size, head_size};
  merge_partitions<Out>(a, partials, num_partitions, int64_t{work.first_row} + row, head);
}

void launch_merge(const AttentionArguments& a, bool prefill, const Memory& partials, cudaStream_t stream) {
  const int64_t num_rows = prefill ? a.p.num_tokens : a.p.num_seqs * a.max_decode_rows;
  const dim3 grid(grid_size(num_rows), grid_height(ceil_div<int64_t>(a.p.num_heads, MERGE_WARPS)));
  dispatch_dtype(a.p.dtype, [&]<typename Out>() {
    constexpr dim3 BLOCK(MERGE_WARPS * WARP_SIZE);
    if (a.may_use.pdl) {
      launch_dependent(merge_kernel<Out>, grid, BLOCK, 0, stream, partials, a, prefill);
    } else {
      launch(merge_kernel<Out>, grid, BLOCK, 0, stream, a, prefill);
    }
  });
}

template <CacheLayout LAYOUT>
void attend(const AttentionArguments& a, cudaStream_t stream) {
  if (!is_on_tensor_cores(a.p)) return attend_fma<LAYOUT>(a, stream);
  switch (a.p.cache_dtype) {
    case DType::FLOAT32:  // with fp32 queries alone
    case DType::INT8:     // on a CPU alone
      return;
    case DType::FLOAT16:
      return attend_mma<float16, float16, LAYOUT>(a, stream);
    case DType::BFLOAT16:
      return attend_mma<bfloat16, bfloat16, LAYOUT>(a, stream);
    case DType::FLOAT8_E4M3:
      return attend_mma<float16, float8_e4m3, LAYOUT>(a, stream);
    case DType::FLOAT8_E5M2:
      return attend_mma<float16, float8_e5m2, LAYOUT>(a, stream);
  }
}

// All mechanisms but those that PAGEDATTN_CUDA_WITHOUT names, as in "wgmma,bulk". The variable is read at each call.
Mechanisms allowed_mechanisms() {
  Mechanisms allowed;
  const char* without = std::getenv("PAGEDATTN_CUDA_WITHOUT");
  if (without == nullptr || *without == '\0') return allowed;
  for (std::string_view rest = without;;) {
    const size_t end = rest.find(',');
    const std::string_view word = rest.substr(0, end);
    bool* const mechanism = word == "wgmma"     ? &allowed.wgmma
                            : word == "cluster" ? &allowed.cluster
                            : word == "bulk"    ? &allowed.bulk
                            : word == "pdl"     ? &allowed.pdl
                                                : nullptr;
    if (mechanism == nullptr) {
      throw std::runtime_error(
          "PAGEDATTN_CUDA_WITHOUT: expected wgmma, cluster, bulk or pdl, or several of these with "
          "commas between them, got '" +
          std::string(word) + "' in '" + without + "'");
    }
    *mechanism = false;
    if (end == std::string_view::npos) return allowed;
    rest.remove_prefix(end + 1);
  }
}

// Whether all that is read of both caches at a time is 16 adjacent bytes, which begin at a multiple of 16 bytes.
bool caches_are_aligned(const PagedAttentionParams& p) {
  if (has_small_blocks(p)) return false;
  const int64_t element_bytes = element_size(p.cache_dtype);
  const auto aligned = [&](const void* cache, const CacheStrides& strides) {
    const int64_t of_token = p.layout == CacheLayout::NHD ? strides.token : 0;  // CHUNKED: no token is read alone
    return is_aligned_16({cache},
                         {strides.block * element_bytes, of_token * element_bytes, strides.kv_head * element_bytes});
  };
  return aligned(p.key_cache, p.key_strides) && aligned(p.value_cache, p.value_strides);
}

// A split without its place in the scratch.
Split make_split(const PagedAttentionParams& p, int64_t max_partitions) {
  const int64_t needed = ceil_div<int64_t>(p.max_seq_len, MIN_PARTITION_TOKENS);
  return {static_cast<int>(std::clamp<int64_t>(needed, 1, max_partitions)), nullptr, nullptr};
}

// Whether the partitions of a tile are a cluster: they fit in one, and all works run at the same time. Each work is to
// have a multiprocessor of its own, though with most kernels two blocks fit there: a cluster lies within a part of the
// GPU, and must find room. Two works for each multiprocessor are to be tried on a GPU.
bool fits_in_clusters(const AttentionArguments& a) {
  return a.may_use.cluster && is_on_tensor_cores(a.p) && a.decode.num_partitions > 1 &&
         a.decode.num_partitions <= MAX_CLUSTER_BLOCKS && has_bulk_slices(a, head_size_of_kernel(a.p.head_size)) &&
         num_decode_works(a) <= num_multiprocessors() && runs_code_of_sm90(merge_kernel<float>);
}

AttentionArguments make_arguments(const PagedAttentionParams& p) {
  const bool on_tensor_cores = is_on_tensor_cores(p);
  const auto group_size = static_cast<int>(p.num_heads / p.num_kv_heads);
  const int prefill_tile_rows = on_tensor_cores ? PREFILL_WARPS * MMA_ROWS : FMA_ROWS;
  const int64_t prefill_blocks = std::max<int64_t>(1, prefill_tiles(p, prefill_tile_rows) * p.num_kv_heads);
  const int max_decode_rows = p.query_start_loc.is_given() ? std::clamp(MMA_ROWS / group_size, 1, MAX_DECODE_ROWS) : 1;
  const int64_t element_bytes = element_size(p.cache_dtype);
  const bool has_wide_decode_tiles = group_size > MMA_ROWS && has_wide_tiles(p.head_size, element_bytes);
  const int mma_decode_rows = has_wide_decode_tiles ? WIDE_TILES * MMA_ROWS : MMA_ROWS;
  const auto block_size = static_cast<int>(std::min<int64_t>(p.block_size, INT32_MAX));
  AttentionArguments a{
      .p = p,
      .may_use = allowed_mechanisms(),
      .decode = make_split(p, MAX_PARTITIONS),
      .prefill = make_split(p, std::clamp<int64_t>(ENOUGH_BLOCKS / prefill_blocks, 1, MAX_PARTITIONS)),
      .group_size = group_size,
      .sliding_window = static_cast<int>(std::min<int64_t>(p.sliding_window, INT32_MAX)),
      .right_window = static_cast<int>(p.right_window),
      .attention_chunk = static_cast<int>(p.attention_chunk),
      .chunk_divisor = Divisor(std::max(static_cast<int>(p.attention_chunk), 1)),
      .max_decode_rows = max_decode_rows,
      .decode_tile_rows = on_tensor_cores ? mma_decode_rows : FMA_ROWS,
      .prefill_tile_rows = prefill_tile_rows,
      .block_shift = p.layout == CacheLayout::CHUNKED ? std::countr_zero(static_cast<uint64_t>(p.block_size)) : 0,
      .block_size = block_size,
      .block_divisor = Divisor(block_size),
      .aligned = caches_are_aligned(p),
      .query_in_pairs =
          reinterpret_cast<uintptr_t>(p.query) % 4 == 0 && p.query_stride * element_size(p.dtype) % 4 == 0,
      .out_aligned = is_aligned_16({p.out}, {p.out_stride * element_size(p.dtype)}),
      .decode_slots_are_rows = p.num_tokens <= p.num_seqs * max_decode_rows,
      .decode_in_clusters = false,
  };
  a.decode_in_clusters = fits_in_clusters(a);
  return a;
}

// Gives the split its place in the scratch, from `begin` on. Returns where it ends.
char* place(Split& split, int64_t num_slots, const PagedAttentionParams& p, char* begin) {
  if (split.num_partitions == 1) return begin;
  // An even number of float2, so that the values begin at a multiple of 16 bytes.
  const int64_t num_partials = ceil_div<int64_t>(num_slots * p.num_heads * split.num_partitions, 2) * 2;
  split.softmax = reinterpret_cast<float2*>(begin);
  split.values = reinterpret_cast<float*>(split.softmax + num_partials);
  return reinterpret_cast<char*>(split.values + num_partials * p.head_size);
}

char* place_splits(AttentionArguments& a, char* scratch) {
  const int64_t decode_slots = a.decode_in_clusters ? 0 : std::min(a.p.num_tokens, a.p.num_seqs * a.max_decode_rows);
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
  auto* const begin = static_cast<char*>(scratch);
  const Memory partials{begin, static_cast<size_t>(place_splits(a, begin) - begin)};
  const bool token_by_token = p.layout == CacheLayout::NHD || has_small_blocks(p);
  token_by_token ? attend<CacheLayout::NHD>(a, stream) : attend<CacheLayout::CHUNKED>(a, stream);
  if (a.decode.num_partitions > 1 && !a.decode_in_clusters) launch_merge(a, false, partials, stream);
  if (may_have_prefill(a) && a.prefill.num_partitions > 1) launch_merge(a, true, partials, stream);
}

}  // namespace pagedattn::cuda
